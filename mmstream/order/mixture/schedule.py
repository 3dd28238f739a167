"""Mixtures, first part: which source the next position of a lane takes.

Weights become whole shares. Shares become a schedule: one period of as many positions as the shares
sum to, repeated without end. Before every position p, each source has been drawn its due number of
times, to less than one sample: |draws - p * share / period| < 1.

All lanes follow the same schedule from different phases, so that a rare source is spread over the
steps. Since a lane begins in the middle of the schedule, its own draws are less than two samples
from their due. `order.py` turns the schedules of all lanes into steps and rows.

Example: shares 3 and 2. The period has 5 positions::

    position   0  1  2  3  4 | 5  6  7  8  9 | 10 ...
    source     0  1  0  0  1 | 0  1  0  0  1 |  0 ...
    draw       0  0  1  2  1 | 3  2  4  5  3 |  6 ...

>>> import numpy as np
>>> schedule = Schedule.from_shares([3, 2])
>>> schedule.source_at(np.arange(7)).tolist()
[0, 1, 0, 0, 1, 0, 1]
>>> schedule.draws_before(0, np.array([0, 1, 4, 7])).tolist()  # of source 0
[0, 1, 3, 4]
>>> schedule.position_of(1, np.array([0, 1, 2, 3])).tolist()  # of the draws of source 1
[1, 4, 6, 9]
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from mmstream.order.permute import random_words
from mmstream.order.settings import require
from mmstream.types import IntArray

MAX_PERIOD = 65_536
"""Largest sum of the shares. A schedule of this length is built in 0.1 s."""

MAX_ROUNDING = 0.05
"""Largest difference between a share and its weight, relative to the weight."""

MAX_CANDIDATES = 32
"""Sets of phases that are compared. Scoring them takes a few hundredths of a second."""


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Return weights as whole numbers without a common divisor.

    Decimals count as they are written: 0.1 and 0.9 are exactly 1 and 9. If the shares would sum to
    more than 65,536, they are rounded to that sum, the largest remainders up.

    Raises:
        ConfigError: no weight is above 0, one is not a number from 0 up, or one is too small
            beside the others to be kept.

    Examples:
        >>> whole_shares([0.5, 0.2, 0])
        [5, 2, 0]
    """
    fractions = [_fraction(weight) for weight in weights]
    total = sum(fractions)
    require(total > 0, f"weights {list(weights)}: at least one must be above 0")
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    shares = _reduced([int(fraction * scale) for fraction in fractions])
    if sum(shares) <= MAX_PERIOD:
        return shares
    exact = [fraction / total * MAX_PERIOD for fraction in fractions]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: MAX_PERIOD - sum(shares)]:
        shares[i] += 1
    for weight, share, exact_share in zip(weights, shares, exact, strict=True):
        require(
            abs(share - exact_share) <= MAX_ROUNDING * exact_share,
            f"weight {weight} of {float(total)} in all is too small to be kept: give whole "
            f"numbers that sum to {MAX_PERIOD:,} at most",
        )
    return _reduced(shares)


def live_shares(weights: Sequence[float]) -> list[int]:
    """Return weights as whole numbers, rounded to thousandths of their sum: at least one, or 0.

    So schedules of weights that change often are short. Errors are those of `whole_shares`.

    Examples:
        >>> live_shares([0.6, 0.399999, 1e-6, 0])
        [600, 400, 1, 0]
    """
    fractions = [_fraction(weight) for weight in weights]
    total = sum(fractions)
    require(total > 0, f"weights {list(weights)}: at least one must be above 0")
    return _reduced([max(1, round(1000 * part / total)) if part else 0 for part in fractions])


def _fraction(weight: float) -> Fraction:
    try:
        valid = not isinstance(weight, bool | str) and math.isfinite(weight) and weight >= 0
    except (TypeError, OverflowError):
        valid = False
    require(valid, f"weight {weight!r}: needs a number from 0")
    return Fraction(str(weight))


def _reduced(shares: list[int]) -> list[int]:
    """Divide shares by their greatest common divisor."""
    divisor = math.gcd(*shares)
    return [share // divisor for share in shares]


@dataclass(frozen=True, eq=False)
class Schedule:
    """An endless schedule over S sources. One period of D positions is stored."""

    sources: IntArray
    """[D] the source of each position."""
    before: npt.NDArray[np.int32]
    """[D + 1, S] draws of each source before each position, and in the whole period."""
    positions: tuple[IntArray, ...]
    """For each source, the positions that take it."""

    @classmethod
    def from_shares(cls, shares: Sequence[int]) -> Schedule:
        """Build the schedule of some shares: unit jobs with windows, earliest deadline first.

        Draw k of a source with share d may come at position floor(k*D/d) or later, and must come
        before position ceil((k+1)*D/d). Such a schedule always exists.

        Sources: Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980; Baruah
        et al., "Proportionate progress", Algorithmica 15, 1996.
        """
        period = sum(shares)
        # Two heaps: (first position allowed, source, draw) of each source's next draw, and
        # (deadline, source, draw) of those that may come now.
        waiting = [(0, source, 0) for source, share in enumerate(shares) if share]
        due: list[tuple[int, int, int]] = []
        sources = np.empty(period, dtype=np.int64)
        for position in range(period):
            while waiting and waiting[0][0] <= position:
                _, source, draw = heapq.heappop(waiting)
                deadline = -(-(draw + 1) * period // shares[source])
                heapq.heappush(due, (deadline, source, draw))
            _, source, draw = heapq.heappop(due)
            sources[position] = source
            if draw + 1 < shares[source]:
                first_position = (draw + 1) * period // shares[source]
                heapq.heappush(waiting, (first_position, source, draw + 1))
        taken = sources[:, None] == np.arange(len(shares))
        before = np.zeros((period + 1, len(shares)), dtype=np.int32)
        np.cumsum(taken, axis=0, out=before[1:])
        positions = tuple(np.flatnonzero(taken[:, source]) for source in range(len(shares)))
        return cls(sources, before, positions)

    @property
    def deviations(self) -> IntArray:
        """[D, S] draws of each source before each position less its due, in 2^-20 of a sample."""
        due = np.arange(self.period)[:, None] * self.shares.astype(np.int64)
        return ((self.before[:-1] * np.int64(self.period) - due) << 20) // self.period

    def positions_like(self, deviations: IntArray) -> IntArray:
        """Return int64 [L]: the position whose deviations are nearest to each lane's [L, S].

        Fourth powers keep the largest difference small. Whole numbers, so that it is the same on
        every machine.
        """
        own = self.deviations >> 10
        nearest = [int((((own - lane) ** 4).sum(axis=1)).argmin()) for lane in deviations >> 10]
        return np.array(nearest, dtype=np.int64)

    @property
    def period(self) -> int:
        """D, positions of a period: the sum of the shares."""
        return self.sources.size

    @property
    def shares(self) -> npt.NDArray[np.int32]:
        """[S] draws of each source in a period."""
        shares: npt.NDArray[np.int32] = self.before[-1]
        return shares

    def source_at(self, positions: IntArray) -> IntArray:
        """Return the source of each position."""
        sources: IntArray = self.sources[positions % self.period]
        return sources

    def draws_before(self, source: IntArray | int, positions: IntArray) -> IntArray:
        """Return how often a source is drawn before each position. The arguments broadcast."""
        periods, offsets = np.divmod(positions, self.period)
        draws: IntArray = periods * self.shares[source] + self.before[offsets, source]
        return draws

    def position_of(self, source: int, draws: IntArray) -> IntArray:
        """Return the position of each draw of a source: the inverse of `draws_before`.

        The share of the source must not be 0.
        """
        periods, offsets = np.divmod(draws, int(self.shares[source]))
        positions: IntArray = periods * self.period + self.positions[source][offsets]
        return positions


def lane_phases(
    schedule: Schedule, grid: tuple[int, int], rows_per_lane: int, *key: int | str
) -> IntArray:
    """Return int64 [P*Q]: the position of the schedule at which each lane begins.

    Evenly spread phases are best for most shares. But if the number of lanes divides a share, all
    lanes would draw that source in the same step. So random sets of phases are compared with the
    even one, and the first of the best is taken: the one whose batches vary least.

    The score of a set is the variance of a source's rows, relative to that of independent draws.
    Its worst value counts, over all sources, and over single steps and whole rounds of P steps.

    Args:
        schedule: the schedule of all lanes.
        grid: (P, Q).
        rows_per_lane: positions that a lane gives to a step of its group.
        key: key of the random sets.
    """
    groups, lanes = grid
    num_lanes = groups * lanes
    period = schedule.period
    num_candidates = min(MAX_CANDIDATES, max(2, (1 << 17) // num_lanes**2))  # memory: their square
    even = np.arange(num_lanes) * period // num_lanes
    phases = random_words((num_candidates - 1) * num_lanes, *key, "phases") % np.uint64(period)
    candidates = np.concatenate([even, phases.astype(np.int64)]).reshape(num_candidates, num_lanes)
    scores = np.zeros(num_candidates)
    for share in schedule.shares.tolist():
        # In one step a lane draws the source rows_per_lane * share / period times, rounded down or
        # up. It rounds up if its phase is on an arc of `extra` out of `period`. Here the schedule
        # counts as evenly spaced.
        extra = rows_per_lane * share % period
        if not extra:
            continue
        arcs = (candidates * share % period).reshape(num_candidates, lanes, groups)
        lanes_of_groups = arcs.transpose(0, 2, 1)
        all_lanes = arcs.reshape(num_candidates, 1, num_lanes)
        for together in (lanes_of_groups, all_lanes):
            size = together.shape[2]
            distance = np.abs(together[:, :, :, None] - together[:, :, None, :])
            both_extra = np.maximum(0, extra - distance) + np.maximum(0, extra - period + distance)
            mean_square = both_extra.sum(axis=(2, 3)).max(axis=1) / period
            variance = mean_square - (size * extra / period) * (size * extra / period)
            independent = size * rows_per_lane * share * (period - share) / period / period
            scores = np.maximum(scores, variance / independent)
    best: IntArray = candidates[int(scores.argmin())]
    return best
