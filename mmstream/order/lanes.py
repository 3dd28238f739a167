"""Order, second half: steps of an epoch to slots, by lanes and windows. Integers only.

The slots of the full steps are cut into P*Q contiguous lanes. Lane q*P + p is lane q of group p;
step t takes G/Q consecutive positions from each of the Q lanes of group t mod P. With this
numbering a step's lanes lie far apart in the epoch. Within a lane, positions are interleaved
from K places (round-robin over K equal parts) and permuted a window of M at a time; the first
window of lane l has 1 + l*M//(P*Q), so that windows end one after another and never all at once.

A window's number is ``w*P*Q + lane``, the same in every epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmstream.order.permute import permutation
from mmstream.types import IntArray

__all__ = ["Lanes", "interleaved"]


@dataclass(frozen=True)
class Lanes:
    """How the full steps of an epoch draw from its slots."""

    num_steps: int
    """Full steps of an epoch."""
    global_batch_size: int
    grid: tuple[int, int]
    """(P, Q): groups of lanes, and lanes of a group."""
    window: int
    """M, positions that are permuted together."""
    interleave: int
    """K, places of a lane that consecutive positions come from."""
    shuffle: bool

    @property
    def num_lanes(self) -> int:
        """P * Q."""
        return self.grid[0] * self.grid[1]

    @property
    def share(self) -> int:
        """Rows that a lane gives to each step of its group: G / Q."""
        return self.global_batch_size // self.grid[1]

    @cached_property
    def sizes(self) -> IntArray:
        """Positions of each lane; they sum to the slots of all full steps."""
        groups = self.grid[0]
        group = np.arange(self.num_lanes, dtype=np.int64) % groups
        return (self.num_steps - group + groups - 1) // groups * self.share

    @cached_property
    def starts(self) -> IntArray:
        """First slot of each lane."""
        return np.cumsum(self.sizes) - self.sizes

    def first_window(self, lane: int) -> int:
        """Return the length of a lane's first window."""
        return 1 + lane * self.window // self.num_lanes if self.shuffle else self.window

    def windows_of_step(self, step: int) -> IntArray:
        """Return int64 [G]: the number of the window that each row of a full step is drawn from."""
        groups = self.grid[0]
        position = step // groups * self.share + np.arange(self.share)
        rows = []
        for lane in range(step % groups, self.num_lanes, groups):
            later = (position - self.first_window(lane)) // self.window + 1
            rows.append(np.maximum(later, 0) * self.num_lanes + lane)
        return np.concatenate(rows)

    def steps_and_rows(self, number: int) -> tuple[IntArray, IntArray]:
        """Return the step and the row of everything that a window delivers, in order."""
        groups = self.grid[0]
        lane = number % self.num_lanes
        turn, place = np.divmod(np.arange(*self._span(number)), self.share)
        return turn * groups + lane % groups, lane // groups * self.share + place

    def slots(self, number: int, seed: int, epoch: int) -> IntArray:
        """Return the slots that a window delivers, in order."""
        lane = number % self.num_lanes
        start, stop = self._span(number)
        if not self.shuffle:
            return np.arange(start, stop)
        drawn = start + permutation(stop - start, seed, epoch, "window", number)
        slots: IntArray = self.starts[lane] + interleaved(
            drawn, int(self.sizes[lane]), self.interleave
        )
        return slots

    def _span(self, number: int) -> tuple[int, int]:
        """Return the positions [start, stop) of a lane that a window covers."""
        window, lane = divmod(number, self.num_lanes)
        first = self.first_window(lane)
        start = first + (window - 1) * self.window if window else 0
        return start, min(int(self.sizes[lane]), first + window * self.window)


def interleaved(drawn: IntArray, size: int, places: int) -> IntArray:
    """Return where positions of a lane lie in it: consecutive ones come from all of its places."""
    each, longer = divmod(size, places)
    place, inside = drawn % places, drawn // places
    return place * each + np.minimum(place, longer) + inside
