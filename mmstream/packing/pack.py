"""The samples of a group -> packs.

Samples come in the order of the dataset. Each goes to the fullest of at most `NUM_OPEN` open packs
that it fits. Where it fits none, a new pack is begun; of `NUM_OPEN`, the fullest is closed first.
A pack that is 99.5 % full is closed. At the end, packs under 97 % and the open ones are packed
anew, longest sample first, if that saves packs.

So the samples of a pack lie near each other, and a pack is read in one or two ranges.
Best-fit decreasing over thousands of samples fills packs less than one point better, and scatters
a pack over 16 ranges.

Everything is an integer, and ties go to the lower number: each machine makes the same packs.
"""

from __future__ import annotations

import numpy as np

from mmstream.types import IntArray

__all__ = ["NUM_OPEN", "pack_samples"]

NUM_OPEN = 16
"""Packs that are open at a time."""

CLOSED_PER_MILLE = 995
"""A pack is closed when so much of T is taken."""

REPACKED_PER_MILLE = 970
"""Packs that are less full are packed anew at the end of a group."""


def pack_samples(costs: IntArray, limits: IntArray) -> IntArray:
    """Return the pack of each sample of a group.

    Args:
        costs: int64 [n, k], what each sample takes of each limit, tokens first. None may be more
            than its limit or negative.
        limits: int64 [k], what a pack may hold.

    Returns:
        int64 [n], numbers of packs. Packs are numbered by their first sample.

    Examples:
        >>> import numpy as np
        >>> pack_samples(np.array([[6], [5], [4], [4], [1]]), np.array([10])).tolist()
        [0, 1, 0, 1, 1]
    """
    labels = _first_pass(costs.tolist(), limits.tolist())
    return _numbered(np.array(labels, dtype=np.int64))


def _first_pass(costs: list[list[int]], limits: list[int]) -> list[int]:
    """Return a label for each sample: samples of equal labels are one pack."""
    max_tokens = limits[0]
    labels: list[int] = []
    open_packs: dict[int, list[int]] = {}  # label -> what it holds, in the order of their begin
    num_packs = 0
    for cost in costs:
        best = -1
        for label, held in open_packs.items():
            if all(
                have + more <= most for have, more, most in zip(held, cost, limits, strict=True)
            ) and (best < 0 or held[0] > open_packs[best][0]):
                best = label
        if best < 0:
            if len(open_packs) == NUM_OPEN:
                fullest = max(open_packs, key=lambda label: (open_packs[label][0], -label))
                del open_packs[fullest]
            best = num_packs
            num_packs += 1
            open_packs[best] = [0] * len(limits)
        held = open_packs[best] = [
            have + more for have, more in zip(open_packs[best], cost, strict=True)
        ]
        labels.append(best)
        if held[0] * 1000 >= CLOSED_PER_MILLE * max_tokens:
            del open_packs[best]
    return labels


def _numbered(labels: IntArray) -> IntArray:
    """Number packs by their first sample."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    numbers = np.empty(first.size, dtype=np.int64)
    numbers[np.argsort(first)] = np.arange(first.size)
    return numbers[inverse]
