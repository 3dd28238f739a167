"""Mixtures, first part: which source the next position of a lane takes, and which draw that is.

Weights become whole shares. Shares become a schedule: one period of as many positions as the shares
sum to, repeated without end. Before every position p, each source has been drawn its due number of
times, to less than one sample: |draws - p * share / period| < 1.

All lanes follow the same schedule from different phases, so that a rare source is spread over the
steps. Since a lane begins in the middle of the schedule, its own draws are less than two samples
from their due. `Draws` turns the schedules of all lanes into steps and rows.

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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mmstream.order.any_order import cached
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


# -- (step, row) -> lane draw of a source, and back ------------------------------------------------
#
# Steps count from the beginning of the run here, over all epochs of the mixture. Step t takes the
# next G/Q positions of each of the Q lanes of group t mod P, as in `order/lanes.py`. Each position
# of a lane takes the source that the lane's schedule says. A phase lasts from one change of weights
# to the next. In a new phase every lane follows a new schedule and goes on counting its draws.
#
# `source.py` turns the draws into samples.
#
# Example: P=2, Q=2, G=4 and shares 3 and 2, so the schedule is 0 1 0 0 1. Each lane gives two rows
# to every second step. Without `rotate`, all lanes begin at position 0 of the schedule::
#
#     position of a lane     0  1   2  3   4  5
#     source                 0  1   0  0   1  0
#     lane draw              0  0   1  2   1  3
#     step of lanes 0 and 2  0  0   2  2   4  4
#     step of lanes 1 and 3  1  1   3  3   5  5

NEVER = 1 << 62
"""The step of a draw that is never made, because its source has no weight any more."""

MAX_DRIFT = 64
"""How many draws a lane may be ahead of another when weights change, besides two steps' rows."""

BLOCK_STEPS = 1024
"""Steps whose rotations are drawn together."""


@dataclass(frozen=True, eq=False)
class Phase:
    """The steps from one change of weights to the next."""

    start: int
    """Its first step."""
    shares: tuple[int, ...]
    begins: IntArray
    """[P*Q] position of the schedule at which each lane begins the phase."""
    positions_before: IntArray
    """[P*Q] positions of each lane before the phase."""
    draws_before: IntArray
    """[P*Q, S] draws of each lane from each source before the phase."""
    errors: IntArray
    """[P*Q, S] these draws less their due, in 2^-20 of a sample. The due of a lane begins where its
    first schedule does, so lanes differ by less than one sample."""

    @property
    def schedule(self) -> Schedule:
        """The schedule of the shares. A few are kept, since weights may change a thousand times."""
        return _schedule(self.shares)

    def schedule_positions(self, lanes: IntArray | slice, positions: IntArray) -> IntArray:
        """Return the positions of the schedule that positions of lanes stand for."""
        return positions - self.positions_before[lanes] + self.begins[lanes]


_schedule = lru_cache(64)(Schedule.from_shares)


class Draws:
    """All draws of a mixture, in closed form: any step costs the same.

    Args:
        shares: shares of the sources, by the step from which they hold. One key is step 0.
        global_batch_size: G.
        grid: (P, Q).
        seed: seed of the phases of lanes and of the rotations.
        rotate: whether the rows of a lane are rotated from step to step. Without it, a rank of few
            rows could see one source for ever, if shares and rows have a common period.
        live: those of the steps in `shares` whose shares were set during the run. There each lane
            begins where the schedule is about as far from its due as the lane is: the errors of
            many changes would add else.
        known: the first phases, where they were laid out before.

    Raises:
        ConfigError: weights change so often that lanes would drift apart.

    Examples:
        >>> draws = Draws({0: [3, 2]}, global_batch_size=4, grid=(2, 2), seed=0, rotate=False)
        >>> sources, lanes, lane_draws = draws.of_step(2)  # of the table above
        >>> sources.tolist(), lanes.tolist(), lane_draws.tolist()
        ([0, 0, 0, 0], [0, 0, 2, 2], [1, 2, 1, 2])
        >>> steps, rows = draws.locate(0, 2, np.array([0, 1, 2, 3]))  # source 0, lane 2
        >>> steps.tolist(), rows.tolist()
        ([0, 2, 2, 4], [2, 2, 3, 3])
        >>> draws.before(3).tolist()  # of lanes 0 to 3, from each source
        [[3, 1], [1, 1], [3, 1], [1, 1]]
    """

    def __init__(
        self,
        shares: Mapping[int, Sequence[int]],
        global_batch_size: int,
        grid: tuple[int, int],
        seed: int,
        *,
        rotate: bool,
        live: Collection[int] = (),
        known: Sequence[Phase] = (),
    ) -> None:
        self.grid = grid
        self.rows_per_lane = global_batch_size // grid[1]
        self._seed = seed
        self._rotate = rotate
        self._rotation_blocks: dict[int, IntArray] = {}
        self.phases = list(known)
        num_lanes = grid[0] * grid[1]
        num_sources = len(next(iter(shares.values())))
        positions_before = np.zeros(num_lanes, np.int64)
        draws_before = errors = np.zeros((num_lanes, num_sources), np.int64)
        for number, (start, phase_shares) in enumerate(sorted(shares.items())[len(known) :]):
            number += len(known)
            if self.phases:
                positions_before = self._positions_before(start)
                draws_before = self.before(start)
                errors = self._errors(positions_before, draws_before)
            schedule = _schedule(tuple(phase_shares))
            begins = np.zeros(num_lanes, np.int64)
            if number and start in live:
                begins = schedule.positions_like(errors)
            elif rotate:
                begins = lane_phases(schedule, grid, self.rows_per_lane, seed, number)
            if not number:
                errors = schedule.deviations[begins]
            of_phase = start, tuple(phase_shares), begins
            self.phases.append(Phase(*of_phase, positions_before, draws_before, errors))
            drift = int((draws_before.max(axis=0) - draws_before.min(axis=0)).max())
            require(
                drift <= MAX_DRIFT + 2 * self.rows_per_lane,
                f"changes: at step {start} some lanes are {drift} draws ahead of others; change "
                f"weights less often, at steps that {grid[0]} divides",
            )
        self._starts = np.array([phase.start for phase in self.phases])

    def of_step(self, step: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return the source, the lane and the lane draw of each row of a step, int64 [G] each."""
        num_groups, lanes_per_group = self.grid
        round_, group = divmod(step, num_groups)
        phase = self.phases[int(np.searchsorted(self._starts, step, side="right")) - 1]
        lanes = np.repeat(np.arange(lanes_per_group) * num_groups + group, self.rows_per_lane)
        rows_in_lane = np.tile(np.arange(self.rows_per_lane), lanes_per_group)
        offsets = (rows_in_lane - self._rotations(np.asarray([step]))) % self.rows_per_lane
        positions = phase.schedule_positions(lanes, round_ * self.rows_per_lane + offsets)
        sources = phase.schedule.source_at(positions)
        drawn_to_here = phase.schedule.draws_before(sources, positions)
        drawn_to_begin = phase.schedule.draws_before(sources, phase.begins[lanes])
        lane_draws = drawn_to_here - drawn_to_begin + phase.draws_before[lanes, sources]
        return sources, lanes, lane_draws

    def locate(self, source: int, lane: int, lane_draws: IntArray) -> tuple[IntArray, IntArray]:
        """Return the step and the row of draws of one lane from one source, int64 each.

        This is the inverse of `of_step`. The step is NEVER for a draw that is never made.
        """
        positions = np.full_like(lane_draws, -1)
        drawn_at_start = np.array([phase.draws_before[lane, source] for phase in self.phases])
        phase_numbers = np.searchsorted(drawn_at_start, lane_draws, side="right") - 1
        for number in np.unique(phase_numbers):
            phase = self.phases[number]
            if phase.shares[source]:
                in_phase = phase_numbers == number
                begin = phase.begins[lane]
                drawn_to_begin = phase.schedule.draws_before(source, begin)
                draws = lane_draws[in_phase] - phase.draws_before[lane, source] + drawn_to_begin
                schedule_positions = phase.schedule.position_of(source, draws)
                positions[in_phase] = schedule_positions - begin + phase.positions_before[lane]
        lane_of_group, group = divmod(lane, self.grid[0])
        rounds, offsets = np.divmod(positions, self.rows_per_lane)
        steps = rounds * self.grid[0] + group
        rows_in_lane = (offsets + self._rotations(steps)) % self.rows_per_lane
        rows = lane_of_group * self.rows_per_lane + rows_in_lane
        return np.where(positions < 0, NEVER, steps), rows

    def before(self, step: int) -> IntArray:
        """Return int64 [P*Q, S]: draws of each lane from each source before a step."""
        phase = [phase for phase in self.phases if phase.start <= step][-1]
        positions = phase.schedule_positions(slice(None), self._positions_before(step))[:, None]
        sources = np.arange(phase.schedule.shares.size)
        drawn_to_here = phase.schedule.draws_before(sources, positions)
        drawn_to_begin = phase.schedule.draws_before(sources, phase.begins[:, None])
        return drawn_to_here - drawn_to_begin + phase.draws_before

    def lanes_by_first_draw(self, source: int) -> IntArray:
        """Return int64 [P*Q]: the lanes in the order in which they first draw from a source."""
        phases = [phase for phase in self.phases if phase.shares[source]]
        if not phases:  # live weights took its weight before it began
            return np.arange(self.grid[0] * self.grid[1])
        schedule, begins = phases[0].schedule, phases[0].begins
        first_draws = schedule.draws_before(source, begins)
        positions = schedule.position_of(source, first_draws) - begins
        rounds, offsets = np.divmod(positions, self.rows_per_lane)
        lanes = np.arange(self.grid[0] * self.grid[1])
        steps = rounds * self.grid[0] + lanes % self.grid[0]
        return np.lexsort((lanes, offsets, steps))

    def _errors(self, positions: IntArray, draws: IntArray) -> IntArray:
        """Return int64 [P*Q, S]: the errors after the last phase, in 2^-20 of a sample."""
        phase = self.phases[-1]
        period = sum(phase.shares)
        due = (positions - phase.positions_before)[:, None] * np.array(phase.shares)
        errors: IntArray = phase.errors + (
            (((draws - phase.draws_before) * period - due) << 20) // period
        )
        return errors

    def _positions_before(self, step: int) -> IntArray:
        """Return int64 [P*Q]: positions of each lane before a step."""
        groups = np.arange(self.grid[0] * self.grid[1], dtype=np.int64) % self.grid[0]
        rounds = -(-(step - groups) // self.grid[0])
        return rounds * self.rows_per_lane

    def _rotations(self, steps: IntArray) -> IntArray:
        """Return int64 like `steps`: by how many rows the rows of a lane are rotated in a step."""
        rotations = np.zeros_like(steps)
        if not self._rotate:
            return rotations
        blocks = steps // BLOCK_STEPS
        for block in np.unique(blocks):
            in_block = blocks == block
            rotations[in_block] = self._rotation_block(int(block))[steps[in_block] % BLOCK_STEPS]
        return rotations

    def _rotation_block(self, block: int) -> IntArray:
        def draw() -> IntArray:
            draws = random_words(BLOCK_STEPS, self._seed, "rows", block)
            return (draws % np.uint64(self.rows_per_lane)).astype(np.int64)

        return cached(self._rotation_blocks, block, 64, draw)
