"""A measure -> a plan: groups of shards, and the packs of each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from mmstream.dataset.manifest import ShardInfo
from mmstream.packing.groups import group_stops
from mmstream.packing.measure_file import Measure
from mmstream.packing.pack import pack_samples
from mmstream.packing.plan import LEFT_OUT_REASONS, PackPlan
from mmstream.packing.settings import PackLimits
from mmstream.types import IntArray

__all__ = ["make_plan", "plan_digest", "plan_of_lengths"]

RULES_VERSION = 1
"""Counts up when equal settings give other units."""

_LIMITS = (
    ("max_documents", "num_documents"),
    ("max_images", "num_images"),
    ("max_patches", "patches"),
    ("max_seconds", "num_seconds"),
)
"""Limits beside tokens, and the columns that they are about."""

_SUMS = ("num_label_tokens", "num_images", "patches", "squared_patches", "num_documents")
"""Columns whose sums a unit has, after num_tokens and squared_tokens."""


class _Group(NamedTuple):
    """The units of one group, with positions from the start of the group."""

    counts: IntArray
    sums: IntArray
    members: IntArray
    left_out: IntArray
    tokens: IntArray


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
) -> PackPlan:
    """Plan the packs of a dataset, in memory. Equal arguments give equal plans.

    Args:
        measure: The lengths of all samples.
        limits: What a pack may hold.
        bad: int64 [n, 2], (shard, index) of samples that are left out: the bad list.
        previous: An earlier plan of the first shards. Its groups stay as they are.
    """
    tokens_of = np.maximum(measure.column("num_tokens"), 0)
    ends = np.cumsum(measure.counts)
    totals = np.concatenate([[0], np.cumsum(tokens_of)])
    shard_tokens = np.diff(totals[np.concatenate([[0], ends]).astype(np.int64)])
    finished = [] if previous is None else previous.group_stops.tolist()
    stops = group_stops(shard_tokens, limits.max_tokens, finished)
    is_bad = np.zeros(measure.num_samples, dtype=bool)
    if bad is not None and len(bad):
        starts = ends - measure.counts
        is_bad[starts[bad[:, 0]] + bad[:, 1]] = True
    groups = []
    for first_shard, stop_shard in pairwise([0, *stops]):
        start = int(ends[first_shard - 1]) if first_shard else 0
        groups.append(_pack_group(measure, limits, is_bad, start, int(ends[stop_shard - 1])))
    return _joined(measure, limits, stops, groups)


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


def _pack_group(
    measure: Measure, limits: PackLimits, is_bad: npt.NDArray[np.bool_], start: int, stop: int
) -> _Group:
    """Pack the samples [start, stop) of a dataset."""
    columns = {
        name: np.asarray(measure.column(name)[start:stop])
        for name in ("num_tokens", "num_documents", *_SUMS, *(name for _, name in _LIMITS))
    }
    tokens = columns["num_tokens"].copy()
    used = [(getattr(limits, limit), columns[name]) for limit, name in _LIMITS]
    used = [(most, column) for most, column in used if most is not None]
    multiple = limits.document_multiple_of
    # A document takes up to multiple - 1 tokens more; of several the lengths are not known.
    costs = (np.maximum(tokens, 0) + columns["num_documents"] * (multiple - 1)) // multiple
    costs *= multiple
    if limits.overlong == "truncate":
        tokens = np.minimum(tokens, limits.max_tokens)
        costs = np.minimum(costs, limits.max_tokens)
    reasons = np.full(len(tokens), -1, dtype=np.int64)
    for most, column in used:
        reasons[column > most] = LEFT_OUT_REASONS.index("over a limit")
    reasons[costs > limits.max_tokens] = LEFT_OUT_REASONS.index("too long")
    reasons[is_bad[start:stop]] = LEFT_OUT_REASONS.index("bad list")
    reasons[tokens < 0] = LEFT_OUT_REASONS.index("unusable")
    kept = np.flatnonzero(reasons < 0)
    table = np.column_stack([costs, *(column for _, column in used)])[kept]
    packs = pack_samples(table, np.array([limits.max_tokens, *(most for most, _ in used)]))
    order = np.argsort(packs, kind="stable")
    members, packs = kept[order], packs[order]
    counts = np.bincount(packs)
    summed = np.column_stack([tokens, tokens * tokens, *(columns[name] for name in _SUMS)])[members]
    starts = np.cumsum(counts) - counts
    sums = np.add.reduceat(summed, starts, axis=0) if len(counts) else summed[:0]
    out = np.flatnonzero(reasons >= 0)
    left_out = np.column_stack([out, reasons[out], columns["num_tokens"][out]])
    return _Group(counts, sums, members, left_out, tokens[members])


def _joined(
    measure: Measure, limits: PackLimits, stops: list[int], groups: list[_Group]
) -> PackPlan:
    ends = np.concatenate([[0], np.cumsum(measure.counts)]).astype(np.int64)
    starts = ends[np.array([0, *stops[:-1]], dtype=np.int64)] if stops else ends[:0]
    counts = np.concatenate([np.zeros(0, np.int64), *(group.counts for group in groups)])
    sums = np.concatenate([np.zeros((0, 7), np.int64), *(group.sums for group in groups)])
    offset = np.array([1, 0, 0])  # positions are those of the dataset from here on
    return PackPlan(
        settings=limits,
        digest=plan_digest(limits, measure.digest),
        shards=measure.shards,
        group_stops=np.array(stops, dtype=np.int64),
        counts=np.array([group.counts.size for group in groups], dtype=np.int64),
        group_digests=tuple(
            _group_digest(measure.shards[first:stop], group)
            for (first, stop), group in zip(pairwise([0, *stops]), groups, strict=True)
        ),
        unit_rows=np.column_stack([np.cumsum(counts) - counts, sums]),
        members=np.concatenate(
            [
                np.zeros(0, np.int64),
                *(group.members + start for group, start in zip(groups, starts, strict=True)),
            ]
        ),
        member_tokens=np.concatenate(
            [np.zeros(0, np.int32), *(group.tokens.astype(np.int32) for group in groups)]
        ),
        left_out=np.concatenate(
            [
                np.zeros((0, 3), np.int64),
                *(
                    group.left_out + start * offset
                    for group, start in zip(groups, starts, strict=True)
                ),
            ]
        ),
    )


def _group_digest(shards: Sequence[ShardInfo], group: _Group) -> str:
    """Return the hash of what a group holds: its shards, and its units."""
    facts = [[shard.name, shard.num_samples, shard.num_bytes, shard.sha256] for shard in shards]
    digest = hashlib.sha256(msgspec.json.encode(facts))
    for numbers in (group.counts, group.members, group.tokens):
        digest.update(np.ascontiguousarray(numbers, dtype="<i8").data)
    return digest.hexdigest()
