"""A part of a dataset's index: where the samples of many shards lie, in one small file.

    mmstream.index.<first 12 hex digits of its SHA-256>

A part never changes: its name says its content. The manifest lists the parts of a dataset, so its
replacement is the only commit. All numbers are little-endian::

    header    16 bytes: b"MMINDEX1", number of shards (u32), CRC-32C of the table (u32)
    table     a row of 40 bytes a shard, see `ROW`
    columns   of each shard with samples: anchors, lengths, checksums

- Lengths: u16 a sample, in blocks of 512 bytes; u32 in a shard with a sample of 32 MiB or more.
- Anchors: u40 every 256 samples, the block where sample 0, 256, 512, ... begins.
- Checksums, where they are known: u32 a sample, CRC-32C of its bytes in the tar.

Samples of a tar follow each other without a gap. So the start of a sample is its anchor and the
lengths of the samples after that one. At most 255 lengths are summed, whatever the shard's size.

Example: a shard of 300 samples of 3 blocks each, from block 0 on, has the anchors 0 and 768. Sample
260 begins at block 768 + 4 x 3 = 780, which is byte 399,360. Its columns take 2 x 5 + 300 x 2 = 610
bytes, and 300 x 4 more with checksums.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from mmstream.dataset.index import Checksums
from mmstream.dataset.manifest import IndexPart, index_part_name
from mmstream.errors import ShardError
from mmstream.storage import Store
from mmstream.tar.header import BLOCK
from mmstream.types import IntArray

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
    is_inside &= _columns_sizes(table) <= room
    if not np.all(is_inside & (table["stop"] <= table["num_bytes"]) & (table["stop"] < MAX_STOP)):
        raise ShardError(f"{name}: its table leads out of the part, or out of a tar")
    return table


def columns_size(row: Any) -> int:
    """Return the bytes of the columns of a row."""
    return int(_columns_sizes(row))


def decode_columns(data: bytes | memoryview, row: Any, name: str) -> ShardColumns:
    """Return the columns of a shard, after all of them were checked.

    Args:
        data: The bytes of the columns.
        row: Of the shard, in the table.
        name: Of the shard, for messages.

    Raises:
        ShardError: The bytes are damaged, or are not columns.
    """
    if len(data) != columns_size(row) or crc32c(data, 0, 0) != int(row["columns_crc32c"]):
        raise ShardError(f"{name}: its part of the index is damaged")
    columns = _split_columns(data, row)
    if not columns.lengths.size:
        return columns
    sums = np.add.reduceat(columns.lengths, np.arange(0, columns.lengths.size, GROUP), dtype="i8")
    anchors = _decode_anchors(columns.anchors)
    # Groups of 256 samples: [0, 768) and [768, 900) blocks have anchors 0, 768 and sums 768, 132.
    are_sums = np.array_equal(anchors + sums, [*anchors[1:], columns.stop // BLOCK])
    if not are_sums or columns.stop % BLOCK or not columns.lengths.min():
        raise ShardError(f"{name}: the lengths in its part of the index are not those of a tar")
    return columns


def _split_columns(data: bytes | memoryview, row: Any) -> ShardColumns:
    """Return views of the columns of a shard, unchecked."""
    count, flags = int(row["num_samples"]), int(row["flags"])
    num_groups = -(-count // GROUP)
    anchors = np.frombuffer(data, np.uint8, num_groups * ANCHOR_BYTES).reshape(-1, ANCHOR_BYTES)
    lengths_type = np.dtype("<u4" if flags & HAS_LONG_LENGTHS else "<u2")
    lengths = np.frombuffer(data, lengths_type, count, anchors.nbytes)
    checksums = None
    if flags & HAS_CHECKSUMS:
        checksums = np.frombuffer(data, "<u4", count, anchors.nbytes + lengths.nbytes)
    return ShardColumns(anchors, lengths, checksums, int(row["stop"]))


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


def _columns_sizes(rows: Any) -> Any:
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
