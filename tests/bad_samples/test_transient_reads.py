"""What storage does once in a while changes no batch: not now, and not after a resume."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.dataset.index import encode_index
from mmstream.decoding.rows import MAX_SAMPLE_READS
from mmstream.errors import ShardError, StorageError
from tests.helpers.bad_corpus import make_pipeline, offsets, policy, truncated_jpeg, write_faulty
from tests.helpers.stores import watched_pipeline
from tests.helpers.topology import described, run

COUNTS = [30, 1, 0, 40, 26]
BAD = {5, 29, 30, 58, 70}


@pytest.fixture
def pipeline(tmp_path) -> mm.Pipeline:
    corpus = write_faulty(tmp_path, COUNTS, BAD, truncated_jpeg)
    return make_pipeline(corpus, decode=mm.Decode(image=mm.ImageDecoder(size=16)))


class RandomFaults:
    """Spoils a part of all answers of a store, at random.

    The chance depends on the bytes that are read and on how often they were read before. The order
    of threads plays no part.

    Args:
        rate: the part of answers that is spoilt, 0 to 1.
        fails: True: storage errors. False: wrong bytes.
        once: the same bytes come right the second time.
    """

    def __init__(self, rate: float, *, fails: bool, once: bool) -> None:
        self.rate, self.fails, self.once = rate, fails, once
        self.num_reads, self.num_spoilt = Counter(), 0

    def __call__(self, name, bounds, answer):
        key = (name, *(bounds or ()))
        self.num_reads[key] += 1
        chance = random.Random(f"{key} {self.num_reads[key]}")
        if (self.once and self.num_reads[key] > 1) or chance.random() >= self.rate:
            return answer
        self.num_spoilt += 1
        if self.fails:
            return StorageError(f"{name}: the line went dead")
        return chance.choice([chance.randbytes, lambda n: b"\xff" * n])(len(answer))


def opened_anew(pipeline, change=None):
    """The same pipeline, of a dataset that has read no index yet."""
    return watched_pipeline(pipeline, change)[0]


def delivered(pipeline, resume_every: int, num_threads: int = 1, change=None):
    """All steps and pixels of an epoch, by loaders that each go on from where one was left."""
    loader = mm.Loader(opened_anew(pipeline, change), num_threads=num_threads)
    steps = []
    while loader.state_dict()["epoch"] == 0:
        for count, batch in enumerate(loader, start=1):
            steps.append((described(batch), batch["image"]))
            if count == resume_every:
                break
        state = loader.state_dict()
        loader = mm.Loader(opened_anew(pipeline, change), num_threads=num_threads)
        loader.load_state_dict(state)
    return steps


def assert_equal(one, other) -> None:
    assert [step for step, _ in one] == [step for step, _ in other]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "once"), [(0.2, False), (0.2, True), (1.0, True)])
def test_bytes_that_come_wrong_at_random_change_no_batch(pipeline, rate, once):
    calm = delivered(pipeline, resume_every=100)
    assert sum(len(step.bad) for step, _ in calm) == len(BAD)
    faults = RandomFaults(rate, fails=False, once=once)
    for resume_every in (100, 1, 3):
        faults.num_reads.clear()
        assert_equal(delivered(pipeline, resume_every, num_threads=2, change=faults), calm)
    assert faults.num_spoilt > 0


def test_a_run_that_storage_stops_at_random_goes_on_with_the_same_batches(pipeline):
    calm = run(pipeline).steps
    faults = RandomFaults(0.2, fails=True, once=True)
    loader = mm.Loader(opened_anew(pipeline, faults), num_threads=1)
    steps, num_stops = [], 0
    while loader.state_dict()["epoch"] == 0:
        try:
            for batch in loader:
                steps.append(described(batch))
        except StorageError:
            num_stops += 1
        state = loader.state_dict()
        loader = mm.Loader(opened_anew(pipeline, faults), num_threads=1)
        loader.load_state_dict(state)
    assert steps == calm
    assert 0 < num_stops <= faults.num_spoilt


def test_an_index_that_came_wrong_but_looks_right_is_read_again(pipeline):
    calm = run(pipeline).steps
    right = offsets(pipeline.dataset.store.url, 3)
    wrong = right.copy()
    wrong[7] += 512
    answers = [encode_index(wrong)]

    def wrong_once(name, _bounds, answer):
        return answers.pop() if name == "shard-000003.tar.idx" and answers else answer

    pipeline = opened_anew(pipeline, wrong_once)
    assert run(pipeline).steps == calm
    assert not answers
    assert np.array_equal(pipeline.dataset.shards.offsets(3), right)


def test_a_shard_that_is_away_for_a_moment_stops_no_run(pipeline):
    calm, away = run(pipeline).steps, {"shard-000003.tar"}

    def away_once(name, bounds, answer):
        if bounds is not None and name in away:
            away.clear()
            return FileNotFoundError(name)
        return answer

    assert run(opened_anew(pipeline, away_once)).steps == calm
    assert not away


def test_a_shard_that_stays_away_stops_the_run_after_a_second_look(pipeline):
    Path(pipeline.dataset.store.url, "shard-000003.tar").unlink()
    pipeline, store = watched_pipeline(pipeline)
    with pytest.raises(ShardError, match="no such shard"):
        list(mm.Loader(pipeline, num_threads=1))
    assert len([name for name, _, _ in store.ranges if name == "shard-000003.tar"]) > 1


def test_bytes_that_a_decoder_refuses_are_read_twice_and_decoded_once(pipeline, monkeypatch):
    refused = []

    def decode(decoder, data, *args, real=mm.ImageDecoder.decode_planned):
        try:
            return real(decoder, data, *args)
        except mm.errors.DecodeError:
            refused.append(data)
            raise

    monkeypatch.setattr(mm.ImageDecoder, "decode_planned", decode)
    steps = run(pipeline).steps
    assert sum(len(step.bad) for step in steps) == len(BAD)
    assert len(refused) == len(set(refused)) == len(BAD)


def test_a_bad_sample_is_read_twice_and_one_in_other_bytes_each_time_no_more_than_some(tmp_path):
    corpus = write_faulty(tmp_path, [12], {5})
    start = int(offsets(corpus, 0)[5])
    pipeline = make_pipeline(corpus, shuffle=False, bad_samples=policy())
    watched, store = watched_pipeline(pipeline)
    (calm,) = run(watched).steps
    # Alone: the first time it came with the others in one range.
    assert len([one for one in store.ranges if one[1] == start]) == 1

    def noisy(_name, bounds, answer):
        return random.randbytes(len(answer)) if bounds and bounds[0] == start else answer

    watched, store = watched_pipeline(pipeline, noisy)
    (step,) = run(watched).steps
    assert step.shown == calm.shown
    assert 1 < len([one for one in store.ranges if one[1] == start]) <= MAX_SAMPLE_READS
