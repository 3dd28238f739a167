"""Shards -> groups, and the samples of a group -> packs.

A group is consecutive shards whose samples are packed together, and a pack lies in one group. To
the order of a run, a group is what a shard is to the order of samples.

Samples come in the order of the dataset. Each goes to the fullest of at most `NUM_OPEN` open packs
that it fits. Where it fits none, a new pack is begun; of `NUM_OPEN`, the fullest is closed first.
A pack that is 99.5 % full is closed. At the end, the packs under 97 % are packed anew, 24
neighbours at a time and longest sample first, if that saves packs.

So the samples of a pack lie near each other, and are read in few ranges. Best-fit decreasing over
all samples fills packs about one point better, and scatters each over the whole group
(docs/packing.md has figures).

Everything is an integer, and ties go to the lower number: each machine makes the same packs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from mmstream.types import IntArray

GROUP_PACKS = 256
"""A group holds the tokens of so many full packs, or more: what is left at its end is little."""

NUM_OPEN = 16
"""Packs that are open at a time."""

CLOSED_PER_MILLE = 995
"""A pack is closed when so much of T is taken."""

REPACKED_PER_MILLE = 970
"""Packs that are less full are packed anew at the end of a group."""

BLOCK_PACKS = 24
"""Packs that are packed anew together. More fill better, and their samples lie farther apart."""

PACK_BITS = 40
"""Of a number that holds the room of a pack above the number of the pack."""

LIMIT_BITS = 48
"""Of a number that holds the room for several things. The highest bit of each is for borrowing."""


def group_stops(shard_tokens: IntArray, max_tokens: int, finished: Sequence[int] = ()) -> list[int]:
    """Return the stop of each group, in shards. A group is whole shards, and never an empty one.

    Where a group ends depends on the shards before it only. So shards that are appended later
    change no finished group: they begin a new one.

    Args:
        shard_tokens: int64 [num_shards], tokens of each shard.
        max_tokens: T, tokens of a pack.
        finished: The stops of groups that an earlier plan has. They stay.

    Examples:
        Packs of 2 tokens, so a group has 512 tokens or more, and the last one has what is left.

        >>> import numpy as np
        >>> group_stops(np.array([300, 300, 600, 10]), 2)
        [2, 3, 4]
        >>> group_stops(np.array([300, 300, 600, 10, 10]), 2, finished=[2, 3, 4])
        [2, 3, 4, 5]
    """
    stops = list(finished)
    ends = np.cumsum(shard_tokens)
    while not stops or stops[-1] < ends.size:
        first = stops[-1] if stops else 0
        if first == ends.size:
            break
        before = int(ends[first - 1]) if first else 0
        full = int(np.searchsorted(ends, before + GROUP_PACKS * max_tokens))
        stops.append(min(full + 1, ends.size))
    return stops


def pack_samples(costs: IntArray, limits: IntArray, block_packs: int = BLOCK_PACKS) -> IntArray:
    """Return the pack of each sample of a group.

    Args:
        costs: int64 [n, k], what each sample takes of each limit, tokens first. None may be more
            than its limit or negative.
        limits: int64 [k], what a pack may hold.
        block_packs: Packs that are packed anew together.

    Returns:
        int64 [n], numbers of packs. Packs are numbered by their first sample.

    Examples:
        >>> import numpy as np
        >>> pack_samples(np.array([[6], [5], [4], [4], [1]]), np.array([10])).tolist()
        [0, 1, 0, 1, 1]
    """
    max_tokens = int(limits[0])
    min_room = max_tokens * (1000 - CLOSED_PER_MILLE) // 1000 + 1
    packs = best_fit(costs, limits, NUM_OPEN, min_room)
    order = np.argsort(packs, kind="stable")
    samples_of = np.split(order, np.cumsum(np.bincount(packs))[:-1])
    taken = np.bincount(packs, costs[:, 0])  # as float64: exact below 2^53
    loose = np.flatnonzero(taken * 1000 < REPACKED_PER_MILLE * max_tokens)
    num_packs = taken.size
    for start in range(0, loose.size, block_packs):
        block = loose[start : start + block_packs]
        samples = np.sort(np.concatenate([samples_of[pack] for pack in block]))
        longest_first = samples[np.argsort(-costs[samples, 0], kind="stable")]
        packed_again = best_fit(costs[longest_first], limits)
        if int(packed_again.max()) + 1 < block.size:
            packs[longest_first] = num_packs + packed_again
            num_packs += block.size
    return _numbered(packs)


def best_fit(
    costs: IntArray, limits: IntArray, num_open: int | None = None, min_room: int = 1
) -> IntArray:
    """Put each sample into the fullest open pack that it fits, or into a new one.

    Args:
        costs: int64 [n, k], as for `pack_samples`. Samples are taken in this order.
        limits: int64 [k], as for `pack_samples`.
        num_open: Packs that are open at a time. None: all.
        min_room: A pack with room for fewer tokens is closed.

    Returns:
        int64 [n], numbers of packs in the order of their begin.
    """
    tokens = costs[:, 0].tolist()
    others = _in_one_number(costs[:, 1:]) if limits.size > 1 else None
    full_room = int(limits[0]) << PACK_BITS
    least = min_room << PACK_BITS
    (full_rest,) = _in_one_number(limits[None, 1:])
    borrow = sum(1 << (LIMIT_BITS * (number + 1) - 1) for number in range(limits.size - 1))
    most_open = num_open or len(tokens)
    # Open packs, fullest first: room << PACK_BITS | number. Example: 3 tokens of room in pack 5.
    open_packs: list[int] = []
    rest: list[int] = []  # of each pack, for the other limits
    packs = [0] * len(tokens)
    mask = (1 << PACK_BITS) - 1
    for sample, length in enumerate(tokens):
        cost = length << PACK_BITS
        position = bisect_left(open_packs, cost)
        if others is not None:
            more = others[sample]
            while position < len(open_packs) and (
                ((rest[open_packs[position] & mask] | borrow) - more) & borrow != borrow
            ):
                position += 1
        if position < len(open_packs):
            entry = open_packs.pop(position) - cost
        else:
            if len(open_packs) == most_open:
                del open_packs[0]
            entry = (full_room | len(rest)) - cost
            rest.append(full_rest)
        pack = entry & mask
        packs[sample] = pack
        if others is not None:
            rest[pack] -= others[sample]
        if entry >= least:
            insort(open_packs, entry)
    return np.array(packs, dtype=np.int64)


def _in_one_number(costs: IntArray) -> list[int]:
    """Return each row as one integer of Python, `LIMIT_BITS` a column.

    So one subtraction compares all of them. Example: with 4 bits a column and 8 | 3 - 5 = 6, the
    highest bit is gone: 5 does not fit into 3. 8 | 5 - 3 = 10 keeps it.
    """
    rows = costs.tolist()
    return [sum(value << (LIMIT_BITS * i) for i, value in enumerate(row)) for row in rows]


def _numbered(packs: IntArray) -> IntArray:
    """Number packs by their first sample."""
    _, first, inverse = np.unique(packs, return_index=True, return_inverse=True)
    numbers = np.empty(first.size, dtype=np.int64)
    numbers[np.argsort(first)] = np.arange(first.size)
    return numbers[inverse]
