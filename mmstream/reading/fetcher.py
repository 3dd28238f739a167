"""From (shard, index) pairs to raw samples, in few and long ranges.

Samples that lie close together come in one range. Each range of a remote shard is a request, and
all requests of a call travel side by side. Local ranges are read about two megabytes at a time, so
that one buffer serves after the other. With `zero_copy`, local shards are mapped instead of read.
`HeldSamples` makes samples of the bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from mmap import MADV_WILLNEED, PAGESIZE, mmap
from typing import TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from mmstream.dataset.source import ShardSource, read_ranges
from mmstream.errors import ShardError
from mmstream.reading.held import NO_CHECKSUM, HeldSamples, SampleRange
from mmstream.storage import NotAFileError, ReplacedError, Store
from mmstream.types import IntArray, SampleRef

__all__ = ["Fetcher"]

MAX_BUFFER_BYTES = 2 * 1024 * 1024
"""Bytes of local ranges that are read before samples are made of them: one buffer per thread."""

MAX_MAPS = 256
"""Shards mapped at a time: each is an open file, and a process may often have 1,024."""

OF_THE_WHOLE_SHARD = (FileNotFoundError, NotAFileError, ReplacedError)
"""Errors of a range that all other ranges of its shard would meet too."""

RangeData: TypeAlias = bytes | OSError
"""The bytes of a range, or why there are none."""


class Fetcher:
    """Fetches samples for a `Reader`, in any of its threads."""

    def __init__(self, source: ShardSource, *, zero_copy: bool) -> None:
        self._source = source
        self._zero_copy = zero_copy
        self._maps: WeakValueDictionary[int, mmap] = WeakValueDictionary()  # views keep them alive
        self._num_bytes = 0
        self._num_requests = 0
        self._num_wrong_reads = 0
        self._lock = threading.Lock()

    def fetch(
        self, refs: Sequence[SampleRef] | IntArray, *, past_caches: bool = False
    ) -> HeldSamples:
        """Return samples, in the order of `refs`; errors of data become values here.

        Args:
            refs: which samples.
            past_caches: read anew what this machine may hold of the shards, mapped files too.

        Raises:
            StorageError: storage failed after retries.
        """
        shards, indexes = np.asarray(refs, dtype=np.int64).reshape(-1, 2).T
        held = HeldSamples(self._source, shards.size, zero_copy=self._zero_copy)
        num_bytes, num_requests, unread = 0, 0, list[SampleRange]()
        for positions in _by_shard(shards, indexes):
            shard, index = int(shards[positions[0]]), indexes[positions]
            location = self._source.locate(shard)
            try:
                bounds = location.dataset.bounds(location.shard, index, self._count_wrong_reads)
            except ShardError as error:
                held.put_error(positions, error)
                continue
            checksum = bounds.checksum
            if checksum is None:
                checksum = np.full(index.size, NO_CHECKSUM)
            samples = SampleRange(shard, index, bounds.start, bounds.stop, positions, checksum)
            access = location.dataset.store.access
            ranges = _merge(samples, access.max_gap_bytes, access.max_range_bytes)
            num_requests += len(ranges)
            num_bytes += sum(one_range.num_bytes for one_range in ranges)
            if past_caches:
                name = location.dataset.name_of(location.shard)
                for sample_range in ranges:
                    _, start, stop = sample_range.bounds
                    location.dataset.store.drop_cache(name, start, stop)
            is_mapped = self._zero_copy and not past_caches
            mapped = self._mapped(samples, ranges) if is_mapped else None
            if mapped is None:
                unread += ranges
            else:
                held.put(samples, mapped, 0, location.dataset.known_stat(location.shard))
        held.scan()
        for sample_range, data in self._read(unread):
            self._hold(sample_range, data, held)
            if not self._zero_copy:
                held.scan()  # the buffer of this range is free for the next one
        held.scan()
        with self._lock:
            self._num_bytes += num_bytes
            self._num_requests += num_requests
        self._count_wrong_reads(held.num_wrong)
        return held

    def pop_counts(self) -> tuple[int, int]:
        """Return how many bytes and ranges were read since the previous call."""
        with self._lock:
            counts = self._num_bytes, self._num_requests
            self._num_bytes = self._num_requests = 0
        return counts

    def pop_wrong_reads(self) -> int:
        """Return how many samples and indexes came with wrong bytes since the previous call."""
        with self._lock:
            count, self._num_wrong_reads = self._num_wrong_reads, 0
        return count

    def _count_wrong_reads(self, count: int) -> None:
        with self._lock:
            self._num_wrong_reads += count

    def _read(self, ranges: Sequence[SampleRange]) -> Iterator[tuple[SampleRange, RangeData]]:
        """Yield each range with its bytes: remote ones all together, local ones in buffers."""
        remote: list[SampleRange] = []
        buffers: list[list[SampleRange]] = [[]]
        num_bytes = 0
        for sample_range in ranges:
            if self._store(sample_range.shard).access.concurrent:
                remote.append(sample_range)
                continue
            buffers[-1].append(sample_range)
            num_bytes += sample_range.num_bytes
            if num_bytes >= MAX_BUFFER_BYTES:
                buffers.append([])
                num_bytes = 0
        for buffer in (remote, *buffers):
            data = read_ranges(self._source, [sample_range.bounds for sample_range in buffer])
            yield from zip(buffer, data, strict=True)
            del data  # before the next buffer is read

    def _store(self, shard: int) -> Store:
        return self._source.locate(shard).dataset.store

    def _mapped(self, samples: SampleRange, ranges: Sequence[SampleRange]) -> mmap | None:
        """Return a shard's file as a map. None: it must be read, be it only for the error."""
        shard = samples.shard
        with self._lock:
            file_map = self._maps.get(shard)
            if file_map is not None or len(self._maps) < MAX_MAPS:
                location = self._source.locate(shard)
                file_map = location.dataset.map(location.shard, file_map)
            if file_map is not None:
                self._maps[shard] = file_map
        if file_map is None or len(file_map) < ranges[-1].bounds[2]:
            return None
        for sample_range in ranges:
            _, start, stop = sample_range.bounds
            page = start // PAGESIZE * PAGESIZE
            file_map.madvise(MADV_WILLNEED, page, stop - page)  # all ranges come in at once
        return file_map

    def _hold(self, samples: SampleRange, data: RangeData, held: HeldSamples) -> None:
        """Hold the samples of a range, or the errors in their place."""
        if not isinstance(data, OSError):
            held.put(samples, data, samples.bounds[1])
            return
        location = self._source.locate(samples.shard)
        cause = location.dataset.explain(data, location.shard, samples.bounds[2])
        if not isinstance(cause, ShardError):
            raise cause  # storage failed; the shard itself is well
        if samples.position.size == 1 or isinstance(data, OF_THE_WHOLE_SHARD):
            held.put_error(samples.position, cause)
            return
        for number in range(samples.position.size):  # samples before the cut are still good
            one_sample = samples.slice(number, number + 1)
            one_data = read_ranges(self._source, [one_sample.bounds])[0]
            self._hold(one_sample, one_data, held)


def _by_shard(shards: IntArray, indexes: IntArray) -> list[IntArray]:
    """Return the positions of each shard's samples, by rising index."""
    if not shards.size:
        return []
    positions = np.lexsort((indexes, shards))
    return np.split(positions, np.flatnonzero(np.diff(shards[positions])) + 1)


def _merge(samples: SampleRange, max_gap_bytes: int, max_range_bytes: int) -> list[SampleRange]:
    """Cut the samples of a shard into ranges to read.

    A gap of more than `max_gap_bytes` starts a new range, and so does a sample that would make the
    range longer than `max_range_bytes`. A longer sample is a range of its own.

    Example: samples at bytes [0, 10), [10, 20), [50, 60), a gap of at most 16 and ranges of at most
    100 bytes: two ranges, [0, 20) and [50, 60).
    """
    is_far = samples.start[1:] - samples.stop[:-1] > max_gap_bytes
    ranges = []
    starts_of_groups = [0, *(np.flatnonzero(is_far) + 1).tolist(), samples.start.size]
    for first, end in pairwise(starts_of_groups):
        while first < end:
            limit = int(samples.start[first]) + max_range_bytes
            num_fitting = int(np.searchsorted(samples.stop[first:end], limit, side="right"))
            next_first = first + max(1, num_fitting)
            ranges.append(samples.slice(first, next_first))
            first = next_first
    return ranges
