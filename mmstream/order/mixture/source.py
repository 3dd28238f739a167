"""Mixtures, third part: from the draws of one source to its samples, epoch after epoch.

Source draws count the draws of all L = P*Q lanes from one source. They deal out the source like
cards: the lane with ordinal k makes the draws k, k + L, k + 2L and so on. Ordinals number the lanes
in the order of their first draws, so that source draws come about in the order of steps. Epoch e of
a source with N samples is the draws from e*N to (e+1)*N - 1.

In each epoch a large source is laid out in L columns. A lane reads one column from front to back,
window by window, and another column in the next epoch. In a small source, a lane would have too few
samples. It is one permutation instead, which all lanes draw from in the order of steps.

Example: N = 15 (three shards of 5), L = 4 lanes with ordinals 0 to 3. Each row below is a column,
with the draws of two epochs::

    column 0    0  4  8 12    15 19 23 27      epoch 1: the lane with ordinal 3
    column 1    1  5  9 13    16 20 24 28      epoch 1: the lane with ordinal 0
    column 2    2  6 10 14    17 21 25 29
    column 3    3  7 11       18 22 26
    depth       0  1  2  3     0  1  2  3

With windows of M = 2 samples, the first windows of the columns have 1, 1, 2 and 2 samples. A
column of 4 samples has at most 4 // 2 + 2 = 4 windows. So window w of epoch e, for the lane with
ordinal k, has the number (4*e + w)*4 + k.

>>> source = Source.lay_out(
...     "text", Corpus(np.array([5, 5, 5])), SourceSettings(window=2, chunk=2), seed=0,
...     lanes_by_first_draw=np.arange(4), rows_per_round=8, interleave=1, shuffle=True,
... )
>>> source.windows(np.array([0, 4, 8, 12])).tolist()  # column 0 in epoch 0, lane 0
[0, 4, 4, 8]
>>> source.windows(np.array([15, 19, 23, 27])).tolist()  # column 0 in epoch 1, lane 3
[19, 23, 23, 27]
>>> draws, shards, indexes = source.window(23)
>>> draws.tolist()
[19, 23]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mmstream.order.any_order import cached
from mmstream.order.chunks import ChunkTable, EpochChunks, LaneLists
from mmstream.order.corpus import Corpus
from mmstream.order.lanes import interleaved
from mmstream.order.permute import permutation, stream_key
from mmstream.order.settings import Reshuffle
from mmstream.types import IntArray

SMALL_ROUNDS = 16
"""A source is small if it has fewer samples than this many rounds of P steps have rows.

In a larger source, a lane that is a round ahead of others is at most 1/16 of an epoch ahead.
"""

MIN_RUN = 16
"""Samples that a window takes from one segment of a column, at least. It limits `interleave`."""


@dataclass(frozen=True)
class SourceSettings:
    """The settings of a source, chosen when its mixture is first made. States contain them."""

    window: int
    """M, samples of a column that are permuted together."""
    chunk: int
    """C, neighbouring samples on storage that stay together."""

    @classmethod
    def default(
        cls, num_samples: int, num_lanes: int, rows_per_round: int, window: float, chunk: int
    ) -> SourceSettings:
        """Return the settings of a source: its part of the window, and 16 chunks a column or more.

        A small source has no windows that would mix it, so its chunks are single samples.

        Args:
            num_samples: samples of the source.
            num_lanes: P * Q.
            rows_per_round: P * G.
            window: the source's part of the window of the mixture, in samples.
            chunk: chunk size of the mixture, which no source exceeds.
        """
        if is_small(num_samples, rows_per_round):
            chunk = 1
        chunk = min(chunk, max(1, num_samples // (16 * num_lanes)))
        return cls(max(1, round(window)), chunk)


def is_small(num_samples: int, rows_per_round: int) -> bool:
    """Return whether all lanes draw from one permutation of a source."""
    return num_samples < SMALL_ROUNDS * rows_per_round


@dataclass(frozen=True, eq=False)
class Source:
    """One dataset of a mixture. Build it with `Source.lay_out`."""

    name: str
    corpus: Corpus
    settings: SourceSettings
    lanes_by_first_draw: IntArray
    """[L] the lanes in the order of their first draws: lane of each ordinal."""
    rows_per_round: int
    """P * G, rows of P consecutive steps."""
    interleave: int
    """K, segments of a column that a window is drawn from, at most."""
    shuffle: bool
    seed: int
    """Seed of its permutations and transforms: a hash of the mixture's seed and its name."""
    table: ChunkTable
    reshuffle: Reshuffle = "global"
    """With "lanes", the lanes of a row have the same samples in every epoch of a large source."""
    num_groups: int = 1
    """P, groups of lanes. Lanes q*P to q*P + P-1 give to the same rows."""
    epochs: dict[int, EpochChunks] = field(default_factory=dict)
    mixed_depths: dict[int, IntArray] = field(default_factory=dict)

    @classmethod
    def lay_out(
        cls, name: str, corpus: Corpus, settings: SourceSettings, seed: int, **fields: Any
    ) -> Source:
        """Lay out a source of a mixture.

        Args:
            name: name of the source.
            corpus: its shards.
            settings: its window and chunk size.
            seed: seed of the mixture.
            fields: the other fields of the class.
        """
        source_seed = stream_key(seed, "source", name)
        keeps_lanes = fields.get("reshuffle") == "lanes"
        table = ChunkTable.cut(corpus, settings.chunk, count_bad=keeps_lanes)
        return cls(name, corpus, settings, seed=source_seed, table=table, **fields)

    def __getstate__(self) -> dict[str, Any]:
        caches: dict[str, Any] = {"epochs": {}, "mixed_depths": {}}
        return {k: v for k, v in (self.__dict__ | caches).items() if k != "_lane_lists"}

    @property
    def size(self) -> int:
        """N, samples of an epoch."""
        return self.corpus.num_samples

    @property
    def num_lanes(self) -> int:
        """L, lanes of the mixture and columns of a large source: P * Q."""
        return self.lanes_by_first_draw.size

    @property
    def small(self) -> bool:
        """Whether all lanes draw from one permutation."""
        return is_small(self.size, self.rows_per_round)

    def windows(self, draws: IntArray) -> IntArray:
        """Return the number of the window of each source draw, for a large source."""
        epochs, draws_in_epoch = np.divmod(draws, self.size)
        depths, columns = np.divmod(draws_in_epoch, self.num_lanes)
        windows = (depths - self._first_window(columns)) // self.settings.window + 1
        ordinals = draws % self.num_lanes
        return (epochs * self._max_windows + windows) * self.num_lanes + ordinals

    def window(self, number: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return the source draws of a window, and the shard and index of each."""
        epoch, _, column, depths = self._span(number)
        draws = epoch * self.size + np.arange(*depths) * self.num_lanes + column
        slots = self._slots(column, self._mixed_depths(number))
        return draws, *self._locate(epoch, slots)

    def locate(self, draws: IntArray, numbers: IntArray | None = None) -> tuple[IntArray, IntArray]:
        """Return the shard and index of each source draw.

        Args:
            draws: source draws.
            numbers: the window of each draw. None: the source is small and has none.
        """
        epochs, slots = np.divmod(draws, self.size)
        if numbers is not None:
            depths, columns = np.divmod(slots, self.num_lanes)
            if self.settings.window > 1:
                lengths = self._first_window(columns)
                windows = (depths - lengths) // self.settings.window
                starts = np.maximum(0, lengths + windows * self.settings.window)
                depths = self._mixed(numbers, depths - starts)
            slots = self._slots(columns, depths)
        shards = np.empty_like(draws)
        indexes = np.empty_like(draws)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            shards[in_epoch], indexes[in_epoch] = self._locate(int(epoch), slots[in_epoch])
        return shards, indexes

    def pick(self, epoch: int, word: int) -> tuple[int, int]:
        """Return the shard and index of the sample of an epoch that a random word stands for."""
        shards, indexes = self._locate(epoch, np.asarray([word % self.size]))
        return int(shards[0]), int(indexes[0])

    def _span(self, number: int) -> tuple[int, int, int, tuple[int, int]]:
        """Return the epoch of a window, its number in its column, the column, and its depths."""
        window_of_lane, ordinal = divmod(number, self.num_lanes)
        epoch, window = divmod(window_of_lane, self._max_windows)
        column = (ordinal - epoch * self.size) % self.num_lanes
        stop = int(self._first_window(np.asarray(column))) + window * self.settings.window
        column_size = self.size // self.num_lanes + (column < self.size % self.num_lanes)
        start = max(0, stop - self.settings.window)
        # A number after that of a column's last window has no depths.
        return epoch, window, column, (start, max(start, min(column_size, stop)))

    def _mixed_depths(self, number: int) -> IntArray:
        """Return the depths of a column that a window covers, as it permutes them."""
        max_entries = 3 * self.num_lanes + self.rows_per_round
        return cached(self.mixed_depths, number, max_entries, lambda: self._mix_depths(number))

    def _mix_depths(self, number: int) -> IntArray:
        epoch, window, column, (start, stop) = self._span(number)
        if not self.shuffle:
            return np.arange(start, stop)
        return start + permutation(stop - start, self.seed, epoch, "window", window, column)

    def _mixed(self, numbers: IntArray, offsets: IntArray) -> IntArray:
        """Return the depths that windows have at offsets from their beginnings."""
        depths = np.empty_like(offsets)
        by_number = np.argsort(numbers, kind="stable")
        begins = np.flatnonzero(np.diff(numbers[by_number], prepend=-1))
        for of_window in np.split(by_number, begins[1:]):
            depths[of_window] = self._mixed_depths(int(numbers[of_window[0]]))[offsets[of_window]]
        return depths

    def _slots(self, columns: IntArray | int, depths: IntArray) -> IntArray:
        """Return the slots of an epoch that depths of columns stand for."""
        short_size, num_longer = divmod(self.size, self.num_lanes)
        starts = columns * short_size + np.minimum(columns, num_longer)
        if self.shuffle:
            sizes = short_size + (np.asarray(columns) < num_longer)
            num_segments = max(1, min(self.interleave, self.settings.window // MIN_RUN))
            depths = interleaved(depths, sizes, num_segments)
        return starts + depths

    @property
    def _max_windows(self) -> int:
        """Windows of a column, at most."""
        longest_column = -(-self.size // self.num_lanes)
        return longest_column // self.settings.window + 2

    def _first_window(self, columns: IntArray) -> IntArray:
        """Return the length of the first window of columns, from 1 to M.

        They differ, so that the windows of different lanes do not all end at once.
        """
        if not self.shuffle:
            return np.full_like(columns, self.settings.window)
        return 1 + columns * self.settings.window // self.num_lanes

    def _locate(self, epoch: int, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Return (shards, indexes) of slots of an epoch."""
        if not self._keeps_lanes:
            return self._epoch(epoch).locate(0, slots)
        short_size, num_longer = divmod(self.size, self.num_lanes)
        columns = np.maximum(slots // (short_size + 1), (slots - num_longer) // short_size)
        offsets = slots - columns * short_size - np.minimum(columns, num_longer)
        ordinals = self._ordinals(epoch, columns)
        lists, first_offsets = self._lists_of_lanes(epoch)
        return self._epoch(epoch).locate(lists[ordinals], first_offsets[ordinals] + offsets)

    @property
    def _keeps_lanes(self) -> bool:
        return self.reshuffle == "lanes" and not self.small

    def _epoch(self, epoch: int) -> EpochChunks:
        return cached(self.epochs, epoch, 2, lambda: self._lay_out_epoch(epoch))

    def _lay_out_epoch(self, epoch: int) -> EpochChunks:
        if not self._keeps_lanes:
            return self.table.epoch(epoch, self.seed, self.shuffle)
        num_longer = self.size % self.num_lanes
        of_singles = self._lane_rows[self._ordinals(epoch, np.arange(num_longer))]
        of_sections = np.concatenate([np.arange(self.num_lanes // self.num_groups), of_singles])
        return self._lane_lists.epoch(epoch, of_sections)

    @cached_property
    def _lane_lists(self) -> LaneLists:
        """The samples that the lanes of a row have in every epoch, and single ones of any lane.

        A column has one sample more than others in some epochs only, and so has a lane. So fewer
        than L samples are of another lane in another epoch.
        """
        short_size, num_longer = divmod(self.size, self.num_lanes)
        num_lists = self.num_lanes // self.num_groups
        sizes = np.repeat([short_size * self.num_groups, 1], [num_lists, num_longer])
        return LaneLists.cut(self.table, sizes, self.seed)

    @property
    def _lane_rows(self) -> IntArray:
        """[L] which lanes give to the same rows as that of each ordinal: q of lane q*P + p."""
        return self.lanes_by_first_draw // self.num_groups

    def _lists_of_lanes(self, epoch: int) -> tuple[IntArray, IntArray]:
        """Return the list of the lane of each ordinal, and where the lane begins in it, [L]."""
        rows = self._lane_rows
        short_size, num_longer = divmod(self.size, self.num_lanes)
        columns = (np.arange(self.num_lanes) - epoch * self.size % self.num_lanes) % self.num_lanes
        sizes = short_size + (columns < num_longer)
        by_row = np.argsort(rows, kind="stable").reshape(-1, self.num_groups)
        firsts = np.empty_like(sizes)
        firsts[by_row] = np.cumsum(sizes[by_row], axis=1) - sizes[by_row]
        return rows, firsts

    def _ordinals(self, epoch: int, columns: IntArray) -> IntArray:
        """Return the ordinals of the lanes that read columns in an epoch."""
        return (columns + epoch * self.size % self.num_lanes) % self.num_lanes
