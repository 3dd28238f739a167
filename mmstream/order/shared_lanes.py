"""What it costs when ranks share lanes: more and shorter reads. The loader's log says it.

A rank has the rows from `start` to `stop` of each step. Where all rows of a lane are of one rank,
that rank reads whole ranges. Where several ranks share a lane, each needs a random part of every
range, and reads it in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["request_factor"]


def request_factor(range_samples: float, num_lanes: int, row_bounds: Sequence[int]) -> float:
    """Return how many times the requests of whole lanes a number of ranks makes, about.

    A rank that has a fraction f of a lane's rows needs each sample of a range of r samples with
    probability f. It finds them in about f + (r - 1) * f * (1 - f) pieces, so all ranks together
    make 1 + (r - 1) * (1 - sum of f * f) requests for the range.

    Args:
        range_samples: r.
        num_lanes: lanes of a step, Q.
        row_bounds: where the rows of each rank begin, and G at the end.

    Examples:
        >>> request_factor(38, num_lanes=64, row_bounds=[0, 128, 256])  # 32 lanes each
        1.0
        >>> request_factor(38, num_lanes=1, row_bounds=[0, 128, 256])  # both have half of each
        19.5
    """
    rows_per_lane = row_bounds[-1] // num_lanes
    lane_bounds = np.arange(num_lanes + 1) * rows_per_lane
    fractions = np.diff(np.union1d(lane_bounds, row_bounds)) / rows_per_lane
    kept_together = float((fractions**2).sum() / num_lanes)
    return 1 + (range_samples - 1) * (1 - kept_together)
