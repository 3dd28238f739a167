"""From (shard, index) pairs to raw samples, in few and long ranges.

Samples that lie close together come in one range. Each range of a remote shard is a request, and
all requests of a call travel side by side. Local ranges are read one after the other. `HeldSamples`
holds the bytes until their samples are taken.

A call may ask for samples of hundreds of shards, one or two of each. So samples and ranges are
columns, one entry per sample or range, and little is done for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.dataset.dataset import taken_down
from mmstream.dataset.index import wrong_samples
from mmstream.dataset.keys import shard_stamp
from mmstream.dataset.shards import MAX_SAMPLE_READS
from mmstream.dataset.source import ShardSource, datasets_of, numbered_datasets, read_ranges
from mmstream.errors import ChecksumError, SampleError, ShardError, where
from mmstream.order import AnyOrder, Unit
from mmstream.reading.large_samples import (
    NO_CHECKSUM,
    LargeFiles,
    LargeSample,
    LargeSamples,
    first_bytes,
)
from mmstream.reading.step import Outcome
from mmstream.storage import NotAFileError, ReplacedError
from mmstream.storage.transfers import SharedCounts
from mmstream.types import IntArray, SampleRef

# -- samples that were read together, held until they are taken ------------------------------------
#
# Bytes are compared with their checksums before anything is made of them. Samples are made when
# they are taken: a dict of each would be more for Python's garbage collector to walk.

MAX_LARGE = 16
"""Large samples of a step whose other headers are read side by side."""


class SampleRange(NamedTuple):
    """Samples of one shard, in its order. Every array has one entry per sample."""

    shard: int
    index: IntArray  # type: ignore[assignment]  # the field's name wins over tuple.index
    start: IntArray
    """The sample is bytes [start, stop) of the shard."""
    stop: IntArray
    position: IntArray
    """Position among the samples that were asked for."""
    checksum: IntArray
    """CRC-32C of the sample's bytes; `NO_CHECKSUM` where there is none."""

    def select(self, is_wanted: npt.NDArray[np.bool_] | slice) -> SampleRange:
        """Return some of the samples."""
        return SampleRange(self.shard, *(column[is_wanted] for column in self[1:]))

    @property
    def bounds(self) -> tuple[int, int, int]:
        """Shard, and the bytes [start, stop) of all samples together."""
        return self.shard, int(self.start[0]), int(self.stop[-1])

    @property
    def num_bytes(self) -> int:
        """Length of the range."""
        return int(self.stop[-1] - self.start[0])


class SampleTable(NamedTuple):
    """Samples of several shards, by shard and then by index. Every array has one entry per sample.

    The columns are those of `SampleRange`.
    """

    shard: IntArray
    index: IntArray  # type: ignore[assignment]
    start: IntArray
    stop: IntArray
    position: IntArray
    checksum: IntArray

    def select(self, is_wanted: npt.NDArray[np.bool_] | slice) -> SampleTable:
        """Return some of the samples."""
        return SampleTable(*(column[is_wanted] for column in self))

    def range(self, first: int, end: int) -> SampleRange:
        """Return samples [first, end), which are of one shard."""
        return SampleRange(int(self.shard[first]), *(column[first:end] for column in self[1:]))


class _HeldSample(NamedTuple):
    """A sample that was not taken yet."""

    shard: int
    index: int  # type: ignore[assignment]  # the field's name wins over tuple.index
    data: memoryview
    """Its bytes in the tar; of a large one, the first of them."""


class HeldSamples:
    """Samples that were asked for together. Each can be taken once.

    Args:
        fetcher: who reads them. What is read of large ones later is counted there.
        num_samples: how many there are.
        past_caches: as `Fetcher.fetch`.

    Attributes:
        large: samples of which only the first bytes are put, by position.
        num_bytes: bytes of all samples that were put.
    """

    def __init__(self, fetcher: Fetcher, num_samples: int, *, past_caches: bool = False) -> None:
        self._source, self._is_viewed = fetcher.source, fetcher.is_viewed
        self._counts = fetcher.counts
        files = fetcher.large_files
        self._large_samples = (
            None
            if files is None
            else LargeSamples(self._source, files, self._counts, past_caches=past_caches)
        )
        self.large: dict[int, LargeSample] = {}
        self.num_bytes = 0
        self._held: list[_HeldSample | ShardError | SampleError | None] = [None] * num_samples

    def __len__(self) -> int:
        """Samples that were not taken yet."""
        return sum(held is not None for held in self._held)

    def put_error(self, positions: IntArray, error: ShardError | SampleError) -> None:
        """Hold why samples cannot be had."""
        for position in positions.tolist():
            self._held[position] = error

    def put(
        self,
        samples: SampleTable,
        data: Sequence[Any],
        data_starts: IntArray,
        data_of_sample: IntArray,
    ) -> None:
        """Hold samples that lie in pieces of data. Those unlike their checksums become errors.

        Args:
            samples: which ones.
            data: bytes of shards, or views of them. They stay in memory until the last sample of
                them was taken, and with views until the last of these is gone.
            data_starts: the byte where each of `data` begins, as `samples` counts them.
            data_of_sample: number of the piece of data that has each sample; it never falls.
        """
        starts = (samples.start - data_starts[data_of_sample]).tolist()
        stops = (samples.stop - data_starts[data_of_sample]).tolist()
        columns = (samples.position, samples.shard, samples.index, data_of_sample)
        for position, shard, index, number, start, stop in zip(
            *(column.tolist() for column in columns), starts, stops, strict=True
        ):
            self._held[position] = _HeldSample(shard, index, memoryview(data[number])[start:stop])
            self.num_bytes += stop - start
        for number in np.unique(data_of_sample[samples.checksum != NO_CHECKSUM]).tolist():
            first, end = np.searchsorted(data_of_sample, (number, number + 1)).tolist()
            of_data = samples.range(first, end)
            start, stop = of_data.start - data_starts[number], of_data.stop - data_starts[number]
            for wrong in wrong_samples(data[number], start, stop, of_data.checksum):
                location = self._source.locate(of_data.shard)
                self._held[of_data.position[wrong]] = location.dataset.shards.checksum_error(
                    location.shard, int(of_data.index[wrong])
                )
                self._counts.add(num_wrong_reads=1)

    def take_all(self, first: int, end: int) -> list[Outcome]:
        """Return the samples at positions [first, end)."""
        positions = range(first, end)
        if self.large.keys().isdisjoint(positions):
            return list(map(self.take, positions))
        with ThreadPoolExecutor(MAX_LARGE, thread_name_prefix="mmstream-large") as pool:
            return list(pool.map(self.take, positions))

    def take(self, position: int) -> Outcome:
        """Return the sample at a position."""
        held, self._held[position] = self._held[position], None
        assert held is not None, "each sample can be taken once"
        if not isinstance(held, _HeldSample):
            return held
        if position in self.large:
            assert self._large_samples is not None, "only it makes samples large"
            large = self.large[position]
            return self._large_samples.sample(held.shard, held.index, large, bytes(held.data))
        source, dataset, shard = self._source.locate(held.shard)
        try:
            sample = dataset.shards.parse(held.data, shard, held.index, is_viewed=self._is_viewed)
        except SampleError as error:
            return error
        if source:
            sample["__source__"] = source
        return sample


# -- samples that are read together ----------------------------------------------------------------

OF_THE_WHOLE_SHARD = (FileNotFoundError, NotAFileError, ReplacedError)
"""Errors of a range that all other ranges of its shard would meet too."""


class _Ranges(NamedTuple):
    """Ranges to read, as columns. Range i has samples [first[i], end[i]) of a `SampleTable`."""

    first: IntArray
    end: IntArray
    shard: IntArray
    start: IntArray
    """The range is bytes [start, stop) of its shard."""
    stop: IntArray

    @property
    def bounds(self) -> list[tuple[int, int, int]]:
        """Shard, start and stop of each range."""
        return list(zip(self.shard.tolist(), self.start.tolist(), self.stop.tolist(), strict=True))


class Fetcher:
    """Fetches samples for a `Reader`, in any of its threads.

    Args:
        source: what they belong to.
        is_viewed: tells which fields are views of what was read, not bytes of their own. None:
            none.
        large_files: which files are read by ranges. None: all samples are read whole.

    Attributes:
        counts: bytes, ranges and wrong reads, by their names in `BatchLineage`.
    """

    def __init__(
        self,
        source: ShardSource,
        *,
        is_viewed: Callable[[str], bool] | None = None,
        large_files: LargeFiles | None = None,
    ) -> None:
        self.source, self.is_viewed, self.large_files = source, is_viewed, large_files
        self.counts = SharedCounts()
        self._has_views = any(dataset.selection is not None for dataset in datasets_of(source))
        self._removed = {
            (first_shard + shard, index): reason
            for first_shard, dataset in numbered_datasets(source)
            for (shard, index), reason in dataset.removed.items()
        }

    def without_removed(
        self, refs: Iterable[SampleRef], outcomes: Iterable[Outcome]
    ) -> list[Outcome]:
        """Return what was read, with an error in place of each sample that was taken down.

        An epoch that was planned before a takedown still has it. Its row gets a substitute, as
        where a filter of the user leaves a sample out.
        """
        if not self._removed:
            return list(outcomes)
        return [
            taken_down(where(self.source.name_of(ref[0]), ref[1]), self._removed[ref])
            if ref in self._removed
            else outcome
            for ref, outcome in zip(refs, outcomes, strict=True)
        ]

    def fetch(
        self, refs: Sequence[SampleRef] | IntArray, *, past_caches: bool = False
    ) -> HeldSamples:
        """Return samples, in the order of `refs`; errors of data become values here.

        Args:
            refs: which samples.
            past_caches: read again what this machine may hold of the shards.

        Raises:
            StorageError: storage failed after retries.
        """
        shards, indexes = np.asarray(refs, dtype=np.int64).reshape(-1, 2).T
        held = HeldSamples(self, shards.size, past_caches=past_caches)
        samples = self._locate(shards, indexes, held)
        ranges = self._ranges(samples)
        if past_caches:
            for shard, start, stop in ranges.bounds:
                location = self.source.locate(shard)
                name = location.dataset.name_of(location.shard)
                location.dataset.store.drop_cache(name, start, stop)
        self._read(samples, ranges, held)
        num_bytes = int((ranges.stop - ranges.start).sum())
        self.counts.add(num_bytes=num_bytes, num_requests=ranges.first.size)
        return held

    def _locate(self, shards: IntArray, indexes: IntArray, held: HeldSamples) -> SampleTable:
        """Return where samples lie, by shard and index; hold the errors of their shards."""
        position = np.lexsort((indexes, shards))
        shards, indexes = shards[position], indexes[position]
        start, stop = np.empty_like(shards), np.empty_like(shards)
        checksum = np.empty_like(shards)
        least_bytes = None if self.large_files is None else self.large_files.least_bytes
        is_located = np.ones(shards.size, dtype=np.bool_)
        for first, end in _groups(shards):
            location = self.source.locate(int(shards[first]))
            of_shard = slice(first, end)
            try:
                bounds = location.dataset.shards.bounds(
                    location.shard,
                    indexes[of_shard],
                    lambda count: self.counts.add(num_wrong_reads=count),
                )
            except ShardError as error:
                held.put_error(position[of_shard], error)
                is_located[of_shard] = False
                continue
            *columns, large = first_bytes(bounds, least_bytes)
            start[of_shard], stop[of_shard], checksum[of_shard] = columns
            for number, sample in large.items():
                held.large[int(position[first + number])] = sample
        samples = SampleTable(shards, indexes, start, stop, position, checksum)
        return samples if is_located.all() else samples.select(is_located)

    def _ranges(self, samples: SampleTable) -> _Ranges:
        """Return the ranges of samples that are read together."""
        groups = _groups(samples.shard)
        sizes = [end - first for first, end in groups]
        accesses = [self.source.locate(int(samples.shard[n])).dataset.access for n, _ in groups]
        limits = [(access.max_gap_bytes, access.max_range_bytes) for access in accesses]
        limits_of_samples = np.repeat(np.array(limits, np.int64).reshape(-1, 2), sizes, axis=0)
        max_gap_bytes, max_range_bytes = limits_of_samples.T
        if self._has_views:  # no more than the sample has: what is not chosen may be large
            max_gap_bytes = np.minimum(max_gap_bytes, samples.stop - samples.start)
        first = starts_of_ranges(
            samples.shard, samples.start, samples.stop, max_gap_bytes, max_range_bytes
        )
        end = np.append(first[1:], samples.shard.size)[: first.size]
        return _Ranges(
            first, end, samples.shard[first], samples.start[first], samples.stop[end - 1]
        )

    def _read(self, samples: SampleTable, ranges: _Ranges, held: HeldSamples) -> None:
        """Read ranges, and hold their samples, or the errors in their place."""
        data = read_ranges(self.source, ranges.bounds)
        failed = []
        for number, answer in enumerate(data):
            if isinstance(answer, OSError):
                failed.append(number)
                of_range = samples.select(slice(ranges.first[number], ranges.end[number]))
                self._hold_error(of_range, answer, held)
        num_samples = ranges.end - ranges.first
        range_of_sample = np.repeat(np.arange(num_samples.size), num_samples)
        is_read = ~np.isin(range_of_sample, failed)
        held.put(samples.select(is_read), data, ranges.start, range_of_sample[is_read])

    def _hold_error(self, samples: SampleTable, error: OSError, held: HeldSamples) -> None:
        """Hold why a range could not be read; or its samples, where they can be had alone."""
        num_samples = samples.position.size
        bounds = samples.range(0, num_samples).bounds
        location = self.source.locate(bounds[0])
        cause = location.dataset.shards.explain(error, location.shard, bounds[2])
        if not isinstance(cause, ShardError):
            raise cause  # storage failed; the shard itself is well
        if num_samples == 1 or isinstance(error, OF_THE_WHOLE_SHARD):
            held.put_error(samples.position, cause)
            return
        for number in range(num_samples):  # samples before the cut are still good
            one_sample = samples.select(slice(number, number + 1))
            data = read_ranges(self.source, [one_sample.range(0, 1).bounds])[0]
            if isinstance(data, OSError):
                self._hold_error(one_sample, data, held)
            else:
                held.put(one_sample, [data], one_sample.start, np.zeros(1, dtype=np.int64))


def _groups(values: IntArray) -> list[tuple[int, int]]:
    """Return [first, end) of each group of equal values that follow one another.

    Examples:
        >>> _groups(np.array([7, 7, 9]))
        [(0, 2), (2, 3)]
    """
    ends = [*(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), values.size]
    return list(zip([0, *ends[:-1]], ends, strict=True)) if values.size else []


def starts_of_ranges(
    shard: IntArray,
    start: IntArray,
    stop: IntArray,
    max_gap_bytes: IntArray,
    max_range_bytes: IntArray,
) -> IntArray:
    """Return the number of the first sample of each range to read. All arrays are [num_samples].

    A new range starts with a shard, after a gap of more than `max_gap_bytes`, and with a sample
    that would make the range longer than `max_range_bytes`. A longer sample is a range of its own.

    Example: samples at bytes [0, 10), [10, 20), [50, 60) of a shard, a gap of at most 16 and ranges
    of at most 100 bytes: two ranges, [0, 20) and [50, 60). The result is [0, 2].
    """
    is_first = np.ones(shard.size, dtype=np.bool_)
    is_first[1:] = (shard[1:] != shard[:-1]) | (start[1:] - stop[:-1] > max_gap_bytes[1:])
    firsts = np.flatnonzero(is_first)
    ends = np.append(firsts[1:], shard.size)[: firsts.size]
    is_long = stop[ends - 1] - start[firsts] > max_range_bytes[firsts]
    for first, end in zip(firsts[is_long].tolist(), ends[is_long].tolist(), strict=True):
        while first < end:
            is_first[first] = True
            limit = int(start[first] + max_range_bytes[first])
            num_fitting = int(np.searchsorted(stop[first:end], limit, side="right"))
            first += max(1, num_fitting)
    return np.flatnonzero(is_first)


# -- single samples, read when they are asked for: second reads and substitutes of bad samples -----


class FixedDraws(NamedTuple):
    """What decoding asks a lookup or an order where samples have no row in an epoch."""

    seed: int
    epoch: int
    shard_name: Callable[[int], str]

    def stream(self, *_: int) -> tuple[int, int]:
        """Return the key of the random draws."""
        return self.seed, self.epoch


@dataclass(frozen=True)
class SampleLookup:
    """Answers what the decode stage asks about samples that its step does not hold."""

    source: ShardSource
    order: AnyOrder
    fetcher: Fetcher

    def read(self, ref: SampleRef) -> Outcome:
        """Read one sample from storage, now."""
        return self.read_all([ref])[0]

    def read_all(self, refs: Sequence[SampleRef]) -> list[Outcome]:
        """Read samples from storage together, such as those of a pack."""
        outcomes = self.fetcher.fetch(refs).take_all(0, len(refs))
        return self.fetcher.without_removed(refs, outcomes)

    def read_again(self, ref: SampleRef) -> Outcome:
        """Read one sample once more, past what this machine holds of its shard."""
        return self.fetcher.fetch([ref], past_caches=True).take(0)

    def read_until_right(self, ref: SampleRef) -> Outcome:
        """Read one sample whose bytes came unlike their checksum, until they fit it or for good."""
        outcome = self.read_again(ref)
        for _ in range(MAX_SAMPLE_READS - 2):
            if not isinstance(outcome, ChecksumError):
                break
            outcome = self.read_again(ref)
        return outcome

    def forget_index(self, shard: int) -> None:
        """Read the index of a shard again at its next use."""
        location = self.source.locate(shard)
        location.dataset.shards.forget_index(location.shard)

    def planned(self, epoch: int, step: int, position: int) -> tuple[int, Unit]:
        """Return the row of the order at a position of a step, and its planned samples."""
        rows = position, position + 1
        shards, indexes, _ = self.order.refs(epoch, step, rows)
        num_tokens = self.order.document_tokens(epoch, step, rows).tolist()
        row = int(self.order.order_rows(epoch, step, rows)[0])
        return row, Unit(list(zip(shards.tolist(), indexes.tolist(), strict=True)), num_tokens)

    def stream(self, epoch: int, step: int, row: int) -> tuple[int, int]:
        """Return (seed, epoch), the key of the random draws for a row."""
        return self.order.stream(epoch, step, row)

    def shard_name(self, shard: int) -> str:
        """Return the name of a shard, as messages show it."""
        return self.source.name_of(shard)

    def shard_stamp(self, shard: int) -> str:
        """Return what tells a shard from one of the same name in another dataset."""
        location = self.source.locate(shard)
        return shard_stamp(location.dataset.manifest.shards[location.shard])
