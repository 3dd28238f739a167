"""Order's settings where the user names none: functions of the corpus and G alone.

They must not look at ranks or workers: a fresh run then has the same batches on every topology.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

__all__ = ["better_grid", "default_chunk", "default_grid", "default_window", "mixture_window"]

WINDOW_BYTES = 2 << 30
"""What all windows of a dataset together hold by default, in raw bytes, over all ranks."""

MIN_LANE = 1024
"""Samples of a lane, at least: a small corpus fits in memory, and there mixing matters more."""


def default_grid(num_samples: int, global_batch_size: int) -> tuple[int, int]:
    """Return (P, Q): Q the largest divisor of G up to 8, P a power of two up to 8.

    Lanes hold 1,024 samples or more, so that a small corpus has few lanes or one, and wide windows.
    """
    room = max(1, num_samples // MIN_LANE)
    lanes = max(q for q in range(1, 9) if global_batch_size % q == 0 and q <= room)
    return max(p for p in (1, 2, 4, 8) if p * lanes <= room), lanes


def default_window(num_samples: int, num_bytes: int | None, grid: tuple[int, int]) -> int:
    """Return M such that all P*Q windows hold about 2 GiB of mean-size samples, 16 to 8,192.

    Without sizes: 1,024.
    """
    if not num_bytes:
        return 1024
    fitting = WINDOW_BYTES * num_samples // (grid[0] * grid[1] * num_bytes)
    return min(8192, max(16, fitting))


def mixture_window(
    shares: Sequence[int], sizes: Sequence[tuple[int | None, int]], grid: tuple[int, int]
) -> int:
    """Return M of a mixture: as `default_window`, of samples mixed by shares.

    Args:
        shares: of each source.
        sizes: bytes and samples of each source.
        grid: (P, Q).
    """
    if any(
        share and num_bytes is None for share, (num_bytes, _) in zip(shares, sizes, strict=True)
    ):
        return default_window(1, None, grid)
    weighed = [
        share * (num_bytes or 0) / num_samples
        for share, (num_bytes, num_samples) in zip(shares, sizes, strict=True)
    ]
    return default_window(sum(shares), round(sum(weighed)), grid)


def default_chunk(num_samples: int) -> int:
    """Return C: 64, doubled while the table would have more than 4 M chunks (64 MB an epoch)."""
    chunk = 64
    while num_samples // chunk > 1 << 22:
        chunk *= 2
    return chunk


def better_grid(
    num_samples: int,
    global_batch_size: int,
    grid: tuple[int, int],
    world_size: int,
    num_workers: int,
) -> tuple[int, int] | None:
    """Return a grid with which each worker reads whole lanes, where `grid` does not let it.

    None where `grid` is good, where none would be, or where the corpus is too small to matter.
    """
    groups, lanes = grid
    if lanes % world_size == 0 and groups % max(1, num_workers) == 0:
        return None
    wanted = lcm(groups, max(1, num_workers)), lcm(lanes, world_size)
    if global_batch_size % wanted[1] or wanted[0] * wanted[1] * MIN_LANE > num_samples:
        return None
    return wanted
