"""Mixtures, second part: from (step, row) to the draw of a lane from a source, and back.

Steps count from the beginning of the run here, over all epochs of the mixture. Step t takes the
next G/Q positions of each of the Q lanes of group t mod P, as in `order/lanes.py`. Each position of
a lane takes the source that the lane's schedule says. A phase lasts from one change of weights to
the next. In a new phase every lane follows a new schedule and goes on counting its draws.

`source.py` turns the draws into samples.

Example: P=2, Q=2, G=4 and shares 3 and 2, so the schedule is 0 1 0 0 1. Each lane gives two rows to
every second step. Without `rotate`, all lanes begin at position 0 of the schedule::

    position of a lane     0  1   2  3   4  5
    source                 0  1   0  0   1  0
    lane draw              0  0   1  2   1  3
    step of lanes 0 and 2  0  0   2  2   4  4
    step of lanes 1 and 3  1  1   3  3   5  5

>>> draws = Draws({0: [3, 2]}, global_batch_size=4, grid=(2, 2), seed=0, rotate=False)
>>> sources, lanes, lane_draws = draws.of_step(2)
>>> sources.tolist(), lanes.tolist(), lane_draws.tolist()
([0, 0, 0, 0], [0, 0, 2, 2], [1, 2, 1, 2])
>>> steps, rows = draws.locate(0, 2, np.array([0, 1, 2, 3]))  # source 0, lane 2
>>> steps.tolist(), rows.tolist()
([0, 2, 2, 4], [2, 2, 3, 3])
>>> draws.before(3).tolist()  # of lanes 0 to 3, from each source
[[3, 1], [1, 1], [3, 1], [1, 1]]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmstream.order.cache import keep
from mmstream.order.checks import require
from mmstream.order.mixture.schedule import Schedule, lane_phases
from mmstream.order.permute import random_words
from mmstream.types import IntArray

NEVER = 1 << 62
"""The step of a draw that is never made, because its source has no weight any more."""

MAX_DRIFT = 64
"""How many draws a lane may be ahead of another when weights change, besides two steps' rows."""

BLOCK_STEPS = 1024
"""Steps whose rotations are drawn together."""


@dataclass(frozen=True, eq=False)
class _Phase:
    """The steps from one change of weights to the next."""

    start: int
    """Its first step."""
    schedule: Schedule
    begins: IntArray
    """[P*Q] position of the schedule at which each lane begins the phase."""
    positions_before: IntArray
    """[P*Q] positions of each lane before the phase."""
    draws_before: IntArray
    """[P*Q, S] draws of each lane from each source before the phase."""

    def schedule_positions(self, lanes: IntArray | slice, positions: IntArray) -> IntArray:
        """Return the positions of the schedule that positions of lanes stand for."""
        return positions - self.positions_before[lanes] + self.begins[lanes]


class Draws:
    """All draws of a mixture, in closed form: any step costs the same.

    Args:
        shares: shares of the sources, by the step from which they hold. One key is step 0.
        global_batch_size: G.
        grid: (P, Q).
        seed: seed of the phases of lanes and of the rotations.
        rotate: whether the rows of a lane are rotated from step to step. Without it, a rank of few
            rows could see one source for ever, if shares and rows have a common period.

    Raises:
        ConfigError: weights change so often that lanes would drift apart.
    """

    def __init__(
        self,
        shares: Mapping[int, Sequence[int]],
        global_batch_size: int,
        grid: tuple[int, int],
        seed: int,
        *,
        rotate: bool,
    ) -> None:
        self.grid = grid
        self.rows_per_lane = global_batch_size // grid[1]
        self._seed = seed
        self._rotate = rotate
        self._rotation_blocks: dict[int, IntArray] = {}
        self._phases: list[_Phase] = []
        num_lanes = grid[0] * grid[1]
        num_sources = len(next(iter(shares.values())))
        positions_before = np.zeros(num_lanes, np.int64)
        draws_before = np.zeros((num_lanes, num_sources), np.int64)
        for number, (start, phase_shares) in enumerate(sorted(shares.items())):
            if self._phases:
                positions_before = self._positions_before(start)
                draws_before = self.before(start)
            schedule = Schedule.from_shares(phase_shares)
            begins = np.zeros(num_lanes, np.int64)
            if rotate:
                begins = lane_phases(schedule, grid, self.rows_per_lane, seed, number)
            self._phases.append(_Phase(start, schedule, begins, positions_before, draws_before))
            drift = int((draws_before.max(axis=0) - draws_before.min(axis=0)).max())
            require(
                drift <= MAX_DRIFT + 2 * self.rows_per_lane,
                f"changes: at step {start} some lanes are {drift} draws ahead of others; change "
                f"weights less often, at steps that {grid[0]} divides",
            )
        self._starts = np.array([phase.start for phase in self._phases])

    def of_step(self, step: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return the source, the lane and the lane draw of each row of a step, int64 [G] each."""
        num_groups, lanes_per_group = self.grid
        round_, group = divmod(step, num_groups)
        phase = self._phases[int(np.searchsorted(self._starts, step, side="right")) - 1]
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
        drawn_at_start = np.array([phase.draws_before[lane, source] for phase in self._phases])
        phase_numbers = np.searchsorted(drawn_at_start, lane_draws, side="right") - 1
        for number in np.unique(phase_numbers):
            phase = self._phases[number]
            if phase.schedule.shares[source]:
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
        phase = [phase for phase in self._phases if phase.start <= step][-1]
        positions = phase.schedule_positions(slice(None), self._positions_before(step))[:, None]
        sources = np.arange(phase.schedule.shares.size)
        drawn_to_here = phase.schedule.draws_before(sources, positions)
        drawn_to_begin = phase.schedule.draws_before(sources, phase.begins[:, None])
        return drawn_to_here - drawn_to_begin + phase.draws_before

    def lanes_by_first_draw(self, source: int) -> IntArray:
        """Return int64 [P*Q]: the lanes in the order in which they first draw from a source."""
        schedule, begins = next(
            (phase.schedule, phase.begins)
            for phase in self._phases
            if phase.schedule.shares[source]
        )
        first_draws = schedule.draws_before(source, begins)
        positions = schedule.position_of(source, first_draws) - begins
        rounds, offsets = np.divmod(positions, self.rows_per_lane)
        lanes = np.arange(self.grid[0] * self.grid[1])
        steps = rounds * self.grid[0] + lanes % self.grid[0]
        return np.lexsort((lanes, offsets, steps))

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
            of_block = self._rotation_blocks.get(int(block))
            if of_block is None:
                words = random_words(BLOCK_STEPS, self._seed, "rows", int(block))
                of_block = (words % np.uint64(self.rows_per_lane)).astype(np.int64)
                keep(self._rotation_blocks, int(block), of_block, most=64)
            in_block = blocks == block
            rotations[in_block] = of_block[steps[in_block] % BLOCK_STEPS]
        return rotations
