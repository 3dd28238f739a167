"""A split in which no medium is in both parts: `Dataset.split(by_media=True)`.

    hashes of media, from the sidecars -> `sides_of` -> two selections

Samples are looked at in stored order. The first one with a medium draws its part, by the hash of
its first medium. Later ones with this medium follow it, and bring their other media there. So
samples that are appended move none of those before them.

Example: of A with medium 1, B with 2, C with 2 and 3, and D with 3, the last three are in one part.
E has 1 and 2. Where A and B are in different parts, E is in neither.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mmstream.order.permute import random_words
from mmstream.types import IntArray

NEITHER = -1


def sides_of(
    num_media: IntArray,
    media: npt.NDArray[np.uint64],
    draws: npt.NDArray[np.float64],
    fraction: float,
    seed: int,
) -> npt.NDArray[np.int8]:
    """Return the part of each sample: int8 [num_samples], 1 the first, 0 the second, or `NEITHER`.

    Args:
        num_media: int64 [num_samples], media of each sample.
        media: uint64 [their sum], hashes of the media of all samples.
        draws: float64 [num_samples] from 0 to 1, the draws of samples without media.
        fraction: The share of the first part.
        seed: Each seed gives other parts.

    Examples:
        >>> media = np.array([1, 2, 2, 3, 3], dtype=np.uint64)
        >>> sides_of(np.array([1, 1, 2, 1]), media, np.zeros(4), 0.5, seed=0).tolist()
        [0, 1, 1, 1]
    """
    starts, has_media = np.cumsum(num_media) - num_media, num_media > 0
    sides = (draws < fraction).astype(np.int8)
    sides[has_media] = _draws_of(media[starts[has_media]], seed) < fraction
    _, numbers, counts = np.unique(media, return_inverse=True, return_counts=True)
    owners = np.repeat(np.arange(len(num_media)), num_media)
    side_of: dict[int, int] = {}  # of media that come more than once, and of those beside them
    for sample in np.unique(owners[counts[numbers] > 1]).tolist():
        start = starts[sample]
        own = numbers[start : start + num_media[sample]].tolist()
        known = {side_of[number] for number in own if number in side_of} or {int(sides[sample])}
        if len(known) > 1:
            sides[sample] = NEITHER
        else:
            sides[sample] = side = known.pop()
            side_of.update(dict.fromkeys(own, side))
    return sides


def _draws_of(media: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.float64]:
    """Return float64 [n] from 0 to 1: a random number for each hash."""
    words = media ^ random_words(1, seed, "split by media")
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # those of SplitMix64
        words = (words ^ (words >> np.uint64(30))) * np.uint64(factor)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
