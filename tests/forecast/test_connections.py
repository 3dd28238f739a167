"""Ranges of a run, and how fast so many connections read them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

import mmstream as mm
from mmstream.forecast import connections
from mmstream.forecast.connections import (
    ReadRange,
    cached_share,
    drop_caches,
    measure_connections,
    planned_ranges,
)
from mmstream.storage.store import RequestError
from tests.helpers.corpora import write_corpus


def ranges_of(dataset: mm.Dataset, batch_size: int = 8) -> list[ReadRange]:
    pipeline = mm.Pipeline(dataset, global_batch_size=batch_size)
    return planned_ranges(dataset, pipeline.order, (0, batch_size))


def test_a_local_corpus_is_read_sample_by_sample(corpus: str) -> None:
    dataset = mm.open_dataset(corpus)
    ranges = ranges_of(dataset)
    assert {one_range.num_samples for one_range in ranges} == {1}
    assert len({(r.name, r.start) for r in ranges}) == len(ranges) > 80  # none comes twice
    for one_range in ranges[:5]:
        shard = [info.name for info in dataset.manifest.shards].index(one_range.name)
        bounds = dataset.bounds(shard, np.arange(dataset.counts[shard]))
        assert (one_range.start, one_range.stop) in zip(bounds.start, bounds.stop, strict=True)


def test_a_corpus_that_a_reader_process_reads_is_read_in_runs(corpus: str) -> None:
    ranges = ranges_of(mm.open_dataset(corpus, storage_kind="shared"))
    assert max(one_range.num_samples for one_range in ranges) > 8
    assert sum(one_range.num_samples for one_range in ranges) > 80


@pytest.mark.parametrize("kind", ["local", "shared"])
def test_every_number_of_connections_brings_bytes(corpus: str, kind: str) -> None:
    dataset = mm.open_dataset(corpus, storage_kind=kind)
    begun: list[int] = []
    speeds = measure_connections(
        dataset, ranges_of(dataset), seconds=0.05, connections=(1, 4), before_each=begun.append
    )
    assert begun == [speed.num_connections for speed in speeds] == [1, 4]
    for speed in speeds:
        assert speed.mb_per_s > 0
        assert 0 < speed.first_byte_p50_s <= speed.first_byte_p95_s <= speed.first_byte_p99_s
        assert (speed.num_throttled, speed.num_failed) == (0, 0)


@pytest.mark.s3
def test_a_real_server_is_read_by_the_client_of_a_reader_process(s3: str) -> None:
    dataset = mm.open_dataset(write_corpus(f"{s3}/connections", [60]))
    ranges = ranges_of(dataset)
    assert max(one_range.num_samples for one_range in ranges) > 8
    (speed,) = measure_connections(dataset, ranges, seconds=0.1, connections=(4,))
    assert speed.mb_per_s > 0
    assert speed.num_failed == 0
    assert cached_share(dataset, ranges) is None


def test_a_disk_that_is_measured_is_not_read_twice(corpus: str) -> None:
    dataset = mm.open_dataset(corpus)
    ranges = ranges_of(dataset)
    speeds = measure_connections(dataset, ranges, seconds=5.0, connections=(1, 2), goes_round=False)
    assert sum(speed.num_requests for speed in speeds) == len(ranges)


def test_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    dataset = mm.open_dataset(write_corpus(tmp_path, [40]))
    ranges = ranges_of(dataset)
    (tmp_path / "shard-000000.tar").unlink()
    with pytest.raises(FileNotFoundError):
        measure_connections(dataset, ranges, seconds=0.05, connections=(2,))


class BusyClient:
    """Answers half of the requests, and asks for fewer in place of the others."""

    streams = True
    refuses_all = False

    def __init__(self, _store: object) -> None:
        self.num_requests = 0

    async def open(self, _name: str, _start: int, _stop: int, _into: object) -> BusyClient:
        await asyncio.sleep(0.001)
        self.num_requests += 1
        if self.refuses_all or self.num_requests % 2:
            raise RequestError("503 SlowDown", is_throttled=True, retry_after_s=0.001)
        return self

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"1234"

    async def close(self) -> None:
        pass


def test_a_store_that_asks_for_fewer_requests_gets_no_more(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "range_client", BusyClient)
    dataset = mm.open_dataset(corpus, storage_kind="shared")
    ranges = ranges_of(dataset)
    speeds = measure_connections(dataset, ranges, seconds=0.05, connections=(1, 2, 4))
    assert [speed.num_connections for speed in speeds] == [1]
    assert speeds[0].num_throttled > 0
    assert speeds[0].num_requests > 0
    monkeypatch.setattr(BusyClient, "refuses_all", True)
    monkeypatch.setattr(connections, "PATIENCE_S", 0.1)
    with pytest.raises(mm.StorageError, match=r"not one range came .* 503 SlowDown"):
        measure_connections(dataset, ranges, seconds=0.01, connections=(1,))


def test_the_page_cache_is_seen_and_emptied(tmp_path: Path) -> None:
    dataset = mm.open_dataset(write_corpus(tmp_path, [60]))
    ranges = ranges_of(dataset)
    path = tmp_path / "shard-000000.tar"
    file = os.open(path, os.O_RDWR)
    os.fsync(file)  # what is not written yet stays in memory
    os.close(file)
    path.read_bytes()
    share = cached_share(dataset, ranges)
    if share is None:
        pytest.skip("this file system does not say what is in memory")
    assert share == 1.0
    drop_caches(dataset)
    rest = cached_share(dataset, ranges)
    assert rest == 1.0 or rest < 0.5  # a file system in memory keeps all


def test_what_is_not_on_this_machine_has_no_page_cache() -> None:
    folder = write_corpus("memory://bench-connections", [30])
    dataset = mm.open_dataset(folder)
    assert cached_share(dataset, ranges_of(dataset)) is None
