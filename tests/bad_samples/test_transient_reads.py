"""What storage does once in a while changes no batch: not now, and not after a resume."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.dataset.index import encode_index
from mmstream.decoding.substitute import MAX_SAMPLE_READS
from mmstream.errors import ShardError, StorageError
from mmstream.storage import LocalStore
from tests.helpers.bad_corpus import offsets, pipeline, policy, truncated_jpeg, write_faulty
from tests.helpers.topology import described, run

COUNTS = [30, 1, 0, 40, 26]
BAD = {5, 29, 30, 58, 70}


@pytest.fixture
def made(tmp_path) -> mm.Pipeline:
    corpus = write_faulty(tmp_path, COUNTS, BAD, truncated_jpeg)
    return pipeline(corpus, decode=mm.Decode(image=mm.ImageDecoder(size=16)))


class Storage:
    """Between a reader and its disk: what is read is spoilt at a rate, at random.

    The chance is that of the place and of how often it was read, not of the order of threads.
    `once`: the same bytes come right the second time.
    """

    def __init__(self, monkeypatch, rate: float, *, fails: bool, once: bool) -> None:
        self.rate, self.fails, self.once = rate, fails, once
        self.times, self.num_spoilt = Counter(), 0
        read, read_ranges = LocalStore.read, LocalStore.read_ranges

        def spoilt_read(store, name):
            data = self.spoil(read(store, name), (name,)) if name.endswith(".idx") else None
            if isinstance(data, OSError):
                raise data
            return read(store, name) if data is None else data

        def spoilt_ranges(store, ranges):
            found = zip(ranges, read_ranges(store, ranges), strict=True)
            return [self.spoil(data, item) for item, data in found]

        monkeypatch.setattr(LocalStore, "read", spoilt_read)
        monkeypatch.setattr(LocalStore, "read_ranges", spoilt_ranges)

    def spoil(self, data, item):
        self.times[item] += 1
        chance = random.Random(f"{item} {self.times[item]}")
        if (self.once and self.times[item] > 1) or chance.random() >= self.rate:
            return data
        self.num_spoilt += 1
        if self.fails:
            return StorageError(f"{item[0]}: the line went dead")
        return chance.choice([chance.randbytes, lambda n: b"\xff" * n])(len(data))


def opened_anew(made):
    """The same pipeline, of a dataset that has read no index yet."""
    return replace(made, dataset=mm.open_dataset(made.dataset.store.url))


def delivered(made, resume_every: int, num_threads: int = 1):
    """All steps and pixels of an epoch, by loaders that each go on from where one was left."""
    made = opened_anew(made)
    loader, found = mm.Loader(made, num_threads=num_threads), []
    while loader.state_dict()["epoch"] == 0:
        for count, batch in enumerate(loader, start=1):
            found.append((described(batch), batch["image"]))
            if count == resume_every:
                break
        state = loader.state_dict()
        loader = mm.Loader(opened_anew(made), num_threads=num_threads)
        loader.load_state_dict(state)
    return found


def assert_equal(one, other) -> None:
    assert [step for step, _ in one] == [step for step, _ in other]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one, other, strict=True))


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
def test_bytes_that_come_wrong_at_random_change_no_batch(made, monkeypatch, rate, once):
    calm = delivered(made, resume_every=100)
    assert sum(len(step.bad) for step, _ in calm) == len(BAD)
    storage = Storage(monkeypatch, rate, fails=False, once=once)
    for resume_every in (100, 1, 3):
        storage.times.clear()
        assert_equal(delivered(made, resume_every, num_threads=2), calm)
    assert storage.num_spoilt > 0


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_a_run_that_storage_stops_at_random_goes_on_with_the_same_batches(made, monkeypatch, rate):
    calm = run(made).steps
    storage = Storage(monkeypatch, rate, fails=True, once=True)
    loader, found, num_stops = mm.Loader(opened_anew(made), num_threads=1), [], 0
    while loader.state_dict()["epoch"] == 0:
        try:
            for batch in loader:
                found.append(described(batch))
        except StorageError:
            num_stops += 1
        state = loader.state_dict()
        loader = mm.Loader(opened_anew(made), num_threads=1)
        loader.load_state_dict(state)
    assert found == calm
    assert 0 < num_stops <= storage.num_spoilt


def test_every_first_read_wrong_is_no_bad_sample(made, monkeypatch):
    calm = run(made).steps
    storage = Storage(monkeypatch, 1.0, fails=False, once=True)
    assert run(opened_anew(made), 2, 2).steps == calm
    assert storage.num_spoilt > 10


def test_an_index_that_came_wrong_but_looks_right_is_read_again(made, monkeypatch):
    calm = run(made).steps
    right = offsets(made.dataset.store.url, 3)
    wrong = right.copy()
    wrong[7] += 512
    read, answers = LocalStore.read, [encode_index(wrong)]

    def read_once_wrong(store, name):
        if name == "shard-000003.tar.idx" and answers:
            return answers.pop()
        return read(store, name)

    monkeypatch.setattr(LocalStore, "read", read_once_wrong)
    made = opened_anew(made)
    assert run(made).steps == calm
    assert not answers
    assert np.array_equal(made.dataset.offsets(3), right)


def test_a_shard_that_is_away_for_a_moment_stops_no_run(made, monkeypatch):
    calm, gone = run(made).steps, {"shard-000003.tar"}
    read_ranges = LocalStore.read_ranges

    def away(store, ranges):
        found = read_ranges(store, ranges)
        if any(name in gone for name, _, _ in ranges):
            gone.clear()
            return [FileNotFoundError(name) for name, _, _ in ranges]
        return found

    monkeypatch.setattr(LocalStore, "read_ranges", away)
    assert run(made).steps == calm
    assert not gone


def test_a_shard_that_stays_away_stops_the_run_after_a_second_look(made, monkeypatch):
    Path(made.dataset.store.url, "shard-000003.tar").unlink()
    read_ranges, asked = LocalStore.read_ranges, []

    def counted(store, ranges):
        asked.extend(ranges)
        return read_ranges(store, ranges)

    monkeypatch.setattr(LocalStore, "read_ranges", counted)
    with pytest.raises(ShardError, match="no such shard"):
        list(mm.Loader(made, num_threads=1))
    assert any(name == "shard-000003.tar" for name, _, _ in asked)


def test_a_bad_sample_is_read_twice_and_one_in_other_bytes_each_time_no_more_than_some(
    tmp_path, monkeypatch
):
    corpus = write_faulty(tmp_path, [12], {5})
    read_ranges, asked = LocalStore.read_ranges, []
    start = int(offsets(corpus, 0)[5])

    def counted(store, ranges):
        asked.extend(item for item in ranges if item[1] == start)
        return read_ranges(store, ranges)

    def noisy(store, ranges):
        asked.extend(item for item in ranges if item[1] == start)
        return [
            random.randbytes(len(data)) if item[1] == start else data
            for item, data in zip(ranges, read_ranges(store, ranges), strict=True)
        ]

    made = pipeline(corpus, shuffle=False, bad_samples=policy())
    monkeypatch.setattr(LocalStore, "read_ranges", counted)
    (calm,) = run(made).steps
    assert len(asked) == 1  # alone; the first time it came with the others in one range
    asked.clear()
    monkeypatch.setattr(LocalStore, "read_ranges", noisy)
    (step,) = run(made).steps
    assert step.shown == calm.shown
    assert 1 < len(asked) <= MAX_SAMPLE_READS
