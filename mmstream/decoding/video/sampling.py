"""Which frames of a video are taken. Pure functions of the times of its frames.

A rate is called constant where no frame is more than half a frame away from its place on an even
grid. Clocks of milliseconds make such files too. There the frames are chosen by number, and by time
where the rate varies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.image.geometry import budgeted_shape
from mmstream.errors import DecodeError
from mmstream.media.types import Shape
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


# -- as families of models take them ---------------------------------------------------------------
#
# The processors number frames and divide by an average rate. Each family has a rule of its own,
# with its own rounding, so each has its own function here. Tests compare them with the processors'
# own ``sample_frames``.


@dataclass(frozen=True, kw_only=True)
class FrameRequest:
    """Which frames are asked for, as the settings of a `VideoDecoder` say it."""

    fps: float | None = None
    """Frames to take per second. None: `num_frames` says how many, or all are taken."""
    num_frames: int | None = None
    """Frames to take, whatever the length."""
    min_frames: int
    """Least frames that `fps` gives."""
    max_frames: int
    """Most frames that `fps` gives."""
    multiple_of: int = 1
    """The number of frames is a multiple of this, where the rule asks for it."""


FamilySampling: TypeAlias = Callable[[int, float, FrameRequest], IntArray]
"""Chooses frames by the rule of a family.

It gets the number of frames of the video or span, from 1 up, their average rate per second, and
what is asked for. It returns the numbers of the frames, int64 [F], ascending, F from 1 up. For a
video with too few frames it raises a DecodeError.
"""


def qwen2_vl_frames(num_source_frames: int, source_fps: float, request: FrameRequest) -> IntArray:
    """Take frames as ``Qwen2VLVideoProcessor.sample_frames`` does, for Qwen2-VL and Qwen2.5-VL.

    The number is a multiple of `multiple_of`. The first frame of each of so many equal parts is
    taken. A video with less frames than `multiple_of`, for which the processor fails, gives its
    first frame.

    Examples:
        >>> request = FrameRequest(fps=2, min_frames=4, max_frames=768, multiple_of=2)
        >>> qwen2_vl_frames(50, 25.0, request).tolist()  # two seconds
        [0, 12, 25, 37]
    """
    multiple_of = request.multiple_of
    if request.num_frames is not None:
        number: float = round(request.num_frames / multiple_of) * multiple_of
        _check_enough(int(number), num_source_frames)
    elif request.fps is not None:
        most = math.floor(min(request.max_frames, num_source_frames) / multiple_of) * multiple_of
        wanted = num_source_frames / source_fps * request.fps
        wanted = min(max(wanted, request.min_frames), most, num_source_frames)
        number = math.floor(wanted / multiple_of) * multiple_of
    else:
        return np.arange(num_source_frames, dtype=np.int64)
    if number < 1:
        return np.zeros(1, dtype=np.int64)
    step = num_source_frames / number
    count = math.ceil(num_source_frames / step)
    # The processor has these numbers in float32 before it cuts them off.
    positions: IntArray = (np.arange(count) * step).astype(np.float32).astype(np.int64)
    return positions


def qwen3_vl_frames(num_source_frames: int, source_fps: float, request: FrameRequest) -> IntArray:
    """Take frames as ``Qwen3VLVideoProcessor.sample_frames`` does.

    They lie at equal distances from the first frame to the last one. Their number may be odd:
    `multiple_of` is not used.

    Examples:
        >>> request = FrameRequest(fps=2, min_frames=4, max_frames=768)
        >>> qwen3_vl_frames(50, 25.0, request).tolist()  # two seconds
        [0, 16, 33, 49]
    """
    low, high = request.min_frames, request.max_frames
    if request.num_frames is not None:
        number = request.num_frames
    elif request.fps is not None:
        number = int(num_source_frames / source_fps * request.fps)
        number = min(max(number, low), high, num_source_frames)
    else:
        number = min(max(num_source_frames, low), high)
    return np.linspace(0, num_source_frames - 1, number).round().astype(np.int64)


def llava_onevision_frames(
    num_source_frames: int, source_fps: float, request: FrameRequest
) -> IntArray:
    """Take frames as ``BaseVideoProcessor.sample_frames`` does, which LLaVA-OneVision inherits.

    The first frame of each of so many equal parts is taken. `min_frames`, `max_frames` and
    `multiple_of` are not used.

    Examples:
        >>> request = FrameRequest(num_frames=4, min_frames=1, max_frames=768)
        >>> llava_onevision_frames(50, 25.0, request).tolist()
        [0, 12, 25, 37]
    """
    num_frames = request.num_frames
    if num_frames is None and request.fps is not None:
        num_frames = max(1, int(num_source_frames / source_fps * request.fps))
    if num_frames is None:
        return np.arange(num_source_frames, dtype=np.int64)
    _check_enough(num_frames, num_source_frames)
    return np.arange(num_frames, dtype=np.int64) * num_source_frames // num_frames


SMOLVLM_SKIPPED_S = 1.0
"""Seconds that SmolVLM leaves out at both ends of a long video."""


def smolvlm_frames(num_source_frames: int, source_fps: float, request: FrameRequest) -> IntArray:
    """Take frames as ``SmolVLMVideoProcessor.sample_frames`` does.

    They lie at equal distances, rounded down. A second at both ends of a long video is left out.
    `num_frames`, `min_frames` and `multiple_of` are not used: `settings` asks for `fps`.

    Examples:
        >>> request = FrameRequest(fps=2, min_frames=1, max_frames=64)
        >>> smolvlm_frames(50, 25.0, request).tolist()  # two seconds
        [0, 16, 32, 49]
    """
    fps, max_frames = request.fps, request.max_frames
    assert fps is not None
    duration_s = num_source_frames / source_fps
    number = max(1, min(round(fps * duration_s), max_frames))
    first, last = 0, num_source_frames - 1
    if duration_s - 2 * SMOLVLM_SKIPPED_S > max_frames * fps:
        num_skipped = SMOLVLM_SKIPPED_S * source_fps
        first, last = int(num_skipped), min(int(num_source_frames - num_skipped), last)
    if first >= last:
        first, last = 0, num_source_frames - 1
    return np.unique(np.linspace(first, last, number, dtype=np.int64))


FAMILY_SAMPLING: Mapping[str, FamilySampling] = {
    "llava_onevision": llava_onevision_frames,
    "qwen2_vl": qwen2_vl_frames,
    "qwen3_vl": qwen3_vl_frames,
    "smolvlm": smolvlm_frames,
}
"""The rules, by the name that ``VideoDecoder(sampling=)`` takes."""


def _check_enough(num_frames: int, num_source_frames: int) -> None:
    if num_frames > num_source_frames:
        raise DecodeError(
            f"{num_frames} frames are wanted, and the video has {num_source_frames}; take fewer "
            "with VideoDecoder(num_frames=)"
        )


# -- sizes of frames that share a budget of pixels -------------------------------------------------

_MIN_SHARE = 1.05
"""The share of a frame is at least so many times the fewest pixels, which leaves room to round."""


def capped_frame_pixels(
    num_frames: int, low: int, max_frame_pixels: int, max_video_pixels: int
) -> int:
    """Return the most pixels of a frame: an even share of all frames', within a frame's own limit.

    This is the rule of ``cap_pixels_per_frame`` in the video processors of Qwen.

    Args:
        num_frames: Number of frames, without those that pad.
        low: The fewest pixels. The result is at least 1.05 times as much.
        max_frame_pixels: Most pixels of a frame.
        max_video_pixels: Most pixels of all frames together.

    Examples:
        >>> capped_frame_pixels(8, 1000, 50_000, 100_000)
        12500
        >>> capped_frame_pixels(200, 1000, 50_000, 100_000)
        1050
    """
    return max(min(max_frame_pixels, max_video_pixels // num_frames), int(low * _MIN_SHARE))


def longest_shape(picture: Shape, side: int) -> Shape:
    """Return the size whose longer side has this length, and whose shorter side is even.

    This is the rule of SmolVLM, ``get_resize_output_image_size`` of its video processor.

    Examples:
        >>> longest_shape((270, 480), 512)
        (288, 512)
    """
    height, width = picture
    aspect_ratio = width / height  # divided twice, as there: it decides how halves are rounded
    if width >= height:
        shorter = int(side / aspect_ratio)
        return max(1, shorter + shorter % 2), side
    shorter = int(side * aspect_ratio)
    return side, max(1, shorter + shorter % 2)


def budgeted_video_shape(
    picture: Shape,
    num_frames: int,
    multiple_of: int,
    frame_multiple_of: int,
    budget: tuple[int, int],
) -> Shape:
    """Return (height, width) of frames that together have a number of pixels within a budget.

    This is the rule of Qwen3-VL, ``smart_resize`` of its video processor in transformers 5.

    Args:
        picture: (height, width) of the upright video.
        num_frames: Number of frames, without those that pad.
        multiple_of: Both sides of the result are multiples of it.
        frame_multiple_of: Frames of a temporal patch.
        budget: (fewest, most) pixels of all frames together.

    Raises:
        DecodeError: One side is more than 200 times the other, or there are too few frames.

    Examples:
        >>> budgeted_video_shape((720, 1280), 8, 32, 2, (4096, 786_432))
        (224, 416)
    """
    height, width = picture
    if num_frames < frame_multiple_of:
        raise DecodeError(f"{num_frames} frames are too few to take {frame_multiple_of}")
    if min(picture) < multiple_of:
        scale = max(multiple_of / height, multiple_of / width)
        height, width = int(height * scale), int(width * scale)
    num_rounded = round(num_frames / frame_multiple_of) * frame_multiple_of
    return budgeted_shape((height, width), multiple_of, *budget, num_frames, num_rounded)
