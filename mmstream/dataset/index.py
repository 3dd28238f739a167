"""The byte index of a shard, ``NAME.tar.idx``: where each sample starts.

The file holds little-endian u64 byte offsets. There is one for the first header of each sample, and
a last one for the end of the last member. So sample i is bytes [offsets[i], offsets[i + 1]) of the
tar. Source of the layout: Megatron-Energon.

Example: a tar of two samples with one small file each (a header of 512 bytes, then 512 bytes of
padded content) has the offsets 0, 1024, 2048. A shard of 500 samples has 501 offsets, 4,008 bytes.

An index is built from the headers alone: 2 % of the bytes are read of a local tar with images of
1 MB.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import numpy as np

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


def encode_index(offsets: list[int] | IntArray) -> bytes:
    """Return the bytes of an index file."""
    return np.asarray(offsets, dtype="<u8").tobytes()


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
        raise ShardError(f"{name}: {len(data)} bytes are no index; {_CURE}")
    offsets = np.frombuffer(data, dtype="<u8").astype(np.int64)
    if offsets.min() < 0 or np.any(np.diff(offsets) <= 0) or np.any(offsets % BLOCK):
        raise ShardError(f"{name}: offsets are not ascending blocks; {_CURE}")
    return offsets


def index_size(num_samples: int) -> int:
    """Return the size in bytes of the index of so many samples."""
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

    def warn_of_rest(offset: int) -> None:
        logger.warning(
            "%s: what follows byte %d, behind the end of the tar, is left out: it is no tar",
            *(escaped(name), offset),
        )

    if size >= 2 and read(0, 2) == b"\x1f\x8b":
        raise ShardError(
            "gzipped, so samples cannot be found by byte; `mmstream convert` writes a plain one"
        )
    yield from iter_members(read, size, rest=warn_of_rest)
