"""From (shard, index) pairs to raw samples, in few and long ranges.

Samples that lie close together come in one range. Each range of a remote shard is a request, and
all requests of a call travel side by side. Local ranges are read one after the other. `HeldSamples`
holds the bytes until their samples are taken.

A call may ask for samples of hundreds of shards, one or two of each. So samples and ranges are
columns, one entry per sample or range, and little is done for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.dataset.dataset import (
    ShardSource,
    datasets_of,
    numbered_datasets,
    read_ranges,
    taken_down,
)
from mmstream.dataset.index import SampleBounds, sample_checksum, wrong_samples
from mmstream.dataset.keys import shard_stamp
from mmstream.dataset.shards import MAX_SAMPLE_READS, ShardReader
from mmstream.errors import ChecksumError, SampleError, ShardError, where
from mmstream.order import AnyOrder, Unit
from mmstream.reading.step import Outcome
from mmstream.storage import NotAFileError, ReplacedError
from mmstream.storage.transfers import SharedCounts
from mmstream.tar.header import BLOCK
from mmstream.tar.lazy_bytes import LazyBytes
from mmstream.tar.samples import LINK, file_of, iter_members
from mmstream.types import IntArray, Sample, SampleRef

# -- samples with large files ----------------------------------------------------------------------
#
# A decoder may need little of a large file: eight frames of a long video lie in eight short ranges
# of it. So a sample of 8 MiB or more is not read whole, where its pipeline has such a decoder. All
# readers read its first bytes only, as if they were the sample. They hold the header of its first
# file, and often the whole of its small files and the header of a video.
#
# They become a sample in the process that decodes it. The headers of the other files are read by
# short ranges, and small files are read whole. The value of a large file is a `LazyBytes`.
#
# Checksums are of whole samples. So a sample of which a file is read by ranges is compared with
# none. What protects it: the checksums of its tar headers, the size and version of its shard in
# each answer, and that its files must end where the index says. A sample that turns out to have no
# file for such a decoder is read whole, and compared.

NO_CHECKSUM = -1

FIRST_BYTES = 64 << 10
"""What is read of a large sample with its step. The header of a video of a minute has less."""

PIECE_BYTES = 8 << 20
"""What is read at a time where a whole sample is summed up."""

HUGE_SAMPLE_BYTES = 256 << 20
"""Samples of this size are left to the process that decodes them, also where they are read whole.
Else the reader process would hold them, and share them in a block, and copy them to a worker."""


@dataclass(frozen=True)
class LargeFiles:
    """Which files of samples are read by ranges."""

    least_bytes: int
    """Smaller ones are read whole, and so are smaller samples."""
    is_ranged: Callable[[str], bool]
    """Tells whether the decoder of a field reads by ranges."""


class LargeSample(NamedTuple):
    """Where a sample lies of which the first bytes are read."""

    start: int
    """It is bytes [start, stop) of its shard."""
    stop: int
    checksum: int
    """CRC-32C of all its bytes, or `NO_CHECKSUM`."""


def first_bytes(
    bounds: SampleBounds, least_bytes: int | None
) -> tuple[IntArray, IntArray, IntArray, dict[int, LargeSample]]:
    """Return what is read of samples with their step, and which of them are large.

    Args:
        bounds: Where the samples lie.
        least_bytes: Bytes of a large sample. None: none is large.

    Returns:
        Their starts, stops and checksums: of large samples the first bytes, without a checksum. And
        the large samples, by their number among all.
    """
    start, stop, checksum = bounds
    if checksum is None:
        checksum = np.full(start.size, NO_CHECKSUM, dtype=np.int64)
    if least_bytes is None:
        return start, stop, checksum, {}
    least_bytes = max(least_bytes, 2 * BLOCK)
    is_large = stop - start >= least_bytes
    large = {
        number: LargeSample(int(start[number]), int(stop[number]), int(checksum[number]))
        for number in np.flatnonzero(is_large).tolist()
    }
    if large:
        num_first = min(FIRST_BYTES, least_bytes // BLOCK * BLOCK)
        stop = np.where(is_large, start + num_first, stop)
        checksum = np.where(is_large, NO_CHECKSUM, checksum)
    return start, stop, checksum, large


class _InOrder:
    """Reads files of a sample one after the other, and sums up what was read.

    Attributes:
        is_whole: no file was passed over.
        checksum: CRC-32C of all bytes so far, if `is_whole`.
    """

    def __init__(self, sample: LazyBytes) -> None:
        self._sample = sample
        self._position = 0
        self.is_whole, self.checksum = True, 0

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop). Those since the call before are read, too."""
        data = self._sample.read(start, stop)
        if self.is_whole:
            between = self._sample.read(self._position, start)
            self.checksum = sample_checksum(data, sample_checksum(between, self.checksum))
        self._position = stop
        return data

    def pass_over(self, start: int, stop: int) -> LazyBytes:
        """Return bytes [start, stop), which are not read."""
        self.is_whole = False
        return self._sample.within(start, stop)


def _files_of(whole: LazyBytes, checksum: int) -> Iterator[tuple[str, int, int]]:
    """Yield the files of a sample, as `sample_of` takes them.

    Raises:
        ShardError: A header is damaged, or a block of zeros has come in place of one. At the end of
            a sample zeros are right where tars were joined: then all of it is read and summed up.
    """
    end = 0
    for member in iter_members(whole.read, len(whole)):
        if member.offset != end:
            raise ShardError(f"a block of zeros at byte {end} of {len(whole)}")
        if (file := file_of(member)) is not None:
            yield file
        end = member.end
    if end < len(whole) and (checksum == NO_CHECKSUM or _checksum_of(whole) != checksum):
        raise ShardError(
            f"a block of zeros at byte {end} of {len(whole)}: damage, or the end of a joined tar; "
            "`mmstream index --checksums` lets readers tell the two apart"
        )


def _checksum_of(whole: LazyBytes) -> int:
    checksum = 0
    for start in range(0, len(whole), PIECE_BYTES):
        piece = whole.read(start, min(len(whole), start + PIECE_BYTES))
        checksum = sample_checksum(piece, checksum)
    return checksum


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
        self._fetcher, self._past_caches = fetcher, past_caches
        self.large: dict[int, LargeSample] = {}
        self.num_bytes = 0
        self._held: list[_HeldSample | ShardError | SampleError | None] = [None] * num_samples

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
                location = self._fetcher.source.locate(of_data.shard)
                self._held[of_data.position[wrong]] = location.dataset.shards.checksum_error(
                    location.shard, int(of_data.index[wrong])
                )
                self._fetcher.counts.add(num_wrong_reads=1)

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
        source, dataset, shard = self._fetcher.source.locate(held.shard)
        try:
            if position in self.large:
                sample = self._assemble(held, self.large[position], dataset.shards, shard)
            else:
                is_viewed = self._fetcher.is_viewed
                sample = dataset.shards.parse(held.data, shard, held.index, is_viewed=is_viewed)
        except (SampleError, ShardError) as error:
            return error
        if source:
            sample["__source__"] = source
        return sample

    def _assemble(
        self, held: _HeldSample, large: LargeSample, shards: ShardReader, shard: int
    ) -> Sample:
        """Return a sample of its first bytes, in any thread.

        Args:
            held: its first bytes.
            large: where it lies.
            shards: those of its dataset.
            shard: number of its shard there.

        Raises:
            SampleError, ShardError: there is none.
            StorageError: storage failed after retries.
        """
        files, counts = self._fetcher.large_files, self._fetcher.counts
        assert files is not None, "else no sample is large"
        errors: list[ShardError] = []

        def read_ranges(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
            absolute = [(large.start + start, large.start + stop) for start, stop in ranges]
            for start, stop in absolute if self._past_caches else ():
                shards.store.drop_cache(shards.name_of(shard), start, stop)
            num_bytes = sum(stop - start for start, stop in ranges)
            counts.add(num_bytes=num_bytes, num_requests=len(ranges))
            try:
                return shards.read_unchecked(shard, absolute)
            except ShardError as error:
                errors.append(error)
                raise

        whole = LazyBytes(large.stop - large.start, read_ranges, bytes(held.data))
        read = _InOrder(whole)

        def value_of(field: str, start: int, size: int) -> bytes | LazyBytes:
            if size == LINK:
                return shards.linked(shard, held.index, field, start)
            is_ranged = size >= files.least_bytes and files.is_ranged(field)
            return (read.pass_over if is_ranged else read.read)(start, start + size)

        try:
            files_of_sample = _files_of(whole, large.checksum)
            sample = shards.assemble(files_of_sample, value_of, shard, held.index)
            if read.is_whole and large.checksum != NO_CHECKSUM:
                read.read(len(whole), len(whole))
                if read.checksum != large.checksum:
                    counts.add(num_wrong_reads=1)
                    raise shards.checksum_error(shard, held.index)
        except (SampleError, ShardError):
            if errors:  # the error of the read says more than what was made of it
                raise errors[-1] from errors[-1].__cause__
            raise
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
