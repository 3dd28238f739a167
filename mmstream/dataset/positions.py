"""The position of a sample in its dataset <-> its shard and its index there."""

from __future__ import annotations

import numpy as np

from mmstream.types import IntArray, SampleRef


def refs_at(ends: IntArray, positions: IntArray) -> list[SampleRef]:
    """Return (shard, index) of the samples at these positions.

    Args:
        ends: int64 [num_shards], cumulative sums of the samples of each shard.
        positions: int64 [n], each at least 0 and below ``ends[-1]``.

    Examples:
        Shards with 2, 0 and 3 samples hold the positions 0-1, none and 2-4.

        >>> import numpy as np
        >>> refs_at(np.cumsum([2, 0, 3]), np.array([1, 2, 4]))
        [(0, 1), (2, 0), (2, 2)]
    """
    shards = np.searchsorted(ends, positions, side="right")
    starts = np.where(shards > 0, ends[shards - 1], 0)
    return list(zip(shards.tolist(), (positions - starts).tolist(), strict=True))
