"""The memory of a reader process in which samples arrive, seen by the processes that it serves.

Whoever takes a sample reads it where it arrived, so nothing is copied from process to process. The
memory is one file without a name, of which each process maps the whole. Its pages exist from their
first use on. Those of pieces that came back serve again: new pages cost more than all copies.

A piece is a range, and it stays until the last of its samples was taken and its step is over. What
a user holds does not count: samples that a loop gets are bytes of their own.
"""

from __future__ import annotations

import mmap
import os
import resource
import weakref
from bisect import bisect_left, insort
from collections import deque
from ctypes import addressof, c_char

import numpy as np

from mmstream.processes.machine import memory_bytes
from mmstream.tar.header import BLOCK

SPARE_BYTES = 256 << 20
"""Where more than this is unused at the end of the memory, it goes back to the system."""


class SampleMemory:
    """Memory that is taken piece by piece. A piece comes back when its last view is gone.

    One thread takes pieces. Any thread may drop them.

    Args:
        num_bytes: most bytes that it may have. They take no room before they are used.

    Attributes:
        file: descriptor for other processes, which belongs to this object.
        num_bytes: its length.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self.file = os.memfd_create("mmstream-samples", os.MFD_CLOEXEC)
        os.ftruncate(self.file, self.num_bytes)
        self._map = mmap.mmap(self.file, self.num_bytes)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._address = addressof(c_char.from_buffer(self._map))
        # Holes, by their size, first and last byte. No two of them touch.
        self._sizes: list[tuple[int, int]] = []
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._dropped = deque[tuple[int, int]]()
        self._num_used = 0
        self._add_hole(0, self.num_bytes)

    def take(self, num_bytes: int) -> memoryview:
        """Return memory with any content, for bytes that are to come.

        Raises:
            MemoryError: no hole is as long.
        """
        while self._dropped:
            self._put_back(*self._dropped.popleft())
        needed = max(1, -(-num_bytes // BLOCK)) * BLOCK  # as headers of tars are found
        number = bisect_left(self._sizes, (needed, 0))  # the smallest hole that is long enough
        if number == len(self._sizes):
            raise MemoryError(
                f"the reader process has no room for {num_bytes:,} bytes of samples: it may have "
                f"{self.num_bytes:,} bytes, by the memory of the machine, ulimit -v and ulimit -f; "
                "raise these limits, run it on more ranks, or begin a new run with a smaller "
                "window_bytes="
            )
        start, stop = self._take_hole(self._sizes[number][1])
        if start + needed < stop:
            self._add_hole(start + needed, stop)
        self._num_used = max(self._num_used, start + needed)
        piece = self._bytes[start : start + num_bytes]
        # Views keep this array alive. It may end in any thread, and in the middle of this function.
        end = weakref.finalize(piece, self._dropped.append, (start, start + needed))
        end.atexit = False
        return memoryview(piece)  # type: ignore[arg-type]

    def position(self, view: memoryview) -> int:
        """Return where in this memory a view of a piece begins."""
        return addressof(c_char.from_buffer(view)) - self._address

    def close(self) -> None:
        """Give the descriptor back. The memory goes with its last view."""
        os.close(self.file)

    def _put_back(self, start: int, stop: int) -> None:
        """Make a hole of a piece, joined with the holes beside it."""
        if stop in self._stop_of:
            _, stop = self._take_hole(stop)
        if start in self._start_of:
            start, _ = self._take_hole(self._start_of[start])
        self._add_hole(start, stop)
        if stop == self.num_bytes and self._num_used - start > SPARE_BYTES:
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_REMOVE, first, self._num_used - first)
            self._num_used = start

    def _add_hole(self, start: int, stop: int) -> None:
        insort(self._sizes, (stop - start, start))
        self._stop_of[start], self._start_of[stop] = stop, start

    def _take_hole(self, start: int) -> tuple[int, int]:
        stop = self._stop_of.pop(start)
        del self._start_of[stop]
        del self._sizes[bisect_left(self._sizes, (stop - start, start))]
        return start, stop


def most_bytes() -> int:
    """Return how many bytes a `SampleMemory` may have: the memory of the machine.

    Limits of addresses and of files (``ulimit -v``, ``ulimit -f``) may leave less.
    """
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    files, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = [memory_bytes()]
    if addresses != resource.RLIM_INFINITY:
        limits.append(addresses // 2)  # whoever takes samples needs addresses for itself, too
    if files != resource.RLIM_INFINITY:
        limits.append(files)
    return min(limits)
