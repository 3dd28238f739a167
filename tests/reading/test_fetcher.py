"""The fetcher: which byte ranges are read for samples, and in how many requests."""

from __future__ import annotations

import random
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import mmstream as mm
from mmstream.reading import fetcher as fetching
from mmstream.reading.fetcher import Fetcher
from mmstream.reading.reader import Reader
from mmstream.reading.step import Job
from tests.helpers.bad_corpus import write_tiny
from tests.helpers.corpora import write_corpus
from tests.helpers.stores import WatchedStore, watched

SAMPLE_BYTES = 300_000
COUNTS = [5, 5, 5, 5]


def large_sample(number: int) -> dict[str, bytes]:
    return {"bin": random.Random(number).randbytes(SAMPLE_BYTES)}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> mm.Dataset:
    folder = tmp_path_factory.mktemp("large")
    return mm.open_dataset(write_corpus(folder, COUNTS, large_sample))


def requests_of_tars(store: WatchedStore) -> list[list[tuple[str, int, int]]]:
    """Requests for samples, not for indexes."""
    return [ranges for ranges in store.range_reads if ranges and ranges[0][0].endswith(".tar")]


def fetched(dataset: mm.Dataset) -> list[bytes]:
    """Fetch all samples at once, the last one first."""
    refs = [(shard, index) for shard, count in enumerate(COUNTS) for index in range(count)][::-1]
    held = Fetcher(dataset).fetch(refs)
    return [bytes(held.take(position)["bin"]) for position in range(len(refs))]


def test_ranges_of_a_concurrent_store_are_read_in_one_request(large: mm.Dataset) -> None:
    dataset = watched(large, concurrent=True, maps_files=False)
    assert fetched(dataset) == fetched(large)
    (request,) = requests_of_tars(dataset.store)
    assert len(request) == len(COUNTS)


@given(data=st.data())
def test_every_sample_lies_in_one_range_and_ranges_keep_to_their_limits(
    data: st.DataObject,
) -> None:
    num_samples = data.draw(st.integers(1, 30), "num_samples")
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=num_samples, max_size=num_samples))
    gaps = data.draw(st.lists(st.integers(0, 30), min_size=num_samples, max_size=num_samples))
    shards = data.draw(st.lists(st.integers(0, 1), min_size=num_samples, max_size=num_samples))
    max_gap_bytes = data.draw(st.integers(0, 30), "max_gap_bytes")
    max_range_bytes = data.draw(st.integers(1, 200), "max_range_bytes")
    stop = np.cumsum(np.array(lengths) + np.array(gaps))
    start, shard = stop - lengths, np.sort(shards)

    firsts = starts_of_ranges(shard, start, stop, max_gap_bytes, max_range_bytes)

    assert firsts[0] == 0
    ends = [*firsts[1:], num_samples]
    for first, end in zip(firsts, ends, strict=True):
        assert end > first
        assert end == first + 1 or stop[end - 1] - start[first] <= max_range_bytes
        assert len(set(shard[first:end])) == 1
        assert (start[first + 1 : end] - stop[first : end - 1] <= max_gap_bytes).all()
    for first, following in pairwise(firsts):  # no two ranges could have been one
        gap = start[following] - stop[following - 1]
        is_far = gap > max_gap_bytes or stop[following] - start[first] > max_range_bytes
        assert is_far or shard[following] != shard[first]


def starts_of_ranges(shard, start, stop, max_gap_bytes, max_range_bytes) -> list[int]:
    """The number of the first sample of each range."""
    limits = (np.full(len(shard), limit) for limit in (max_gap_bytes, max_range_bytes))
    return fetching.starts_of_ranges(np.asarray(shard), start, stop, *limits).tolist()


def test_an_absent_shard_is_asked_for_once_and_not_sample_by_sample(tmp_path):
    dataset = watched(mm.open_dataset(write_tiny(tmp_path, [100])), maps_files=False)
    dataset.shards.offsets(0)
    (tmp_path / dataset.name_of(0)).unlink()
    held = Fetcher(dataset).fetch([(0, index) for index in range(100)])
    assert all(isinstance(held.take(position), mm.errors.ShardError) for position in range(100))
    (request,) = requests_of_tars(dataset.store)
    assert len(request) == 1


def test_a_step_can_be_taken_again_after_a_jump_back(tmp_path: Path) -> None:
    dataset = mm.open_dataset(write_corpus(tmp_path, [20, 20]))
    order = dataset.plan_order(global_batch_size=4)
    with closing(Reader(dataset, order)) as reader:
        jobs = [Job(0, step, 0, 4) for step in (0, 1, 2, 3, 2, 3, 4, 1)]
        outcomes = [reader.step(job).outcomes for job in jobs]
    assert all(isinstance(sample, dict) for step in outcomes for sample in step)
    keys = [[sample["__key__"] for sample in step] for step in outcomes]
    assert keys[2] == keys[4] != keys[3] == keys[5]
    assert keys[1] == keys[7]
