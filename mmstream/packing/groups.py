"""Groups of shards: consecutive shards whose samples are packed together.

A pack lies in one group. To the order of a run, a group is what a shard is to the order of samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmstream.types import IntArray

__all__ = ["GROUP_PACKS", "group_stops"]

GROUP_PACKS = 256
"""A group holds the tokens of so many full packs, or more: what is left at its end is little."""


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
