"""Which frames the processors of transformers take from a video, by family of models.

Place in the flow: a `VideoDecoder` with the `sampling` of a family asks here, with the number of
frames of the span and their rate. Without a family, it chooses frames by their times.

The processors number frames and divide by an average rate. Each family has a rule of its own, with
its own rounding, so each has its own function here. Tests compare them with the processors' own
``sample_frames``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from mmstream.errors import DecodeError
from mmstream.types import IntArray


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
    positions: IntArray = np.linspace(0, num_source_frames - 1, number).round().astype(np.int64)
    return positions


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
