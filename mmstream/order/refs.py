"""What an order answers: the rows of a step, and the deliveries of a window."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.types import IntArray

__all__ = ["MAX_ATTEMPTS", "NEAR_ATTEMPTS", "Refs", "Window", "refs_of_step"]

NEAR_ATTEMPTS = 8
"""Substitutes 0-7 come from the bad sample's own window, whose bytes are likely at hand."""

MAX_ATTEMPTS = 16
"""Substitutes 8-15 come from anywhere in the epoch; then the row is given up."""


class Refs(NamedTuple):
    """Where the rows of a step come from; every array has one entry a row."""

    shard: IntArray
    """Position of the shard in the manifest."""
    index: IntArray  # type: ignore[assignment]  # the field's name wins over tuple.index
    """Position of the sample in the shard."""
    valid: npt.NDArray[np.bool_]
    """False for the padding of a last, partial step (`drop_last=False`)."""


class Window(NamedTuple):
    """What one window delivers, in order of delivery."""

    step: IntArray
    row: IntArray
    shard: IntArray
    index: IntArray  # type: ignore[assignment]


def refs_of_step(step: int, numbers: IntArray, window: Callable[[int], Window]) -> Refs:
    """Return the rows of a step, all valid, from the windows that they are drawn from."""
    refs = Refs(
        np.empty_like(numbers), np.empty_like(numbers), np.ones(numbers.size, dtype=np.bool_)
    )
    for number in np.unique(numbers):
        found = window(int(number))
        here = np.flatnonzero(found.step == step)
        rows = found.row[here]
        refs.shard[rows], refs.index[rows] = found.shard[here], found.index[here]
    return refs
