"""The order of one dataset: which samples make each step of each epoch.

The first stage of the flow, ORDER -> read -> decode -> batch -> loader -> device. It needs a
`Corpus` and no bytes of any sample. A row of a step is found in two moves::

    (step, row)  --lanes.py-->  slot of the epoch  --chunks.py-->  (shard, index)

The later stages ask an `Order` for the refs of a step, its windows, and substitutes of bad samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmstream.errors import StateError
from mmstream.order.any_order import AnyOrder, Refs, Window, cached
from mmstream.order.chunks import ChunkTable, EpochChunks, LaneLists
from mmstream.order.corpus import Corpus, SavedOrder, differing_keys, making
from mmstream.order.lanes import Lanes
from mmstream.order.settings import (
    SINGLE_SAMPLE,
    ChosenSettings,
    Reshuffle,
    RowShape,
    batch_size_text,
    default_settings,
    require,
)
from mmstream.settings import checked, missing_attribute
from mmstream.types import IntArray, SampleRef

ORDER_VERSIONS: Mapping[Reshuffle, int] = {"global": 1, "lanes": 2}
"""Part of every saved state; a change of any rule of the order must raise it. An mmstream without
lanes that keep their samples refuses 2."""

_SETTINGS = (
    "global_batch_size",
    "seed",
    "grid",
    "window",
    "interleave",
    "chunk",
    "shuffle",
    "drop_last",
    "reshuffle",
    "repeat",
)
"""The keys of an identity that `Order.from_corpus` takes as arguments."""

TAIL_WINDOW = -1
"""Number of the window of the last, partial step (`drop_last=False`)."""


class Order(AnyOrder):
    """The order of all epochs of a dataset. Build it with `Order.from_counts`.

    Each epoch has every sample in exactly one row. With `drop_last`, fewer than G samples are left
    out. The order does not depend on ranks or workers.

    The first step of an epoch costs O(number of chunks). Any other step costs O(G + the sizes of
    its windows).

    Attributes:
        steps_per_epoch: steps of every epoch, known before anything is read.
        corpus: the dataset.
        with_corpus: makes the order that the same settings give the dataset of before: its first
            shards, or all without later takedowns. It raises a ConfigError where they fill no step.
        num_samples: samples of the corpus without those on its bad list.
        global_batch_size: G, rows of a step over all ranks.
        repeat: rows of a batch that each of them becomes. An identity counts those of the batch.
        seed: the seed of all permutations.
        grid: (P, Q), groups of lanes and lanes of a group. A worker reads whole lanes if the world
            size divides Q and `num_workers` divides P.
        stride: P * Q. Windows of the same lane have numbers that differ by multiples of this.
        drop_last: whether the samples that do not fill a step are left out.
        reshuffle: "global", or "lanes": each row of a step has samples of the same part of the
            corpus in every epoch.
    """

    def __init__(
        self,
        corpus: Corpus,
        table: ChunkTable,
        lanes: Lanes,
        *,
        seed: int,
        drop_last: bool,
        with_corpus: Callable[[Corpus], Order],
        reshuffle: Reshuffle = "global",
        repeat: int = 1,
        defaulted: Sequence[str] = (),
    ) -> None:
        self.seed = seed
        self.repeat = repeat
        self.drop_last = drop_last
        self.reshuffle = reshuffle
        self.global_batch_size = lanes.global_batch_size
        self.grid, self.stride = lanes.grid, lanes.num_lanes
        self.num_samples = corpus.num_samples
        self._tail_size = self.num_samples - lanes.num_steps * self.global_batch_size
        self.steps_per_epoch = lanes.num_steps + (self._tail_size > 0 and not drop_last)
        self.corpus = corpus
        self._table = table
        self._lanes = lanes
        self._defaulted = tuple(defaulted)
        self.with_corpus = with_corpus
        self._epochs: dict[int, EpochChunks] = {}
        self._mixed: dict[tuple[int, int], IntArray] = {}
        self._windows: dict[tuple[int, int], Window] = {}

    @classmethod
    @checked(late=True)
    def from_counts(
        cls,
        counts: Sequence[int] | IntArray,
        *,
        global_batch_size: int,
        seed: int = 0,
        names: Sequence[str] | None = None,
        num_bytes: int | None = None,
        bad: Sequence[tuple[int, int]] | IntArray = (),
        sizes: Sequence[int] | IntArray | None = None,
        checksums: Sequence[str | None] | None = None,
        grid: tuple[int, int] | None = None,
        window: int | None = None,
        window_bytes: int | None = None,
        interleave: int | None = None,
        chunk: int | None = None,
        row_shape: RowShape = SINGLE_SAMPLE,
        reshuffle: Reshuffle | None = None,
        has_cache: bool = False,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> Order:
        """Build the order of a dataset from the sample counts of its shards.

        Args:
            counts: samples of each shard, in the order of the manifest. Zeros are allowed.
            global_batch_size: G, rows of a step over all ranks.
            seed: any integer. Each epoch of a seed has its own permutation.
            names: names of the shards. They are part of the identity in saved states.
            num_bytes: size of all shards together, in bytes. Sets the default window by the mean
                size of a sample.
            bad: [num_bad, 2] (shard, index) of known bad samples, which are never planned. Part of
                the identity in saved states.
            sizes: size of each shard in bytes. Part of the identity in saved states.
            checksums: sha256 of each shard in hexadecimal, None for a shard without. Part of the
                identity in saved states if every shard has one.
            grid: (P, Q), groups of lanes and lanes of a group. Q must divide G. Default: derived
                from the number of samples, their mean size and G, as the next settings are.
            window: M, samples of a lane that are permuted together: the shuffle buffer of a lane.
            window_bytes: B, bytes of all windows together, over all ranks, in place of `window`.
                Default: 2 MiB for each row of a batch, within 2 to 8 GiB.
            interleave: K, segments of a lane that a window is drawn from.
            chunk: C, neighbouring samples on storage that stay together.
            row_shape: what a row is, for the defaults: a sample, or a pack of several.
            reshuffle: "global": each epoch deals all chunks afresh. "lanes": the lanes that give a
                row to steps have the same samples in every epoch of a seed, in another order.
                Default: "lanes" with `has_cache`, else "global".
            has_cache: whether nodes keep what they read. It only sets the default of `reshuffle`.
            shuffle: False: the corpus in its own order, in every epoch.
            drop_last: False: one more step delivers the left-over samples, padded to G rows.

        Raises:
            ConfigError: impossible settings, or fewer samples than one step needs.

        Examples:
            >>> order = Order.from_counts([5, 5, 5], global_batch_size=4, shuffle=False)
            >>> order.steps_per_epoch
            3
            >>> refs = order.refs(epoch=0, step=1)
            >>> list(zip(refs.shard.tolist(), refs.index.tolist()))
            [(0, 4), (1, 0), (1, 1), (1, 2)]
        """
        return cls.from_corpus(
            Corpus(
                np.asarray(counts),
                names,
                num_bytes,
                np.asarray(bad),
                None if sizes is None else np.asarray(sizes),
                checksums,
            ),
            row_shape=row_shape,
            drop_last=drop_last,
            global_batch_size=global_batch_size,
            seed=seed,
            grid=grid,
            window=window,
            window_bytes=window_bytes,
            interleave=interleave,
            chunk=chunk,
            shuffle=shuffle,
            reshuffle=reshuffle,
            has_cache=has_cache,
        )

    @classmethod
    @checked(late=True)
    def from_corpus(
        cls,
        corpus: Corpus,
        *,
        row_shape: RowShape = SINGLE_SAMPLE,
        drop_last: bool = True,
        defaulted: Sequence[str] | None = None,
        **settings: Any,
    ) -> Order:
        """Build the order of a corpus. Settings and errors are those of `from_counts`.

        `defaulted` names settings that count as not given: see `with_saved_defaults`.
        """
        chosen = ChosenSettings.check(**settings)
        num_samples, rows = corpus.num_samples, chosen.global_batch_size
        only_bad = " that are not on its bad list" if corpus.bad.size else ""
        whole = "dataset" if corpus.selection is None else "selection"
        require(num_samples > 0, f"the {whole} has no samples{only_bad}")
        require(
            num_samples >= rows or not drop_last,
            f"{num_samples} samples do not fill one step of global_batch_size "
            f"{batch_size_text(rows, chosen.repeat)}: "
            "lower it, or in Python pass drop_last=False",
        )
        planned = default_settings(
            num_samples,
            corpus.chosen_bytes,
            rows,
            window_bytes=chosen.window_bytes,
            grid=chosen.grid,
            window=chosen.window,
            row_shape=row_shape,
        )
        lanes = Lanes(
            num_steps=num_samples // rows,
            global_batch_size=rows,
            grid=planned.grid if chosen.shuffle else (1, 1),
            window=planned.window,
            interleave=(chosen.interleave or planned.interleave) if chosen.shuffle else 1,
            shuffle=chosen.shuffle,
        )
        keeps_lanes = chosen.reshuffle == "lanes"
        table = ChunkTable.cut(corpus, chosen.chunk or planned.chunk, count_bad=keeps_lanes)
        return cls(
            corpus,
            table,
            lanes,
            seed=chosen.seed,
            drop_last=bool(drop_last),
            with_corpus=partial(
                cls.from_corpus, row_shape=row_shape, drop_last=drop_last, **settings
            ),
            reshuffle=chosen.reshuffle,
            repeat=chosen.repeat,
            defaulted=chosen.defaulted if defaulted is None else defaulted,
        )

    @classmethod
    @checked(late=True)
    def from_identity(
        cls,
        identity: Mapping[str, Any],
        counts: Sequence[int] | IntArray,
        names: Sequence[str] | None = None,
        bad: Sequence[tuple[int, int]] | IntArray = (),
        sizes: Sequence[int] | IntArray | None = None,
        checksums: Sequence[str | None] | None = None,
    ) -> Order:
        """Rebuild the order of a saved state, even if shards were appended to the corpus since.

        Args:
            identity: ``state["order"]``.
            counts: samples of each shard now.
            names: names of the shards now.
            bad: the bad list now. It is ignored if the state was saved without a bad list.
            sizes: size of each shard in bytes now.
            checksums: sha256 of each shard now.

        Raises:
            StateError: `identity` is malformed or of another version, the first shards of the
                corpus are not those of the state, or the bad list is another one. Sizes and
                checksums are compared where both the state and the corpus have them.
        """
        size_array = None if sizes is None else np.asarray(sizes)
        corpus = Corpus(np.asarray(counts), names, None, np.asarray(bad), size_array, checksums)
        return cls.from_saved(identity, corpus)

    @classmethod
    def from_saved(cls, identity: Mapping[str, Any], corpus: Corpus) -> Order:
        """Rebuild the order of a saved state from the corpus as it is now. See `from_identity`."""
        with making("an order's identity"):
            saved = SavedOrder.parse(identity)
            settings = {key: saved.keys[key] for key in _SETTINGS}
            was, version = saved.keys["version"], ORDER_VERSIONS[saved.reshuffle]
            if was != version:
                raise StateError(f"order version {was}, this mmstream has {version}")
            return cls.from_corpus(corpus.as_saved(saved.corpus), **settings)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute("Order", name, self)

    def __getstate__(self) -> dict[str, Any]:
        caches: dict[str, Any] = {"_epochs": {}, "_mixed": {}, "_windows": {}}
        return {k: v for k, v in (self.__dict__ | caches).items() if k != "_lane_lists"}

    def with_saved_defaults(self, saved: SavedOrder) -> Order:
        """Return this order with the settings that were left to defaults taken from a state.

        Defaults may change from version to version, and with the size of the corpus. A run that
        resumes in the middle of an epoch keeps those that its epoch began with. At the start of an
        epoch the present defaults begin: then this is the order itself. With `window_bytes`, all
        of them but `reshuffle` count as chosen.

        Raises:
            ConfigError: impossible settings.
        """
        present = SavedOrder.parse(self.identity()).keys
        kept = {name: saved.keys[name] for name in self._defaulted if name in saved.keys}
        if not saved.has_begun or not differing_keys(kept, {name: present[name] for name in kept}):
            return self
        return Order.from_corpus(self.corpus, **{name: present[name] for name in _SETTINGS} | kept)

    def identity(self) -> dict[str, Any]:
        """Return everything the order depends on, in plain JSON types. States contain it.

        ``reshuffle`` is in it only where it is "lanes", and ``repeat`` where it is not 1.
        """
        identity = {
            "version": ORDER_VERSIONS[self.reshuffle],
            **self.corpus.identity(),
            "seed": self.seed,
            "global_batch_size": self.global_batch_size * self.repeat,
            "grid": list(self._lanes.grid),
            "window": self._lanes.window,
            "interleave": self._lanes.interleave,
            "chunk": self._table.chunk_size,
            "shuffle": self._lanes.shuffle,
            "drop_last": self.drop_last,
        }
        identity |= {"reshuffle": "lanes"} if self.reshuffle == "lanes" else {}
        return identity | ({"repeat": self.repeat} if self.repeat > 1 else {})

    def refs(self, epoch: int, step: int, rows: tuple[int, int] | None = None) -> Refs:
        """Return the samples of a step: shard int64 [G], index int64 [G], valid bool [G].

        Args:
            epoch: any epoch, from 0.
            step: step of the epoch.
            rows: [start, stop), the rows of a rank: only those are computed and returned. None: all
                rows.

        Raises:
            ConfigError: an epoch has no such step.

        Examples:
            >>> order = Order.from_counts([5, 5, 5], global_batch_size=4, seed=1)
            >>> shard, index, valid = order.refs(epoch=0, step=2)
            >>> list(zip(shard.tolist(), index.tolist()))
            [(0, 3), (0, 4), (2, 0), (1, 4)]
        """
        row_numbers = self._rows(epoch, step, rows)
        if step == self._lanes.num_steps:
            all_slots, is_valid = self._tail_slots()
            slots, valid = all_slots[row_numbers], is_valid[row_numbers]
        else:
            valid = np.ones(row_numbers.size, dtype=np.bool_)
            slots = self._lanes.slots_of_step(
                step, row_numbers, lambda number: self._mixed_positions(epoch, number)
            )
        return Refs(*self._locate(epoch, slots), valid)

    def windows(self, epoch: int, step: int, rows: tuple[int, int] | None = None) -> IntArray:
        """Return int64 [G]: the number of the window that each row of a step comes from.

        Arguments and errors are those of `refs`.
        """
        row_numbers = self._rows(epoch, step, rows)
        if step == self._lanes.num_steps:
            return np.full(row_numbers.size, TAIL_WINDOW, dtype=np.int64)
        return self._lanes.windows_of_step(step, row_numbers)

    def _rows(self, epoch: int, step: int, rows: tuple[int, int] | None) -> IntArray:
        """Return the numbers of the rows that were asked for; ConfigError: no such step."""
        self.require_step(epoch, step)
        return np.arange(*(rows or (0, self.global_batch_size)), dtype=np.int64)

    def window(self, epoch: int, number: int) -> Window:
        """Return the samples of a window, and the step and row that each of them belongs to.

        The windows in use are cached: a walk through an epoch computes each window once.
        """
        key = epoch, number
        return cached(self._windows, key, self._most_windows, lambda: self._new_window(*key))

    def _new_window(self, epoch: int, number: int) -> Window:
        if number == TAIL_WINDOW:
            rows = np.arange(self.global_batch_size, dtype=np.int64)
            steps = np.full_like(rows, self._lanes.num_steps)
            slots, _ = self._tail_slots()
        else:
            steps, rows = self._lanes.steps_and_rows(number)
            slots = self._lanes.slots(number, self._mixed_positions(epoch, number))
        return Window(steps, rows, *self._locate(epoch, slots))

    def _mixed_positions(self, epoch: int, number: int) -> IntArray:
        return cached(
            self._mixed,
            (epoch, number),
            self._most_windows,
            lambda: self._lanes.mixed_positions(number, self.seed, epoch),
        )

    @property
    def _most_windows(self) -> int:
        """Windows that are cached: those of about three steps, and three of each lane."""
        return 3 * (self._lanes.num_lanes + self.global_batch_size // self._lanes.window) + 2

    def _far_substitute(self, epoch: int, _step: int, _row: int, word: int) -> SampleRef:
        num_planned = self.num_samples - (self._tail_size if self.drop_last else 0)
        shards, indexes = self._locate(epoch, np.asarray([word % num_planned]))
        return int(shards[0]), int(indexes[0])

    def _tail_slots(self) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Return the slot of each row of the partial step, int64 [G], and whether it is valid.

        The left-over slots are spread evenly over the rows, so that each rank gets its share. A row
        between them repeats a slot and is not valid. 2 slots over 4 rows: 0 0 1 1, where the second
        and the fourth row are valid.
        """
        boundaries = np.arange(self.global_batch_size + 1, dtype=np.int64) * self._tail_size
        offsets = boundaries // self.global_batch_size
        first_slot = self._lanes.num_steps * self.global_batch_size
        return first_slot + offsets[:-1], offsets[1:] > offsets[:-1]

    def _locate(self, epoch: int, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Return (shards, indexes) of slots of an epoch."""
        if self.reshuffle == "global":
            return self._epoch(epoch).locate(0, slots)
        return self._epoch(epoch).locate(*self._lists_of_slots(slots))

    def _lists_of_slots(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Return the list of each slot, and the offset of the slot in it.

        Lane q of each group takes from list q. These lanes lie side by side among the slots of full
        steps. Example: 11 slots, 2 lists and 3 slots left over. Lists 0 and 1 have slots 0 to 3 and
        4 to 7, then 8, and 9 and 10. Slot 10 has offset 5 in list 1.
        """
        in_steps = self._lanes.num_steps * self._lanes.rows_per_lane
        left_over = slots - in_steps * self.grid[1]  # number among those, or negative
        is_left_over = left_over >= 0
        ends = np.cumsum(self._left_over)
        lists = np.searchsorted(ends, np.where(is_left_over, left_over, -1), side="right")
        first_of_list = (ends - self._left_over)[lists]
        return (
            np.where(is_left_over, lists, slots // max(1, in_steps)),
            np.where(is_left_over, in_steps + left_over - first_of_list, slots % max(1, in_steps)),
        )

    @property
    def _left_over(self) -> IntArray:
        """[Q] how many of the samples that fill no step each list has.

        They are spread evenly, as over the rows of a partial step. So those rows have samples of
        the same lists as in the full steps.
        """
        num_lists = self.grid[1]
        return np.diff(np.arange(num_lists + 1) * self._tail_size // num_lists)

    def _epoch(self, epoch: int) -> EpochChunks:
        return cached(self._epochs, epoch, 2, lambda: self._lay_out(epoch))

    def _lay_out(self, epoch: int) -> EpochChunks:
        if self.reshuffle == "lanes":
            return self._lane_lists.epoch(epoch)
        return self._table.epoch(epoch, self.seed, self._lanes.shuffle)

    @cached_property
    def _lane_lists(self) -> LaneLists:
        """The samples of each list, with those that it leaves over."""
        sizes = self._lanes.num_steps * self._lanes.rows_per_lane + self._left_over
        return LaneLists.cut(self._table, sizes, self.seed)
