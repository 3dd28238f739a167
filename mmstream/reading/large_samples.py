"""Samples with large files: their first bytes come with their step, the rest when it is decoded.

A decoder may need little of a large file: eight frames of a long video lie in eight short ranges of
it. So a sample of 8 MiB or more is not read whole, where its pipeline has such a decoder. All
readers read its first bytes only, as if they were the sample. They hold the header of its first
file, and often the whole of its small files and the header of a video.

Here they become a sample, in the process that decodes it. The headers of the other files are read
by short ranges, and small files are read whole. The value of a large file is a `LazyBytes`.

Checksums are of whole samples. So a sample of which a file is read by ranges is compared with none.
What protects it: the checksums of its tar headers, the size and version of its shard in each
answer, and that its files must end where the index says. A sample that turns out to have no file
for such a decoder is read whole, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmstream.dataset.index import sample_checksum
from mmstream.dataset.index_part import SampleBounds
from mmstream.dataset.source import ShardSource
from mmstream.errors import SampleError, ShardError
from mmstream.reading.step import Outcome
from mmstream.storage.transfers import SharedCounts
from mmstream.tar.header import BLOCK
from mmstream.tar.lazy_bytes import LazyBytes
from mmstream.tar.samples import LINK, file_of, iter_members
from mmstream.types import IntArray

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


class LargeSamples:
    """Makes samples of first bytes, in any thread.

    Args:
        source: what they belong to.
        files: which of their files are read by ranges.
        counts: of bytes and ranges that are read, and of samples that come wrong.
        past_caches: read again what this machine may hold of the shards.
    """

    def __init__(
        self,
        source: ShardSource,
        files: LargeFiles,
        counts: SharedCounts,
        *,
        past_caches: bool = False,
    ) -> None:
        self._source, self._files, self._counts = source, files, counts
        self._past_caches = past_caches

    def sample(self, shard: int, index: int, large: LargeSample, head: bytes) -> Outcome:
        """Return a sample, or why there is none.

        Args:
            shard: number of its shard.
            index: position in its shard.
            large: where it lies.
            head: its first bytes.

        Raises:
            StorageError: storage failed after retries.
        """
        source, dataset, local_shard = self._source.locate(shard)
        errors: list[ShardError] = []

        def read_ranges(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
            absolute = [(large.start + start, large.start + stop) for start, stop in ranges]
            if self._past_caches:
                dataset.shards.drop_cache(local_shard, absolute)
            num_bytes = sum(stop - start for start, stop in ranges)
            self._counts.add(num_bytes=num_bytes, num_requests=len(ranges))
            try:
                return dataset.shards.read_unchecked(local_shard, absolute)
            except ShardError as error:
                errors.append(error)
                raise

        whole = LazyBytes(large.stop - large.start, read_ranges, head)
        read = _InOrder(whole)

        def value_of(field: str, start: int, size: int) -> bytes | LazyBytes:
            if size == LINK:
                return dataset.shards.linked(local_shard, index, field, start)
            is_ranged = size >= self._files.least_bytes and self._files.is_ranged(field)
            return (read.pass_over if is_ranged else read.read)(start, start + size)

        try:
            files = _files_of(whole, large.checksum)
            sample = dataset.shards.assemble(files, value_of, local_shard, index)
            if read.is_whole and large.checksum != NO_CHECKSUM:
                read.read(len(whole), len(whole))
                if read.checksum != large.checksum:
                    self._counts.add(num_wrong_reads=1)
                    return dataset.shards.checksum_error(local_shard, index)
        except (SampleError, ShardError) as error:
            return errors[-1] if errors else error
        if source:
            sample["__source__"] = source
        return sample


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
