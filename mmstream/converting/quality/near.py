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

MAX_DISTANCE = 15
"""Most bits of 256 that differ between near-duplicates. One less than the number of bands."""

MAX_BUCKET = 4096
"""Largest group of hashes with an equal band in which each is compared with each."""

Words = npt.NDArray[np.uint64]


class NearPairs(NamedTuple):
    """Pairs of hashes that are near to each other.

    Equal hashes are one: the first of them represents the others.
    """

    representative: IntArray
    """int64 [n]: for each hash, the first that equals it."""
    first: IntArray
    """int64 [num_pairs]: a representative."""
    second: IntArray
    """A later representative that is near to `first`. Pairs are sorted by `second`."""
    distance: IntArray
    """Bits that differ: 1 to `MAX_DISTANCE`."""


class Matches(NamedTuple):
    """Hashes, each with the one that it is near to. All arrays are int64 [num_matches]."""

    first: IntArray
    again: IntArray
    """Later than `first`. Sorted, and none comes twice."""
    distance: IntArray


def near_pairs(hashes: npt.NDArray[np.uint8]) -> NearPairs:
    """Find all pairs of different hashes that differ in at most `MAX_DISTANCE` bits.

    In a group of more than 4,096 different hashes with an equal band, those near to an earlier one
    of the group are not compared with each other. So pictures that a corpus holds a million times,
    with small differences, cost little.

    Memory: about 150 bytes for each hash, and 24 for each pair.

    Args:
        hashes: uint8 [n, 32]
    """
    words = np.ascontiguousarray(hashes).view(np.uint64).reshape(-1, 4)
    representative = _representatives(words)
    different = np.flatnonzero(representative == np.arange(len(words)))
    pairs = [np.zeros((0, 2), dtype=np.int64)]
    for earlier, later in _near_different(words[different]):
        pairs.append(np.stack([different[later], different[earlier]], axis=1))
    second, first = np.unique(np.concatenate(pairs), axis=0).T
    return NearPairs(representative, first, second, _distance(words[first], words[second]))


def keep_first(near: NearPairs) -> Matches:
    """Match each hash that is near to an earlier one that is kept with the first such.

    Hashes are looked at in order. One that is near to a kept one is not kept itself. So in a chain
    of pictures, each a little unlike the one before, none is dropped for one that it is not near
    to.
    """
    count = len(near.representative)
    leader, distance = np.arange(count), np.zeros(count, dtype=np.int64)
    pairs = zip(near.first.tolist(), near.second.tolist(), near.distance.tolist(), strict=True)
    for first, second, bits in pairs:
        if leader[first] == first and leader[second] == second:
            leader[second], distance[second] = first, bits
    return _matches(near, leader, distance, np.arange(count))


def match_with_first(near: NearPairs, num_first: int) -> Matches:
    """Match each of the later hashes with the nearest one among the first `num_first`."""
    count = len(near.representative)
    leader = np.where(near.representative < num_first, near.representative, -1)
    distance = np.zeros(count, dtype=np.int64)
    is_across = near.first < num_first
    is_across &= near.second >= num_first
    across = np.lexsort((near.first, near.distance))
    for number in across[is_across[across]].tolist():
        second = near.second[number]
        if leader[second] < 0:
            leader[second], distance[second] = near.first[number], near.distance[number]
    later = np.arange(num_first, count)
    is_matched = leader[near.representative[later]] >= 0
    return _matches(near, leader, distance, later[is_matched])


def _matches(near: NearPairs, leader: IntArray, distance: IntArray, hashes: IntArray) -> Matches:
    """Give each hash what its representative was matched with."""
    representative = near.representative[hashes]
    first = leader[representative]
    is_other = first != hashes
    return Matches(first[is_other], hashes[is_other], distance[representative][is_other])


def _representatives(words: Words) -> IntArray:
    """Return for each hash the first that equals it."""
    order = np.lexsort(words.T)  # stable: the earliest comes first
    ordered = words[order]
    is_new = np.ones(len(words), dtype=np.bool_)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    representative = np.empty(len(words), dtype=np.int64)
    representative[order] = order[is_new][np.cumsum(is_new) - 1]
    return representative


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
