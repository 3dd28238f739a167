"""The answers of an order: the samples of a step (`Refs`), and the samples of a window (`Window`).

Both kinds of order make the rows of a step from its windows, here. The read stage asks for both:
refs say which samples a step needs, windows say which samples to read ahead together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.types import IntArray

__all__ = ["MAX_ATTEMPTS", "NEAR_ATTEMPTS", "Refs", "Window", "refs_of_step"]

NEAR_ATTEMPTS = 8
"""Substitutes 0-7 come from the bad sample's own window, whose bytes are often in memory."""

MAX_ATTEMPTS = 16
"""Substitutes 8-15 come from anywhere in the epoch. After them the row is given up."""


class Refs(NamedTuple):
    """The samples of a step. Each array has one entry per row."""

    shard: IntArray
    """[G] position of the shard in the manifest."""
    index: IntArray  # type: ignore[assignment]  # the field's name wins over tuple.index
    """[G] position of the sample in its shard."""
    valid: npt.NDArray[np.bool_]
    """[G] False for the padding of a last, partial step (`drop_last=False`)."""


class Window(NamedTuple):
    """The samples of one window, in the order of delivery. Each array has one entry per sample."""

    step: IntArray
    """Step of the epoch that delivers the sample. It never falls."""
    row: IntArray
    """Row of that step, from 0 to G-1."""
    shard: IntArray
    """Position of the shard in the manifest."""
    index: IntArray  # type: ignore[assignment]
    """Position of the sample in its shard."""


def refs_of_step(step: int, numbers: IntArray, window: Callable[[int], Window]) -> Refs:
    """Return the rows of a step from the windows that they come from. All rows are valid.

    Args:
        step: step of the epoch.
        numbers: int64 [G], the number of each row's window.
        window: returns the window of a number.

    Example: rows 0 and 1 of step 2 come from window 4, rows 2 and 3 from window 6. Window 4 also
    delivers row 1 of step 0, which is left out here.

    >>> window_4 = Window(np.array([0, 2, 2]), np.array([1, 0, 1]), np.array([0, 0, 2]),
    ...     np.array([3, 1, 4]))
    >>> window_6 = Window(np.array([2, 2]), np.array([2, 3]), np.array([1, 1]), np.array([0, 2]))
    >>> refs = refs_of_step(2, np.array([4, 4, 6, 6]), {4: window_4, 6: window_6}.__getitem__)
    >>> list(zip(refs.shard.tolist(), refs.index.tolist()))
    [(0, 1), (2, 4), (1, 0), (1, 2)]
    """
    refs = Refs(
        shard=np.empty_like(numbers),
        index=np.empty_like(numbers),
        valid=np.ones(numbers.size, dtype=np.bool_),
    )
    for number in np.unique(numbers):
        deliveries = window(int(number))
        of_step = np.flatnonzero(deliveries.step == step)
        rows = deliveries.row[of_step]
        refs.shard[rows] = deliveries.shard[of_step]
        refs.index[rows] = deliveries.index[of_step]
    return refs
