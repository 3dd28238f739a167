"""The answers of an order: samples of a step (`Refs`), of a window (`Window`), of a row (`Unit`).

All kinds of order answer with them. The read stage asks for both: refs say which samples a step
needs, windows say which samples to read ahead together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.types import IntArray, SampleRef

NEAR_ATTEMPTS = 8
"""Substitutes 0-7 come from the bad sample's own window, whose bytes are often in memory."""

MAX_ATTEMPTS = 16
"""Substitutes 8-15 come from anywhere in the epoch. After them the row is given up."""


class Refs(NamedTuple):
    """The samples of a step. Each array has N entries: one per row, or per sample of packs."""

    shard: IntArray
    """[N] position of the shard in the manifest."""
    index: IntArray  # type: ignore[assignment]  # the field's name wins over tuple.index
    """[N] position of the sample in its shard."""
    valid: npt.NDArray[np.bool_]
    """[N] False for the padding of a last, partial step (`drop_last=False`). Padding rows of packs
    have no sample."""


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


class Unit(NamedTuple):
    """The samples of one row."""

    refs: list[SampleRef]
    num_tokens: list[int] | None = None
    """Tokens of each sample, as measured. None where nothing was measured."""
