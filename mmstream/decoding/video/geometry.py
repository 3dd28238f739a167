"""The size of a video's frames where a budget of pixels holds for all of them together."""

from __future__ import annotations

import math

from mmstream.decoding.image.geometry import MAX_ASPECT_RATIO, Shape
from mmstream.errors import DecodeError

__all__ = ["budgeted_video_shape"]


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
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise DecodeError(
            f"picture of {width}x{height}: one side is over {MAX_ASPECT_RATIO} times the other"
        )
    rows, columns = round(height / multiple_of), round(width / multiple_of)
    num_rounded = round(num_frames / frame_multiple_of) * frame_multiple_of
    area = num_rounded * rows * columns * multiple_of**2
    low, high = budget
    if area > high:
        shrink = math.sqrt(num_frames * height * width / high)
        rows = max(1, math.floor(height / shrink / multiple_of))
        columns = max(1, math.floor(width / shrink / multiple_of))
    elif area < low:
        grow = math.sqrt(low / (num_frames * height * width))
        rows = math.ceil(height * grow / multiple_of)
        columns = math.ceil(width * grow / multiple_of)
    return rows * multiple_of, columns * multiple_of
