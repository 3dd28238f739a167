"""Which frames of a video are taken. Pure functions of the times of its frames.

A rate is called constant where no frame is more than half a frame away from its place on an even
grid. Clocks of milliseconds make such files too. There the frames are chosen by number, and by time
where the rate varies.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from mmstream.errors import DecodeError
from mmstream.types import IntArray

__all__ = [
    "frames_of_span",
    "is_constant_rate",
    "qwen2_vl_frames",
    "qwen3_vl_frames",
    "uniform_frames",
    "uniform_number",
]

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

    With a constant rate they are ``linspace(0, n - 1, number)``, rounded. Else they are the frames
    that are nearest to evenly spread times. A frame that is shown for long may be taken repeatedly.

    Examples:
        >>> uniform_frames(np.arange(10) / 25, 4).tolist()
        [0, 3, 6, 9]
        >>> uniform_frames(np.array([0, 0.1, 0.2, 4.0, 6.0]), 4).tolist()
        [0, 2, 3, 4]
    """
    if is_constant_rate(times_s):
        return np.linspace(0, len(times_s) - 1, number).round().astype(np.int64)
    wanted = np.linspace(times_s[0], times_s[-1], number)
    after = np.clip(np.searchsorted(times_s, wanted), 1, len(times_s) - 1)
    is_before_nearer = wanted - times_s[after - 1] <= times_s[after] - wanted
    return np.asarray(after - is_before_nearer, np.int64)


def qwen2_vl_frames(
    num_source: int,
    source_fps: float,
    fps: float | None,
    num_frames: int | None,
    min_frames: int,
    max_frames: int,
    multiple_of: int,
) -> IntArray:
    """Return the numbers of frames that Qwen2-VL's and Qwen2.5-VL's video processor takes.

    This is ``Qwen2VLVideoProcessor.sample_frames`` of transformers 5. Its division in float32
    decides about single frames, so it is repeated to the bit.

    Args:
        num_source: Number of frames of the video.
        source_fps: Frames per second of the video.
        fps: Frames to take in a second, or None.
        num_frames: How many frames to take, or None.
        min_frames: Fewest frames, with `fps`.
        max_frames: Most frames, with `fps`.
        multiple_of: Frames of a temporal patch.

    Raises:
        DecodeError: The video has too few frames.
    """
    number: float = num_source
    if num_frames is not None:
        number = round(num_frames / multiple_of) * multiple_of
    elif fps is not None:
        most = math.floor(min(max_frames, num_source) / multiple_of) * multiple_of
        number = min(max(num_source / source_fps * fps, min_frames), most, num_source)
        number = math.floor(number / multiple_of) * multiple_of
    if number > num_source or number < 1:
        raise DecodeError(f"{num_source} frames are too few to take {max(number, multiple_of)}")
    return torch.arange(0, num_source, num_source / number).int().numpy().astype(np.int64)


def qwen3_vl_frames(
    num_source: int,
    source_fps: float,
    fps: float | None,
    num_frames: int | None,
    min_frames: int,
    max_frames: int,
) -> IntArray:
    """Return the numbers of frames that Qwen3-VL's video processor takes.

    This is ``Qwen3VLVideoProcessor.sample_frames`` of transformers 5. Arguments are those of
    `qwen2_vl_frames`.

    Examples:
        >>> qwen3_vl_frames(75, 25.0, 2.0, None, 4, 768).tolist()
        [0, 15, 30, 44, 59, 74]
    """
    if num_frames is None and fps is not None:
        wanted = int(num_source / source_fps * fps)
        num_frames = min(max(wanted, min_frames), max_frames, num_source)
    if num_frames is None:
        num_frames = min(max(num_source, min_frames), max_frames)
    return np.linspace(0, num_source - 1, num_frames).round().astype(np.int64)
