"""What it costs when ranks or nodes share lanes. The loader's log says it.

A rank has the rows from `start` to `stop` of each step. Where all rows of a lane are of one rank,
that rank reads whole ranges. Where several ranks share a lane, each needs a random part of every
range, and reads it in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

READ_ALONG_SAMPLES = 16
"""A range has up to 4 MiB. If it has at least so many samples, they are 256 KiB or less in the
mean, and one that lies between two needed ones is read along."""


def request_factor(range_samples: float, num_lanes: int, row_bounds: Sequence[int]) -> float:
    """Return how many times the requests of whole lanes a number of ranks makes, about.

    A rank that has a fraction f of a lane's rows needs each sample of a range of r samples with
    probability f. It finds them in about f + (r - 1) * f * (1 - f) pieces. Where single samples
    between them are read along, a gap has two samples or more, and f + (r - 1) * f * (1 - f)**2
    pieces are left.

    Args:
        range_samples: r.
        num_lanes: lanes of a step, Q.
        row_bounds: where the rows of each rank begin, and G at the end.

    Examples:
        >>> request_factor(38, num_lanes=64, row_bounds=[0, 128, 256])  # 32 lanes each
        1.0
        >>> request_factor(38, num_lanes=1, row_bounds=[0, 128, 256])  # both have half of each
        10.25
        >>> request_factor(4, num_lanes=1, row_bounds=[0, 128, 256])  # samples of 1 MB
        2.5
    """
    fractions = _fractions(num_lanes, row_bounds)
    least_gap = 2 if range_samples >= READ_ALONG_SAMPLES else 1
    pieces = fractions + (range_samples - 1) * fractions * (1 - fractions) ** least_gap
    return float(pieces.sum() / num_lanes)


def _fractions(num_lanes: int, row_bounds: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return what fraction of a lane's rows each part of a lane is that one rank or node has."""
    rows_per_lane = row_bounds[-1] // num_lanes
    lane_bounds = np.arange(num_lanes + 1) * rows_per_lane
    fractions: npt.NDArray[np.float64] = (
        np.diff(np.union1d(lane_bounds, row_bounds)) / rows_per_lane
    )
    return fractions
