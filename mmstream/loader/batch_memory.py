"""Ground floor of decode, batch and loader: memory for batches, used again when nobody holds it.

New memory is the dearest thing about a batch beside decoding: the system hands it out zeroed and
page by page. So a batch's memory comes from a pool, and goes back to it with the last tensor, view
or array that looks at it, however long that takes, and on whichever side of a process boundary.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any

import numpy as np
import torch

__all__ = ["Memory", "Slot", "attach"]

HEADER_BYTES = 64
"""Before a slot's data: whether the process that it was sent to holds it."""

ALL_PAGES = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
"""Of memory that is there: its 2,400 pages at once, where each touch of a new one is a fault."""

ROUND_BYTES = 64 * 1024
MAX_FREE = 4
"""Slots that wait for use; more are given back to the system."""


class Slot:
    """A piece of memory, in use while a tensor of this process or of the other looks at it.

    Attributes:
        file: Descriptor of shared memory; None in private memory.
        num_bytes: Of data.
        num_used: Bytes that were asked for; those behind them are nobody's.
    """

    def __init__(self, num_bytes: int, *, shared: bool) -> None:
        self.num_bytes = self.num_used = num_bytes
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
        """Return the data, uint8 [num_bytes]; in use until the last view of it is gone."""
        array = None if self._leased is None else self._leased()
        if array is None:
            array = _view(self._map)
            self._leased = weakref.ref(array)
        return torch.from_numpy(array)

    def mark_sent(self) -> None:
        """Keep it in use until the other side, which must attach to it, ends that by itself."""
        self._map[0] = 1

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor looks at this slot."""
        return tensor.untyped_storage().data_ptr() == self._address


class Memory:
    """The slots of one process.

    Args:
        shared: whether slots can be sent to another process.

    Attributes:
        room: Bytes that a batch's other tensors need behind its pictures, as far as is known.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self.room = 0
        self._slots: list[Slot] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, in use or waiting."""
        return sum(slot.num_bytes for slot in self._slots)

    def take(self, num_bytes: int, room: int = 0) -> torch.Tensor:
        """Return memory with any content, uint8 [num_bytes], and `room` more bytes behind it."""
        wanted = num_bytes + room
        free = [slot for slot in self._slots if slot.is_free]
        fitting = [slot for slot in free if wanted <= slot.num_bytes <= 2 * wanted + ROUND_BYTES]
        slot = min(fitting, key=lambda slot: slot.num_bytes, default=None)
        if slot is None:
            slot = Slot(-(-wanted // ROUND_BYTES) * ROUND_BYTES, shared=self.shared)
        else:
            self._slots.remove(slot)
            free.remove(slot)
        for old in free[: max(0, len(free) - MAX_FREE)]:
            self._slots.remove(old)
        self._slots.append(slot)  # those that were used longest ago come first
        slot.num_used = num_bytes
        return slot.lease()[:num_bytes]

    def slot_of(self, tensor: torch.Tensor) -> Slot | None:
        """Return the slot that a tensor looks at."""
        return next((slot for slot in self._slots if slot.holds(tensor)), None)


def attach(file: int, num_bytes: int) -> torch.Tensor:
    """Return a slot's data in another process; its sender learns when the last view is gone.

    Args:
        file: Descriptor of the slot's memory; closed here.
        num_bytes: Of data.
    """
    try:
        memory = mmap.mmap(file, HEADER_BYTES + num_bytes, flags=ALL_PAGES)
    finally:
        os.close(file)
    array = _view(memory)
    weakref.finalize(array, memory.__setitem__, 0, 0).atexit = False
    return torch.from_numpy(array)


def _view(memory: mmap.mmap) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(memory, dtype=np.uint8, offset=HEADER_BYTES)
