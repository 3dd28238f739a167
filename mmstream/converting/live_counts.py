"""Counts of the rows that a process has converted so far, for the progress bar of another one.

shard -> LIVE COUNTS -> progress
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["live_counts"]


@contextmanager
def live_counts(folder: str | None) -> Iterator[MutableSequence[int]]:
    """Open the counts of this process: rows, rejects, bytes. The caller adds to them.

    Args:
        folder: `Progress.folder`. None, or a folder of another machine: nobody reads them.
    """
    try:
        path = Path(folder, str(os.getpid())) if folder is not None else None
        descriptor = -1 if path is None else os.open(path, os.O_RDWR | os.O_CREAT)
    except OSError:
        descriptor = -1
    if descriptor < 0:
        yield [0, 0, 0]
        return
    try:
        os.ftruncate(descriptor, 24)
        with mmap.mmap(descriptor, 24) as mapped, memoryview(mapped).cast("q") as counts:
            yield counts  # type: ignore[misc]  # a memoryview of numbers has their methods
    finally:
        os.close(descriptor)
