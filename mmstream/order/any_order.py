"""What all orders are to the later stages, its results, and small caches.

`Order` and `MixtureOrder` run over samples: a row is a sample. `packing.order.PackOrder` runs over
packs: a row is a *unit* of several samples, which stay side by side in all results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from mmstream.order.corpus import SavedOrder
from mmstream.order.permute import random_words
from mmstream.order.settings import require
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
    """The order of all epochs of a run. `Order` describes the methods.

    Where a method has a body, rows are single samples: what packs do is in `PackOrder`.
    """

    is_packed: bool = False
    """Whether a row is a unit of samples, and not one sample."""
    steps_per_epoch: int
    global_batch_size: int
    """G, rows of a step over all ranks."""
    repeat: int = 1
    """How many rows of a batch each row of the order becomes (`Pipeline(repeat=)`)."""
    seed: int
    grid: tuple[int, int]
    """(P, Q), groups of lanes and lanes of a group."""
    stride: int
    """Windows of one lane have numbers that differ by multiples of this."""

    def identity(self) -> dict[str, Any]:
        """Return everything the order depends on, in plain JSON types."""

    def with_saved_defaults(self, saved: SavedOrder, /) -> AnyOrder:
        """Return this order with the settings that were left to defaults taken from a state."""

    def require_step(self, epoch: int, step: int, /) -> None:
        """Raise a ConfigError where there is no such step."""
        require(epoch >= 0, f"epoch {epoch}: epochs count from 0")
        require(
            0 <= step < self.steps_per_epoch,
            f"step {step}: an epoch has steps 0 to {self.steps_per_epoch - 1}",
        )

    def rows_of(self, _epoch: int, _step: int, rows: tuple[int, int], /) -> tuple[int, int]:
        """Return the rows of a step that a rank delivers which has `rows` of G.

        Only buckets have steps of fewer rows.
        """
        return rows

    def refs(self, epoch: int, step: int, rows: tuple[int, int] | None = None) -> Refs:
        """Return the samples of a step."""

    def document_counts(
        self, epoch: int, step: int, rows: tuple[int, int] | None = None
    ) -> IntArray:
        """Return how many samples each row has, int64 [rows]; 0: padding."""
        start, stop = rows or self.rows_of(epoch, step, (0, self.global_batch_size))
        return np.ones(stop - start, dtype=np.int64)

    def document_tokens(
        self, epoch: int, step: int, rows: tuple[int, int] | None = None
    ) -> IntArray:
        """Return the measured tokens of each sample of `refs`; 0 where nothing was measured."""
        start, stop = rows or self.rows_of(epoch, step, (0, self.global_batch_size))
        return np.zeros(stop - start, dtype=np.int64)

    def order_rows(self, epoch: int, step: int, rows: tuple[int, int] | None = None) -> IntArray:
        """Return the row of the order at each position of a step, int64 [rows]."""
        rows = rows or self.rows_of(epoch, step, (0, self.global_batch_size))
        return np.arange(*rows, dtype=np.int64)

    def windows(self, epoch: int, step: int, rows: tuple[int, int] | None = None) -> IntArray:
        """Return the number of the window of each row."""

    def window(self, epoch: int, number: int) -> Window:
        """Return the samples of a window."""

    def substitute_unit(self, epoch: int, step: int, row: int, attempt: int) -> Unit:
        """Return the samples that take a row of the order where none of its samples is good."""
        return Unit([self.substitute(epoch, step, row, attempt)])

    def substitute(self, epoch: int, step: int, row: int, attempt: int) -> SampleRef:
        """Return (shard, index) of the sample that replaces a bad sample.

        Attempts 0-7 choose from the row's own window, but not from the same step. Attempts 8-15
        choose from the whole epoch, and so do all attempts if the window has no other step.

        Args:
            epoch: epoch of the bad sample.
            step: its step.
            row: its row in the step.
            attempt: how many substitutes of this row were bad, too.
        """
        word = int(random_words(1, self.seed, epoch, "substitute", step, row, attempt)[0])
        if attempt < NEAR_ATTEMPTS:
            window = self.window(epoch, int(self.windows(epoch, step)[row]))
            candidates = np.flatnonzero(window.step != step)
            if candidates.size:
                chosen = candidates[word % candidates.size]
                return int(window.shard[chosen]), int(window.index[chosen])
        return self._far_substitute(epoch, step, row, word)

    def _far_substitute(self, _epoch: int, _step: int, _row: int, _word: int, /) -> SampleRef:
        """Return the sample of the whole epoch that a random word stands for."""
        raise TypeError(f"the rows of a {type(self).__name__} are no single samples")

    def stream(self, epoch: int, _step: int, _row: int, /) -> tuple[int, int]:
        """Return (seed, epoch), the key of the random transforms of a row of the order."""
        return self.seed, epoch


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
