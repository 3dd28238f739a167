"""The answers of an order: the samples of a step (`Refs`), and the samples of a window (`Window`).

Both kinds of order answer with them. The read stage asks for both: refs say which samples a step
needs, windows say which samples to read ahead together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.types import IntArray

__all__ = ["MAX_ATTEMPTS", "NEAR_ATTEMPTS", "Refs", "Window"]

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
