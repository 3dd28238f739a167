"""The interface of all orders, which the later stages call, its results, and small caches.

`Order` and `MixtureOrder` run over samples: a row is a sample. `packing.order.PackOrder` runs over
packs: a row is a *unit* of several samples, which stay side by side in all results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from mmstream.order.saved import SavedOrder
from mmstream.types import IntArray, SampleRef

K = TypeVar("K")
V = TypeVar("V")

# -- the results of an order -----------------------------------------------------------------------
#
# All kinds of order return them. The read stage asks for both: refs say which samples a step
# needs, windows say which samples to read ahead together.

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


# -- any order -------------------------------------------------------------------------------------


class AnyOrder(Protocol):
    """The order of all epochs of a run. `Order` describes the methods."""

    is_packed: bool
    """Whether a row is a unit of samples, and not one sample."""
    steps_per_epoch: int
    global_batch_size: int
    """G, rows of a step over all ranks."""
    repeat: int
    """How many rows of a batch each row of the order becomes (`Pipeline(repeat=)`)."""
    seed: int

    @property
    def grid(self) -> tuple[int, int]:
        """(P, Q), groups of lanes and lanes of a group."""

    @property
    def stride(self) -> int:
        """Windows of one lane have numbers that differ by multiples of this."""

    def identity(self) -> dict[str, Any]:
        """Return everything the order depends on, in plain JSON types."""

    def with_saved_defaults(self, saved: SavedOrder, /) -> AnyOrder:
        """Return this order with the settings that were left to defaults taken from a state."""

    def rows_of(self, epoch: int, step: int, rows: tuple[int, int], /) -> tuple[int, int]:
        """Return the rows of a step that a rank delivers which has `rows` of G."""

    def refs(self, epoch: int, step: int, rows: tuple[int, int] | None = None) -> Refs:
        """Return the samples of a step."""

    def document_counts(
        self, epoch: int, step: int, rows: tuple[int, int] | None = None
    ) -> IntArray:
        """Return how many samples each row has, int64 [rows]; 0: padding."""

    def document_tokens(
        self, epoch: int, step: int, rows: tuple[int, int] | None = None
    ) -> IntArray:
        """Return the measured tokens of each sample of `refs`; 0 where nothing was measured."""

    def order_rows(self, epoch: int, step: int, rows: tuple[int, int] | None = None) -> IntArray:
        """Return the row of the order at each position of a step, int64 [rows]."""

    def windows(self, epoch: int, step: int, rows: tuple[int, int] | None = None) -> IntArray:
        """Return the number of the window of each row."""

    def window(self, epoch: int, number: int) -> Window:
        """Return the samples of a window."""

    def substitute_unit(self, epoch: int, step: int, row: int, attempt: int) -> Unit:
        """Return the samples that take a row of the order where none of its samples is good."""

    def stream(self, epoch: int, step: int, row: int, /) -> tuple[int, int]:
        """Return (seed, epoch), the key of the random transforms of a row of the order."""


class SampleRows:
    """The methods that all orders share whose rows are single samples."""

    is_packed = False
    repeat = 1
    global_batch_size: int

    def substitute(self, epoch: int, step: int, row: int, attempt: int) -> SampleRef:
        """Return the sample that replaces a bad one."""
        raise NotImplementedError

    def rows_of(self, _epoch: int, _step: int, rows: tuple[int, int]) -> tuple[int, int]:
        """Return the rows of a step that a rank delivers: the same of each step."""
        return rows

    def document_counts(
        self, _epoch: int, _step: int, rows: tuple[int, int] | None = None
    ) -> IntArray:
        """Return int64 [rows]: how many samples each row has. That is 1."""
        start, stop = rows or self.rows_of(_epoch, _step, (0, self.global_batch_size))
        return np.ones(stop - start, dtype=np.int64)

    def document_tokens(
        self, _epoch: int, _step: int, rows: tuple[int, int] | None = None
    ) -> IntArray:
        """Return int64 [rows] of 0: nothing is measured."""
        start, stop = rows or self.rows_of(_epoch, _step, (0, self.global_batch_size))
        return np.zeros(stop - start, dtype=np.int64)

    def order_rows(self, _epoch: int, _step: int, rows: tuple[int, int] | None = None) -> IntArray:
        """Return int64 [rows]: the row at each position of a step. Positions are rows here."""
        rows = rows or self.rows_of(_epoch, _step, (0, self.global_batch_size))
        return np.arange(*rows, dtype=np.int64)

    def substitute_unit(self, epoch: int, step: int, row: int, attempt: int) -> Unit:
        """Return the sample that takes the row of a bad one. See `Order.substitute`."""
        return Unit([self.substitute(epoch, step, row, attempt)])


# -- caches of a few entries -----------------------------------------------------------------------


def cached(cache: dict[K, V], key: K, max_entries: int, make: Callable[[], V]) -> V:
    """Return a value of a cache, which is made where the cache lacks it.

    A full cache drops its oldest entries, an eighth of `max_entries`. Decode threads share the
    caches of an order. ``list(cache)`` runs as one step under the GIL, so another thread cannot
    change the cache in the middle of it.
    """
    value = cache.get(key)
    if value is None:
        value = make()
        excess = len(cache) - max_entries + 1
        if excess > 0:  # several at once: the list of all keys costs as much as a window
            for oldest in list(cache)[: max(excess, max_entries // 8)]:
                cache.pop(oldest, None)
        cache[key] = value
    return value
