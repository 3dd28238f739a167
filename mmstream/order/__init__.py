"""The flow's first stage: ORDER -> read -> decode -> batch -> loader -> device.

The order of an epoch is a pure function of integers, computed before any byte is read:
``order(epoch, step, row) -> (shard, index)``. Who asks (which rank, which worker, after which
crash) is no argument of it, so every topology sees the same global batches.

    chunks.py    N slots of an epoch: chunks of each shard, permuted, end to end, rotated
    lanes.py     steps of G rows: slots cut into lanes, drawn from window by window
    permute.py   the keyed permutations behind both
    defaults.py  grid, window and chunk of a corpus

A reader that owns whole lanes reads each from front to back. `shuffle=False` is one lane without
permutations: slot = step*G + row. Set-up costs O(chunks) an epoch, a step O(rows + its windows).
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.errors import ConfigError
from mmstream.order.chunks import ChunkTable, EpochChunks
from mmstream.order.defaults import default_chunk, default_grid, default_window
from mmstream.order.lanes import Lanes
from mmstream.order.permute import random_words

__all__ = ["MAX_ATTEMPTS", "Order", "Refs", "Window"]

ORDER_VERSION = 1
"""Part of every saved state; a change of any rule of the order must raise it."""

NEAR_ATTEMPTS = 8
"""Substitutes 0-7 come from the bad sample's own window, whose bytes are likely at hand."""

MAX_ATTEMPTS = 16
"""Substitutes 8-15 come from anywhere in the epoch; then the row is given up."""

TAIL_WINDOW = -1
"""The window of the last, partial step (`drop_last=False`)."""

Ints = npt.NDArray[np.int64]


class Refs(NamedTuple):
    """Where the rows of a step come from; every array has one entry a row."""

    shard: Ints
    """Position of the shard in the manifest."""
    index: Ints  # type: ignore[assignment]  # the field's name wins over tuple.index
    """Position of the sample in the shard."""
    valid: npt.NDArray[np.bool_]
    """False for the padding of a last, partial step (`drop_last=False`)."""


class Window(NamedTuple):
    """What one window delivers, in order of delivery."""

    step: Ints
    row: Ints
    shard: Ints
    index: Ints  # type: ignore[assignment]


class Order:
    """The order of all epochs of a corpus. Build it with `Order.from_counts`.

    Attributes:
        steps_per_epoch: steps of every epoch, known before any read.
        num_samples: samples of the corpus.
        global_batch_size: G, rows of a step over all ranks.
    """

    def __init__(
        self, table: ChunkTable, lanes: Lanes, *, corpus: str, seed: int, drop_last: bool
    ) -> None:
        self.corpus, self.seed, self.drop_last = corpus, seed, drop_last
        self.global_batch_size = lanes.global_batch_size
        self.num_samples = int(table.counts.sum())
        self._tail = self.num_samples - lanes.num_steps * self.global_batch_size
        self.steps_per_epoch = lanes.num_steps + (self._tail > 0 and not drop_last)
        self._table, self._lanes = table, lanes
        self._epochs: dict[int, EpochChunks] = {}
        self._windows: dict[tuple[int, int], Window] = {}

    @classmethod
    def from_counts(
        cls,
        counts: Sequence[int] | Ints,
        *,
        global_batch_size: int,
        seed: int = 0,
        names: Sequence[str] | None = None,
        num_bytes: int | None = None,
        grid: tuple[int, int] | None = None,
        window: int | None = None,
        interleave: int = 16,
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
            grid: (P, Q) lanes; Q divides G. By default a function of the corpus and G alone.
            window: M, samples that are permuted together in a lane.
            interleave: K, places of a lane that a window is drawn from.
            chunk: C, contiguous samples that stay together on storage.
            shuffle: False: the corpus' own order.
            drop_last: False: one more step holds the left-over samples, padded.

        Raises:
            ConfigError: impossible settings, or fewer samples than one step needs.
        """
        array = np.asarray(counts, dtype=np.int64).reshape(-1)
        total, rows = int(array.sum()), _integer("global_batch_size", global_batch_size)
        seed, interleave = _integer("seed", seed), _integer("interleave", interleave)
        window = None if window is None else _integer("window", window)
        chunk = None if chunk is None else _integer("chunk", chunk)
        _require(rows >= 1, f"global_batch_size {rows}: needs at least 1")
        _require(not array.size or int(array.min()) >= 0, "a shard has a negative count")
        _require(total > 0, "the dataset has no samples")
        _require(
            total >= rows or not drop_last,
            f"{total} samples do not fill one step of global_batch_size {rows}: "
            "lower it, or pass drop_last=False",
        )
        grid = (int(grid[0]), int(grid[1])) if grid else default_grid(total, rows)
        _require(
            min(grid) >= 1 and rows % grid[1] == 0,
            f"grid {grid}: P and Q must be positive, and Q divide global_batch_size {rows}",
        )
        window = default_window(total, num_bytes, grid) if window is None else window
        chunk = default_chunk(total) if chunk is None else chunk
        _require(min(window, interleave, chunk) >= 1, "window, interleave, chunk: at least 1")
        lanes = Lanes(
            num_steps=total // rows,
            global_batch_size=rows,
            grid=grid if shuffle else (1, 1),
            window=window,
            interleave=interleave if shuffle else 1,
            shuffle=shuffle,
        )
        table = ChunkTable.cut(array, chunk)
        return cls(
            table, lanes, corpus=_corpus_id(array, names), seed=int(seed), drop_last=drop_last
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_epochs": {}, "_windows": {}}

    @property
    def grid(self) -> tuple[int, int]:
        """(P, Q): a worker reads whole lanes where W divides Q and num_workers divides P."""
        return self._lanes.grid

    def identity(self) -> dict[str, Any]:
        """Return all that the order depends on, in plain JSON types: part of a saved state."""
        return {
            "version": ORDER_VERSION,
            "corpus": self.corpus,
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
        numbers = self.windows(step)
        _require(epoch >= 0, f"epoch {epoch}: counts from 0")
        refs = Refs(
            np.empty_like(numbers), np.empty_like(numbers), np.ones(numbers.size, dtype=np.bool_)
        )
        for number in np.unique(numbers):
            window = self.window(epoch, int(number))
            here = window.step == step
            rows = window.row[here]
            refs.shard[rows], refs.index[rows] = window.shard[here], window.index[here]
        if step == self._lanes.num_steps:
            refs.valid[:] = self._tail_slots()[1]
        return refs

    def windows(self, step: int) -> Ints:
        """Return int64 [G]: the number of the window that each row of a step is drawn from.

        The same in every epoch. Raises ConfigError when an epoch has no such step.
        """
        _require(
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
            _keep(self._windows, (epoch, number), found, most=3 * self._lanes.num_lanes + 2)
        return found

    def substitute(self, epoch: int, step: int, row: int, attempt: int) -> tuple[int, int]:
        """Return (shard, index) of the sample that takes a bad row's place.

        Attempts 0-7 draw from the row's own window but not from its step; attempts 8-15, and all
        of a row whose window has nothing else, from anywhere in the epoch.
        """
        word = int(random_words(1, self.seed, epoch, "substitute", step, row, attempt)[0])
        if attempt < NEAR_ATTEMPTS:
            window = self.window(epoch, int(self.windows(step)[row]))
            others = np.flatnonzero(window.step != step)
            if others.size:
                chosen = others[word % others.size]
                return int(window.shard[chosen]), int(window.index[chosen])
        planned = self.num_samples - (self._tail if self.drop_last else 0)
        shard, index = self._chunks(epoch).find(np.asarray([word % planned]))
        return int(shard[0]), int(index[0])

    def _tail_slots(self) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Spread the left-over slots evenly over the rows of one step, so that ranks share them."""
        rows = np.arange(self.global_batch_size + 1, dtype=np.int64)
        offset = rows * self._tail // self.global_batch_size
        start = self._lanes.num_steps * self.global_batch_size
        return start + offset[:-1], offset[1:] > offset[:-1]

    def _chunks(self, epoch: int) -> EpochChunks:
        found = self._epochs.get(epoch)
        if found is None:
            found = self._table.epoch(epoch, self.seed, self._lanes.shuffle)
            _keep(self._epochs, epoch, found, most=2)
        return found


def _corpus_id(counts: Ints, names: Sequence[str] | None) -> str:
    _require(names is None or len(names) == counts.size, "as many names as counts, please")
    digest = hashlib.sha256(counts.astype("<i8").tobytes())
    for name in names or ():
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()[:32]


def _keep(cache: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Put a value in a cache that holds the latest few. Decode threads share the cache."""
    for oldest in list(cache)[: max(0, len(cache) - most + 1)]:  # list() is one step under the GIL
        cache.pop(oldest, None)
    cache[key] = value


def _integer(name: str, value: Any) -> int:
    """Return a plain int: keys and states are made of its repr, where numpy's integers differ."""
    try:
        return int(operator.index(value))
    except TypeError:
        raise ConfigError(f"{name} {value!r}: needs an integer") from None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
