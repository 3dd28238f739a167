"""How full the packs of a plan are, and which samples are in none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmstream.display.text import count_text
from mmstream.packing.plan import LEFT_OUT_REASONS, PackPlan
from mmstream.packing.planner import GROUP_PACKS


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
