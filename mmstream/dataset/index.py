"""Ground floor: the byte index of a shard, ``NAME.tar.idx``.

Little-endian u64 byte offsets: one a sample, where its first header starts, and the end of the
last member. So sample i is bytes [offsets[i], offsets[i + 1]) of the tar. This is the layout that
Megatron-Energon writes; a shard of 500 samples has an index of 501 entries, 4,008 bytes.

An index is built by hopping from header to header: of a local tar with 1 MB images, 2 % is read.
"""

from __future__ import annotations

import numpy as np

from mmstream.errors import ShardError
from mmstream.storage import Store
from mmstream.tar.header import BLOCK
from mmstream.tar.samples import iter_members, sample_offsets
from mmstream.types import IntArray

__all__ = ["build_index", "decode_index", "encode_index", "index_name", "num_indexed"]


_CURE = "run `mmstream index --overwrite`"


def index_name(name: str) -> str:
    """Return the name of a shard's index: ``a.tar`` -> ``a.tar.idx``."""
    return f"{name}.idx"


def encode_index(offsets: list[int] | IntArray) -> bytes:
    """Return the bytes of an index file."""
    return np.asarray(offsets, dtype="<u8").tobytes()


def decode_index(data: bytes, name: str) -> IntArray:
    """Return int64 [num_samples + 1] offsets in bytes, ascending.

    Raises:
        ShardError: the bytes are not an index.
    """
    if len(data) % 8 or not data:
        raise ShardError(f"{name}: {len(data)} bytes are no index; {_CURE}")
    offsets = np.frombuffer(data, dtype="<u8").astype(np.int64)
    if offsets.min() < 0 or np.any(np.diff(offsets) <= 0) or np.any(offsets % BLOCK):
        raise ShardError(f"{name}: offsets are not ascending blocks; {_CURE}")
    return offsets


def num_indexed(index_bytes: int) -> int:
    """Return how many samples an index file of so many bytes describes."""
    return max(0, index_bytes // 8 - 1)


def build_index(store: Store, name: str) -> IntArray:
    """Return int64 [num_samples + 1] offsets of a tar, read from its headers alone.

    Raises:
        ShardError: not a plain tar (a gzipped one has no byte index), truncated, or damaged.
        StorageError, FileNotFoundError: as the store.
    """
    size = store.size(name)
    least, most = store.access.min_header_read_bytes, store.access.max_header_read_bytes
    held, held_start, window = b"", 0, least

    def read(start: int, stop: int) -> bytes:
        nonlocal held, held_start, window
        held_stop = held_start + len(held)
        if start < held_start or stop > held_stop:
            window = min(2 * window, most) if held and start - held_stop < least else least
            held = store.read_range(name, start, min(size, max(stop, start + window)))
            held_start = start
        return held[start - held_start : stop - held_start]

    if size >= 2 and read(0, 2) == b"\x1f\x8b":
        raise ShardError(
            f"{name}: gzipped, so samples cannot be found by byte; "
            "unpack it with `mmstream index --repack`"
        )
    try:
        offsets = sample_offsets(iter_members(read, size))
    except ShardError as error:
        raise ShardError(f"{name}: {error}") from error
    return np.asarray(offsets, dtype=np.int64)
