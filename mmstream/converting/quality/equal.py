"""Equal hashes among many: 16 bytes each in memory, and little more.

contents -> EQUAL -> duplicates, leaks
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmstream.converting.quality.contents import Hashes
from mmstream.types import IntArray

__all__ = ["equal_to_first"]

BUCKET = 1 << 22
"""Hashes that are sorted at a time. Sorting takes about 60 bytes for each of them."""


def equal_to_first(chunks: Sequence[Hashes]) -> tuple[IntArray, IntArray]:
    """Find the hashes that came before.

    The hashes are cut into buckets by their first bits, and sorted bucket by bucket. So besides the
    hashes themselves, the memory for one bucket is needed (about 250 MB), and 16 bytes for each
    hash that came before.

    Args:
        chunks: Hashes, numbered through from 0 over all chunks.

    Returns:
        (first, again): int64 [n] each. Hash ``again[i]`` equals hash ``first[i]``, the earliest of
        its kind. Sorted by `again`.

    Examples:
        >>> chunks = [np.array([[1, 1], [2, 2]], np.uint64), np.array([[2, 2], [2, 3]], np.uint64)]
        >>> first, again = equal_to_first(chunks)
        >>> first.tolist(), again.tolist()
        ([1], [2])
    """
    starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])
    num_bits = max(0, int(starts[-1]) // BUCKET).bit_length()
    firsts, agains = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for bucket in range(1 << num_bits):
        numbers, hashes = [np.zeros(0, np.int64)], [np.zeros((0, 2), np.uint64)]
        for start, chunk in zip(starts.tolist(), chunks, strict=False):
            chosen = _chosen(chunk, bucket, num_bits)
            numbers.append(chosen + start)
            hashes.append(chunk[chosen])
        first, again = _equal(np.concatenate(hashes), np.concatenate(numbers))
        firsts.append(first)
        agains.append(again)
    first, again = np.concatenate(firsts), np.concatenate(agains)
    order = np.argsort(again, kind="stable")
    return first[order], again[order]


def _chosen(chunk: Hashes, bucket: int, num_bits: int) -> IntArray:
    if not num_bits:
        return np.arange(len(chunk))
    return np.flatnonzero(chunk[:, 0] >> np.uint64(64 - num_bits) == bucket)


def _equal(hashes: Hashes, numbers: IntArray) -> tuple[IntArray, IntArray]:
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: the earliest comes first
    hashes, numbers = hashes[order], numbers[order]
    is_first = np.ones(len(numbers), dtype=np.bool_)
    is_first[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
    group_starts = np.flatnonzero(is_first)
    first_of_group = numbers[group_starts]
    group = np.cumsum(is_first) - 1
    return first_of_group[group[~is_first]], numbers[~is_first]
