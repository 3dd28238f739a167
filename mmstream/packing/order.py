"""The order over packs: which packs make each step, answered in samples.

The first stage of the flow where a pipeline packs, in the place of `Order` and `MixtureOrder`. It
wraps one of them. To the inner order a *group* of shards is a shard, and a *unit* (a pack) of the
group is a sample. So steps, windows, states and resumes are those of the inner order. A row is
found in one more move::

    (step, row)  --inner order-->  (group, unit)  --plan-->  the unit's samples

Row numbers are the inner order's. `with_ranks` deals the rows of a step to ranks by their cost. It
gives an order of *positions*: rank r takes positions [start, stop), and `order_rows` says which row
is at each. Substitutes, random draws and logs go by rows, so they are the same for every deal.

Example: a step has rows 0 to 3 with 2, 1, 3 and 1 samples. Dealt to two ranks, positions 0 to 3 may
have rows 2, 1, 0, 3. Then rank 1 has positions [2, 4): `document_counts` says 2, 1 there, and
`refs` has three samples, those of row 0 and then that of row 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from mmstream.errors import StateError
from mmstream.order import Corpus, MixtureOrder, Order, Recipe, Refs, Stop, Unit, Window
from mmstream.order.any_order import AnyOrder, cached
from mmstream.order.corpus import DATASET, SavedOrder, differing_keys, making
from mmstream.order.settings import RowShape, integer, require
from mmstream.packing.plan import MixturePlan, PackPlan, Units, UnitSums
from mmstream.types import IntArray

SCANNED_UNITS = 1 << 20
"""Units whose samples are looked for on the bad list at a time."""


CostOfUnits: TypeAlias = Callable[[UnitSums], npt.NDArray[Any]]
"""Costs of units from their sums: one number each."""

Deal: TypeAlias = Callable[[npt.NDArray[Any], int], IntArray]
"""Deals rows to ranks: costs [G], number of ranks -> row of each position [G]."""


class PackOrder(AnyOrder):
    """The order over the packs of a plan. Build it with `from_plan`.

    Attributes:
        inner: the order over groups and units. Steps, seed, grid and stride are its own.
        plan: what the packs are.
        num_units: packs of the plan without those that only have samples of the bad list.
    """

    is_packed = True
    inner: Order | MixtureOrder
    plan: PackPlan | MixturePlan

    def __init__(
        self, inner: Order | MixtureOrder, plan: PackPlan | MixturePlan, corpus: Corpus
    ) -> None:
        self.plan = plan
        self.corpus = corpus
        self._bad_codes = _codes(*corpus.bad.T)
        self._first_units = plan.first_units
        self._deal: tuple[Deal, int, CostOfUnits] | None = None
        self._set_inner(inner)

    def _set_inner(self, inner: Order | MixtureOrder) -> None:
        self.inner = inner
        self.steps_per_epoch = inner.steps_per_epoch
        self.global_batch_size = inner.global_batch_size
        self.seed, self.grid, self.stride = inner.seed, inner.grid, inner.stride
        self.num_units = inner.num_samples
        self._forget()

    def _forget(self) -> None:
        self._steps: dict[tuple[int, int, tuple[int, int]], Units] = {}
        self._dealt: dict[tuple[int, int], IntArray] = {}
        self._windows: dict[tuple[int, int], Window] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_steps": {}, "_dealt": {}, "_windows": {}}

    @classmethod
    def from_plan(cls, plan: PackPlan, corpus: Corpus, **settings: Any) -> PackOrder:
        """Build the order over the packs of a dataset.

        Args:
            plan: the packs.
            corpus: of the dataset, with its bad list: these samples are left out of their packs.
                Shards after those of the plan are ignored.
            settings: `global_batch_size`, `seed` and others of `Order.from_counts`. They count
                packs.

        Raises:
            ConfigError: impossible settings, or fewer packs than one step needs.
        """
        corpus = corpus.first_shards(len(plan.shards))
        units = corpus_of_units(plan, corpus.bad)
        rows = integer("global_batch_size", settings["global_batch_size"])
        require(
            units.num_samples >= rows or not settings.get("drop_last", True),
            f"{units.num_samples:,} packs of {plan.settings.max_tokens:,} tokens do not fill one "
            f"step of global_batch_size {rows}, which counts packs: lower it, plan shorter packs, "
            "or in Python pass drop_last=False",
        )
        row_shape = RowShape(plan.mean_samples, plan.spread)
        return cls(Order.from_corpus(units, row_shape=row_shape, **settings), plan, corpus)

    @classmethod
    def from_identity(
        cls, identity: Mapping[str, Any], plan: PackPlan, corpus: Corpus
    ) -> PackOrder:
        """Rebuild the order of a saved state, even if shards were appended and planned since.

        Args:
            identity: ``state["order"]``.
            plan: the packs now. Groups may have been appended.
            corpus: of the dataset now. Its bad list is ignored if the state was saved without one.

        Raises:
            StateError: `identity` is malformed, or of another dataset, plan or bad list.
        """
        saved = SavedOrder.parse(identity)
        if (digest := saved.keys.get("plan")) != plan.digest:
            raise StateError(
                f"the packs of the state are of plan {digest!r}, these of plan {plan.digest!r}: "
                "give the plan of the state, mm.Pack(plan=...)"
            )
        with making("an order of packs"):
            corpus = corpus.as_saved(saved.dataset)
        try:
            inner = Order.from_saved(identity, corpus_of_units(plan, corpus.bad))
        except StateError as error:
            num_groups = saved.corpus.get("num_shards")
            raise StateError(
                f"the first {num_groups} groups of the plan hold other packs than those of the "
                f"state: add shards to the plan that it had ({error})"
            ) from None
        return cls(inner, plan, corpus)

    # -- what the order is ---------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Return everything the order depends on, in plain JSON types. States contain it.

        How rows are dealt is not in it. Keys of the inner order keep their names, so that states
        have them in one place, and those of the dataset are beside them::

            corpus, num_shards, bad, ...            the plan: a group is a shard, a unit is a sample
            dataset corpus, dataset num_shards ...  the dataset, as an order without packs says it
            plan                                    digest of the plan's settings and measure
            seed, window, shuffle, ...              settings of the order
        """
        of_dataset = self.corpus.identity()
        return {
            **self.inner.identity(),
            "plan": self.plan.digest,
            **{f"{DATASET} {key}": value for key, value in of_dataset.items()},
        }

    def with_saved_defaults(self, saved: SavedOrder) -> Self:
        """Return this order with the defaults of a state: see `Order`."""
        inner = self.inner.with_saved_defaults(saved)
        if inner is self.inner:
            return self
        order = copy(self)
        order._set_inner(inner)
        return order

    def with_corpus(self, corpus: Corpus) -> PackOrder:
        """Return the order that the same settings give the dataset of before. See `Order`."""
        assert isinstance(self.plan, PackPlan), "no mixture has one corpus"
        assert isinstance(self.inner, Order), "nor has its plan"
        inner = self.inner.with_corpus(corpus_of_units(self.plan, corpus.bad))
        return PackOrder(inner, self.plan, corpus)

    def with_ranks(self, num_ranks: int, deal: Deal, cost: CostOfUnits) -> Self:
        """Return this order with the rows of each step dealt to ranks by their cost.

        Args:
            num_ranks: ranks of the run. Their rows must divide the step equally.
            deal: returns the row of each position, of costs and the number of ranks.
            cost: returns the costs of units, of their sums.
        """
        order = copy(self)
        order._forget()
        order._deal = (deal, num_ranks, cost)
        return order

    # -- samples of steps and windows ----------------------------------------------------------

    def refs(self, epoch: int, step: int, rows: tuple[int, int] | None = None) -> Refs:
        """Return the samples of a step, row by row. Padding rows have none. See `Order.refs`.

        Args:
            epoch: any epoch, from 0.
            step: step of the epoch.
            rows: [start, stop), the positions of a rank. None: all of them.
        """
        units = self._step(epoch, step, rows)
        return Refs(units.shard, units.index, np.ones(units.shard.size, dtype=np.bool_))

    def document_counts(
        self, epoch: int, step: int, rows: tuple[int, int] | None = None
    ) -> IntArray:
        """Return int64 [rows]: how many samples each row has. 0: padding."""
        return self._step(epoch, step, rows).counts

    def document_tokens(
        self, epoch: int, step: int, rows: tuple[int, int] | None = None
    ) -> IntArray:
        """Return int64 [N]: the measured tokens of each sample of `refs`."""
        return self._step(epoch, step, rows).num_tokens

    def order_rows(self, epoch: int, step: int, rows: tuple[int, int] | None = None) -> IntArray:
        """Return int64 [rows]: the row of the order at each position."""
        start, stop = rows or (0, self.global_batch_size)
        if self._deal is None:
            return np.arange(start, stop, dtype=np.int64)
        return self._row_of_position(epoch, step)[start:stop]

    def unit_sums(self, epoch: int, step: int) -> UnitSums:
        """Return the sums of the units of a step, padding left out."""
        numbers, valid = self._numbers(epoch, step, None)
        return self.plan.sums(numbers[valid])

    def windows(self, epoch: int, step: int, rows: tuple[int, int] | None = None) -> IntArray:
        """Return int64 [rows]: the number of the window of each row."""
        if self._deal is None:
            return self.inner.windows(epoch, step, rows)
        return self.inner.windows(epoch, step)[self.order_rows(epoch, step, rows)]

    def window(self, epoch: int, number: int) -> Window:
        """Return the samples of a window in the order of delivery, those of a unit side by side.

        `row` is the position of the sample's unit in its step. See `Order.window`.
        """
        max_entries, key = 3 * self.stride + self._most_steps, (epoch, number)
        return cached(self._windows, key, max_entries, lambda: self._new_window(*key))

    def _new_window(self, epoch: int, number: int) -> Window:
        units = self.inner.window(epoch, number)
        steps, rows = units.step, units.row
        documents = self._documents(self._first_units[units.shard] + units.index)
        counts = np.where(self._is_planned(epoch, steps, rows), documents.counts, 0)
        documents = _first_of(documents, counts)
        if self._deal is not None:
            rows = self._positions(epoch, steps, rows)
        steps, rows = np.repeat(steps, counts), np.repeat(rows, counts)
        return Window(steps, rows, documents.shard, documents.index)

    def substitute_unit(self, epoch: int, step: int, row: int, attempt: int) -> Unit:
        """Return the unit that takes the row of one without a good sample.

        It is the inner order's substitute. So attempts 0-7 choose from the row's own window, but
        not from the same step.

        Args:
            epoch: epoch of the row.
            step: its step.
            row: the row of the order, which is not its position.
            attempt: how many substitutes of this row had no good sample either.
        """
        group, index = self.inner.substitute(epoch, step, row, attempt)
        units = self._documents(self._first_units[[group]] + index)
        refs = list(zip(units.shard.tolist(), units.index.tolist(), strict=True))
        return Unit(refs, units.num_tokens.tolist())

    def stream(self, epoch: int, step: int, row: int) -> tuple[int, int]:
        """Return (seed, epoch), the key of the random transforms of a row of the order."""
        return self.inner.stream(epoch, step, row)

    # -- units ---------------------------------------------------------------------------------

    def _step(self, epoch: int, step: int, rows: tuple[int, int] | None) -> Units:
        """Return the units at some positions of a step. Padding has 0 samples.

        The read stage asks twice for each.
        """
        key = epoch, step, rows or (0, self.global_batch_size)

        def unpack() -> Units:
            numbers, valid = self._numbers(epoch, step, rows)
            units = self._documents(numbers)
            return _first_of(units, np.where(valid, units.counts, 0))

        return cached(self._steps, key, 8, unpack)

    def _numbers(
        self, epoch: int, step: int, rows: tuple[int, int] | None
    ) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Return the numbers of the units at some positions of a step, and which rows are valid."""
        if self._deal is None:
            return self._inner_numbers(epoch, step, rows)
        numbers, valid = self._inner_numbers(epoch, step, None)
        row_numbers = self.order_rows(epoch, step, rows)
        return numbers[row_numbers], valid[row_numbers]

    def _inner_numbers(
        self, epoch: int, step: int, rows: tuple[int, int] | None
    ) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Return the numbers of the units of some rows of the order, and which rows are valid."""
        groups, indexes, valid = self.inner.refs(epoch, step, rows)
        return self._first_units[groups] + indexes, valid

    def _documents(self, numbers: IntArray) -> Units:
        """Return the samples of units, without those of the bad list."""
        units = self.plan.units(numbers)
        if not self._bad_codes.size:
            return units
        is_good = ~np.isin(_codes(units.shard, units.index), self._bad_codes)
        rows = np.repeat(np.arange(numbers.size), units.counts)[is_good]
        counts = np.bincount(rows, minlength=numbers.size)
        return Units(counts, *(column[is_good] for column in units[1:]))

    def _is_planned(self, epoch: int, steps: IntArray, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Tell which rows of a window are not padding. Only the last, partial step has some."""
        is_planned = np.ones(steps.size, dtype=np.bool_)
        if not self.inner.drop_last and steps.size:
            last = self.steps_per_epoch - 1
            in_last = steps == last
            if in_last.any():
                is_planned[in_last] = self.inner.refs(epoch, last).valid[rows[in_last]]
        return is_planned

    # -- rows dealt to ranks -------------------------------------------------------------------

    def _row_of_position(self, epoch: int, step: int) -> IntArray:
        """Return the row at each position of a step, [G]. Padding costs nothing."""
        assert self._deal is not None, "only dealt orders ask"
        deal, num_ranks, cost = self._deal

        def deal_rows() -> IntArray:
            numbers, valid = self._inner_numbers(epoch, step, None)
            costs = np.where(valid, cost(self.plan.sums(numbers)), 0)
            return np.asarray(deal(costs, num_ranks), dtype=np.int64)

        return cached(self._dealt, (epoch, step), self._most_steps, deal_rows)

    def _positions(self, epoch: int, steps: IntArray, rows: IntArray) -> IntArray:
        """Return the position of each row of some steps."""
        positions = np.empty_like(rows)
        for step in np.unique(steps).tolist():
            of_step = steps == step
            position_of_row = np.argsort(self._row_of_position(epoch, step))
            positions[of_step] = position_of_row[rows[of_step]]
        return positions

    @property
    def _most_steps(self) -> int:
        """Entries of a cache by steps, or by windows beside those of the lanes."""
        return 64 + self.global_batch_size


def _first_of(units: Units, counts: IntArray) -> Units:
    """Return the units of which a count is not 0; the others are padding and have no samples.

    Example: units of 2, 1 and 3 samples, and counts 2, 0 and 3: the samples of the first and third.
    """
    if (counts == units.counts).all():
        return units
    is_kept = np.repeat(counts > 0, units.counts)
    return Units(counts, *(column[is_kept] for column in units[1:]))


def _codes(shards: IntArray, indexes: IntArray) -> IntArray:
    """Return one integer for each (shard, index)."""
    return shards << 32 | indexes


def corpus_of_units(plan: PackPlan, bad: IntArray) -> Corpus:
    """Return the groups and units of a plan, as shards and samples.

    Args:
        plan: the packs.
        bad: (shard, index) of the bad samples of the dataset.
    """
    return Corpus(
        plan.counts,
        plan.group_names,
        bad=bad_units(plan, bad),
        sizes=plan.group_bytes,
        checksums=plan.group_digests,
    )


def bad_units(plan: PackPlan, bad: IntArray) -> IntArray:
    """Return int64 [n, 2]: (group, index) of the units that have only samples of the bad list.

    The order never plans them. It looks through the samples of all units, where there is a list.
    """
    bad_codes = _codes(*bad.T)
    numbers: list[IntArray] = [np.zeros(0, dtype=np.int64)]
    for first in range(0, plan.num_units if bad_codes.size else 0, SCANNED_UNITS):
        units = plan.units(np.arange(first, min(first + SCANNED_UNITS, plan.num_units)))
        is_bad = np.isin(_codes(units.shard, units.index), bad_codes)
        rows = np.repeat(np.arange(units.counts.size), units.counts)[is_bad]
        num_bad = np.bincount(rows, minlength=units.counts.size)
        numbers.append(first + np.flatnonzero(num_bad == units.counts))
    bad_numbers = np.concatenate(numbers)
    groups = np.searchsorted(plan.first_units, bad_numbers, side="right") - 1
    return np.column_stack((groups, bad_numbers - plan.first_units[groups]))


# -- the order over the packs of a mixture ---------------------------------------------------------
#
# It is `PackOrder` over a `MixtureOrder`. To that, a *group* of shards is a shard and a *unit* (a
# pack) is a sample, and each source has its own groups and units. A pack holds samples of one
# source::
#
# Each source has separate epochs, with each of its packs once. Weights say how many
# samples or tokens a source gives, so they become shares of packs: those weights over what a pack
# of the source holds on average. They are kept on average over many packs, since packs differ.


class MixturePackOrder(PackOrder):
    """The order over the packs of a mixture. Build it with `from_plans`.

    Attributes:
        inner: the order over the groups and units of all sources.
        plan: what the packs are.
        num_units: rows of an epoch of the mixture.
    """

    inner: MixtureOrder
    plan: MixturePlan

    def __init__(
        self, inner: MixtureOrder, plan: MixturePlan, corpora: Mapping[str, Corpus]
    ) -> None:
        super().__init__(inner, plan, _end_to_end(corpora, plan))
        self._corpora = corpora

    @classmethod
    def from_plans(
        cls,
        plan: MixturePlan,
        corpora: Mapping[str, Corpus],
        shares: Mapping[int, Mapping[str, int]],
        *,
        epoch_steps: int | Stop,
        drop_last: bool = True,
        **settings: Any,
    ) -> MixturePackOrder:
        """Build the order over the packs of a mixture.

        Args:
            plan: the packs.
            corpora: of the sources, with their bad lists: these samples are left out of their
                packs. Shards after those of a plan are ignored.
            shares: of packs, by source, by the step of the run from which they hold.
            epoch_steps: steps of an epoch, or when an epoch ends.
            drop_last: has no effect, since no step is partial.
            settings: `global_batch_size`, `seed` and others of `Recipe.from_weights`. They count
                packs.

        Raises:
            ConfigError: impossible settings, or a source without packs.
        """
        del drop_last
        corpora = _planned(corpora, plan)
        recipe = Recipe.from_weights(
            _units(corpora, plan),
            shares,
            epoch_steps=epoch_steps,
            row_shape=plan.row_shape(shares[0]),
            **settings,
        )
        return cls(MixtureOrder(recipe), plan, corpora)

    @classmethod
    def from_mixture_identity(
        cls, identity: Mapping[str, Any], plan: MixturePlan, corpora: Mapping[str, Corpus]
    ) -> MixturePackOrder:
        """Rebuild the order of a saved state. It knows the shares.

        Args:
            identity: ``state["order"]``.
            plan: the packs of the sources now.
            corpora: of the sources now.

        Raises:
            StateError: `identity` is malformed, or of other sources or plans.
        """
        corpora = _planned(corpora, plan)
        inner = MixtureOrder(Recipe.from_identity(identity, _units(corpora, plan)))
        for source in identity["sources"]:
            name = source["name"]
            if source.get("plan") != plan.plans[name].digest:
                raise StateError(
                    f"the packs of source {name!r} of the state are of plan "
                    f"{source.get('plan')!r}, these of plan {plan.plans[name].digest!r}: give the "
                    "plan of the state, mm.Pack(plan={name: plan})"
                )
            of_dataset = SavedOrder.parse(source).dataset
            differing = differing_keys(of_dataset, corpora[name].identity())
            if differing:
                raise StateError(
                    f"the shards of source {name!r} are not those of the state, in "
                    f"{', '.join(differing)}: resume on the old ones, or start over"
                )
        return cls(inner, plan, corpora)

    def identity(self) -> dict[str, Any]:
        """Return everything the order depends on, in plain JSON types. States contain it.

        It has the keys of the inner order. Each source has keys as in `PackOrder.identity`.
        """
        identity = self.inner.identity()
        sources = [
            {
                **source,
                "plan": self.plan.plans[source["name"]].digest,
                **{
                    f"{DATASET} {key}": value
                    for key, value in self._corpora[source["name"]].identity().items()
                },
            }
            for source in identity["sources"]
        ]
        return {**identity, "sources": sources, "plan": self.plan.digest}


def _planned(corpora: Mapping[str, Corpus], plan: MixturePlan) -> dict[str, Corpus]:
    """Return the shards of each source that its plan has."""
    return {
        name: corpora[name].first_shards(len(of_source.shards))
        for name, of_source in plan.plans.items()
    }


def _units(corpora: Mapping[str, Corpus], plan: MixturePlan) -> dict[str, Corpus]:
    """Return the groups and units of each source, as shards and samples."""
    return {
        name: corpus_of_units(of_source, corpora[name].bad)
        for name, of_source in plan.plans.items()
    }


def _end_to_end(corpora: Mapping[str, Corpus], plan: MixturePlan) -> Corpus:
    """Return the shards of all sources as one corpus, numbered as in the mixture."""
    counts, bad, first_shard = [], [], 0
    for corpus, num_shards in zip(corpora.values(), plan.num_shards, strict=True):
        counts.append(np.pad(corpus.counts, (0, num_shards - corpus.counts.size)))
        bad.append(corpus.bad + np.array([first_shard, 0]))
        first_shard += num_shards
    return Corpus(np.concatenate(counts), bad=np.concatenate(bad))
