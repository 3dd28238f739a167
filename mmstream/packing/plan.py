"""A plan: the units of a dataset, which are packs of samples, and what they hold.

The order of a run asks a plan by unit numbers. Unit number = first unit of its group + its number
in the group. All answers are arrays; nothing is read but the rows that are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mmstream.dataset.manifest import ShardInfo
from mmstream.errors import ConfigError
from mmstream.order.mixture.schedule import whole_shares
from mmstream.order.settings import RowShape
from mmstream.packing.settings import PackLimits
from mmstream.types import IntArray

LEFT_OUT_REASONS = ("unusable", "on the bad list", "condition", "too long", "over a limit")
"""Why a sample is in no unit, by the number in the second column of `PackPlan.left_out`."""

UNUSABLE, ON_BAD_LIST, CONDITION, TOO_LONG, OVER_A_LIMIT = range(len(LEFT_OUT_REASONS))


class Units(NamedTuple):
    """The samples of units, one after the other.

    Attributes:
        counts: int64 [n], samples of each unit.
        shard: int64 [m], shard of each sample, m = sum of `counts`.
        index: int64 [m], its index in the shard.
        num_tokens: int64 [m], its tokens.
    """

    counts: IntArray
    shard: IntArray
    index: IntArray  # type: ignore[assignment]  # the field's name wins over tuple.index
    num_tokens: IntArray


class UnitSums(NamedTuple):
    """What units hold, int64 [n] each.

    Attributes:
        num_tokens: Tokens of all documents, without padding.
        squared_tokens: Sum of L * L over the samples, each of L tokens.
        num_label_tokens: Tokens with a label, without the first of each document.
        num_images: Images.
        patches: Sum of p over all media, each of p patches.
        squared_patches: Sum of p * p over all media.
        num_documents: Documents; a sample may have several.
    """

    num_tokens: IntArray
    squared_tokens: IntArray
    num_label_tokens: IntArray
    num_images: IntArray
    patches: IntArray
    squared_patches: IntArray
    num_documents: IntArray


@dataclass(frozen=True, eq=False)
class PackPlan:
    """The units of a dataset. `make_plan` makes it, and `open_plan` opens it.

    A plan of a folder pickles as its address, and its arrays are mapped again.

    Attributes:
        settings: What a unit may hold.
        digest: Hash of the settings and of those of the measure: what decides the units, beside
            the samples.
        shards: The shards that are planned.
        group_stops: int64 [num_groups], the stop of each group, in shards.
        counts: int64 [num_groups], units of each group.
        group_digests: Of each group: hash of its units, by positions in the group.
        spread: Among the bytes of how many units in a row the samples of a unit lie, on average.
        unit_rows: int64 [num_units, 8], the first member of each unit, and its sums in the order
            of `UnitSums`.
        members: int64 [num_members], positions in the dataset of the samples of all units.
        member_tokens: int32 [num_members], tokens of each.
        left_out: int64 [n, 3], samples that are in no unit: position, reason, tokens. The reason is
            an index into `LEFT_OUT_REASONS`; -1 tokens are not known.
        lengths: The settings of its measure: what decided the lengths. Plans of version 0.1 have
            none.
        url: The folder of the plan. None: it is in memory.
        reopen: Opens the plan of the folder again, in another process. None: it is in memory.

    Examples:
        >>> import numpy as np
        >>> from mmstream.packing.planner import plan_of_lengths
        >>> from mmstream.packing.settings import PackLimits
        >>> plan = plan_of_lengths([3, 2], [6, 5, 4, 4, 1], PackLimits(10))
        >>> plan.num_units, plan.counts.tolist()
        (2, [2])
        >>> units = plan.units(np.array([1]))
        >>> units.shard.tolist(), units.index.tolist(), units.num_tokens.tolist()
        ([0, 1, 1], [1, 0, 1], [5, 4, 1])
        >>> plan.sums(np.array([0, 1])).num_tokens.tolist()
        [10, 10]
    """

    settings: PackLimits
    digest: str
    shards: tuple[ShardInfo, ...]
    group_stops: IntArray
    counts: IntArray
    group_digests: tuple[str, ...]
    spread: int
    unit_rows: IntArray
    members: IntArray
    member_tokens: npt.NDArray[np.int32]
    left_out: IntArray
    lengths: Mapping[str, Any] = field(default_factory=dict)
    url: str | None = None
    reopen: Callable[[], PackPlan] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.reopen is None:
            return PackPlan, tuple(getattr(self, name) for name in self.__dataclass_fields__)
        return self.reopen, ()

    def __repr__(self) -> str:
        where = "in memory" if self.url is None else self.url
        return (
            f"<PackPlan {where}: {self.num_units:,} packs of {self.settings.max_tokens:,} tokens, "
            f"{self.fill:.1%} full, {self.members.size:,} samples>"
        )

    @property
    def num_units(self) -> int:
        """Units of all groups."""
        return len(self.unit_rows)

    @property
    def mean_samples(self) -> float:
        """Samples of a unit, in the mean."""
        return self.members.size / max(1, self.num_units)

    @property
    def num_groups(self) -> int:
        """Groups of shards."""
        return len(self.counts)

    @property
    def fill(self) -> float:
        """Tokens of all units, as a share of what they could hold; 0 without units."""
        room = self.num_units * self.settings.max_tokens
        return int(self.member_tokens.sum(dtype=np.int64)) / room if room else 0.0

    @cached_property
    def first_units(self) -> IntArray:
        """int64 [num_groups + 1], number of the first unit of each group, and of all units."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    @cached_property
    def shard_ends(self) -> IntArray:
        """int64 [num_shards], samples up to the end of each shard."""
        counts = [shard.num_samples for shard in self.shards]
        return np.cumsum(np.array(counts, dtype=np.int64))

    @cached_property
    def group_names(self) -> tuple[str, ...]:
        """Names of the groups: their first and last shard."""
        starts = [0, *self.group_stops.tolist()]
        return tuple(
            f"{self.shards[start].name}..{self.shards[stop - 1].name}"
            for start, stop in zip(starts, self.group_stops.tolist(), strict=False)
        )

    @cached_property
    def group_bytes(self) -> IntArray:
        """int64 [num_groups], bytes of the shards of each group."""
        sizes = np.array([0, *(shard.num_bytes for shard in self.shards)], dtype=np.int64)
        ends = np.cumsum(sizes)[np.concatenate([[0], self.group_stops]).astype(np.int64)]
        return np.diff(ends)

    def units(self, numbers: IntArray) -> Units:
        """Return the samples of units, in the order of `numbers`.

        Args:
            numbers: int64 [n], numbers of units.
        """
        numbers = np.asarray(numbers, dtype=np.int64)
        first = self.unit_rows[numbers, 0]
        is_last = numbers == self.num_units - 1
        stop = self.unit_rows[np.where(is_last, 0, numbers + 1), 0]
        counts = np.where(is_last, self.members.size, stop) - first
        # Unit 0 with members 5-6 and unit 1 with members 2-4 are members 5, 6, 2, 3, 4.
        ends = np.cumsum(counts)
        rows = np.arange(counts.sum()) + np.repeat(first - ends + counts, counts)
        positions = self.members[rows]
        shard = np.searchsorted(self.shard_ends, positions, side="right").astype(np.int64)
        starts = np.where(shard > 0, self.shard_ends[shard - 1], 0)
        return Units(counts, shard, positions - starts, self.member_tokens[rows].astype(np.int64))

    def sums(self, numbers: IntArray) -> UnitSums:
        """Return what units hold, in the order of `numbers`.

        Args:
            numbers: int64 [n], numbers of units.
        """
        rows = self.unit_rows[np.asarray(numbers, dtype=np.int64)]
        return UnitSums(*rows[:, 1:].T)


# -- the plans of a mixture as one -----------------------------------------------------------------
#
# Example: "web" has 5 units and "books" 3, so unit 6 is the second unit of "books".

WeightsOf: TypeAlias = Literal["samples", "tokens"]
"""What the weights of a mixture are proportions of."""

BY_SOURCE = "of each source"

MAX_SHARE_ERROR = Fraction(1, 200)
"""Shares of packs are rounded so far, relative to each. A longer period would be rounded less."""


@dataclass(frozen=True, eq=False)
class MixturePlan:
    """The plans of the sources of a mixture.

    Raises:
        ConfigError: packs of two sources may not hold the same.

    Examples:
        >>> import numpy as np
        >>> from mmstream.packing.planner import plan_of_lengths
        >>> from mmstream.packing.settings import PackLimits
        >>> web = plan_of_lengths([3, 2], [6, 5, 4, 4, 1], PackLimits(10))
        >>> books = plan_of_lengths([2], [9, 8], PackLimits(10))
        >>> plan = MixturePlan({"web": web, "books": books}, [2, 1])
        >>> units = plan.units(np.array([3, 0]))
        >>> units.counts.tolist(), units.shard.tolist(), units.index.tolist()
        ([1, 2], [2, 0, 0], [1, 0, 2])
        >>> plan.sums(np.array([3, 0])).num_tokens.tolist()
        [8, 10]
    """

    plans: Mapping[str, PackPlan]
    """The plan of each source, by its name."""
    num_shards: Sequence[int]
    """Shards of each source. A plan may lack the last ones."""

    def __post_init__(self) -> None:
        limits = {name: _common(plan.settings) for name, plan in self.plans.items()}
        first_name, first = next(iter(limits.items()))
        for name, other in limits.items():
            if other != first:
                raise ConfigError(
                    f"mm.Pack: packs of {name!r} hold {other.as_json()}, and those of "
                    f"{first_name!r} {first.as_json()}: plan both with the same limits"
                )

    def __repr__(self) -> str:
        return (
            f"<MixturePlan {', '.join(f'{name}: {plan!r}' for name, plan in self.plans.items())}>"
        )

    @property
    def digest(self) -> str:
        """In the place of a plan's digest: the identity of each source has its own."""
        return BY_SOURCE

    @property
    def settings(self) -> PackLimits:
        """What each unit may hold. Sources may choose their samples by other conditions."""
        return _common(next(iter(self.plans.values())).settings)

    @cached_property
    def first_units(self) -> IntArray:
        """int64 [num_groups + 1], number of the first unit of each group, and of all units."""
        counts = np.concatenate([plan.counts for plan in self.plans.values()])
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def units(self, numbers: IntArray) -> Units:
        """Return the samples of units, in the order of `numbers`. See `PackPlan.units`."""
        numbers = np.asarray(numbers, dtype=np.int64)
        asked = self._by_source(numbers)
        answers = []
        for number, (plan, _, local) in enumerate(asked):
            units = plan.units(local)
            answers.append(units._replace(shard=units.shard + self._first_shards[number]))
        rows = np.concatenate([rows for _, rows, _ in asked])
        counts = np.empty_like(numbers)
        counts[rows] = np.concatenate([units.counts for units in answers])
        # Samples are source by source: bring them to the order of the rows.
        row_of_sample = np.repeat(rows, counts[rows])
        by_row = np.argsort(row_of_sample, kind="stable")
        columns = (
            np.concatenate(column)[by_row] for column in list(zip(*answers, strict=True))[1:]
        )
        return Units(counts, *columns)

    def sums(self, numbers: IntArray) -> UnitSums:
        """Return what units hold, in the order of `numbers`. See `PackPlan.sums`."""
        asked = self._by_source(np.asarray(numbers, dtype=np.int64))
        by_row = np.argsort(np.concatenate([rows for _, rows, _ in asked]))
        answers = [plan.sums(local) for plan, _, local in asked]
        return UnitSums(*(np.concatenate(c)[by_row] for c in zip(*answers, strict=True)))

    @cached_property
    def _first_unit_of_source(self) -> IntArray:
        return np.cumsum([0, *(plan.num_units for plan in self.plans.values())])

    @cached_property
    def _first_shards(self) -> IntArray:
        return np.cumsum([0, *self.num_shards])

    def _by_source(self, numbers: IntArray) -> list[tuple[PackPlan, IntArray, IntArray]]:
        """Return for each source its plan, where `numbers` are of it, and these in its plan."""
        sources = np.searchsorted(self._first_unit_of_source, numbers, side="right") - 1
        asked = []
        for source, plan in enumerate(self.plans.values()):
            rows = np.flatnonzero(sources == source)
            asked.append((plan, rows, numbers[rows] - self._first_unit_of_source[source]))
        return asked

    def shares(self, weights: Sequence[float], weights_of: WeightsOf) -> list[int]:
        """Return shares of packs, so that the weights of what they hold are kept in the mean.

        Args:
            weights: of the sources, from 0.
            weights_of: what they are proportions of.

        Raises:
            ConfigError: impossible weights, or one is too small beside the others.
        """
        means = []
        for plan in self.plans.values():
            total = _total_of(plan, weights_of)
            means.append(Fraction(total, plan.num_units) if total else Fraction(1))
        return unit_shares(weights, means)

    def shares_by_step(
        self, weights: Mapping[int, Mapping[str, float]], weights_of: WeightsOf
    ) -> dict[int, dict[str, int]]:
        """Return shares of packs by source, by the step from which they hold. See `shares`.

        Args:
            weights: of the sources by name, by the step of the run from which they hold.
            weights_of: what they are proportions of.
        """
        return {
            step: dict(
                zip(
                    self.plans,
                    self.shares([of_step[name] for name in self.plans], weights_of),
                    strict=True,
                )
            )
            for step, of_step in sorted(weights.items())
        }

    def row_shape(self, shares: Mapping[str, int]) -> RowShape:
        """Return what a unit is, in the mean of shares of units."""
        total = sum(shares.values()) or 1
        samples = [shares[name] * plan.mean_samples for name, plan in self.plans.items()]
        spread = [shares[name] * plan.spread for name, plan in self.plans.items()]
        return RowShape(math.fsum(samples) / total, max(1, round(sum(spread) / total)))

    def expected(self, shares: Sequence[int], weights_of: WeightsOf) -> dict[str, float]:
        """Return the part of all samples or tokens that each source gives in the mean."""
        amounts = {
            name: share * _total_of(plan, weights_of) / max(1, plan.num_units)
            for share, (name, plan) in zip(shares, self.plans.items(), strict=True)
        }
        total = math.fsum(amounts.values())
        return {name: amount / total for name, amount in amounts.items()}


def unit_shares(weights: Sequence[float], means: Sequence[Fraction]) -> list[int]:
    """Return whole shares of units of sources, so that weights of what units hold are kept.

    The sum is the smallest power of two of those that round no share by more than 0.5 %.

    Args:
        weights: of the sources, from 0.
        means: what a unit of each source holds in the mean.

    Raises:
        ConfigError: impossible weights, or one is too small beside the others.

    Examples:
        >>> unit_shares([7, 3], [Fraction(70), Fraction(3)])  # one unit of ten
        [93, 931]
    """
    wanted = [share / mean for share, mean in zip(whole_shares(weights), means, strict=True)]
    total = sum(wanted)
    exact = [share / total for share in wanted]
    for bits in range(6, 16):
        shares = [round(share * 2**bits) for share in exact]
        if all(
            abs(Fraction(share, sum(shares)) - wish) <= MAX_SHARE_ERROR * wish
            for share, wish in zip(shares, exact, strict=True)
        ):
            return whole_shares(shares)
    return whole_shares([float(share) for share in exact])


def _total_of(plan: PackPlan, weights_of: WeightsOf) -> int:
    """Return the samples or tokens of all units of a plan."""
    if weights_of == "samples":
        return int(plan.members.size)
    return int(plan.unit_rows[:, 1 + UnitSums._fields.index("num_tokens")].sum())


def _common(limits: PackLimits) -> PackLimits:
    """Return what a unit may hold, without which samples were chosen."""
    return replace(limits, where="", overlong="reject")
