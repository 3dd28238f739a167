"""The default grid, window and chunk size of an order.

They depend on the corpus and G alone, never on ranks or workers. So a fresh run has the same
batches on every topology. `Order.from_counts` and `Recipe` call these functions; the loader asks
`better_grid` for the advice in its log.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

__all__ = ["better_grid", "default_chunk", "default_grid", "default_window", "mixture_window"]

WINDOW_BYTES = 2 << 30
"""Raw bytes that all windows of a dataset hold together by default, over all ranks."""

MIN_LANE_SAMPLES = 1024
"""Samples of a lane, at least. A small corpus fits in memory, where good mixing matters more."""


def default_grid(num_samples: int, global_batch_size: int) -> tuple[int, int]:
    """Return (P, Q): Q the largest divisor of G up to 8, P a power of two up to 8.

    Each lane has at least 1,024 samples. So a small corpus has few lanes, or only one.

    Examples:
        >>> default_grid(1_000_000, global_batch_size=256)
        (8, 8)
        >>> default_grid(10_000, global_batch_size=256)  # at most 9 lanes
        (1, 8)
    """
    max_lanes = max(1, num_samples // MIN_LANE_SAMPLES)
    lanes = max(q for q in range(1, 9) if global_batch_size % q == 0 and q <= max_lanes)
    groups = max(p for p in (1, 2, 4, 8) if p * lanes <= max_lanes)
    return groups, lanes


def default_window(num_samples: int, num_bytes: int | None, grid: tuple[int, int]) -> int:
    """Return M, from 16 to 8,192, such that all P*Q windows hold about 2 GiB together.

    Args:
        num_samples: samples of the dataset.
        num_bytes: size of all its shards in bytes. If it is not known, M is 1,024.
        grid: (P, Q).

    Examples:
        >>> default_window(1_000_000, num_bytes=100_000 * 1_000_000, grid=(8, 8))
        335
    """
    if not num_bytes:
        return 1024
    fitting = WINDOW_BYTES * num_samples // (grid[0] * grid[1] * num_bytes)
    return min(8192, max(16, fitting))


def mixture_window(
    shares: Sequence[int], sizes: Sequence[tuple[int | None, int]], grid: tuple[int, int]
) -> int:
    """Return M of a mixture: like `default_window`, for the mean sample of the mixture.

    Args:
        shares: share of each source in the mixture; a share of 0 does not count.
        sizes: (bytes, samples) of each source.
        grid: (P, Q).
    """
    begun = [(share, size) for share, size in zip(shares, sizes, strict=True) if share]
    if any(num_bytes is None for _, (num_bytes, _) in begun):
        return default_window(1, None, grid)
    weighted_bytes = [
        share * (num_bytes or 0) / num_samples for share, (num_bytes, num_samples) in begun
    ]
    return default_window(sum(shares), round(sum(weighted_bytes)), grid)


def default_chunk(num_samples: int) -> int:
    """Return C: 64, doubled until there are at most 4 Mi chunks (64 MB of table per epoch)."""
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
    """Return a grid in which each worker owns whole lanes, or None if there is nothing to advise.

    None means that workers own whole lanes already, that no such grid divides G, or that its lanes
    would have fewer than 1,024 samples.

    Examples:
        >>> better_grid(1_000_000, 256, grid=(8, 8), world_size=16, num_workers=4)
        (8, 16)
    """
    groups, lanes = grid
    workers = max(1, num_workers)
    if lanes % world_size == 0 and groups % workers == 0:
        return None
    better_groups = lcm(groups, workers)
    better_lanes = lcm(lanes, world_size)
    if global_batch_size % better_lanes:
        return None
    if better_groups * better_lanes * MIN_LANE_SAMPLES > num_samples:
        return None
    return better_groups, better_lanes
