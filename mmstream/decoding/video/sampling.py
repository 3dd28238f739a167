"""Which frames of a video are taken. Pure functions of the times of its frames.

A rate is called constant where no frame is more than half a frame away from its place on an even
grid. Clocks of milliseconds make such files too. There the frames are chosen by number, and by time
where the rate varies.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mmstream.types import IntArray

Times = NDArray[np.float64]


def is_constant_rate(times_s: Times) -> bool:
    """Tell whether frames come at a constant rate, within half a frame.

    Examples:
        >>> is_constant_rate(np.array([0, 0.033, 0.067, 0.1]))
        True
        >>> is_constant_rate(np.array([0, 0.1, 0.2, 1.0]))
        False
    """
    if len(times_s) < 3:
        return True
    grid = np.linspace(times_s[0], times_s[-1], len(times_s))
    step = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
    return bool(np.abs(times_s - grid).max() <= step / 2)


def frames_of_span(times_s: Times, span: tuple[float, float] | None) -> IntArray:
    """Return the numbers of the frames within [start, end) seconds.

    Where no frame begins within the span, it is the frame that is on the screen at its start.

    Examples:
        >>> frames_of_span(np.array([0, 0.5, 1.0, 1.5]), (0.5, 1.5)).tolist()
        [1, 2]
        >>> frames_of_span(np.array([0, 0.5, 1.0, 1.5]), (0.6, 0.9)).tolist()
        [1]
    """
    if span is None:
        return np.arange(len(times_s))
    first, end = (int(np.searchsorted(times_s, seconds, side="left")) for seconds in span)
    if end <= first:
        first = max(0, int(np.searchsorted(times_s, span[0], side="right")) - 1)
        end = first + 1
    return np.arange(first, end)


def uniform_number(
    num_frames: int,
    duration_s: float,
    fps: float | None,
    min_frames: int,
    max_frames: int,
    multiple_of: int,
) -> int:
    """Return how many frames to take, at least one.

    Args:
        num_frames: How many there are. No more are taken.
        duration_s: How long they are shown, in seconds.
        fps: How many to take in a second. None: all.
        min_frames: Fewest frames.
        max_frames: Most frames.
        multiple_of: The number is rounded down to a multiple of it, where there is one.

    Examples:
        >>> uniform_number(250, 10.0, 2.0, 4, 768, 2)
        20
        >>> uniform_number(250, 10.0, 0.1, 4, 768, 2)
        4
    """
    # Ten seconds of 30000/1001 frames a second take 19.99999 in floats, and mean 20.
    wanted = num_frames if fps is None else math.floor(duration_s * fps + 1e-6)
    number = min(max(wanted, min_frames), max_frames, num_frames)
    return max(1, number // multiple_of * multiple_of if number >= multiple_of else number)


def uniform_frames(times_s: Times, number: int) -> IntArray:
    """Return the numbers of frames that are spread evenly from the first to the last.

    As many as there are: all of them. With a constant rate they are ``linspace(0, n - 1, number)``,
    rounded. Else they are the frames that are nearest to evenly spread times. A frame that is shown
    for long may be taken repeatedly.

    Examples:
        >>> uniform_frames(np.arange(10) / 25, 4).tolist()
        [0, 3, 6, 9]
        >>> uniform_frames(np.array([0, 0.1, 0.2, 4.0, 6.0]), 4).tolist()
        [0, 2, 3, 4]
    """
    if number == len(times_s):
        return np.arange(number)
    if is_constant_rate(times_s):
        return np.linspace(0, len(times_s) - 1, number).round().astype(np.int64)
    wanted = np.linspace(times_s[0], times_s[-1], number)
    after = np.clip(np.searchsorted(times_s, wanted), 1, len(times_s) - 1)
    is_before_nearer = wanted - times_s[after - 1] <= times_s[after] - wanted
    return np.asarray(after - is_before_nearer, np.int64)
