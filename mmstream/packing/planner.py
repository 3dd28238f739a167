"""Lengths -> a measure -> a plan: which samples are packed, groups of shards, and their packs."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from mmstream.dataset.manifest import ShardInfo, is_same_shard
from mmstream.display.text import count_text
from mmstream.errors import ConfigError, escaped, where
from mmstream.packing.plan import (
    CONDITION,
    LEFT_OUT_REASONS,
    NOT_CHOSEN,
    ON_BAD_LIST,
    OVER_A_LIMIT,
    TOO_LONG,
    UNUSABLE,
    PackLimits,
    PackPlan,
)
from mmstream.storage import Store, open_store
from mmstream.types import IntArray

# -- the lengths of all samples of a dataset: a measure, as a file of integers for each shard ------
#
#     mmstream.measure.DIGEST/      beside the manifest; the digest is that of the settings
#         <hash of a shard>         its lengths: one line of JSON, then int64 [num_samples, columns]
#         unusable.jsonl            which samples cannot be used, and why
#
# A file is written when its shard is measured, and never changes. So a call that was killed goes on
# where it was, and appended shards are measured alone.

UNUSABLE_NAME = "unusable.jsonl"

COLUMNS = (
    "num_tokens",
    "num_label_tokens",
    "num_documents",
    "num_images",
    "patches",
    "squared_patches",
    "num_seconds",
)
"""Columns that a plan knows. Only the first must be there: without "num_documents" each sample is
one document, and without another one all its values are 0."""

NOT_MEASURED = -2
"""Tokens of a sample that is not chosen."""

NUM_THREADS = 16
"""Files that are read at a time."""


@dataclass(frozen=True, eq=False)
class Measure:
    """The lengths of all samples of a dataset.

    Attributes:
        shards: The shards that were measured, in the order of the dataset.
        columns: int64 [num_samples] each, by name. ``num_tokens`` must be there, and others of
            `COLUMNS` may. Further ones, such as "width", are for conditions. In ``num_tokens``,
            -1 says that the sample cannot be used, -2 that it is not chosen. ``num_label_tokens``
            does not count the first token of a document. ``patches`` is the sum of p over the media
            of a sample, each of p patches, and ``squared_patches`` the sum of p * p.
            ``num_seconds`` is rounded up.
        settings: What decides the lengths, in plain JSON types: tokenizer, templates, seeds.

    Examples:
        >>> import numpy as np
        >>> from mmstream.dataset.manifest import ShardInfo
        >>> shards = (ShardInfo("a.tar", 2, 10240), ShardInfo("b.tar", 1, 10240))
        >>> measure = Measure(shards, {"num_tokens": np.array([5, -1, 7])})
        >>> measure.column("num_documents").tolist(), measure.column("num_images").tolist()
        ([1, 1, 1], [0, 0, 0])
    """

    shards: tuple[ShardInfo, ...]
    columns: Mapping[str, IntArray]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Samples of all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def counts(self) -> IntArray:
        """Samples of each shard, int64 [num_shards]."""
        return np.array([shard.num_samples for shard in self.shards], dtype=np.int64)

    @cached_property
    def ends(self) -> IntArray:
        """int64 [num_shards + 1], samples before each shard, and of all shards."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    @property
    def digest(self) -> str:
        """Hash of the settings: equal for measures that count alike, of whatever samples."""
        return settings_digest(self.settings)

    def column(self, name: str) -> IntArray:
        """Return a column, int64 [num_samples]. One that is absent has its default values.

        Raises:
            ConfigError: There is no such column.
        """
        if name in self.columns:
            return self.columns[name]
        if name not in COLUMNS:
            names = ", ".join(sorted({*COLUMNS, *self.columns}))
            raise ConfigError(f"{escaped(name)}: the measure has no such column, but {names}")
        default = np.int64(name == "num_documents")
        return np.broadcast_to(default, self.num_samples)


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Return the hash of settings in plain JSON types."""
    return hashlib.sha256(msgspec.json.encode(settings, order="sorted")).hexdigest()[:32]


def measure_folder(root: str, settings: Mapping[str, Any]) -> str:
    """Return where the measure of these settings lies within a folder or URL."""
    return f"{root.rstrip('/')}/mmstream.measure.{settings_digest(settings)[:12]}"


class ShardLengths(NamedTuple):
    """The lengths of the samples of one shard."""

    values: IntArray
    """int64 [num_samples, len(COLUMNS)]."""
    reasons: list[tuple[int, str]]
    """Which samples cannot be used, and why."""


class _Head(msgspec.Struct):
    crc32c: int
    reasons: list[tuple[int, str]]


def write_lengths(store: Store, shard: ShardInfo, lengths: ShardLengths) -> None:
    """Write what was measured of a shard."""
    numbers = np.ascontiguousarray(lengths.values, "<i8").tobytes()
    head = msgspec.json.encode(_Head(int(crc32c(numbers)), lengths.reasons))
    store.write(_file_name(shard), head + b"\n" + numbers)


def read_lengths(store: Store, shards: Sequence[ShardInfo]) -> list[ShardLengths | None]:
    """Return what was measured of each shard. None: nothing yet, or its file is damaged."""
    existing = store.list()

    def read(shard: ShardInfo) -> ShardLengths | None:
        if _file_name(shard) not in existing:
            return None
        head, _, numbers = store.read(_file_name(shard)).partition(b"\n")
        try:
            content = msgspec.json.decode(head, type=_Head)
        except msgspec.MsgspecError:
            return None
        if content.crc32c != crc32c(numbers):
            return None
        if len(numbers) != shard.num_samples * len(COLUMNS) * 8:
            return None
        values = np.frombuffer(numbers, "<i8").reshape(-1, len(COLUMNS))
        return ShardLengths(values.astype(np.int64), content.reasons)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(read, shards))


def measure_of_shards(
    shards: Sequence[ShardInfo], lengths: Sequence[ShardLengths], settings: Mapping[str, Any]
) -> Measure:
    """Return the lengths of all shards as one measure."""
    values = np.concatenate([np.zeros((0, len(COLUMNS)), np.int64), *(of.values for of in lengths)])
    columns = {name: np.ascontiguousarray(values[:, i]) for i, name in enumerate(COLUMNS)}
    return Measure(tuple(shards), columns, settings)


def write_measure(measure: Measure, root: str) -> None:
    """Write a measure into a folder or URL, as `write_lengths` writes it shard by shard."""
    store = open_store(measure_folder(root, measure.settings))
    values = np.column_stack([measure.column(name) for name in COLUMNS])
    for shard, part in zip(
        measure.shards, np.split(values, np.cumsum(measure.counts)), strict=False
    ):
        write_lengths(store, shard, ShardLengths(part, []))


def _file_name(shard: ShardInfo) -> str:
    return hashlib.sha256(msgspec.json.encode(shard)).hexdigest()[:32]


# -- shards -> groups, and the samples of a group -> packs -----------------------------------------
#
# A group is consecutive shards whose samples are packed together, and a pack lies in one group. To
# the order of a run, a group is what a shard is to the order of samples.
#
# Samples come in the order of the dataset. Each goes to the fullest of at most `NUM_OPEN` open
# packs that it fits. Where it fits none, a new pack is begun; of `NUM_OPEN`, the fullest is closed
# first. A pack that is 99.5 % full is closed. At the end, the packs under 97 % are packed again, 24
# neighbours at a time and longest sample first, if that saves packs.
#
# So the samples of a pack lie near each other, and are read in few ranges. Best-fit decreasing over
# all samples fills packs about one point better, and scatters each over the whole group
# (docs/packing.md has figures).
#
# Everything is an integer, and ties go to the lower number: each machine makes the same packs.

GROUP_PACKS = 256
"""A group holds the tokens of this many full packs, or more, so little is left at its end."""

NUM_OPEN = 16
"""Packs that are open at a time."""

CLOSED_PER_MILLE = 995
"""A pack is closed when so much of T is taken."""

REPACKED_PER_MILLE = 970
"""Packs that are less full are packed again at the end of a group."""

BLOCK_PACKS = 24
"""Packs that are packed again together. More fill better, and their samples lie farther apart."""

PACK_BITS = 40
"""Low bits of an integer, for the number of a pack. Its room in tokens is in the bits above."""

LIMIT_BITS = 48
"""Bits of each limit in an integer that holds several. The highest bit of each is for borrowing."""


def group_stops(shard_tokens: IntArray, max_tokens: int, finished: Sequence[int] = ()) -> list[int]:
    """Return the stop of each group, in shards. A group is whole shards, and never an empty one.

    Where a group ends depends on the shards before it only. So shards that are appended later
    change no finished group: they begin a new one.

    Args:
        shard_tokens: int64 [num_shards], tokens of each shard.
        max_tokens: T, tokens of a pack.
        finished: The stops of groups that an earlier plan has. They stay.

    Examples:
        Packs of 2 tokens, so a group has 512 tokens or more, and the last one has what is left.

        >>> import numpy as np
        >>> group_stops(np.array([300, 300, 600, 10]), 2)
        [2, 3, 4]
        >>> group_stops(np.array([300, 300, 600, 10, 10]), 2, finished=[2, 3, 4])
        [2, 3, 4, 5]
    """
    stops = list(finished)
    ends = np.cumsum(shard_tokens)
    while not stops or stops[-1] < ends.size:
        first = stops[-1] if stops else 0
        if first == ends.size:
            break
        before = int(ends[first - 1]) if first else 0
        full = int(np.searchsorted(ends, before + GROUP_PACKS * max_tokens))
        stops.append(min(full + 1, ends.size))
    return stops


def pack_samples(costs: IntArray, limits: IntArray, block_packs: int = BLOCK_PACKS) -> IntArray:
    """Return the pack of each sample of a group.

    Args:
        costs: int64 [n, k], what each sample takes of each limit, tokens first. None may be more
            than its limit or negative.
        limits: int64 [k], what a pack may hold.
        block_packs: Packs that are packed again together.

    Returns:
        int64 [n], numbers of packs. Packs are numbered by their first sample.

    Examples:
        >>> import numpy as np
        >>> pack_samples(np.array([[6], [5], [4], [4], [1]]), np.array([10])).tolist()
        [0, 1, 0, 1, 1]
    """
    max_tokens = int(limits[0])
    min_room = max_tokens * (1000 - CLOSED_PER_MILLE) // 1000 + 1
    packs = best_fit(costs, limits, NUM_OPEN, min_room)
    order = np.argsort(packs, kind="stable")
    samples_of = np.split(order, np.cumsum(np.bincount(packs))[:-1])
    taken = np.bincount(packs, costs[:, 0])  # as float64: exact below 2^53
    loose = np.flatnonzero(taken * 1000 < REPACKED_PER_MILLE * max_tokens)
    num_packs = taken.size
    for start in range(0, loose.size, block_packs):
        block = loose[start : start + block_packs]
        samples = np.sort(np.concatenate([samples_of[pack] for pack in block]))
        longest_first = samples[np.argsort(-costs[samples, 0], kind="stable")]
        packed_again = best_fit(costs[longest_first], limits)
        if int(packed_again.max()) + 1 < block.size:
            packs[longest_first] = num_packs + packed_again
            num_packs += block.size
    return _numbered(packs)


def best_fit(
    costs: IntArray, limits: IntArray, num_open: int | None = None, min_room: int = 1
) -> IntArray:
    """Put each sample into the fullest open pack that it fits, or into a new one.

    Args:
        costs: int64 [n, k], as for `pack_samples`. Samples are taken in this order.
        limits: int64 [k], as for `pack_samples`.
        num_open: Packs that are open at a time. None: all.
        min_room: A pack with room for fewer tokens is closed.

    Returns:
        int64 [n], numbers of packs in the order of their begin.
    """
    tokens = costs[:, 0].tolist()
    others = _in_one_number(costs[:, 1:]) if limits.size > 1 else None
    full_room = int(limits[0]) << PACK_BITS
    least = min_room << PACK_BITS
    (full_other_room,) = _in_one_number(limits[None, 1:])
    borrow = sum(1 << (LIMIT_BITS * (number + 1) - 1) for number in range(limits.size - 1))
    most_open = num_open or len(tokens)
    # Open packs, fullest first: room << PACK_BITS | number. Example: 3 tokens of room in pack 5.
    open_packs: list[int] = []
    other_room: list[int] = []  # of each pack, for the other limits
    packs = [0] * len(tokens)
    mask = (1 << PACK_BITS) - 1
    for sample, length in enumerate(tokens):
        cost = length << PACK_BITS
        position = bisect_left(open_packs, cost)
        if others is not None:
            more = others[sample]
            while position < len(open_packs) and (
                ((other_room[open_packs[position] & mask] | borrow) - more) & borrow != borrow
            ):
                position += 1
        if position < len(open_packs):
            entry = open_packs.pop(position) - cost
        else:
            if len(open_packs) == most_open:
                del open_packs[0]
            entry = (full_room | len(other_room)) - cost
            other_room.append(full_other_room)
        pack = entry & mask
        packs[sample] = pack
        if others is not None:
            other_room[pack] -= others[sample]
        if entry >= least:
            insort(open_packs, entry)
    return np.array(packs, dtype=np.int64)


def _in_one_number(costs: IntArray) -> list[int]:
    """Return each row as one integer of Python, `LIMIT_BITS` a column.

    So one subtraction compares all of them. Example: with 4 bits a column and 8 | 3 - 5 = 6, the
    highest bit is gone: 5 does not fit into 3. 8 | 5 - 3 = 10 keeps it.
    """
    rows = costs.tolist()
    return [sum(value << (LIMIT_BITS * i) for i, value in enumerate(row)) for row in rows]


def _numbered(packs: IntArray) -> IntArray:
    """Number packs by their first sample."""
    _, first, inverse = np.unique(packs, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]  # the rank of each first sample


# -- a measure -> a plan ---------------------------------------------------------------------------

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

SAMPLES_AT_ONCE = 1 << 20
"""Samples that are looked at together, where nothing needs all of them."""

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


class _Group(NamedTuple):
    """The units of a group, with positions from the start of the group."""

    counts: IntArray
    sums: IntArray
    members: IntArray
    tokens: npt.NDArray[np.int32]
    left_out: IntArray


def plan_digest(limits: PackLimits, measure_digest: str) -> str:
    """Return the hash of what decides the units, beside the samples."""
    return settings_digest({"rules": RULES_VERSION, "measure": measure_digest, **limits.as_json()})


def make_plan(
    measure: Measure,
    limits: PackLimits,
    *,
    bad: IntArray | None = None,
    previous: PackPlan | None = None,
    block_packs: int = BLOCK_PACKS,
) -> PackPlan:
    """Plan the packs of a dataset, in memory. Equal arguments give equal plans.

    One process plans a million samples a second, and measuring them takes a minute. So others would
    gain nothing.

    Args:
        measure: The lengths of all samples.
        limits: What a pack may hold.
        bad: int64 [n, 2], (shard, index) of samples that are left out: the bad list.
        previous: An earlier plan of the same settings. Its groups stay as they are, and shards
            that were appended since form new ones.
        block_packs: As for `pack_samples`. More is for plans whose samples are rewritten.

    Raises:
        ConfigError: The condition names no column of the measure, or the earlier plan is of other
            settings, shards or lengths.
    """
    if previous is not None:
        require_first_shards(measure.shards, plan_digest(limits, measure.digest), previous)
        _require_same_lengths(measure, previous)
    finished = [] if previous is None else previous.group_stops.tolist()
    stops = group_stops(_shard_tokens(measure, limits, bad), limits.max_tokens, finished)
    bounds = measure.ends[[0, *stops]].tolist()
    groups = [] if previous is None else _groups_of(previous, bounds)
    digests = [] if previous is None else list(previous.group_digests)
    for first, stop in list(pairwise([0, *stops]))[len(finished) :]:
        part = _part(measure, first, stop)
        chosen = choose(part, limits, _bad_of(bad, first, stop))
        packs = pack_samples(chosen.costs[chosen.is_kept], chosen.limits, block_packs)
        groups.append(_units(part, chosen, packs))
        digests.append(_group_digest(groups[-1]))
    return _joined(measure, limits, stops, bounds, groups, digests)


def plan_in_order(
    measure: Measure, limits: PackLimits, unit_counts: IntArray, stops: list[int]
) -> PackPlan:
    """Return the plan of a dataset whose samples are in the order of their packs.

    Args:
        measure: The lengths of all samples. All of them are packed.
        limits: What the packs were made with.
        unit_counts: int64 [num_units], samples of each pack.
        stops: The stop of each group, in shards. A group ends with a pack.
    """
    ends = measure.ends
    bounds = ends[[0, *stops]].tolist()
    packs = np.repeat(np.arange(unit_counts.size), unit_counts)
    groups = []
    for first, last in pairwise([0, *stops]):
        part, numbers = _part(measure, first, last), packs[ends[first] : ends[last]]
        groups.append(_units(part, choose(part, limits), numbers - numbers[0]))
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
        reasons[~fulfils(limits.where, measure)] = CONDITION
    if bad is not None:
        starts = np.cumsum(measure.counts) - measure.counts
        covered = bad[bad[:, 0] < len(measure.shards)]  # others are of shards without a measure
        reasons[starts[covered[:, 0]] + covered[:, 1]] = ON_BAD_LIST
    reasons[measured < 0] = UNUSABLE
    reasons[measured == NOT_MEASURED] = NOT_CHOSEN
    most_of = np.array([most for _, most in used], dtype=np.int64)
    return Chosen(tokens, np.column_stack([amounts for amounts, _ in used]), most_of, reasons)


def fulfils(where: str, measure: Measure) -> Mask:
    """Return which samples fulfil a condition, bool [num_samples]. Unknown is no."""
    import pyarrow as pa

    from mmstream.dataset.condition import Condition

    condition = Condition.parse(where)
    columns = {name: pa.array(measure.column(name)) for name in condition.names}
    truth = condition.evaluate(columns).fill_null(False)
    return np.asarray(truth.to_numpy(zero_copy_only=False))


def _part(measure: Measure, first: int, stop: int) -> Measure:
    """Return the measure of the shards [first, stop), whose columns are views."""
    samples = slice(int(measure.ends[first]), int(measure.ends[stop]))
    columns = {name: column[samples] for name, column in measure.columns.items()}
    return Measure(measure.shards[first:stop], columns)


def _bad_of(bad: IntArray | None, first: int, stop: int) -> IntArray | None:
    """Return the samples of a bad list in the shards [first, stop), counted from `first`."""
    if bad is None:
        return None
    is_there = (bad[:, 0] >= first) & (bad[:, 0] < stop)
    counted: IntArray = bad[is_there] - np.array([first, 0])
    return counted


def _shard_tokens(measure: Measure, limits: PackLimits, bad: IntArray | None) -> IntArray:
    """Return int64 [num_shards], the tokens that the packed samples of each shard take.

    Some shards come after others: all samples together would take 100 bytes each.
    """
    ends, first = measure.ends, 0
    tokens = np.zeros(len(measure.shards), dtype=np.int64)
    while first < len(measure.shards):
        stop = int(np.searchsorted(ends, ends[first] + SAMPLES_AT_ONCE, side="right")) - 1
        stop = max(stop, first + 1)
        chosen = choose(_part(measure, first, stop), limits, _bad_of(bad, first, stop))
        totals = np.cumsum(np.where(chosen.is_kept, chosen.costs[:, 0], 0))
        totals = np.concatenate([[0], totals])[ends[first : stop + 1] - ends[first]]
        tokens[first:stop] = np.diff(totals)
        first = stop
    return tokens


def _is_plain_text(measure: Measure) -> Mask:
    """Tell which samples are one document of text, of which each token has a label."""
    is_text: Mask = measure.column("num_documents") == 1
    is_text &= measure.column("num_label_tokens") == measure.column("num_tokens") - 1
    for name in ("num_images", "patches", "num_seconds"):
        is_text &= measure.column(name) == 0
    return is_text


def _units(part: Measure, chosen: Chosen, packs: IntArray) -> _Group:
    """Return the units of a group, of the pack of each of its samples."""
    order = np.argsort(packs, kind="stable")
    members = np.flatnonzero(chosen.is_kept)[order]
    tokens = chosen.tokens[members]
    counts = np.bincount(packs).astype(np.int64)
    columns = [part.column(name)[members] for name in _SUMS]
    # A text that is cut has fewer labels than were measured.
    columns[0] = np.minimum(columns[0], np.maximum(tokens - 1, 0))
    summed = np.column_stack([tokens, tokens * tokens, *columns])
    sums = np.add.reduceat(summed, np.cumsum(counts) - counts, axis=0) if counts.size else summed
    out = np.flatnonzero(~chosen.is_kept)
    left_out = np.column_stack([out, chosen.reasons[out], part.column("num_tokens")[out]])
    return _Group(counts, sums, members, tokens.astype(np.int32), left_out)


def require_first_shards(shards: Sequence[ShardInfo], digest: str, previous: PackPlan) -> None:
    """Raise a ConfigError where a plan cannot be continued: it is of other settings or shards.

    Args:
        shards: All shards.
        digest: That of a plan of these settings.
        previous: The plan.
    """
    if previous.digest != digest:
        raise ConfigError(
            "plan: there is a plan of other settings or other lengths; give another name, or "
            "replace it with overwrite=True"
        )
    for shard, planned in zip(shards, previous.shards, strict=False):
        if not is_same_shard(shard, planned):
            raise ConfigError(
                f"plan: {escaped(planned.name)} is another shard than in the plan that is there; "
                "give another name, or replace it with overwrite=True"
            )
    if len(previous.shards) > len(shards):
        raise ConfigError(
            f"plan: there is a plan of {len(previous.shards)} shards, and the dataset has "
            f"{len(shards)}; give another name, or replace it with overwrite=True"
        )


def _require_same_lengths(measure: Measure, previous: PackPlan) -> None:
    """Raise a ConfigError where samples have other lengths now than in an earlier plan."""
    tokens = measure.column("num_tokens")[previous.members]
    if previous.settings.overlong == "truncate":
        tokens = np.minimum(tokens, previous.settings.max_tokens)
    differing = np.flatnonzero(tokens != previous.member_tokens)
    if differing.size:
        first = differing[0]
        position = int(previous.members[first])
        shard = int(np.searchsorted(previous.shard_ends, position, side="right"))
        index = position - int(previous.shard_ends[shard]) + previous.shards[shard].num_samples
        raise ConfigError(
            f"{previous.url or 'plan'}: its lengths are not those of this pipeline: "
            f"{where(previous.shards[shard].name, index)} has {tokens[first]:,} tokens, and "
            f"{previous.member_tokens[first]:,} in the plan; give another name, or replace it with "
            "overwrite=True"
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
                plan.member_tokens[members],
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
    no_units = _Group(
        counts=np.zeros(0, np.int64),
        sums=np.zeros((0, 7), np.int64),
        members=np.zeros(0, np.int64),
        tokens=np.zeros(0, np.int32),
        left_out=np.zeros((0, 3), np.int64),
    )
    moved = [
        group._replace(
            members=group.members + start, left_out=group.left_out + np.array([start, 0, 0])
        )
        for group, start in zip(groups, bounds, strict=False)
    ]
    counts, sums, members, tokens, left_out = map(
        np.concatenate, zip(no_units, *moved, strict=True)
    )
    return PackPlan(
        settings=limits,
        digest=plan_digest(limits, measure.digest),
        shards=measure.shards,
        group_stops=np.array(stops, dtype=np.int64),
        counts=np.array([group.counts.size for group in groups], dtype=np.int64),
        group_digests=tuple(digests),
        spread=_spread(counts, members),
        unit_rows=np.column_stack([np.cumsum(counts) - counts, sums]),
        members=members,
        member_tokens=tokens,
        left_out=left_out,
        lengths=measure.settings,
    )


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


# -- how full the packs of a plan are, and which samples are in none -------------------------------
#


@dataclass(frozen=True)
class LeftOut:
    """Samples that are in no pack.

    Attributes:
        reason: One of `LEFT_OUT_REASONS`.
        num_samples: How many.
        num_tokens: Their tokens, as far as they are known.
    """

    reason: str
    num_samples: int
    num_tokens: int


@dataclass(frozen=True)
class PlanReport:
    """The figures of a plan.

    Attributes:
        num_samples: Samples in packs.
        num_packs: Packs.
        fill: Their tokens, as a share of what they could hold.
        left_out: Samples in no pack, by their reasons.
        spread: Among the bytes of how many packs in a row the samples of a pack lie.
        num_short_groups: Groups that hold less than a full group does, without the last one: each
            comes from an earlier plan that ended there, and has a pack or more that is not full.
    """

    num_samples: int
    num_packs: int
    fill: float
    left_out: tuple[LeftOut, ...]
    spread: int
    num_short_groups: int

    def lines(self, max_tokens: int) -> list[str]:
        """Return the report as lines of text.

        Args:
            max_tokens: T of the plan.
        """
        lines = [
            f"{count_text(self.num_samples, 'sample')} in {count_text(self.num_packs, 'pack')} of "
            f"{max_tokens:,} tokens, {self.fill:.1%} full; samples of a pack lie among "
            f"{count_text(self.spread, 'pack')}"
        ]
        lines += [
            f"left out: {count_text(entry.num_samples, 'sample')}, "
            f"{count_text(entry.num_tokens, 'token')}: {entry.reason}"
            for entry in self.left_out
        ]
        if self.num_short_groups:
            lines.append(
                f"{self.num_short_groups} groups are short, because shards were appended after "
                "them; --overwrite plans all shards again, but runs mid-epoch need the old plan"
            )
        return lines


def plan_report(plan: PackPlan) -> PlanReport:
    """Return how full the packs of a plan are."""
    return PlanReport(
        num_samples=plan.members.size,
        num_packs=plan.num_units,
        fill=plan.fill,
        left_out=left_out_of(plan),
        spread=plan.spread,
        num_short_groups=int((plan.counts[:-1] < GROUP_PACKS).sum()),
    )


def left_out_of(plan: PackPlan) -> tuple[LeftOut, ...]:
    """Return the samples that are in no pack, by their reasons."""
    reasons, tokens = plan.left_out[:, 1], np.maximum(plan.left_out[:, 2], 0)
    return tuple(
        LeftOut(name, int((reasons == number).sum()), int(tokens[reasons == number].sum()))
        for number, name in enumerate(LEFT_OUT_REASONS)
        if (reasons == number).any()
    )
