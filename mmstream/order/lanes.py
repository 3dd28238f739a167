"""From the rows of a step to the slots of an epoch. `Order` uses it before `chunks.py`.

The S full steps of an epoch use its first S*G slots. These are cut into P*Q contiguous lanes of
about the same size. Lane q*P + p is lane q of group p. Step t draws from the Q lanes of group
t mod P, and takes G/Q consecutive positions of each. The lanes of one group lie far apart, so a
step mixes distant samples.

The positions of a lane are mixed in two ways. A lane is cut into K segments, and consecutive
positions come from different segments (`interleaved`). Then each M consecutive positions, called
a window, are permuted. The first window of lane l has only 1 + l*M//(P*Q) positions. So the
windows of different lanes end at different steps, and reading spreads evenly over time. Window w of
lane l has the number w*P*Q + l, in every epoch.

Example: P=2, Q=2, G=4, and three shards of 5 samples: 15 slots, 3 full steps, 3 slots left over.
Here is the lane of each slot, and the step and row that each position of a lane belongs to::

    lane         0           1       2           3
    group        0           1       0           1
    slots        0 1 2 3     4 5     6 7 8 9     10 11
    step         0 0 2 2     1 1     0 0 2 2      1  1
    row          0 1 0 1     0 1     2 3 2 3      2  3

With M=3 the first windows have 1, 1, 2 and 3 positions::

    window       0 4 4 4     1 5     2 2 6 6      3  3

>>> lanes = Lanes(
...     num_steps=3, global_batch_size=4, grid=(2, 2), window=3, interleave=2, shuffle=True
... )
>>> lanes.sizes.tolist(), lanes.starts.tolist()
([4, 2, 4, 2], [0, 4, 6, 10])
>>> [lanes.first_window(lane) for lane in range(4)]
[1, 1, 2, 3]
>>> rows = np.arange(4)
>>> [lanes.windows_of_step(step, rows).tolist() for step in range(3)]
[[0, 4, 2, 2], [1, 5, 3, 3], [4, 4, 6, 6]]
>>> steps, rows = lanes.steps_and_rows(4)  # the second window of lane 0
>>> steps.tolist(), rows.tolist()
([0, 2, 2], [1, 0, 1])
>>> mixed = {number: lanes.mixed_positions(number, seed=0, epoch=0) for number in range(7)}
>>> sorted(mixed[4].tolist())  # window 0 has position 0
[1, 2, 3]
>>> lanes.slots_of_step(2, np.array([0, 1]), mixed.__getitem__).tolist()
[2, 1]
>>> lanes.slots(4, mixed[4]).tolist()  # the first one is row 1 of step 0
[3, 2, 1]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from mmstream.order.permute import permutation
from mmstream.types import IntArray

IntOrArray = TypeVar("IntOrArray", int, IntArray)


@dataclass(frozen=True)
class Lanes:
    """How the full steps of an epoch draw from its slots. It holds integers only."""

    num_steps: int
    """Full steps of an epoch."""
    global_batch_size: int
    """G, rows of a step over all ranks."""
    grid: tuple[int, int]
    """(P, Q): groups of lanes, and lanes of a group."""
    window: int
    """M, positions that are permuted together."""
    interleave: int
    """K, segments of a lane that consecutive positions come from. 1 where nothing is shuffled."""
    shuffle: bool

    @property
    def num_lanes(self) -> int:
        """P * Q."""
        return self.grid[0] * self.grid[1]

    @property
    def rows_per_lane(self) -> int:
        """Rows that a lane gives to each step of its group: G / Q."""
        return self.global_batch_size // self.grid[1]

    @cached_property
    def sizes(self) -> IntArray:
        """[P*Q] positions of each lane. Their sum is the number of slots of all full steps."""
        num_groups = self.grid[0]
        groups = np.arange(self.num_lanes, dtype=np.int64) % num_groups
        steps_per_group = (self.num_steps - groups + num_groups - 1) // num_groups
        return steps_per_group * self.rows_per_lane

    @cached_property
    def starts(self) -> IntArray:
        """[P*Q] first slot of each lane."""
        return np.cumsum(self.sizes) - self.sizes

    def first_window(self, lane: IntOrArray) -> IntOrArray:
        """Return the length of a lane's first window, from 1 to M."""
        return 1 + lane * self.window // self.num_lanes if self.shuffle else lane * 0 + self.window

    def windows_of_step(self, step: int, rows: IntArray) -> IntArray:
        """Return the number of the window that each of some rows of a full step comes from."""
        lanes, positions = self._positions(step, rows)
        # At most M positions are before the end of the first window: -M // M + 1 is window 0.
        windows = (positions - self.first_window(lanes)) // self.window + 1
        return windows * self.num_lanes + lanes

    def slots_of_step(
        self, step: int, rows: IntArray, mixed_positions: Callable[[int], IntArray]
    ) -> IntArray:
        """Return the slot of each of some rows of a full step.

        Args:
            step: a full step.
            rows: rising; those of a lane follow one another.
            mixed_positions: returns what the method of this name returns for a window.
        """
        lanes, positions = self._positions(step, rows)
        if not self.shuffle:
            return self.starts[lanes] + positions
        if self.window > 1:
            numbers = self.windows_of_step(step, rows)
            lengths = self.first_window(lanes) + numbers // self.num_lanes * self.window
            offsets = positions - np.maximum(0, lengths - self.window)
            # Rows of the same window lie side by side, there and here.
            begins = np.flatnonzero(np.diff(numbers, prepend=-1))
            sizes = np.diff(begins, append=numbers.size)
            positions = np.concatenate(
                [
                    mixed_positions(number)[offset : offset + size]
                    for number, offset, size in zip(
                        numbers[begins].tolist(),
                        offsets[begins].tolist(),
                        sizes.tolist(),
                        strict=True,
                    )
                ]
            )
        return self.starts[lanes] + interleaved(positions, self.sizes[lanes], self.interleave)

    def _positions(self, step: int, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Return the lane of each row of a full step, and the row's position in it."""
        num_groups = self.grid[0]
        round_, group = divmod(step, num_groups)
        lanes_of_group, offsets = np.divmod(rows, self.rows_per_lane)
        return lanes_of_group * num_groups + group, round_ * self.rows_per_lane + offsets

    def steps_and_rows(self, number: int) -> tuple[IntArray, IntArray]:
        """Return the step and the row of each position of a window, in the order of delivery."""
        num_groups = self.grid[0]
        lane = number % self.num_lanes
        lane_of_group, group = divmod(lane, num_groups)
        steps_before, offsets = np.divmod(np.arange(*self._span(number)), self.rows_per_lane)
        steps = steps_before * num_groups + group
        rows = lane_of_group * self.rows_per_lane + offsets
        return steps, rows

    def mixed_positions(self, number: int, seed: int, epoch: int) -> IntArray:
        """Return the positions of a lane that a window covers, as it permutes them."""
        start, stop = self._span(number)
        if not self.shuffle:
            return np.arange(start, stop)
        return start + permutation(stop - start, seed, epoch, "window", number)

    def slots(self, number: int, mixed_positions: IntArray) -> IntArray:
        """Return the slot of each position of a window, in the order of delivery."""
        lane = number % self.num_lanes
        size = int(self.sizes[lane])
        return int(self.starts[lane]) + interleaved(mixed_positions, size, self.interleave)

    def _span(self, number: int) -> tuple[int, int]:
        """Return the positions [start, stop) of a lane that a window covers."""
        window, lane = divmod(number, self.num_lanes)
        stop = self.first_window(lane) + window * self.window
        start = max(0, stop - self.window)
        return start, min(int(self.sizes[lane]), stop)


def interleaved(positions: IntArray, size: int | IntArray, num_segments: int) -> IntArray:
    """Return the offsets of positions in their lane, so that neighbours are of other segments.

    Args:
        positions: int64, each from 0 to size-1.
        size: positions of the lane, or of the lane of each position.
        num_segments: K. The first ``size % K`` segments have one position more than the others.

    Returns:
        int64 like `positions`: offsets from the start of the lane.

    Example: 7 positions in 3 segments: offsets 0 1 2, 3 4 and 5 6.

    >>> interleaved(np.arange(7), size=7, num_segments=3).tolist()
    [0, 3, 5, 1, 4, 6, 2]
    """
    short_length, num_longer = divmod(size, num_segments)
    segments = positions % num_segments
    offsets_in_segment = positions // num_segments
    segment_starts = segments * short_length + np.minimum(segments, num_longer)
    return segment_starts + offsets_in_segment


# -- what it costs when ranks share lanes ----------------------------------------------------------
#
# A rank has the rows from `start` to `stop` of each step. Where all rows of a lane are of one rank,
# that rank reads whole ranges. Where several ranks share a lane, each needs a random part of every
# range, and reads it in pieces.

READ_ALONG_SAMPLES = 16
"""A range has up to 4 MiB. If it has at least this many samples, they are 256 KiB or less in the
mean, and one that lies between two needed ones is read along."""


def request_factor(
    range_samples: float,
    num_lanes: int,
    row_bounds: Sequence[int],
    gap_share: float = 0.0,
    least_gap: int | None = None,
) -> float:
    """Return how many times the requests of whole lanes a number of ranks makes, about.

    A rank that has a fraction f of a lane's rows needs each sample of a range of r samples with
    probability f. It finds them in about f + (r - 1) * f * (1 - f) pieces. Where single samples
    between them are read along, a gap has two samples or more, and f + (r - 1) * f * (1 - f)**2
    pieces are left. In a view, f * (1 - g) stands in place of f in parentheses: only a share 1 - g
    of the samples has a chosen one right before it.

    Args:
        range_samples: r.
        num_lanes: lanes of a step, Q.
        row_bounds: where the rows of each rank begin, and G at the end.
        gap_share: g.
        least_gap: samples between two needed ones that are not read along. None: by r.

    Examples:
        >>> request_factor(38, num_lanes=64, row_bounds=[0, 128, 256])  # 32 lanes each
        1.0
        >>> request_factor(38, num_lanes=1, row_bounds=[0, 128, 256])  # both have half of each
        10.25
        >>> request_factor(4, num_lanes=1, row_bounds=[0, 128, 256])  # samples of 1 MB
        2.5
        >>> request_factor(38, 64, [0, 256], 0.5, least_gap=1)  # a view of a random half
        19.5
    """
    rows_per_lane = row_bounds[-1] // num_lanes
    lane_bounds = np.arange(num_lanes + 1) * rows_per_lane
    # What fraction of a lane's rows each part of a lane is that one rank has.
    fractions = np.diff(np.union1d(lane_bounds, row_bounds)) / rows_per_lane
    least_gap = least_gap or (2 if range_samples >= READ_ALONG_SAMPLES else 1)
    gaps = (1 - fractions * (1 - gap_share)) ** least_gap
    pieces = fractions + (range_samples - 1) * fractions * gaps
    return float(pieces.sum() / num_lanes)
