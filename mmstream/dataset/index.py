"""Where samples start, and the checksum of each: small files beside a tar, and parts for many tars.

``NAME.tar.idx`` is the byte index. It holds little-endian u64 byte offsets. There is one for the
first header of each sample, and a last one for the end of the last member. So sample i is bytes
[offsets[i], offsets[i + 1]) of the tar. Source of the layout: Megatron-Energon.

Example: a tar of two samples with one small file each (a header of 512 bytes, then 512 bytes of
padded content) has the offsets 0, 1024, 2048. A shard of 500 samples has 501 offsets, 4,008
bytes.

An index is built from the headers alone: 2 % of the bytes are read of a local tar with images of
1 MB.

``NAME.tar.crc32c`` has the checksums. It holds little-endian u32 numbers. There is one for each
sample: the CRC-32C of its bytes [offsets[i], offsets[i + 1]) in the tar, with headers and
padding. A last one, the seal, is the CRC-32C of the index file and of all numbers before it. So a
damaged column, a damaged index and a column of another index are noticed.

Example: a shard of 500 samples has 501 numbers, 2,004 bytes.

CRC-32C finds every flip of up to three bits in a sample of less than 256 MB, and all but one of 4
* 10^9 other changes. It is not protection against somebody who changes tar and column together.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from mmstream.dataset.manifest import IndexPart, index_part_name
from mmstream.errors import ShardError, escaped
from mmstream.storage import Store
from mmstream.tar.header import BLOCK, Member
from mmstream.tar.samples import InPiecesError, iter_members, sample_offsets, split_member
from mmstream.types import IntArray

logger = logging.getLogger(__name__)

_RECORD = 20 * BLOCK
"""Most programs fill a tar with zeros up to a multiple of this (GNU tar, Python)."""

_CURE = "run `mmstream index --overwrite`"


def index_name(name: str) -> str:
    """Return the name of the index of a shard: ``a.tar`` -> ``a.tar.idx``."""
    return f"{name}.idx"


def encode_index(offsets: Sequence[int] | IntArray) -> bytes:
    """Return the bytes of an index file."""
    return np.asarray(offsets, dtype="<u8").tobytes()


def index_checksum(name: str, offsets: Sequence[int] | IntArray) -> int:
    """Return the CRC-32C of a shard's name and index."""
    return int(crc32c(encode_index(offsets), crc32c(name.encode())))


def decode_index(data: bytes, name: str) -> IntArray:
    """Return the offsets of an index file.

    Args:
        data: The content of the file.
        name: Of the file, for messages.

    Returns:
        int64 [num_samples + 1] byte offsets, ascending.

    Raises:
        ShardError: The bytes are not an index.
    """
    if len(data) % 8 or not data:
        raise ShardError(f"{name}: {len(data)} bytes are not an index; {_CURE}")
    offsets = np.frombuffer(data, dtype="<u8").astype(np.int64)
    if offsets.min() < 0 or np.any(np.diff(offsets) <= 0) or np.any(offsets % BLOCK):
        raise ShardError(f"{name}: offsets are not ascending blocks; {_CURE}")
    return offsets


def index_size(num_samples: int) -> int:
    """Return the size in bytes of an index of a number of samples."""
    return 8 * (num_samples + 1)


def num_indexed(index_bytes: int) -> int:
    """Return the number of samples that an index file of this size describes."""
    return max(0, index_bytes // 8 - 1)


def build_index(store: Store, name: str, size: int | None = None) -> IntArray:
    """Build the index of a tar from its headers.

    Args:
        store: Where the tar lies.
        name: Of the tar.
        size: Of the tar in bytes, if it is known. Else the store is asked.

    Returns:
        int64 [num_samples + 1] byte offsets, ascending.

    Raises:
        ShardError: The tar is gzipped (such a tar has no byte index), truncated or damaged. Or the
            files of a sample do not stand together.
        FileNotFoundError: No such tar.
        StorageError: The storage failed.
    """
    try:
        offsets = sample_offsets(walk_tar(store, name, size))
    except ShardError as error:
        raise type(error)(f"{name}: {error}") from error
    return np.asarray(offsets, dtype=np.int64)


def require_whole(
    store: Store, name: str, size: int, offsets: IntArray, *, thorough: bool = True
) -> None:
    """Refuse an index of unknown origin that leaves out samples, or has them in pieces.

    Some programs stop at the first end of a tar that was joined of several, or take each file for a
    sample where the files of a sample do not stand together.

    Args:
        store: Where the tar lies.
        name: Of the tar.
        size: Of the tar in bytes.
        offsets: Of the index.
        thorough: Read the headers of the first and the last sample, and what follows it, and all
            headers where these two have no files of the same type. False: nothing is read where
            only zeros of the usual number can follow.

    Raises:
        ShardError: Names the tar, and says what to do.
        StorageError: The storage failed.
    """
    end, read = int(offsets[-1]), partial(store.read_range, name)
    is_usual = size - end <= 2 * BLOCK or (size % _RECORD == 0 and size - end <= _RECORD + BLOCK)
    member = None
    with suppress(ShardError):  # what is damaged is said where it is used
        member = next(iter_members(read, size, end), None) if thorough or not is_usual else None
    if member is not None:
        raise ShardError(
            f"{name}: its index ends at byte {end}, and more samples follow (tars joined by cat?); "
            f"{_CURE}"
        )
    if not thorough or len(offsets) < 3:
        return
    try:
        first, last = (
            {
                split[1]
                for member in iter_members(read, stop, start)
                if (split := split_member(member))
            }
            for start, stop in (offsets[:2].tolist(), offsets[-2:].tolist())
        )
        if first.isdisjoint(last):
            build_index(store, name, size)
    except InPiecesError:
        raise
    except ShardError:
        pass


def walk_tar(store: Store, name: str, size: int | None = None) -> Iterator[Member]:
    """Yield the members of a tar, in few reads. Arguments and errors are those of `build_index`."""
    size = store.size(name) if size is None else size
    min_bytes = store.access.min_header_read_bytes
    max_bytes = store.access.max_header_read_bytes
    buffer, buffer_start, read_bytes = b"", 0, min_bytes

    def read(start: int, stop: int) -> bytes:
        """Return bytes [start, stop); keeps what it read beyond them for the next call."""
        nonlocal buffer, buffer_start, read_bytes
        buffer_stop = buffer_start + len(buffer)
        if start < buffer_start or stop > buffer_stop:
            # Small members: the next header is near the end of the last read, so read more at once
            # and go through them. Large members: the header is far away, so skip to it and read
            # little. With 16 KiB reads and headers 20 KiB apart, reads double up to 256 KiB;
            # with headers 1 MB apart, they stay at 16 KiB.
            is_near = bool(buffer) and start - buffer_stop < min_bytes
            read_bytes = min(2 * read_bytes, max_bytes) if is_near else min_bytes
            buffer = store.read_range(name, start, min(size, max(stop, start + read_bytes)))
            buffer_start = start
        return buffer[start - buffer_start : stop - buffer_start]

    if size >= 2 and read(0, 2) == b"\x1f\x8b":
        raise ShardError(
            "gzipped, so samples cannot be found by byte; `mmstream convert` writes a plain one"
        )
    junk = "%s: what follows byte %d, after the end of the tar, is left out: it is not a tar"
    yield from iter_members(read, size, on_junk=partial(logger.warning, junk, escaped(name)))


# -- checksums of samples --------------------------------------------------------------------------

Checksums = npt.NDArray[np.uint32]
"""CRC-32C of each sample of a shard."""

NO_SAMPLES = np.zeros(1, dtype=np.int64)
"""The index of a tar that has none: no sample is read."""

READ_BYTES = 8 << 20
"""Bytes that are read at once of a tar that is read whole."""


def checksums_name(name: str) -> str:
    """Return the name of the checksums of a shard: ``a.tar`` -> ``a.tar.crc32c``."""
    return f"{name}.crc32c"


def checksums_size(num_samples: int) -> int:
    """Return the size in bytes of the checksums of a number of samples."""
    return 4 * (num_samples + 1)


def sample_checksum(data: bytes | memoryview, before: int = 0) -> int:
    """Return the CRC-32C of bytes, or of bytes that follow others whose CRC-32C is `before`.

    Examples:
        >>> hex(sample_checksum(b"123456789"))
        '0xe3069283'
        >>> hex(sample_checksum(b"456789", sample_checksum(b"123")))
        '0xe3069283'
    """
    # The 0 keeps Python's lock: to give it back and wait for it costs more than the checksum.
    return int(crc32c(data, before, 0))


def encode_checksums(checksums: Sequence[int] | Checksums, index: bytes) -> bytes:
    """Return the bytes of a file of checksums.

    Args:
        checksums: CRC-32C of each sample.
        index: The index file of the same shard.
    """
    column = np.asarray(checksums, dtype="<u4").tobytes()
    return column + sample_checksum(column, sample_checksum(index)).to_bytes(4, "little")


def decode_checksums(data: bytes, index: bytes, name: str) -> Checksums:
    """Return the checksums of a file.

    Args:
        data: The content of the file.
        index: The index file of the same shard.
        name: Of the file, for messages.

    Returns:
        uint32 [num_samples], the CRC-32C of each sample.

    Raises:
        ShardError: The file is damaged, the index is, or they belong to different tars.
    """
    if len(data) != checksums_size(len(index) // 8 - 1) or data != encode_checksums(
        np.frombuffer(data, "<u4")[:-1], index
    ):
        raise ShardError(
            f"{name}: the checksums do not fit the index: one of the two is damaged, or of another "
            "tar; run `mmstream verify`, then `mmstream index --checksums --overwrite`"
        )
    return np.frombuffer(data, "<u4")[:-1].astype(np.uint32)


def read_checksums(store: Store, shard: str, index: bytes) -> Checksums:
    """Read the checksums of a shard, and no more bytes than they can have.

    Args:
        store: Where the file of checksums lies.
        shard: Name of the tar.
        index: The index file of the same shard.

    Returns:
        uint32 [num_samples], the CRC-32C of each sample.

    Raises:
        FileNotFoundError: There is no such file.
        ShardError: The file is damaged, the index is, or they belong to different tars.
        StorageError: The storage failed after retries, or there is something that is not a file.
    """
    name, size = checksums_name(shard), len(index) // 8 * 4
    data = store.read_range(name, 0, size) if store.size(name) == size else b""
    return decode_checksums(data, index, name)


def wrong_samples(data: Any, starts: IntArray, stops: IntArray, checksums: IntArray) -> list[int]:
    """Return which samples of a range have other bytes than their checksums say.

    Args:
        data: Bytes, or a view or map of bytes.
        starts: Sample i is ``data[starts[i]:stops[i]]``.
        stops: Where each sample ends.
        checksums: What the CRC-32C of each sample must be. A negative one fits all bytes.

    Examples:
        >>> starts, stops = np.array([0, 9]), np.array([9, 18])
        >>> wrong_samples(b"123456789123456780", starts, stops, np.array([0xE3069283] * 2))
        [1]
    """
    with memoryview(data) as view:
        bounds = zip(starts.tolist(), stops.tolist(), checksums.tolist(), strict=True)
        return [
            number
            for number, (start, stop, checksum) in enumerate(bounds)
            if checksum >= 0 and crc32c(view[start:stop], 0, 0) != checksum
        ]


def object_sha256(store: Store, name: str, size: int) -> str:
    """Read an object of `size` bytes, and return its SHA-256; errors as `read_samples`."""
    digest = hashlib.sha256()
    list(read_samples(store, name, size, NO_SAMPLES, digest.update))
    return digest.hexdigest()


def read_samples(
    store: Store, name: str, size: int, offsets: IntArray, update: Callable[[bytes], object]
) -> Iterator[bytes]:
    """Yield the bytes of each sample of a tar, which is read once, from front to back.

    One sample is in memory, and at most `READ_BYTES` after it.

    Args:
        store: Where the tar lies.
        name: Of the tar.
        size: Of the tar in bytes.
        offsets: Its index.
        update: Called with all bytes of the tar, piece by piece, such as that of a hash.

    Raises:
        FileNotFoundError: No such tar.
        StorageError: The tar became shorter, or the storage failed.
    """
    held = bytearray()
    held_start = read_stop = 0

    def read_on() -> None:
        nonlocal held, read_stop
        chunk = store.read_range(name, read_stop, min(size, read_stop + READ_BYTES))
        update(chunk)
        held += chunk
        read_stop += len(chunk)

    for start, stop in pairwise(offsets.tolist()):
        while read_stop < stop:
            read_on()
        yield bytes(held[start - held_start : stop - held_start])
        del held[: stop - held_start]
        held_start = stop
    while read_stop < size:
        read_on()
        held.clear()


# -- a part of a dataset's index: where the samples of many shards lie, in one small file ----------
#
#     mmstream.index.<first 12 hex digits of its SHA-256>
#
# A part never changes: its name says its content. The manifest lists the parts of a dataset, so its
# replacement is the only commit. All numbers are little-endian::
#
#     header    16 bytes: b"MMINDEX1", number of shards (u32), CRC-32C of the table (u32)
#     table     a row of 40 bytes a shard, see `ROW`
#     columns   of each shard with samples: anchors, lengths, checksums
#
# - Lengths: u16 a sample, in blocks of 512 bytes; u32 in a shard with a sample of 32 MiB or more.
# - Anchors: u40 every 256 samples, the block where sample 0, 256, 512, ... begins.
# - Checksums, where they are known: u32 a sample, CRC-32C of its bytes in the tar.
#
# Samples of a tar follow each other without a gap. So the start of a sample is its anchor and the
# lengths of the samples after that one. At most 255 lengths are summed, whatever the shard's size.
#
# Example: a shard of 300 samples of 3 blocks each, from block 0 on, has the anchors 0 and 768.
# Sample 260 begins at block 768 + 4 x 3 = 780, which is byte 399,360. Its columns take 2 x 5 + 300
# x 2 = 610 bytes, and 300 x 4 more with checksums.

MAGIC = b"MMINDEX1"

HEADER_BYTES = 16

GROUP = 256
"""Samples from one anchor to the next."""

ANCHOR_BYTES = 5

ROW = np.dtype(
    [
        ("num_samples", "<u4"),
        ("flags", "<u4"),  # which columns there are, see below
        ("num_bytes", "<u8"),  # size of the tar
        ("stop", "<u8"),  # where the last sample ends, in bytes
        ("offset", "<u8"),  # of the shard's columns in the part
        ("columns_crc32c", "<u4"),
        ("unused", "<u4"),  # earlier versions kept a checksum of the whole tar here
    ]
)

HAS_LONG_LENGTHS, HAS_CHECKSUMS = 1, 2
"""Flags of a row: lengths are u32; there are checksums of samples. Others mean nothing."""

MAX_SINGLE = 8
"""Samples of a shard whose bounds are summed up one after the other."""

MAX_STOP = 512 << 40
"""An anchor counts up to 2^40 blocks."""

Table = npt.NDArray[Any]
"""`ROW` [num_shards]."""


class SampleBounds(NamedTuple):
    """Where samples of a shard lie, and what their bytes must be. One entry per sample."""

    start: IntArray
    """int64, first byte in the tar."""
    stop: IntArray
    """int64, the byte after the last one."""
    checksum: IntArray | None
    """int64, CRC-32C of the bytes. None: nothing is compared."""


@dataclass(frozen=True)
class ShardColumns:
    """Where the samples of a shard lie, as a part holds it: about 2 bytes a sample, or 6."""

    anchors: npt.NDArray[np.uint8]
    """uint8 [num_groups, 5], the blocks where samples 0, 256, 512, ... begin."""
    lengths: npt.NDArray[Any]
    """uint16 or uint32 [num_samples], in blocks."""
    checksums: Checksums | None
    stop: int
    """Where the last sample ends, in bytes."""

    @property
    def num_bytes(self) -> int:
        """Memory of the columns."""
        num_bytes = self.anchors.nbytes + self.lengths.nbytes
        return num_bytes + (0 if self.checksums is None else self.checksums.nbytes)

    def bounds(self, index: IntArray) -> SampleBounds:
        """Return where samples lie.

        Args:
            index: int64 [n], which samples, in any order.

        Raises:
            IndexError: There is no such sample.
        """
        count = self.lengths.size
        if index.size and not 0 <= index.min() <= index.max() < count:
            raise IndexError(f"samples {index.min()} to {index.max()} of {count}")
        few = index.size <= MAX_SINGLE
        stop, length = self._stops_of_few(index) if few else self._stops_of_many(index)
        checksum = None if self.checksums is None else self.checksums[index].astype(np.int64)
        return SampleBounds((stop - length) * BLOCK, stop * BLOCK, checksum)

    def _stops_of_many(self, index: IntArray) -> tuple[IntArray, IntArray]:
        """Return where samples end, and their lengths, in blocks.

        Samples 3 and 260 belong to groups 0 and 1, whose lengths are summed from their anchors on.
        """
        groups, group = np.unique(index // GROUP, return_inverse=True)
        last = self.lengths.size - 1
        rows = np.minimum(groups[:, None] * GROUP + np.arange(GROUP), last)
        lengths = self.lengths[rows].astype(np.int64)
        stops = _decode_anchors(self.anchors[groups])[:, None] + np.cumsum(lengths, axis=1)
        return stops[group, index % GROUP], lengths[group, index % GROUP]

    def _stops_of_few(self, index: IntArray) -> tuple[IntArray, IntArray]:
        """Return the same for a few samples, one after the other.

        A step takes one or two samples of hundreds of shards. For these, arrays of whole groups
        cost five times as much.
        """
        stops, lengths = [], []
        for number in index.tolist():
            group = number // GROUP
            anchor = int.from_bytes(self.anchors[group].tobytes(), "little")
            before = self.lengths[group * GROUP : number + 1]
            stops.append(anchor + int(np.add.reduce(before, dtype=np.int64)))
            lengths.append(int(self.lengths[number]))
        return np.array(stops, np.int64), np.array(lengths, np.int64)

    def offsets(self) -> IntArray:
        """Return int64 [num_samples + 1], where each sample begins, and the end of the last."""
        if not self.lengths.size:
            return np.array([self.stop])
        first = _decode_anchors(self.anchors[:1])
        lengths = self.lengths.astype(np.int64)
        return np.concatenate([first, first + np.cumsum(lengths)]) * BLOCK


def columns_of(offsets: IntArray, checksums: Checksums | None) -> ShardColumns:
    """Return the columns of a shard.

    Args:
        offsets: int64 [num_samples + 1], its index (see `mmstream.dataset.index`).
        checksums: uint32 [num_samples]; None where they are not known.
    """
    blocks = offsets // BLOCK
    lengths = np.diff(blocks)
    is_long = bool(lengths.size) and int(lengths.max()) > np.iinfo(np.uint16).max
    anchors = blocks[:-1:GROUP].astype("<u8").view(np.uint8).reshape(-1, 8)[:, :ANCHOR_BYTES]
    return ShardColumns(
        np.ascontiguousarray(anchors),
        lengths.astype("<u4" if is_long else "<u2"),
        None if checksums is None else np.asarray(checksums, dtype="<u4"),
        int(offsets[-1]),
    )


def table_size(num_shards: int) -> int:
    """Return the bytes of a part before its first column."""
    return HEADER_BYTES + num_shards * ROW.itemsize


def decode_table(data: bytes | memoryview, name: str, part: IndexPart) -> Table:
    """Return the table of a part. All columns that it names lie inside of the part.

    Args:
        data: The part, or its first `table_size` bytes.
        name: Of the part, for messages.
        part: What the manifest says of it.

    Raises:
        ShardError: The bytes are not the table of this part.
    """
    num_shards = part.last_shard - part.first_shard + 1
    size = table_size(num_shards)
    head = bytes(data[:HEADER_BYTES])
    if len(data) < size or head[:12] != MAGIC + num_shards.to_bytes(4, "little"):
        raise ShardError(f"{name}: no part of an index, or of other shards")
    if crc32c(data[HEADER_BYTES:size], 0, 0) != int.from_bytes(head[12:], "little"):
        raise ShardError(f"{name}: its table is damaged")
    table = np.frombuffer(data, ROW, num_shards, HEADER_BYTES)
    # Sizes are below 2^36. An offset is compared first, so that no sum can run over.
    is_inside = table["offset"] <= np.uint64(part.num_bytes)
    room = np.uint64(part.num_bytes) - np.where(is_inside, table["offset"], np.uint64(0))
    is_inside &= columns_sizes(table) <= room
    if not np.all(is_inside & (table["stop"] <= table["num_bytes"]) & (table["stop"] < MAX_STOP)):
        raise ShardError(f"{name}: its table leads out of the part, or out of a tar")
    return table


def decode_columns(data: bytes | memoryview, row: Any, name: str) -> ShardColumns:
    """Return the columns of a shard, after all of them were checked.

    Args:
        data: The bytes of the columns.
        row: Of the shard, in the table.
        name: Of the shard, for messages.

    Raises:
        ShardError: The bytes are damaged, or are not columns.
    """
    if len(data) != int(columns_sizes(row)) or crc32c(data, 0, 0) != int(row["columns_crc32c"]):
        raise ShardError(f"{name}: its part of the index is damaged")
    count, flags = int(row["num_samples"]), int(row["flags"])
    anchor_bytes = -(-count // GROUP) * ANCHOR_BYTES
    anchors = np.frombuffer(data, np.uint8, anchor_bytes).reshape(-1, ANCHOR_BYTES)
    lengths_type = np.dtype("<u4" if flags & HAS_LONG_LENGTHS else "<u2")
    lengths = np.frombuffer(data, lengths_type, count, anchors.nbytes)
    checksums = None
    if flags & HAS_CHECKSUMS:
        checksums = np.frombuffer(data, "<u4", count, anchors.nbytes + lengths.nbytes)
    columns = ShardColumns(anchors, lengths, checksums, int(row["stop"]))
    if not count:
        return columns
    sums = np.add.reduceat(lengths, np.arange(0, count, GROUP), dtype="i8")
    starts = _decode_anchors(anchors)
    # Groups of 256 samples: [0, 768) and [768, 900) blocks have anchors 0, 768 and sums 768, 132.
    are_sums = np.array_equal(starts + sums, [*starts[1:], columns.stop // BLOCK])
    if not are_sums or columns.stop % BLOCK or not lengths.min():
        raise ShardError(f"{name}: the lengths in its part of the index are not those of a tar")
    return columns


class PartWriter:
    """Writes a part of an index, shard after shard.

    The table is in memory, 40 bytes a shard. Columns go to a file first, since the name of the part
    is known only at its end.

    Args:
        columns_file: A temporary file, empty.
        first_shard: Position in the manifest of the first shard that is added.
    """

    def __init__(self, columns_file: IO[bytes], first_shard: int = 0) -> None:
        self._file, self._first_shard = columns_file, first_shard
        self._rows: list[tuple[int, ...]] = []

    def add(self, num_bytes: int, columns: ShardColumns) -> None:
        """Append a shard.

        Args:
            num_bytes: Size of its tar.
            columns: Where its samples lie.
        """
        flags = HAS_LONG_LENGTHS if columns.lengths.dtype.itemsize == 4 else 0
        data = columns.anchors.tobytes() + columns.lengths.tobytes()
        if columns.checksums is not None:
            flags |= HAS_CHECKSUMS
            data += columns.checksums.tobytes()
        offset, count = self._file.tell(), columns.lengths.size
        checksum = crc32c(data, 0, 0)
        row = (count, flags, num_bytes, columns.stop, offset, checksum, 0)
        self._rows.append(row)
        self._file.write(data)

    def write(self, store: Store) -> IndexPart | None:
        """Write the part into a store. Return what the manifest says of it; None without shards.

        Raises:
            StorageError: The storage failed.
            OSError: The disk with the temporary file failed.
        """
        if not self._rows:
            return None
        table = np.array(self._rows, dtype=ROW)
        table["offset"] += table_size(len(table))
        content = table.tobytes()
        head = MAGIC + len(table).to_bytes(4, "little")
        head += int(crc32c(content, 0, 0)).to_bytes(4, "little") + content
        num_bytes = len(head) + self._file.tell()
        digest = hashlib.sha256(head)
        self._file.seek(0)
        while data := self._file.read(1 << 20):
            digest.update(data)
        sha256 = digest.hexdigest()
        self._file.seek(0)
        with store.create(index_part_name(sha256)) as file:
            file.write(head)
            shutil.copyfileobj(self._file, file, 1 << 20)
        last_shard = self._first_shard + len(table) - 1
        name = index_part_name(sha256)
        return IndexPart(name, num_bytes, sha256, self._first_shard, last_shard)


def columns_sizes(rows: Any) -> Any:
    """Return the bytes of the columns of rows, uint64."""
    count, flags = rows["num_samples"].astype(np.uint64), rows["flags"]
    num_groups = (count + np.uint64(GROUP - 1)) // np.uint64(GROUP)
    width = np.where(flags & HAS_LONG_LENGTHS, 4, 2) + np.where(flags & HAS_CHECKSUMS, 4, 0)
    return num_groups * np.uint64(ANCHOR_BYTES) + count * width.astype(np.uint64)


def _decode_anchors(anchors: npt.NDArray[np.uint8]) -> IntArray:
    """Return anchors as int64: bytes 1, 2, 0, 0, 0 are 1 + 2 x 256 = 513."""
    padded = np.zeros((len(anchors), 8), dtype=np.uint8)
    padded[:, :ANCHOR_BYTES] = anchors
    return padded.view("<i8")[:, 0].astype(np.int64)
