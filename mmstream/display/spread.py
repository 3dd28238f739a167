"""Which samples stand for a whole dataset in a preview: spread over it, with different pictures."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from mmstream.display.contents import pictures_of
from mmstream.errors import MMStreamError

CANDIDATES = 3
"""Samples that are read for each one that is shown, at most."""


def spread(num_samples: int, count: int, seed: int | None = None) -> list[int]:
    """Return positions that cut a dataset into equal parts, one from each part.

    Args:
        num_samples: Of the dataset.
        count: Positions to return, at most.
        seed: Draws a position from each part. None: the middle of each.

    Examples:
        >>> spread(1000, 4), spread(3, 4)
        ([125, 375, 625, 875], [0, 1, 2])
    """
    if num_samples <= count:
        return list(range(num_samples))
    if seed is None:
        return [(2 * i + 1) * num_samples // (2 * count) for i in range(count)]
    draw = random.Random(seed).random  # the same numbers in every version of Python
    bounds = [i * num_samples // count for i in range(count + 1)]
    return [start + int(draw() * (stop - start)) for start, stop in pairwise(bounds)]


def preview(read: Callable[[int], Any], num_samples: int, count: int) -> Iterator[Any]:
    """Yield samples that are spread over a dataset, in its order.

    Neighbours may share a picture, one with each caption of it. So a sample whose first picture was
    taken already is left out, if there are others.

    Args:
        read: Returns the sample of a position.
        num_samples: Of the dataset.
        count: Samples to yield.

    Yields:
        Samples, and in place of one that cannot be read its error.
    """
    positions = spread(num_samples, count)
    if num_samples > count:
        positions = list(dict.fromkeys([*positions, *spread(num_samples, CANDIDATES * count)]))
    taken: dict[int, Any] = {}
    pictures: set[bytes] = set()
    for position in positions:
        if len(taken) == count:
            break
        try:
            sample = read(position)
        except (MMStreamError, OSError) as error:
            taken[position] = error
            continue
        first = next(iter(pictures_of(sample).values()), None)
        if not isinstance(first, bytes) or first not in pictures or num_samples <= count:
            taken[position] = sample
            pictures |= {first} if isinstance(first, bytes) else set()
    yield from (taken[position] for position in sorted(taken))
