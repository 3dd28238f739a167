"""Mixtures, first part: which source takes a lane's next position.

Weights become whole shares, shares a table of one period. At every place of it each source has had
its due, to less than one sample: |draws - place * share / period| < 1. Lanes walk the same table
from different phases, so that a rare source is spread over steps and never bunched; what a lane has
drawn since it began is then less than two samples from its part.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from mmstream.order.checks import require
from mmstream.order.permute import random_words
from mmstream.types import IntArray

__all__ = ["Table", "lane_phases", "whole_shares"]


MAX_PERIOD = 65_536
"""Shares sum to this at most; a table of it is built in 0.1 s."""

MAX_ROUNDING = 0.05
"""How far a share may lie from its weight, of that weight."""

MAX_CANDIDATES = 32
"""Sets of phases that are looked at; scoring them takes a few hundredths of a second."""


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Return weights as whole numbers without a common divisor, exactly where their sum allows.

    Decimals are taken as they are written, so 0.1 and 0.9 are 1 and 9. Where the sum would pass
    65,536, shares are rounded to that sum (largest remainders first).

    Raises:
        ConfigError: no weight is above 0, or one is too small beside the others.
    """
    fractions = [_fraction(weight) for weight in weights]
    total = sum(fractions)
    require(total > 0, f"weights {list(weights)}: at least one must be above 0")
    scale = math.lcm(*(part.denominator for part in fractions))
    shares = [int(part * scale) for part in fractions]
    shares = [share // math.gcd(*shares) for share in shares]
    if sum(shares) > MAX_PERIOD:
        exact = [part / total * MAX_PERIOD for part in fractions]
        shares = [int(part) for part in exact]
        by_rest = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
        for i in by_rest[: MAX_PERIOD - sum(shares)]:
            shares[i] += 1
        for weight, share, part in zip(weights, shares, exact, strict=True):
            require(
                abs(share - part) <= MAX_ROUNDING * part,
                f"weight {weight} of {float(total)} in all is too small to be kept: give whole "
                f"numbers that sum to {MAX_PERIOD:,} at most",
            )
        shares = [share // math.gcd(*shares) for share in shares]
    return shares


def _fraction(weight: float) -> Fraction:
    try:
        plain = not isinstance(weight, bool | str) and math.isfinite(weight) and weight >= 0
    except (TypeError, OverflowError):
        plain = False
    require(plain, f"weight {weight!r}: needs a number from 0")
    return Fraction(str(weight))


@dataclass(frozen=True, eq=False)
class Table:
    """One period of an endless schedule over S sources, D places long."""

    source: IntArray
    """[D] which source takes each place."""
    before: npt.NDArray[np.int32]
    """[D + 1, S] draws of each source before each place."""
    places: tuple[IntArray, ...]
    """Of each source, the places that it takes."""

    @classmethod
    def of(cls, shares: Sequence[int]) -> Table:
        """Build the table of some shares: unit jobs with windows, the earliest deadline first.

        The k-th draw of a source of share d may come from place floor(k*D/d) on and must come
        before ceil((k+1)*D/d); such a schedule always exists.

        Sources: Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980; Baruah
        et al., "Proportionate progress", Algorithmica 15, 1996.
        """
        period = sum(shares)
        released = [(0, s, 0) for s, share in enumerate(shares) if share]
        due: list[tuple[int, int, int]] = []
        source = np.empty(period, dtype=np.int64)
        for place in range(period):
            while released and released[0][0] <= place:
                _, s, draw = heapq.heappop(released)
                heapq.heappush(due, (-(-(draw + 1) * period // shares[s]), s, draw))
            _, s, draw = heapq.heappop(due)
            source[place] = s
            if draw + 1 < shares[s]:
                heapq.heappush(released, ((draw + 1) * period // shares[s], s, draw + 1))
        before = np.zeros((period + 1, len(shares)), dtype=np.int32)
        np.cumsum(source[:, None] == np.arange(len(shares)), axis=0, out=before[1:])
        return cls(source, before, tuple(np.flatnonzero(source == s) for s in range(len(shares))))

    @property
    def shares(self) -> npt.NDArray[np.int32]:
        """[S] draws of each source in a period."""
        shares: npt.NDArray[np.int32] = self.before[-1]
        return shares

    def source_at(self, place: IntArray) -> IntArray:
        """Return which source takes each place of the endless schedule."""
        found: IntArray = self.source[place % self.source.size]
        return found

    def draws(self, source: IntArray | int, place: IntArray) -> IntArray:
        """Return how often sources are drawn before places of the endless schedule."""
        turn, inside = np.divmod(place, self.source.size)
        found: IntArray = turn * self.shares[source] + self.before[inside, source]
        return found

    def place(self, source: int, draw: IntArray) -> IntArray:
        """Return the places of a source's draws: `draws` the other way. Its share is above 0."""
        turn, inside = np.divmod(draw, int(self.shares[source]))
        found: IntArray = turn * self.source.size + self.places[source][inside]
        return found


def lane_phases(table: Table, grid: tuple[int, int], share: int, *key: int | str) -> IntArray:
    """Return int64 [P*Q]: the place of the table at which each lane begins.

    Evenly spread phases are best for most shares, but where one divides by the number of lanes, all
    of them would draw a rare source in the same step. So random sets are looked at too, and the
    first of those is taken whose batches vary least: by the variance of a source's rows in a step
    and in P steps, beside that of independent draws, as if the table spaced each source evenly.

    Args:
        table: the schedule.
        grid: (P, Q).
        share: positions that a lane gives to a step of its group.
        key: of the random sets.
    """
    groups, lanes = grid
    period, num_lanes = table.source.size, groups * lanes
    num_sets = min(MAX_CANDIDATES, max(2, (1 << 17) // num_lanes**2))
    words = random_words((num_sets - 1) * num_lanes, *key, "phases") % np.uint64(period)
    sets = np.concatenate([np.arange(num_lanes) * period // num_lanes, words.astype(np.int64)])
    sets = sets.reshape(num_sets, num_lanes)
    worst = np.zeros(num_sets)
    for drawn in table.shares.tolist():
        more = share * drawn % period  # a lane draws so many of `period` times one more
        if not more:
            continue
        arc = (sets * drawn % period).reshape(num_sets, lanes, groups)
        for together in (arc.transpose(0, 2, 1), arc.reshape(num_sets, 1, num_lanes)):
            size = together.shape[2]
            apart = np.abs(together[:, :, :, None] - together[:, :, None, :])
            both = np.maximum(0, more - apart) + np.maximum(0, more - period + apart)
            square = both.sum(axis=(2, 3)).max(axis=1) / period
            variance = square - (size * more / period) * (size * more / period)
            alone = size * share * drawn * (period - drawn) / period / period
            worst = np.maximum(worst, variance / alone)
    best: IntArray = sets[int(worst.argmin())]
    return best
