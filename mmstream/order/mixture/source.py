"""Mixtures, third part: from the draws of one source to its samples, epoch after epoch.

Draws of a source are numbered 0, 1, 2, ... over all lanes; its epoch e is the draws from e*N on. A
large source is laid out in as many columns as there are lanes: a lane walks one column of an epoch
from front to back, window by window, and in the next epoch another. A small source, of which a lane
would have too little, is one permutation that all lanes draw from in the order of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmstream.order.checks import keep
from mmstream.order.chunks import ChunkTable, EpochChunks
from mmstream.order.corpus import Corpus
from mmstream.order.defaults import default_chunk
from mmstream.order.lanes import interleaved
from mmstream.order.permute import permutation, stream_key
from mmstream.types import IntArray

__all__ = ["Source", "SourceSettings"]


SMALL_TURNS = 16
"""A source of fewer samples than all lanes take in so many turns is small: in an epoch of a larger
one, lanes that are a turn ahead of others are at most 1/16 of it ahead."""


@dataclass(frozen=True)
class SourceSettings:
    """What is chosen for a source when a mixture is first made; part of saved states."""

    window: int
    """M_s, samples of a lane's column that are permuted together."""
    chunk: int
    """C_s, contiguous samples that stay together on storage."""

    @classmethod
    def default(
        cls, num_samples: int, num_lanes: int, rows_of_turn: int, window: float, total: int
    ) -> SourceSettings:
        """Return a source's settings: at least 16 chunks a column, and its part of the window.

        A small source has no windows that would mix it, so its chunks are single samples.

        Args:
            num_samples: of the source.
            num_lanes: P * Q.
            rows_of_turn: P * G.
            window: its part of the mixture's.
            total: samples of all sources that share memory for their chunk tables.
        """
        chunk = min(default_chunk(total), max(1, num_samples // (16 * num_lanes)))
        return cls(max(1, round(window)), 1 if is_small(num_samples, rows_of_turn) else chunk)


def is_small(num_samples: int, rows_of_turn: int) -> bool:
    """Return whether all lanes draw from one permutation of a source."""
    return num_samples < SMALL_TURNS * rows_of_turn


@dataclass(frozen=True, eq=False)
class Source:
    """One corpus of a mixture."""

    name: str
    corpus: Corpus
    settings: SourceSettings
    lanes: IntArray
    """[P*Q] lanes in the order of their first draws."""
    rows_of_turn: int
    """P * G, rows of all lanes' next steps."""
    interleave: int
    shuffle: bool
    seed: int
    """Of its own permutations and transforms: the mixture's, keyed by the source's name."""
    table: ChunkTable
    epochs: dict[int, EpochChunks] = field(default_factory=dict)

    @classmethod
    def of(
        cls, name: str, corpus: Corpus, settings: SourceSettings, seed: int, **given: Any
    ) -> Source:
        """Lay out a source of a mixture."""
        table = ChunkTable.cut(corpus, settings.chunk)
        return cls(name, corpus, settings, seed=stream_key(seed, "source", name), table=table,
                   **given)  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"epochs": {}}

    @property
    def size(self) -> int:
        """N, samples of an epoch."""
        return self.corpus.num_samples

    @property
    def small(self) -> bool:
        """Whether all lanes draw from one permutation."""
        return is_small(self.size, self.rows_of_turn)

    def rank(self) -> IntArray:
        """Return int64 [P*Q]: each lane's place among the lanes."""
        rank = np.empty_like(self.lanes)
        rank[self.lanes] = np.arange(self.lanes.size)
        return rank

    def windows(self, draws: IntArray) -> IntArray:
        """Return the number of the window of each draw; for a large source."""
        epoch, place = np.divmod(draws, self.size)
        depth, column = np.divmod(place, self.lanes.size)
        window = np.maximum((depth - self._first(column)) // self.settings.window + 1, 0)
        return (epoch * self._most + window) * self.lanes.size + draws % self.lanes.size

    def epoch_of(self, window: int) -> int:
        """Return the source's epoch that a window belongs to."""
        return window // self.lanes.size // self._most

    def window(self, number: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return the draws that a window covers, and the shard and index of each."""
        turn, rank = divmod(number, self.lanes.size)
        epoch, window = divmod(turn, self._most)
        column = (rank - epoch * self.size) % self.lanes.size
        each, longer = divmod(self.size, self.lanes.size)
        size, start = each + (column < longer), column * each + min(column, longer)
        first = int(self._first(np.asarray(column)))
        begin = first + (window - 1) * self.settings.window if window else 0
        end = min(size, first + window * self.settings.window)
        depths = np.arange(begin, end)
        slots = depths
        if self.shuffle:
            key = (self.seed, epoch, "window", window, column)
            drawn = begin + permutation(end - begin, *key)
            places = max(1, min(self.interleave, self.settings.window // 16))  # runs of 16 or more
            slots = interleaved(drawn, size, places)
        draws = epoch * self.size + depths * self.lanes.size + column
        return draws, *self._epoch(epoch).find(start + slots)

    def find(self, draws: IntArray) -> tuple[IntArray, IntArray]:
        """Return the shard and index of draws; for a small source."""
        epochs, places = np.divmod(draws, self.size)
        shard, index = np.empty_like(draws), np.empty_like(draws)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            shard[here], index[here] = self._epoch(int(epoch)).find(places[here])
        return shard, index

    def any(self, epoch: int, word: int) -> tuple[int, int]:
        """Return the shard and index of any sample of an epoch."""
        shard, index = self._epoch(epoch).find(np.asarray([word % self.size]))
        return int(shard[0]), int(index[0])

    @property
    def _most(self) -> int:
        """Windows of a column, at most."""
        return -(-self.size // self.lanes.size) // self.settings.window + 2

    def _first(self, column: IntArray) -> IntArray:
        """Return the length of columns' first windows, so that windows do not end all at once."""
        if not self.shuffle:
            return np.full_like(column, self.settings.window)
        return 1 + column * self.settings.window // self.lanes.size

    def _epoch(self, epoch: int) -> EpochChunks:
        found = self.epochs.get(epoch)
        if found is None:
            found = self.table.epoch(epoch, self.seed, self.shuffle)
            keep(self.epochs, epoch, found, most=2)
        return found
