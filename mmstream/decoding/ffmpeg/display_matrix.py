"""How the frames of a video are turned to be shown: what the matrix of a track means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Turn(NamedTuple):
    """What a player does with each stored frame."""

    rotation: int
    """Degrees clockwise: 0, 90, 180 or 270."""
    is_flipped: bool = False
    """Whether the frame is turned upside down before that, as in a mirror."""


UPRIGHT = Turn(0)
"""Nothing is done."""


def turn_of(matrix: Sequence[int]) -> Turn:
    """Return what a matrix means (ISO 14496-12, section 6.2.2).

    Args:
        matrix: At least its first five numbers: ``x' = a x + c y`` and ``y' = b x + d y`` are
            stored as a, b, 0, c, d, in any fixed point.

    Examples:
        >>> turn_of([0, 1, 0, -1, 0])
        Turn(rotation=90, is_flipped=False)
        >>> turn_of([-1, 0, 0, 0, 1])  # left and right are exchanged
        Turn(rotation=180, is_flipped=True)
    """
    a, b, _, c, d = matrix[:5]
    rotation = round(math.degrees(math.atan2(b, a)) / 90) * 90 % 360
    return Turn(rotation, a * d - b * c < 0)
