"""Memory for batches, used again when nobody holds it any more.

Beside decoding, new memory is the most expensive part of a batch: the system hands it out zeroed,
page by page. So the memory of a batch comes from a pool. It goes back when the last tensor, view or
array on it is gone, on either side of a process boundary. Decode writes images into it, and
``loader/batch_transport.py`` sends it to the main process.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Sequence
from itertools import accumulate, count
from typing import Any

import numpy as np
import torch

HEADER_BYTES = 64
"""In front of the data of a block. Byte 0 says whether the receiving process still holds it."""

ALL_PAGES = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
"""Map all pages of existing memory at once, instead of one fault per page."""

ROUND_BYTES = 64 * 1024
"""Sizes of blocks are multiples of this, so that batches of similar size share blocks."""

ALIGN_BYTES = 64
"""The pictures and videos of each field begin at a multiple of this in the memory of a batch."""

MAX_FREE_BLOCKS = 4
"""Unused blocks that are kept; more are given back to the system."""


class MemoryBlock:
    """A block of memory, in use while a tensor of this or of the receiving process looks at it.

    Attributes:
        number: of the block in its `BatchMemory`.
        file: descriptor of shared memory. None for private memory.
        is_attached: whether the receiving process has it, since a batch before.
        num_bytes: size of the data.
        num_used: bytes that were asked for. The rest is free for more tensors of the batch.
    """

    def __init__(self, number: int, num_bytes: int, *, shared: bool) -> None:
        self.number = number
        self.is_attached = False
        self.num_bytes = num_bytes
        self.num_used = num_bytes
        self.file: int | None = None
        size = HEADER_BYTES + num_bytes
        if shared:  # not in /dev/shm, which is small in many containers
            self.file = os.memfd_create("mmstream-batch", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self.file).atexit = False
            os.ftruncate(self.file, size)
        self._map = mmap.mmap(-1 if self.file is None else self.file, size)
        self._address = int(_view(self._map).ctypes.data)
        self._leased: weakref.ref[Any] | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing looks at it, on either side."""
        return not self._map[0] and (self._leased is None or self._leased() is None)

    def lease(self) -> torch.Tensor:
        """Return the data, uint8 [num_bytes]. It is in use until the last view of it is gone."""
        array = None if self._leased is None else self._leased()
        if array is None:
            array = _view(self._map)
            self._leased = weakref.ref(array)
        return torch.from_numpy(array)

    @property
    def is_sent(self) -> bool:
        """Whether a receiver holds it, or is about to attach to it."""
        return bool(self._map[0])

    def mark_sent(self) -> None:
        """Keep it in use until the receiver, which must attach to it, is done with it."""
        self._map[0] = 1

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies in this block."""
        return tensor.untyped_storage().data_ptr() == self._address


class BatchMemory:
    """The blocks of one process. It has no lock: one thread takes memory at a time.

    `mmstream.pipeline.PipelineRunner` sees to that.

    Args:
        shared: whether blocks can be sent to another process.

    Attributes:
        spare_bytes: bytes that the other tensors of a batch need after its images, as far as is
            known.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self.spare_bytes = 0
        self._blocks: list[MemoryBlock] = []
        self._numbers = count()

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, used and free."""
        return sum(block.num_bytes for block in self._blocks)

    @property
    def numbers(self) -> list[int]:
        """Numbers of all blocks, used and free."""
        return [block.number for block in self._blocks]

    def take(self, num_bytes: int, spare_bytes: int = 0) -> torch.Tensor:
        """Return uninitialised memory, uint8 [num_bytes], with `spare_bytes` after it."""
        wanted = num_bytes + spare_bytes
        free = [block for block in self._blocks if block.is_free]
        fitting = [block for block in free if wanted <= block.num_bytes <= 2 * wanted + ROUND_BYTES]
        block = min(fitting, key=lambda block: block.num_bytes, default=None)
        if block is None:
            num_rounded = -(-wanted // ROUND_BYTES) * ROUND_BYTES
            block = MemoryBlock(next(self._numbers), num_rounded, shared=self.shared)
        else:
            self._blocks.remove(block)
            free.remove(block)
        for oldest in free[: max(0, len(free) - MAX_FREE_BLOCKS)]:
            self._blocks.remove(oldest)
        self._blocks.append(block)  # least recently used blocks come first
        block.num_used = num_bytes
        return block.lease()[:num_bytes]

    def take_groups(self, groups: Sequence[Sequence[tuple[int, ...]]]) -> list[list[torch.Tensor]]:
        """Return memory for tensors of bytes in one block, with `spare_bytes` after it.

        Args:
            groups: shapes. The tensors of a group lie one after the other, and each group begins
                at a multiple of `ALIGN_BYTES`.
        """
        if not groups:
            return []
        sizes = [sum(map(math.prod, shapes)) for shapes in groups]
        starts = [0, *accumulate(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)]
        block = self.take(starts[-2] + sizes[-1], spare_bytes=self.spare_bytes)
        return [_cut(block[start:], shapes) for start, shapes in zip(starts, groups, strict=False)]

    def block_of(self, tensor: torch.Tensor) -> MemoryBlock | None:
        """Return the block that a tensor lies in."""
        return next((block for block in self._blocks if block.holds(tensor)), None)


class AttachedBlock:
    """A block in the receiving process. It stays mapped from one batch to the next.

    Args:
        file: descriptor of the block's memory. It is closed here.
        num_bytes: size of the data.
    """

    def __init__(self, file: int, num_bytes: int) -> None:
        try:
            self._map = mmap.mmap(file, HEADER_BYTES + num_bytes, flags=ALL_PAGES)
        finally:
            os.close(file)

    def lease(self) -> torch.Tensor:
        """Return the data of a batch, uint8 [num_bytes].

        The sender learns when the last view of it is gone.
        """
        array = _view(self._map)
        weakref.finalize(array, self._map.__setitem__, 0, 0).atexit = False
        return torch.from_numpy(array)


def _cut(block: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Cut bytes into tensors that lie one after the other."""
    starts = [0, *accumulate(map(math.prod, shapes))]
    return [
        block[start : start + math.prod(shape)].view(shape)
        for start, shape in zip(starts, shapes, strict=False)
    ]


def _view(memory: mmap.mmap) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(memory, dtype=np.uint8, offset=HEADER_BYTES)
