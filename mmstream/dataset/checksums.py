"""The checksums of a shard's samples, ``NAME.tar.crc32c``: a column beside the index.

The file holds little-endian u32 numbers. There is one for each sample: the CRC-32C of its bytes
[offsets[i], offsets[i + 1]) in the tar, with headers and padding. A last one, the seal, is the
CRC-32C of the index file and of all numbers before it. So a damaged column, a damaged index and a
column of another index are noticed.

Example: a shard of 500 samples has 501 numbers, 2,004 bytes.

CRC-32C finds every flip of up to three bits in a sample of less than 256 MB, and all but one of
4 * 10^9 other changes. It is no protection against somebody who changes tar and column together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from mmstream.errors import ShardError
from mmstream.storage import Store
from mmstream.types import IntArray

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
    """Return the size in bytes of the checksums of so many samples."""
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
        StorageError: The storage failed after retries, or there is something that is no file.
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
