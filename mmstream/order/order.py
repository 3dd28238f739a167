"""The order of all epochs of one corpus: steps of G rows, drawn from lanes window by window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmstream.errors import ConfigError, StateError
from mmstream.order.checks import integer, keep, require
from mmstream.order.chunks import ChunkTable, EpochChunks
from mmstream.order.corpus import Corpus
from mmstream.order.defaults import default_chunk, default_grid, default_window
from mmstream.order.lanes import Lanes
from mmstream.order.permute import random_words
from mmstream.order.refs import NEAR_ATTEMPTS, Refs, Window, refs_of_step
from mmstream.types import IntArray

__all__ = ["Order"]

ORDER_VERSION = 1
"""Part of every saved state; a change of any rule of the order must raise it."""

_SETTINGS = (
    "global_batch_size", "seed", "grid", "window", "interleave", "chunk", "shuffle", "drop_last",
)  # fmt: skip

TAIL_WINDOW = -1
"""The window of the last, partial step (`drop_last=False`)."""


class Order:
    """The order of all epochs of a corpus. Build it with `Order.from_counts`.

    Attributes:
        steps_per_epoch: steps of every epoch, known before any read.
        num_samples: samples of the corpus, those on its bad list left out.
        global_batch_size: G, rows of a step over all ranks.
    """

    def __init__(
        self, corpus: Corpus, table: ChunkTable, lanes: Lanes, *, seed: int, drop_last: bool
    ) -> None:
        self.seed, self.drop_last = seed, drop_last
        self.global_batch_size = lanes.global_batch_size
        self.num_samples = corpus.num_samples
        self._tail = self.num_samples - lanes.num_steps * self.global_batch_size
        self.steps_per_epoch = lanes.num_steps + (self._tail > 0 and not drop_last)
        self._corpus, self._table, self._lanes = corpus.identity(), table, lanes
        self._epochs: dict[int, EpochChunks] = {}
        self._windows: dict[tuple[int, int], Window] = {}

    @classmethod
    def from_counts(
        cls,
        counts: Sequence[int] | IntArray,
        *,
        global_batch_size: int,
        seed: int = 0,
        names: Sequence[str] | None = None,
        num_bytes: int | None = None,
        bad: Sequence[tuple[int, int]] | IntArray = (),
        grid: tuple[int, int] | None = None,
        window: int | None = None,
        interleave: int = 32,
        chunk: int | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> Order:
        """Build the order of a corpus from the sample counts of its shards.

        Args:
            counts: samples of each shard, in the manifest's order; zeros are fine.
            global_batch_size: G, rows of a step over all ranks.
            seed: any integer; each epoch of a seed has a permutation of its own.
            names: of the shards, part of the corpus' identity in saved states.
            num_bytes: of all shards together; sets the default window by mean sample size.
            bad: (shard, index) of samples that are never planned.
            grid: (P, Q) lanes; Q divides G. By default a function of the corpus and G alone.
            window: M, samples that are permuted together in a lane.
            interleave: K, places of a lane that a window is drawn from.
            chunk: C, contiguous samples that stay together on storage.
            shuffle: False: the corpus' own order.
            drop_last: False: one more step holds the left-over samples, padded.

        Raises:
            ConfigError: impossible settings, or fewer samples than one step needs.
        """
        corpus = Corpus(np.asarray(counts), names, num_bytes, np.asarray(bad))
        total, rows = corpus.num_samples, integer("global_batch_size", global_batch_size)
        seed, interleave = integer("seed", seed), integer("interleave", interleave)
        window = None if window is None else integer("window", window)
        chunk = None if chunk is None else integer("chunk", chunk)
        require(rows >= 1, f"global_batch_size {rows}: needs at least 1")
        require(total > 0, "the dataset has no samples" + (" but bad ones" * bool(len(corpus.bad))))
        require(
            total >= rows or not drop_last,
            f"{total} samples do not fill one step of global_batch_size {rows}: "
            "lower it, or in Python pass drop_last=False",
        )
        grid = (int(grid[0]), int(grid[1])) if grid else default_grid(total, rows)
        require(
            min(grid) >= 1 and rows % grid[1] == 0,
            f"grid {grid}: P and Q must be positive, and Q divide global_batch_size {rows}",
        )
        window = default_window(total, num_bytes, grid) if window is None else window
        chunk = default_chunk(total) if chunk is None else chunk
        require(min(window, interleave, chunk) >= 1, "window, interleave, chunk: at least 1")
        lanes = Lanes(
            num_steps=total // rows,
            global_batch_size=rows,
            grid=grid if shuffle else (1, 1),
            window=window,
            interleave=interleave if shuffle else 1,
            shuffle=shuffle,
        )
        table = ChunkTable.cut(corpus, chunk)
        return cls(corpus, table, lanes, seed=int(seed), drop_last=drop_last)

    @classmethod
    def from_identity(
        cls,
        identity: Mapping[str, Any],
        counts: Sequence[int] | IntArray,
        names: Sequence[str] | None = None,
        bad: Sequence[tuple[int, int]] | IntArray = (),
    ) -> Order:
        """Rebuild the order of a saved state, also where the corpus has grown since.

        Args:
            identity: ``state["order"]``.
            counts: samples of each shard now; shards may have been appended.
            names: of the shards now.
            bad: the bad list now; a state from before there was one does without it.

        Raises:
            StateError: the corpus' first shards are not those of the state, or its bad list is
                another one.
        """
        try:
            known = {name: identity[name] for name in ("version", "corpus", "bad")}
            num_shards = integer("num_shards", identity["num_shards"])
            settings = {name: identity[name] for name in _SETTINGS}
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not an order's identity: {type(error).__name__}: {error}") from None
        if known["version"] != ORDER_VERSION:
            raise StateError(f"order version {known['version']}, this mmstream has {ORDER_VERSION}")
        corpus = Corpus(np.asarray(counts), names, None, np.asarray(bad))
        corpus = corpus.first(num_shards, keep_bad=known["bad"] is not None)
        found = corpus.identity()
        for name, what, advice in (
            ("corpus", f"the corpus' first {num_shards} shards are", "resume on the old ones"),
            ("bad", "the known-bad samples are", "put back mmstream.bad.previous.json"),
        ):
            if found[name] != known[name]:
                raise StateError(
                    f"{what} not those of the state ({name} was {known[name]!r} and is "
                    f"{found[name]!r}): {advice}, or start anew"
                )
        try:
            return cls.from_counts(corpus.counts, names=corpus.names, bad=corpus.bad, **settings)
        except (ConfigError, TypeError, ValueError, IndexError) as error:
            raise StateError(f"not an order's identity: {error}") from None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_epochs": {}, "_windows": {}}

    @staticmethod
    def binding(identity: Mapping[str, Any], _epoch: int, step: int) -> dict[str, Any]:
        """Return what of an identity a resume at (epoch, step) must find unchanged."""
        return {k: v for k, v in identity.items() if step or k in ("corpus", "num_shards", "seed")}

    @property
    def stride(self) -> int:
        """Windows whose numbers differ by a multiple of this follow each other in a lane."""
        return self._lanes.num_lanes

    @property
    def grid(self) -> tuple[int, int]:
        """(P, Q): a worker reads whole lanes where W divides Q and num_workers divides P."""
        return self._lanes.grid

    def identity(self) -> dict[str, Any]:
        """Return all that the order depends on, in plain JSON types: part of a saved state."""
        return {
            "version": ORDER_VERSION,
            **self._corpus,
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "grid": list(self._lanes.grid),
            "window": self._lanes.window,
            "interleave": self._lanes.interleave,
            "chunk": self._table.chunk,
            "shuffle": self._lanes.shuffle,
            "drop_last": self.drop_last,
        }

    def refs(self, epoch: int, step: int) -> Refs:
        """Return (shard int64 [G], index int64 [G], valid bool [G]) of a step.

        Raises:
            ConfigError: no such step in an epoch.
        """
        numbers = self.windows(epoch, step)
        refs = refs_of_step(step, numbers, lambda number: self.window(epoch, number))
        if step == self._lanes.num_steps:
            refs.valid[:] = self._tail_slots()[1]
        return refs

    def windows(self, epoch: int, step: int) -> IntArray:
        """Return int64 [G]: the number of the window that each row of a step is drawn from.

        Raises:
            ConfigError: no such step in an epoch.
        """
        require(epoch >= 0, f"epoch {epoch}: counts from 0")
        require(
            0 <= step < self.steps_per_epoch,
            f"step {step}: an epoch has steps 0 to {self.steps_per_epoch - 1}",
        )
        if step == self._lanes.num_steps:
            return np.full(self.global_batch_size, TAIL_WINDOW, dtype=np.int64)
        return self._lanes.windows_of_step(step)

    def window(self, epoch: int, number: int) -> Window:
        """Return what a window delivers, and at which step and row.

        The last few windows are kept, so that walking an epoch computes each once.
        """
        found = self._windows.get((epoch, number))
        if found is None:
            if number == TAIL_WINDOW:
                rows = np.arange(self.global_batch_size, dtype=np.int64)
                steps, slots = np.full_like(rows, self._lanes.num_steps), self._tail_slots()[0]
            else:
                steps, rows = self._lanes.steps_and_rows(number)
                slots = self._lanes.slots(number, self.seed, epoch)
            found = Window(steps, rows, *self._chunks(epoch).find(slots))
            keep(self._windows, (epoch, number), found, most=3 * self._lanes.num_lanes + 2)
        return found

    def substitute(self, epoch: int, step: int, row: int, attempt: int) -> tuple[int, int]:
        """Return (shard, index) of the sample that takes a bad row's place.

        Attempts 0-7 draw from the row's own window but not from its step; attempts 8-15, and all
        of a row whose window has nothing else, from anywhere in the epoch.
        """
        word = int(random_words(1, self.seed, epoch, "substitute", step, row, attempt)[0])
        if attempt < NEAR_ATTEMPTS:
            window = self.window(epoch, int(self.windows(epoch, step)[row]))
            others = np.flatnonzero(window.step != step)
            if others.size:
                chosen = others[word % others.size]
                return int(window.shard[chosen]), int(window.index[chosen])
        planned = self.num_samples - (self._tail if self.drop_last else 0)
        shard, index = self._chunks(epoch).find(np.asarray([word % planned]))
        return int(shard[0]), int(index[0])

    def stream(self, epoch: int, _step: int, _row: int) -> tuple[int, int]:
        """Return (seed, epoch) that key the random draws of a row's transforms."""
        return self.seed, epoch

    def _tail_slots(self) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Spread the left-over slots evenly over the rows of one step, so that ranks share them."""
        rows = np.arange(self.global_batch_size + 1, dtype=np.int64)
        offset = rows * self._tail // self.global_batch_size
        start = self._lanes.num_steps * self.global_batch_size
        return start + offset[:-1], offset[1:] > offset[:-1]

    def _chunks(self, epoch: int) -> EpochChunks:
        found = self._epochs.get(epoch)
        if found is None:
            found = self._table.epoch(epoch, self.seed, self._lanes.shuffle)
            keep(self._epochs, epoch, found, most=2)
        return found
