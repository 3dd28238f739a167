"""The size of a video's frames where they share a budget of pixels."""

from __future__ import annotations

import math

from mmstream.decoding.image.geometry import MAX_ASPECT_RATIO, Shape
from mmstream.errors import DecodeError

_LEAST_SHARE = 1.05
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
    return max(min(max_frame_pixels, max_video_pixels // num_frames), int(low * _LEAST_SHARE))


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
