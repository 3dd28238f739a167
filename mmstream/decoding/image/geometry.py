"""Where the pixels of a result come from: all geometry of the image decoder, in integers.

Part of the decode stage, before any pixel exists: `decoding.image` plans a picture from
the size in its header, so that decoding can leave out what the plan does not need. Roundings are
those of torchvision and transformers, whose results they are compared with; a box off by half a
pixel is 33 dB away.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from mmstream.errors import DecodeError

Shape = tuple[int, int]
"""(height, width) in pixels."""

MAX_ASPECT_RATIO = 200
NUM_ATTEMPTS = 10
INNER_MARGIN = 1.5


class View(NamedTuple):
    """One result: a box of the picture, resized, laid on the result, and perhaps mirrored."""

    box: tuple[int, int, int, int]
    """Top, left, height, width in the picture."""
    resized: Shape
    """To which the box is resized."""
    shape: Shape
    """Of the result."""
    offset: Shape
    """(top, left) of the resized box on the result: below zero it is cut, above zero padded."""
    flip: bool = False
    tile: int | None = None
    """Side of the square tiles into which the result is divided."""


def whole(
    picture: Shape, resized: Shape, shape: Shape | None = None, rounding: str = "even"
) -> View:
    """Resize the whole picture, and cut it or pad it to `shape` around its centre.

    Half a pixel of a cut is rounded to "even", as torchvision does, or "down", as transformers.
    """
    shape = resized if shape is None else shape
    cuts = ((have - want) / 2 for have, want in zip(resized, shape, strict=True))
    top, left = (round(cut) if cut >= 0 and rounding == "even" else math.trunc(cut) for cut in cuts)
    return View((0, 0, *picture), resized, shape, (-top, -left))


def covering(picture: Shape, size: Shape, resize_size: int | None) -> Shape:
    """Return the shape to which a picture is resized before `size` is cut out of its centre.

    Args:
        picture: Its shape.
        size: Of the crop.
        resize_size: The shorter side after resizing; None: the smallest picture that covers the
            crop, which for a square is its side.

    Returns:
        A shape; the longer side is rounded down, as torchvision's ``Resize`` does.
    """
    (height, width), (crop_height, crop_width) = picture, size
    if resize_size:
        crop_height = crop_width = resize_size
    if width * crop_height >= height * crop_width:  # wider than the crop: the height decides
        return crop_height, max(crop_width, int(crop_height * width / height))
    return max(crop_height, int(crop_width * height / width)), crop_width


def fitting(picture: Shape, size: Shape) -> Shape:
    """Return the largest shape of the picture's proportions inside `size`, sides rounded up."""
    (height, width), (most_height, most_width) = picture, size
    by_height, by_width = most_height / height, most_width / width
    if by_width < by_height:
        return min(math.ceil(height * by_width), most_height), most_width
    return most_height, min(math.ceil(width * by_height), most_width)


def budgeted(picture: Shape, multiple_of: int, fewest: int, most: int) -> Shape:
    """Return the shape nearest to the picture's whose sides are multiples, within a pixel budget.

    The rule of Qwen-VL (``smart_resize`` of transformers). A side is never below `multiple_of`: a
    picture that is too thin for the budget exceeds it.

    Raises:
        DecodeError: One side is more than 200 times the other.
    """
    height, width = picture
    if max(picture) > MAX_ASPECT_RATIO * min(picture):
        raise DecodeError(
            f"picture of {width}x{height}: one side is over {MAX_ASPECT_RATIO} times the other"
        )
    sides = (round(height / multiple_of), round(width / multiple_of))
    area = sides[0] * sides[1] * multiple_of**2
    if area > most:
        shrink = math.sqrt(height * width / most)
        sides = (
            max(1, math.floor(height / shrink / multiple_of)),
            max(1, math.floor(width / shrink / multiple_of)),
        )
    elif area < fewest:
        grow = math.sqrt(fewest / (height * width))
        sides = (math.ceil(height * grow / multiple_of), math.ceil(width * grow / multiple_of))
    return sides[0] * multiple_of, sides[1] * multiple_of


def random_box(
    picture: Shape,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    rng: np.random.Generator,
) -> tuple[int, int, int, int]:
    """Draw a box as torchvision's ``RandomResizedCrop``: top, left, height, width.

    Only ``rng.random()`` is used, 53 bits of the generator's raw words: the other methods of
    numpy's `Generator` may draw differently in another version.
    """
    height, width = picture
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(NUM_ATTEMPTS):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * rng.random())
        aspect = math.exp(low + (high - low) * rng.random())
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = int(rng.random() * (height - box_height + 1))
            left = int(rng.random() * (width - box_width + 1))
            return top, left, box_height, box_width
    # The centre, with the nearest proportions that are allowed.
    box_height, box_width = height, width
    if width / height < ratio[0]:
        box_height = min(height, round(width / ratio[0]))
    elif width / height > ratio[1]:
        box_width = min(width, round(height * ratio[1]))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def shrunk(view: View, picture: Shape, factor: int) -> View:
    """Translate a view of a picture to the same picture decoded at 1/factor of its size.

    A box within the picture is rounded to whole pixels of the smaller one.
    """
    top, left, height, width = view.box
    bottom, right = (
        -(-side // factor) if end == side else round(end / factor)
        for end, side in zip((top + height, left + width), picture, strict=True)
    )
    top, left = round(top / factor), round(left / factor)
    return view._replace(box=(top, left, bottom - top, right - left))


def shrink_factor(views: list[View], picture: Shape) -> int:
    """Return the largest of 8, 4, 2, 1 at which each view's box still is large enough.

    The whole picture may not become smaller than it is resized to; a box within it, whose edges
    are rounded to the smaller picture's pixels, stays half as large again. Of the scales of
    libjpeg-turbo only these powers of two save time.
    """
    enough = 1
    for factor in (2, 4, 8):
        for view in views:
            if not _is_enough(shrunk(view, picture, factor), view, picture):
                return enough
        enough = factor
    return enough


def _is_enough(smaller: View, view: View, picture: Shape) -> bool:
    margin = 1.0 if view.box == (0, 0, *picture) else INNER_MARGIN
    height, width = view.resized
    return smaller.box[2] >= margin * height and smaller.box[3] >= margin * width
