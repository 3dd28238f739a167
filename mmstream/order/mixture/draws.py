"""Mixtures, second part: which draw of which source each row of a step is, and the way back.

Steps T count from the beginning of the run. Step T takes the next G/Q positions of each of the Q
lanes of group T mod P; a lane's positions walk a schedule. Where weights change, at a declared
step, every lane turns to another schedule and goes on counting its draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmstream.order.checks import keep, require
from mmstream.order.mixture.schedule import Table, lane_phases
from mmstream.order.permute import random_words
from mmstream.types import IntArray

__all__ = ["NEVER", "Draws"]


NEVER = 1 << 62
"""The step of a draw that no step makes: its source has no weight any more."""

MAX_DRIFT = 64
"""Draws that a lane may be ahead of another, beside two steps' worth, when weights change."""

BLOCK = 1024
"""Steps whose rotations are drawn together."""


@dataclass(frozen=True, eq=False)
class _Phase:
    """The time between two changes of weights."""

    start: int
    """Its first step."""
    table: Table
    begins: IntArray
    """[P*Q] place of the table at which each lane begins."""
    positions: IntArray
    """[P*Q] positions of each lane before it."""
    done: IntArray
    """[P*Q, S] draws of each lane and source before it."""

    def place(self, lane: IntArray | slice, position: IntArray) -> IntArray:
        return position - self.positions[lane] + self.begins[lane]


class Draws:
    """All draws of a mixture, in closed form.

    Args:
        shares: of each source, by the step from which they hold; one of them is step 0.
        global_batch_size: G.
        grid: (P, Q).
        seed: of the lanes' phases and the rotations.
        rotate: whether rows of a lane are rotated from step to step: else a rank of few rows would
            see one source for ever where shares and rows have a common period.

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
        self.grid, self.share = grid, global_batch_size // grid[1]
        self._seed, self._rotate = seed, rotate
        self._blocks: dict[int, IntArray] = {}
        lanes, sources = grid[0] * grid[1], len(next(iter(shares.values())))
        positions, done = np.zeros(lanes, np.int64), np.zeros((lanes, sources), np.int64)
        self._phases: list[_Phase] = []
        for number, (start, now) in enumerate(sorted(shares.items())):
            if self._phases:
                positions, done = self._positions(start), self.before(start)
            table = Table.of(now)
            begins = lane_phases(table, grid, self.share, seed, number) if rotate else 0 * positions
            self._phases.append(_Phase(start, table, begins, positions, done))
            drift = int((done.max(axis=0) - done.min(axis=0)).max())
            require(
                drift <= MAX_DRIFT + 2 * self.share,
                f"changes: at step {start} some lanes are {drift} draws ahead of others; change "
                f"weights less often, at steps that {grid[0]} divides",
            )
        self._starts = np.array([phase.start for phase in self._phases])

    def step(self, step: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return the source, the lane and the draw of that lane and source, int64 [G] each."""
        groups, lanes = self.grid
        turn, group = divmod(step, groups)
        phase = self._phases[int(np.searchsorted(self._starts, step, side="right")) - 1]
        lane = np.repeat(np.arange(lanes) * groups + group, self.share)
        rotation = self._rotation(np.asarray([step]))
        inside = (np.tile(np.arange(self.share), lanes) - rotation) % self.share
        place = phase.place(lane, turn * self.share + inside)
        source = phase.table.source_at(place)
        draw = phase.table.draws(source, place) - phase.table.draws(source, phase.begins[lane])
        return source, lane, draw + phase.done[lane, source]

    def when(self, source: int, lane: int, draw: IntArray) -> tuple[IntArray, IntArray]:
        """Return the step and the row of draws of one lane and source; `step` the other way.

        The step is NEVER where no step makes the draw.
        """
        position = np.full_like(draw, -1)
        done = np.array([phase.done[lane, source] for phase in self._phases])
        numbers = np.searchsorted(done, draw, side="right") - 1
        for number in np.unique(numbers):
            phase, here = self._phases[number], numbers == number
            if phase.table.shares[source]:
                begin = phase.begins[lane]
                before = phase.table.draws(source, begin) - phase.done[lane, source]
                place = phase.table.place(source, draw[here] + before)
                position[here] = place - begin + phase.positions[lane]
        column, group = divmod(lane, self.grid[0])
        turn, inside = np.divmod(position, self.share)
        steps = turn * self.grid[0] + group
        rows = column * self.share + (inside + self._rotation(steps)) % self.share
        return np.where(position < 0, NEVER, steps), rows

    def before(self, step: int) -> IntArray:
        """Return int64 [P*Q, S]: draws of each lane and source before a step."""
        phases = [phase for phase in self._phases if phase.start <= step]
        phase = phases[-1]
        every = slice(None)
        places = phase.place(every, self._positions(step))[:, None]
        sources = np.arange(phase.table.shares.size)
        draws = phase.table.draws(sources, places)
        return draws - phase.table.draws(sources, phase.begins[:, None]) + phase.done

    def first(self, source: int) -> IntArray:
        """Return int64 [P*Q]: lanes in the order of their first draws of a source."""
        phase = next(phase for phase in self._phases if phase.table.shares[source])
        ahead = phase.table.draws(source, phase.begins)
        inside = phase.table.place(source, ahead) - phase.begins
        turn, place = np.divmod(inside, self.share)
        lane = np.arange(self.grid[0] * self.grid[1])
        return np.lexsort((lane, place, turn * self.grid[0] + lane % self.grid[0]))

    def _positions(self, step: int) -> IntArray:
        group = np.arange(self.grid[0] * self.grid[1], dtype=np.int64) % self.grid[0]
        return np.maximum(0, -(-(step - group) // self.grid[0])) * self.share

    def _rotation(self, steps: IntArray) -> IntArray:
        """Return by how many rows a lane's rows of each step are rotated."""
        if not self._rotate:
            return np.zeros_like(steps)
        rotation = np.zeros_like(steps)
        for block in np.unique(steps // BLOCK):
            words = self._blocks.get(int(block))
            if words is None:
                drawn = random_words(BLOCK, self._seed, "rows", int(block))
                words = (drawn % np.uint64(self.share)).astype(np.int64)
                keep(self._blocks, int(block), words, most=64)
            here = steps // BLOCK == block
            rotation[here] = words[steps[here] % BLOCK]
        return rotation
