"""A measure -> a plan: which samples are packed, groups of shards, and the packs of each group."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from mmstream.dataset.manifest import ShardInfo
from mmstream.errors import ConfigError, escaped
from mmstream.packing.condition import evaluate
from mmstream.packing.groups import group_stops
from mmstream.packing.measure_file import Measure, is_same_shard
from mmstream.packing.pack import BLOCK_PACKS, pack_samples
from mmstream.packing.plan import (
    CONDITION,
    ON_BAD_LIST,
    OVER_A_LIMIT,
    TOO_LONG,
    UNUSABLE,
    PackPlan,
)
from mmstream.packing.settings import PackLimits
from mmstream.process_pool import run_in_processes
from mmstream.types import IntArray

__all__ = [
    "LIMIT_COLUMNS",
    "Chosen",
    "choose",
    "make_plan",
    "plan_digest",
    "plan_in_order",
    "plan_of_lengths",
]

RULES_VERSION = 1
"""Counts up when equal settings give other units."""

LIMIT_COLUMNS = {
    "max_documents": "num_documents",
    "max_images": "num_images",
    "max_patches": "patches",
    "max_seconds": "num_seconds",
}
"""Limits beside tokens, and the columns that they are about."""

_SUMS = ("num_label_tokens", "num_images", "patches", "squared_patches", "num_documents")
"""Columns whose sums a unit has, after its tokens and their squares."""

_KEPT = -1
"""In place of a reason: the sample is packed."""

Mask: TypeAlias = npt.NDArray[np.bool_]


class Chosen(NamedTuple):
    """The samples of a dataset, and which of them are packed.

    Attributes:
        tokens: int64 [num_samples], as they are packed.
        costs: int64 [num_samples, k], what each takes of each limit, tokens first.
        limits: int64 [k], what a pack may hold.
        reasons: int64 [num_samples], why a sample is left out, or -1.
    """

    tokens: IntArray
    costs: IntArray
    limits: IntArray
    reasons: IntArray

    @property
    def is_kept(self) -> Mask:
        """Which samples are packed."""
        return np.asarray(self.reasons == _KEPT)


class _Job(NamedTuple):
    """What a process needs to pack a group."""

    group: int
    costs: IntArray
    limits: IntArray
    block_packs: int


class _Group(NamedTuple):
    """The units of a group, with positions from the start of the group."""

    counts: IntArray
    sums: IntArray
    members: IntArray
    tokens: IntArray
    left_out: IntArray


def plan_digest(limits: PackLimits, measure_digest: str) -> str:
    """Return the hash of what decides the units, beside the samples."""
    content = {"rules": RULES_VERSION, "measure": measure_digest, **limits.as_json()}
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:32]


def make_plan(
    measure: Measure,
    limits: PackLimits,
    *,
    bad: IntArray | None = None,
    previous: PackPlan | None = None,
    block_packs: int = BLOCK_PACKS,
    num_workers: int = 0,
) -> PackPlan:
    """Plan the packs of a dataset, in memory. Equal arguments give equal plans.

    Args:
        measure: The lengths of all samples.
        limits: What a pack may hold.
        bad: int64 [n, 2], (shard, index) of samples that are left out: the bad list.
        previous: An earlier plan of the same settings. Its groups stay as they are, and shards
            that were appended since form new ones.
        block_packs: As for `pack_samples`. More is for plans whose samples are written anew.
        num_workers: Processes. 0: this one. The plan does not depend on their number.

    Raises:
        ConfigError: The condition names no column of the measure, or the earlier plan is of other
            settings or shards.
    """
    if previous is not None:
        _require_first_shards(measure, limits, previous)
    chosen = choose(measure, limits, bad)
    ends = np.concatenate([[0], np.cumsum(measure.counts)]).astype(np.int64)
    totals = np.concatenate([[0], np.cumsum(np.where(chosen.is_kept, chosen.costs[:, 0], 0))])
    finished = [] if previous is None else previous.group_stops.tolist()
    stops = group_stops(np.diff(totals[ends]), limits.max_tokens, finished)
    bounds = ends[[0, *stops]].tolist()
    groups = [] if previous is None else _groups_of(previous, bounds)
    jobs = (
        _Job(
            group,
            chosen.costs[start:stop][chosen.is_kept[start:stop]],
            chosen.limits,
            block_packs,
        )
        for group, (start, stop) in enumerate(pairwise(bounds))
        if group >= len(finished)
    )
    results = run_in_processes(_pack, jobs, num_workers, command="plan")
    packs = {job.group: packs for job, packs in results}
    for group in range(len(finished), len(stops)):
        start, stop = bounds[group : group + 2]
        groups.append(_units(measure, chosen, start, stop, packs[group]))
    digests = [] if previous is None else list(previous.group_digests)
    for group in range(len(finished), len(stops)):
        digests.append(_group_digest(groups[group]))
    return _joined(measure, limits, stops, bounds, groups, digests)


def plan_in_order(
    measure: Measure, limits: PackLimits, unit_counts: IntArray, stops: list[int]
) -> PackPlan:
    """Return the plan of a dataset whose samples lie in the order of their packs.

    Args:
        measure: The lengths of all samples. All of them are packed.
        limits: What the packs were made with.
        unit_counts: int64 [num_units], samples of each pack.
        stops: The stop of each group, in shards. A group ends with a pack.
    """
    chosen = choose(measure, limits)
    ends = np.concatenate([[0], np.cumsum(measure.counts)]).astype(np.int64)
    bounds = ends[[0, *stops]].tolist()
    packs = np.repeat(np.arange(unit_counts.size), unit_counts)
    groups = []
    for start, stop in pairwise(bounds):
        numbers = packs[start:stop] - packs[start]
        groups.append(_units(measure, chosen, start, stop, numbers))
    digests = [_group_digest(group) for group in groups]
    return _joined(measure, limits, stops, bounds, groups, digests)


def plan_of_lengths(
    counts: Sequence[int] | IntArray, lengths: Sequence[int] | IntArray, limits: PackLimits
) -> PackPlan:
    """Plan packs of samples of given lengths, in memory. Shards are named by their numbers.

    Args:
        counts: Samples of each shard.
        lengths: Tokens of each sample.
        limits: What a pack may hold.
    """
    shards = tuple(
        ShardInfo(f"shard-{number:06d}.tar", int(count), 10240 * max(1, int(count)))
        for number, count in enumerate(counts)
    )
    lengths = np.asarray(lengths, dtype=np.int64)
    columns = {"num_tokens": lengths, "num_label_tokens": np.maximum(lengths - 1, 0)}
    return make_plan(Measure(shards, columns), limits)


def choose(measure: Measure, limits: PackLimits, bad: IntArray | None = None) -> Chosen:
    """Return which samples are packed, and what each takes of a pack; arguments as `make_plan`."""
    measured = measure.column("num_tokens")
    tokens = np.maximum(measured, 0)
    if limits.overlong == "truncate":
        is_cut = (tokens > limits.max_tokens) & _is_plain_text(measure)
        tokens = np.where(is_cut, limits.max_tokens, tokens)
    multiple = limits.document_multiple_of
    # Each document takes up to multiple - 1 tokens more. Of several, only the sum is known.
    costs = (tokens + measure.column("num_documents") * (multiple - 1)) // multiple * multiple
    used = [(costs, limits.max_tokens)]
    for limit, name in LIMIT_COLUMNS.items():
        if (most := getattr(limits, limit)) is not None:
            used.append((measure.column(name), most))
    reasons = np.full(measure.num_samples, _KEPT, dtype=np.int64)
    for number, (amounts, most) in enumerate(used):
        reasons[amounts > most] = OVER_A_LIMIT if number else TOO_LONG
    if limits.where:
        reasons[~evaluate(limits.where, measure.column)] = CONDITION
    if bad is not None:
        starts = np.cumsum(measure.counts) - measure.counts
        known = bad[bad[:, 0] < len(measure.shards)]  # others are of shards without a measure
        reasons[starts[known[:, 0]] + known[:, 1]] = ON_BAD_LIST
    reasons[measured < 0] = UNUSABLE
    most_of = np.array([most for _, most in used], dtype=np.int64)
    return Chosen(tokens, np.column_stack([amounts for amounts, _ in used]), most_of, reasons)


def _pack(job: _Job) -> IntArray:
    return pack_samples(job.costs, job.limits, job.block_packs)


def _is_plain_text(measure: Measure) -> Mask:
    """Tell which samples are one document of text, of which each token has a label."""
    num_labels = measure.column("num_tokens") - 1
    columns = [measure.column(name) for name in ("num_images", "patches", "num_seconds")]
    is_text: Mask = measure.column("num_documents") == 1
    is_text &= measure.column("num_label_tokens") == num_labels
    for column in columns:
        is_text &= column == 0
    return is_text


def _units(measure: Measure, chosen: Chosen, start: int, stop: int, packs: IntArray) -> _Group:
    """Return the units of the samples [start, stop) of a dataset."""
    order = np.argsort(packs, kind="stable")
    members = np.flatnonzero(chosen.is_kept[start:stop])[order]
    tokens = chosen.tokens[start:stop][members]
    counts = np.bincount(packs).astype(np.int64)
    columns = [measure.column(name)[start:stop][members] for name in _SUMS]
    # A text that is cut has fewer labels than were measured.
    columns[0] = np.minimum(columns[0], np.maximum(tokens - 1, 0))
    summed = np.column_stack([tokens, tokens * tokens, *columns])
    sums = np.add.reduceat(summed, np.cumsum(counts) - counts, axis=0) if counts.size else summed
    out = np.flatnonzero(~chosen.is_kept[start:stop])
    measured = measure.column("num_tokens")[start:stop][out]
    left_out = np.column_stack([out, chosen.reasons[start:stop][out], measured])
    return _Group(counts, sums, members, tokens, left_out)


def _require_first_shards(measure: Measure, limits: PackLimits, previous: PackPlan) -> None:
    """Raise a ConfigError where a plan is not one of the first shards of a measure."""
    if previous.digest != plan_digest(limits, measure.digest):
        raise ConfigError(
            "plan: there is a plan of other settings or another measure; give another name, or "
            "replace it with overwrite=True"
        )
    for shard, planned in zip(measure.shards, previous.shards, strict=False):
        if not is_same_shard(shard, planned):
            raise ConfigError(
                f"plan: {escaped(planned.name)} is another shard than in the plan that is there; "
                "give another name, or replace it with overwrite=True"
            )
    if len(previous.shards) > len(measure.shards):
        raise ConfigError(
            f"plan: there is a plan of {len(previous.shards)} shards, and the measure has "
            f"{len(measure.shards)}; give another name, or replace it with overwrite=True"
        )


def _groups_of(plan: PackPlan, bounds: list[int]) -> list[_Group]:
    """Return the groups of a plan as they are."""
    groups = []
    firsts = np.append(plan.unit_rows[:, 0], plan.members.size)
    for group, (start, stop) in enumerate(pairwise(bounds[: plan.num_groups + 1])):
        units = slice(*plan.first_units[group : group + 2].tolist())
        members = slice(firsts[units.start], firsts[units.stop])
        out = plan.left_out[(plan.left_out[:, 0] >= start) & (plan.left_out[:, 0] < stop)]
        groups.append(
            _Group(
                np.diff(firsts[units.start : units.stop + 1]),
                plan.unit_rows[units, 1:],
                plan.members[members] - start,
                plan.member_tokens[members].astype(np.int64),
                out - np.array([start, 0, 0]),
            )
        )
    return groups


def _joined(
    measure: Measure,
    limits: PackLimits,
    stops: list[int],
    bounds: list[int],
    groups: list[_Group],
    digests: list[str],
) -> PackPlan:
    """Return the groups as one plan, with positions from the start of the dataset."""
    counts = _concatenated([group.counts for group in groups])
    sums = _concatenated([group.sums for group in groups], 7)
    first = np.cumsum(counts) - counts
    started = list(zip(bounds, groups, strict=False))
    members = _concatenated([group.members + start for start, group in started])
    return PackPlan(
        settings=limits,
        digest=plan_digest(limits, measure.digest),
        shards=measure.shards,
        group_stops=np.array(stops, dtype=np.int64),
        counts=np.array([group.counts.size for group in groups], dtype=np.int64),
        group_digests=tuple(digests),
        spread=_spread(counts, members),
        unit_rows=np.column_stack([first, sums]),
        members=members,
        member_tokens=_concatenated([group.tokens for group in groups]).astype(np.int32),
        left_out=_concatenated(
            [group.left_out + np.array([start, 0, 0]) for start, group in started], 3
        ),
    )


def _concatenated(arrays: list[IntArray], num_columns: int | None = None) -> IntArray:
    shape = (0,) if num_columns is None else (0, num_columns)
    return np.concatenate([np.zeros(shape, dtype=np.int64), *arrays])


def _spread(counts: IntArray, members: IntArray) -> int:
    """Return among how many neighbours the samples of a unit lie, on average, rounded up.

    Example: units of 4 samples, each of which lies among 10 samples in a row: 2.5, so 3.
    """
    if not counts.size:
        return 1
    stops = np.cumsum(counts)
    spans = members[stops - 1] - members[stops - counts] + 1
    return -(-int(spans.sum()) // members.size)


def _group_digest(group: _Group) -> str:
    """Return the hash of the units of a group."""
    digest = hashlib.sha256()
    for numbers in (group.counts, group.members, group.tokens):
        digest.update(np.ascontiguousarray(numbers, dtype="<i8").data)
    return digest.hexdigest()
