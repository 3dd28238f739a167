"""How much memory a call takes, for tests of limits."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def allocations_below(num_bytes: int) -> Iterator[None]:
    """Fail if Python and numpy together hold more than `num_bytes` at any moment of the block.

    An array that is too large for the machine is a MemoryError, which fails too.
    """
    tracemalloc.start()
    try:
        yield
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < num_bytes, f"{peak:,} bytes"
