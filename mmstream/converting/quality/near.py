"""Perceptual hashes that differ in few bits, without comparing each with each.

    contents -> NEAR -> duplicates, leaks

Hashes of 256 bits are cut into 16 bands of 16 bits. Two hashes that differ in at most 15 bits have
a band in common, since 15 bits cannot change 16 bands. So only hashes with an equal band are
compared. A million random hashes give 8 comparisons for each hash and band.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.types import IntArray

__all__ = ["MAX_DISTANCE", "NearPairs", "keep_first", "near_pairs"]

MAX_DISTANCE = 15
"""Most bits of 256 that differ between near-duplicates. One less than the number of bands."""

MAX_BUCKET = 4096
"""Largest group of hashes with an equal band in which each is compared with each."""

Words = npt.NDArray[np.uint64]


class NearPairs(NamedTuple):
    """Pairs of hashes that are near to each other, sorted by `second`, then by `first`."""

    first: IntArray
    second: IntArray
    """Greater than `first`."""
    distance: IntArray
    """Bits that differ: 0 to `MAX_DISTANCE`."""


def near_pairs(hashes: npt.NDArray[np.uint8]) -> NearPairs:
    """Find all pairs of hashes that differ in at most `MAX_DISTANCE` bits.

    Equal hashes are compared as one: each is a pair with the first of them alone. In a group of
    more than 4,096 different hashes with an equal band, those near to an earlier one of the group
    are not compared with each other. So the pictures that a corpus holds a million times cost
    nothing.

    Memory: about 150 bytes for each hash, and 24 for each pair.

    Args:
        hashes: uint8 [n, 32]
    """
    words = np.ascontiguousarray(hashes).view(np.uint64).reshape(-1, 4)
    first, again = _equal_words(words)
    is_different = np.ones(len(words), dtype=np.bool_)
    is_different[again] = False
    different = np.flatnonzero(is_different)
    firsts, seconds = [first], [again]
    compact = words[different]
    for earlier, later in _near_different(compact):
        firsts.append(different[earlier])
        seconds.append(different[later])
    first, second = np.concatenate(firsts), np.concatenate(seconds)
    pairs = np.unique(np.stack([second, first], axis=1), axis=0)
    first, second = pairs[:, 1], pairs[:, 0]
    return NearPairs(first, second, _distance(words[first], words[second]))


def keep_first(pairs: NearPairs) -> NearPairs:
    """Choose one pair for each hash that is near to an earlier one that is kept.

    Hashes are looked at in order. A hash that is near to one that is kept is not kept itself. So a
    chain of pictures, each a little unlike the one before, does not end with a picture that is
    dropped for one that it is not near to.

    Returns:
        For each hash that is not kept, its pair with the earliest kept one.
    """
    dropped: dict[int, int] = {}
    for number, (first, second) in enumerate(
        zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)
    ):
        if first not in dropped:
            dropped.setdefault(second, number)
    chosen = np.fromiter(dropped.values(), dtype=np.int64, count=len(dropped))
    return NearPairs(*(column[chosen] for column in pairs))


def _equal_words(words: Words) -> tuple[IntArray, IntArray]:
    """Return (first, again): each hash that came before, and its first position."""
    order = np.lexsort(words.T)  # stable: the earliest comes first
    ordered = words[order]
    is_new = np.ones(len(words), dtype=np.bool_)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    group = np.cumsum(is_new) - 1
    return order[is_new][group[~is_new]], order[~is_new]


def _near_different(words: Words) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield (earlier, later) of near hashes, for each band. A pair may come several times."""
    bands = words.view(np.uint16).reshape(-1, 16)
    for band in range(bands.shape[1]):
        keys = bands[:, band]
        order = np.argsort(keys, kind="stable")
        sizes = np.bincount(keys, minlength=1 << 16)
        stops = np.repeat(np.cumsum(sizes), sizes)
        num_after = stops - np.arange(len(keys)) - 1  # in the same bucket
        is_large = sizes > MAX_BUCKET
        num_after[np.repeat(is_large, sizes)] = 0
        yield from _near_neighbours(words, order, num_after)
        starts = np.cumsum(sizes) - sizes
        for bucket in np.flatnonzero(is_large).tolist():
            yield from _near_leaders(words, order[starts[bucket] :][: sizes[bucket]])


def _near_neighbours(
    words: Words, order: IntArray, num_after: IntArray
) -> Iterator[tuple[IntArray, IntArray]]:
    """Compare each hash with all that follow it in its bucket.

    A bucket of the hashes a, b, c: step 1 compares a with b and b with c, step 2 a with c.
    """
    ordered = words[order]
    head = np.ascontiguousarray(ordered[:, 0])
    active = np.flatnonzero(num_after > 0)
    step = 1
    while active.size:
        # A quarter of the bits decides about nearly all pairs.
        is_candidate = np.bitwise_count(head[active] ^ head[active + step]) <= MAX_DISTANCE
        candidates = active[is_candidate]
        is_near = _distance(ordered[candidates], ordered[candidates + step]) <= MAX_DISTANCE
        near = candidates[is_near]
        if near.size:
            yield order[near], order[near + step]
        step += 1
        active = active[num_after[active] >= step]


def _near_leaders(words: Words, members: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
    """Compare the first hash of a large bucket with the others, leave out the near ones; again."""
    while members.size > 1:
        leader, others = members[0], members[1:]
        is_near = _distance(words[others], words[leader]) <= MAX_DISTANCE
        if is_near.any():
            near = others[is_near]
            yield np.full_like(near, leader), near
        members = others[~is_near]


def _distance(a: Words, b: Words) -> IntArray:
    """Return the number of bits that differ, int64 [n]."""
    distance: IntArray = np.bitwise_count(a ^ b).sum(axis=-1, dtype=np.int64)
    return distance
