"""The small files beside a tar: where its samples start, and the checksum of each.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

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

    def warn_of_junk(offset: int) -> None:
        logger.warning(
            "%s: what follows byte %d, after the end of the tar, is left out: it is not a tar",
            *(escaped(name), offset),
        )

    if size >= 2 and read(0, 2) == b"\x1f\x8b":
        raise ShardError(
            "gzipped, so samples cannot be found by byte; `mmstream convert` writes a plain one"
        )
    yield from iter_members(read, size, on_junk=warn_of_junk)


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
