"""How well a plan fills its packs, what keeps it from more, and what another length would give.

The bound is best-fit decreasing over all samples of the dataset: hardly anything fills better. It
needs to know how many samples have each length, and no more. So the samples are counted in one pass
over parts of the dataset, and memory does not grow with it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from mmstream.display.text import count_text
from mmstream.packing.measure_file import Measure
from mmstream.packing.plan import LEFT_OUT_REASONS, TOO_LONG, PackPlan
from mmstream.packing.planner import GROUP_PACKS, LIMIT_COLUMNS, choose_in_parts
from mmstream.types import IntArray

STEP_TOKENS = 128
"""Other lengths are multiples of this number of tokens."""


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
        bound: The fill that best-fit decreasing over the whole dataset reaches, or less where
            another limit than tokens allows less. Or that of the plan, where it is fuller.
        binding_limit: What keeps packs from being fuller: "max_tokens", or the setting of the
            limit of which the packs use the largest share.
        left_out: Samples in no pack, by their reasons.
        other_fills: {T: the fill that best-fit decreasing reaches} for other lengths of packs. A
            sample that is longer than T is not counted.
        spread: Among the bytes of how many packs in a row the samples of a pack lie.
        num_short_groups: Groups that hold less than a full group does, without the last one: each
            comes from an earlier plan that ended there, and has a pack or more that is not full.
    """

    num_samples: int
    num_packs: int
    fill: float
    bound: float
    binding_limit: str
    left_out: tuple[LeftOut, ...]
    other_fills: dict[int, float]
    spread: int
    num_short_groups: int

    def lines(self, max_tokens: int) -> list[str]:
        """Return the report as lines of text.

        Args:
            max_tokens: T of the plan.
        """
        lines = [
            f"{count_text(self.num_samples, 'sample')} in {count_text(self.num_packs, 'pack')} of "
            f"{max_tokens:,} tokens, {self.fill:.1%} full (best-fit decreasing: {self.bound:.1%})",
            f"samples of a pack lie among {count_text(self.spread, 'pack')}; {self.binding_limit} "
            "binds",
        ]
        lines += [
            f"left out: {count_text(entry.num_samples, 'sample')}, "
            f"{count_text(entry.num_tokens, 'token')}: {entry.reason}"
            for entry in self.left_out
        ]
        if self.other_fills:
            fills = (f"{length:,}: {fill:.1%}" for length, fill in self.other_fills.items())
            lines.append(f"best-fit decreasing fills packs of other lengths: {', '.join(fills)}")
        if self.num_short_groups:
            lines.append(
                f"{self.num_short_groups} groups are short, because shards were appended after "
                "them; --overwrite plans all shards anew, but runs in mid-epoch need the old plan"
            )
        return lines


def plan_report(plan: PackPlan, measure: Measure, bad: IntArray | None = None) -> PlanReport:
    """Tell how well a plan fills its packs. It takes seconds for a million samples.

    Args:
        plan: The plan.
        measure: The measure that it was made of.
        bad: The bad list that it was made with.
    """
    max_tokens = plan.settings.max_tokens
    lengths = _other_lengths(max_tokens, plan.settings.document_multiple_of)
    shares, kept, usable, tokens = _count(plan, measure, bad, max([max_tokens, *lengths]))
    least = [_num_packs(kept, max_tokens), *np.ceil(shares[1:]).tolist()]
    limits = ["max_tokens", *(name for name in LIMIT_COLUMNS if getattr(plan.settings, name))]
    room = min(int(max(least)), plan.num_units) * max_tokens
    return PlanReport(
        num_samples=plan.members.size,
        num_packs=plan.num_units,
        fill=plan.fill,
        bound=int(plan.member_tokens.sum(dtype=np.int64)) / room if room else 0.0,
        binding_limit=limits[int(np.argmax(shares))],
        left_out=left_out_of(plan),
        other_fills=_other_fills(usable, tokens, lengths),
        spread=plan.spread,
        num_short_groups=int((plan.counts[:-1] < GROUP_PACKS).sum()),
    )


def _num_packs(histogram: IntArray, max_tokens: int) -> int:
    """Return how many packs best-fit decreasing needs.

    Samples of one length are packed at once: the fullest pack that they fit takes as many of them
    as it can, and is the fullest for the next one too.

    Args:
        histogram: int64 [n], how many samples take 0, 1, 2 tokens of a pack, and so on. None takes
            more than `max_tokens`.
        max_tokens: T.
    """
    num_packs = 0
    num_of_room: dict[int, int] = {}
    rooms: list[int] = []  # ascending

    def add(room: int, number: int) -> None:
        if number and room not in num_of_room:
            insort(rooms, room)
        if number:
            num_of_room[room] = num_of_room.get(room, 0) + number

    for length in np.flatnonzero(histogram)[::-1].tolist():
        left = int(histogram[length]) * (length > 0)
        while left:
            position = bisect_left(rooms, length)
            if position == len(rooms):  # new packs: as many as these samples fill
                number = -(-left // (max_tokens // length))
                num_packs += number
                add(max_tokens, number)
            room = rooms[position]
            num_fitting = room // length
            full = min(num_of_room[room], left // num_fitting)
            taken, num_taken = (full, num_fitting) if full else (1, left)
            num_of_room[room] -= taken
            if not num_of_room[room]:
                del num_of_room[room], rooms[position]
            add(room - num_taken * length, taken)
            left -= taken * num_taken
    return num_packs


def left_out_of(plan: PackPlan) -> tuple[LeftOut, ...]:
    """Return the samples that are in no pack, by their reasons."""
    reasons, tokens = plan.left_out[:, 1], np.maximum(plan.left_out[:, 2], 0)
    return tuple(
        LeftOut(name, int((reasons == number).sum()), int(tokens[reasons == number].sum()))
        for number, name in enumerate(LEFT_OUT_REASONS)
        if (reasons == number).any()
    )


def _other_lengths(max_tokens: int, multiple: int) -> list[int]:
    """Return a dozen other lengths of packs, ascending."""
    step = STEP_TOKENS * multiple // gcd(STEP_TOKENS, multiple)
    near = [max_tokens + step * number for number in (-4, -2, -1, 1, 2, 4)]
    far = [max_tokens * number // 8 // step * step for number in (2, 4, 6, 12, 16, 32)]
    return sorted(length for length in {*near, *far} - {max_tokens} if length > 0)


def _other_fills(usable: IntArray, tokens: IntArray, lengths: list[int]) -> dict[int, float]:
    """Return {T: fill of best-fit decreasing} for other lengths of packs."""
    fills = {}
    for length in lengths:
        num_packs = _num_packs(usable[: length + 1], length)
        if num_packs:
            fills[length] = int(tokens[: length + 1].sum()) / (num_packs * length)
    return fills


def _count(
    plan: PackPlan, measure: Measure, bad: IntArray | None, most_tokens: int
) -> tuple[npt.NDArray[np.float64], IntArray, IntArray, IntArray]:
    """Count the samples of a dataset by their lengths. Those above `most_tokens` do not count.

    Returns:
        float64 [k], the packs that each limit needs if nothing is lost, tokens first. Then int64
        [most_tokens + 1] each: how many packed samples take 0, 1, 2 tokens of a pack, and so on;
        the same with those that are only too long for the plan; and the tokens of these.
    """
    kept, usable, tokens = np.zeros((3, most_tokens + 1), dtype=np.int64)
    shares = np.zeros(1)
    for _, chosen in choose_in_parts(measure, plan.settings, bad):
        costs = chosen.costs[chosen.is_kept]
        shares = shares + costs.sum(axis=0) / chosen.limits
        kept += np.bincount(costs[:, 0], minlength=kept.size)
        is_usable = chosen.is_kept | (chosen.reasons == TOO_LONG)
        is_usable &= chosen.costs[:, 0] <= most_tokens
        lengths = chosen.costs[is_usable, 0]
        usable += np.bincount(lengths, minlength=usable.size)
        np.add.at(tokens, lengths, chosen.tokens[is_usable])
    return shares, kept, usable, tokens
