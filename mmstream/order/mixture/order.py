"""Mixtures: the order of several corpora. Answers the same questions as `Order`.

    recipe.py    what a mixture is: sources, shares, settings
    schedule.py  which source takes a lane's next position
    draws.py     rows of a step -> draws of sources, and back; weights that change
    source.py    draws of a source -> its samples, epoch after epoch

A mixture's epoch is so many steps, no more: sources come round in epochs of their own, and steps
count on from one epoch of the mixture to the next.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mmstream.order.checks import keep, require
from mmstream.order.mixture.draws import Draws
from mmstream.order.mixture.recipe import Recipe, binding
from mmstream.order.mixture.source import Source
from mmstream.order.permute import random_words
from mmstream.order.refs import NEAR_ATTEMPTS, Refs, Window, refs_of_step
from mmstream.types import IntArray

__all__ = ["MixtureOrder"]

MAX_ROWS = 1 << 62
"""Rows of a whole run: beyond, 64-bit integers would wrap."""


class _Step(NamedTuple):
    """The rows of one step; every array has one entry a row."""

    source: IntArray
    epoch: IntArray
    """Of the source."""
    draw: IntArray
    """Of the source, over all lanes."""
    window: IntArray


class MixtureOrder:
    """The order of a mixture, from its recipe.

    Shards are numbered over all sources, end to end.

    Attributes:
        steps_per_epoch: steps of every epoch of the mixture.
        num_samples: rows of such an epoch.
        global_batch_size: G, rows of a step over all ranks.
        grid: (P, Q) lanes.
        stride: windows whose numbers differ by a multiple of this follow each other in a lane.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.global_batch_size, self.seed, self.grid = (
            recipe.global_batch_size, recipe.seed, recipe.grid,
        )  # fmt: skip
        self._draws = Draws(
            recipe.shares, recipe.global_batch_size, recipe.grid, recipe.seed, rotate=recipe.shuffle
        )
        self._sources = [
            Source.of(
                name, corpus, recipe.settings[name], recipe.seed, lanes=self._draws.first(number),
                rows_of_turn=recipe.grid[0] * recipe.global_batch_size,
                interleave=recipe.interleave, shuffle=recipe.shuffle,
            )
            for number, (name, corpus) in enumerate(recipe.corpora.items())
        ]  # fmt: skip
        self._ranks = np.stack([source.rank() for source in self._sources])
        num_shards = [source.corpus.counts.size for source in self._sources]
        self._first_shard = np.cumsum([0, *num_shards])
        self.stride = len(self._sources) * self.grid[0] * self.grid[1]
        self._windows: dict[tuple[int, int], Window] = {}
        self._steps: dict[int, _Step] = {}
        self.steps_per_epoch = self._epoch_steps()
        self.num_samples = self.steps_per_epoch * self.global_batch_size

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_windows": {}, "_steps": {}}

    def identity(self) -> dict[str, Any]:
        """Return all that the order depends on, in plain JSON types: part of a saved state."""
        return self.recipe.identity() | {"epoch_steps": self.steps_per_epoch}

    binding = staticmethod(binding)

    def refs(self, epoch: int, step: int) -> Refs:
        """Return (shard, index, valid) of a step's rows; see `Order.refs`."""
        numbers = self.windows(epoch, step)
        return refs_of_step(step, numbers, lambda number: self.window(epoch, number))

    def windows(self, epoch: int, step: int) -> IntArray:
        """Return int64 [G]: the number of the window of each row; see `Order.windows`."""
        return self._at(epoch, step).window

    def window(self, epoch: int, number: int) -> Window:
        """Return what a window delivers in this epoch of the mixture; see `Order.window`."""
        found = self._windows.get((epoch, number))
        if found is None:
            local, of = divmod(number, len(self._sources))
            source = self._sources[of]
            if source.small:  # its windows are steps
                rows = self._step(local)
                row = np.flatnonzero(rows.source == of)
                step = np.full_like(row, local)
                shard, index = source.find(rows.draw[row])
            else:
                draws, shard, index = source.window(local)
                lane = int(source.lanes[local % source.lanes.size])
                step, row = self._draws.when(of, lane, draws // source.lanes.size)
            step = step - epoch * self.steps_per_epoch
            here = (step >= 0) & (step < self.steps_per_epoch)
            shard = shard + self._first_shard[of]
            found = Window(step[here], row[here], shard[here], index[here])
            keep(self._windows, (epoch, number), found, most=3 * self.stride + 64)
        return found

    def substitute(self, epoch: int, step: int, row: int, attempt: int) -> tuple[int, int]:
        """Return (shard, index) of the sample of the same source that takes a bad one's place.

        Attempts 0-7 draw from the row's window but not from its step; attempts 8-15, and all of a
        row whose window has nothing else, from anywhere in the source's epoch.
        """
        at = self._at(epoch, step)
        word = int(random_words(1, self.seed, epoch, "substitute", step, row, attempt)[0])
        if attempt < NEAR_ATTEMPTS:
            window = self.window(epoch, int(at.window[row]))
            others = np.flatnonzero(window.step != step)
            if others.size:
                chosen = others[word % others.size]
                return int(window.shard[chosen]), int(window.index[chosen])
        of = int(at.source[row])
        shard, index = self._sources[of].any(int(at.epoch[row]), word)
        return int(self._first_shard[of]) + shard, index

    def stream(self, epoch: int, step: int, row: int) -> tuple[int, int]:
        """Return (seed, epoch of the source) that key the random draws of a row's transforms."""
        at = self._at(epoch, step)
        return self._sources[int(at.source[row])].seed, int(at.epoch[row])

    def _at(self, epoch: int, step: int) -> _Step:
        require(epoch >= 0, f"epoch {epoch}: counts from 0")
        require(
            0 <= step < self.steps_per_epoch,
            f"step {step}: an epoch has steps 0 to {self.steps_per_epoch - 1}",
        )
        at = epoch * self.steps_per_epoch + step
        require(at * self.global_batch_size < MAX_ROWS, f"epoch {epoch}: beyond 2^62 rows")
        return self._step(at)

    def _step(self, at: int) -> _Step:
        found = self._steps.get(at)
        if found is None:
            source, lane, count = self._draws.step(at)
            draw = count * self._ranks.shape[1] + self._ranks[source, lane]
            window = np.empty_like(draw)
            for of in np.unique(source):
                here, drawn = source == of, self._sources[of]
                if drawn.small:
                    first = int(self._draws.before(at)[:, of].sum())
                    draw[here] = first + np.arange(int(here.sum()))
                    local: IntArray | int = at
                else:
                    local = drawn.windows(draw[here])
                window[here] = local * len(self._sources) + of
            sizes = np.array([drawn.size for drawn in self._sources])
            found = _Step(source, draw // sizes[source], draw, window)
            keep(self._steps, at, found, most=64)
        return found

    def _epoch_steps(self) -> int:
        stop = self.recipe.epoch_steps
        if isinstance(stop, int):
            return stop
        once = [self._steps_of_once(number) for number in range(len(self._sources))]
        return min(once) if stop == "first" else max(once)

    def _steps_of_once(self, of: int) -> int:
        """Return after how many steps each sample of a source has come once."""
        source = self._sources[of]
        lanes = self._ranks.shape[1]
        wanted = -(-(source.size - self._ranks[of]) // lanes)

        def seen(steps: int) -> bool:
            done = self._draws.before(steps)[:, of]
            return int(done.sum()) >= source.size if source.small else bool((done >= wanted).all())

        high = 1
        while not seen(high):
            high *= 2
        low = high // 2
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if seen(middle) else (middle, high)
        return high
