"""Geometry of the image decoder: which pixels of a picture go where in the result, or in its tiles.

Place in the flow: `decoder.py` reads the size of a picture from its header and plans the result
with this module. No pixel exists yet, so decoding can leave out what the plan does not need.
`resize.py` then carries out the plan.

All coordinates are whole pixels. Roundings are those of torchvision and transformers, and the tests
compare with both. Roundings matter: with a box that is off by half a pixel, a photograph reaches
only 33 dB PSNR against theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mmstream.errors import ConfigError, DecodeError
from mmstream.media.types import Shape
from mmstream.settings import Level, PositiveFloat, PositiveInt, checked


class Plan(NamedTuple):
    """How one picture becomes its result."""

    picture: Shape
    """(height, width) of the picture when it is upright."""
    view: View
    """How the result is made of the upright picture."""


class ImageShape(NamedTuple):
    """The shape that an `ImageDecoder` gives a picture. Functions of image length take it.

    Examples:
        A picture of 600 x 800 pixels is cut into 2 x 2 tiles of 336 pixels. The whole picture is a
        fifth tile:

        >>> ImageShape(336, 336, picture=(600, 800), num_tiles=5, grid=(2, 2)).num_tiles
        5
    """

    height: int
    """Height in pixels of the result, or of each tile."""
    width: int
    """Width in pixels of the result, or of each tile."""
    picture: Shape
    """(height, width) of the upright picture in its file, in pixels."""
    num_tiles: int = 1
    """Number of tiles. The whole picture counts where it is a tile too."""
    grid: Shape = (1, 1)
    """(rows, columns) of the tiles that the picture is cut into, without the whole picture."""

    @classmethod
    def from_views(cls, picture: Shape, views: list[View]) -> ImageShape:
        """Return the shape of a picture's planned results."""
        for view in views:
            if view.tile is not None:
                side = view.tile
                rows, columns = view.shape[0] // side, view.shape[1] // side
                num_whole = len(views) - 1
                return cls(side, side, picture, rows * columns + num_whole, (rows, columns))
        return cls(*views[0].shape, picture)


Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels of a picture."""

MAX_ASPECT_RATIO = 200
"""The limit of ``smart_resize`` in transformers."""

NUM_ATTEMPTS = 10
"""How often `random_box` draws before it takes the centre, as torchvision does."""

INNER_MARGIN = 1.5
"""How many times larger than its result a box within the picture stays; see `shrink_factor`."""


class View(NamedTuple):
    """How one result is made: a box of the picture is resized and laid on the result.

    Example: a picture of 480x640 is resized to 256x341, and 224x224 pixels are cut out of its
    centre: ``View(box=(0, 0, 480, 640), resized=(256, 341), shape=(224, 224), offset=(-16, -58))``.
    """

    box: Box
    """Top, left, height, width in the picture. What sticks out of it is filled."""
    resized: Shape
    """The size that the box is resized to."""
    shape: Shape
    """The size of the result."""
    offset: Shape
    """(top, left) of the resized box on the result. Below zero it is cut, above zero padded."""
    flip: bool = False
    """Whether the result is mirrored left to right."""
    tile: int | None = None
    """Side of the square tiles that the result is divided into. None: it is not divided."""

    @property
    def crop(self) -> Shape:
        """(top, left) of the result in the whole picture, resized as its box is."""
        top, left, height, width = self.box
        scale_y, scale_x = self.resized[0] / height, self.resized[1] / width
        return round(top * scale_y) - self.offset[0], round(left * scale_x) - self.offset[1]


def whole_view(
    picture: Shape, resized: Shape, shape: Shape | None = None, rounding: str = "even"
) -> View:
    """Resize the whole picture, and cut it or pad it to `shape` around its centre.

    Args:
        picture: (height, width) of the picture.
        resized: The size that the picture is resized to.
        shape: The size of the result. None: `resized`.
        rounding: How half a pixel of a cut is rounded: "even" as torchvision does, "down" as
            transformers does. Half a pixel of padding is always rounded down.

    Returns:
        A view. Where 3 columns must go, "even" cuts 2 of them at the left and "down" cuts 1.
    """
    shape = resized if shape is None else shape
    margins = ((before - after) / 2 for before, after in zip(resized, shape, strict=True))
    top, left = (
        round(margin) if margin >= 0 and rounding == "even" else math.trunc(margin)
        for margin in margins
    )
    return View((0, 0, *picture), resized, shape, (-top, -left))


def covering_shape(picture: Shape, size: Shape, resize_size: int | None) -> Shape:
    """Return the size that a picture is resized to before `size` is cut out of its centre.

    Args:
        picture: (height, width) of the picture.
        size: (height, width) of the crop.
        resize_size: The shorter side after resizing. None: the smallest size that covers the crop;
            for a square crop, its side.

    Returns:
        (height, width). The longer side is rounded down, as torchvision's ``Resize`` does: 480x640
        with ``resize_size=256`` becomes 256x341.
    """
    height, width = picture
    crop_height, crop_width = size
    if resize_size:
        crop_height = crop_width = resize_size
    if width * crop_height >= height * crop_width:  # wider than the crop: the height decides
        return crop_height, max(crop_width, int(crop_height * width / height))
    return max(crop_height, int(crop_width * height / width)), crop_width


def fitting_shape(picture: Shape, size: Shape) -> Shape:
    """Return the largest shape of the picture's proportions inside `size`, sides rounded up."""
    height, width = picture
    max_height, max_width = size
    height_scale = max_height / height
    width_scale = max_width / width
    if width_scale < height_scale:
        return min(math.ceil(height * width_scale), max_height), max_width
    return max_height, min(math.ceil(width * height_scale), max_width)


def budgeted_shape(
    picture: Shape,
    multiple_of: int,
    min_pixels: int,
    max_pixels: int,
    num_frames: int = 1,
    num_counted: int = 1,
) -> Shape:
    """Return the nearest shape whose sides are multiples, within a budget of pixels.

    This is the rule of Qwen-VL, ``smart_resize`` in transformers. A side is never below
    `multiple_of`, so a very thin picture may exceed `max_pixels`.

    Args:
        picture: (height, width) of the picture.
        multiple_of: Both sides of the result are multiples of it.
        min_pixels: Lower limit on height x width.
        max_pixels: Upper limit on height x width.
        num_frames: Frames of a video that share the budget.
        num_counted: Their number, rounded as the limits count it.

    Returns:
        (height, width).

    Raises:
        DecodeError: One side is more than 200 times the other.
    """
    height, width = picture
    if max(picture) > MAX_ASPECT_RATIO * min(picture):
        raise DecodeError(
            f"picture of {width}x{height}: one side is over {MAX_ASPECT_RATIO} times the other"
        )
    rows, columns = round(height / multiple_of), round(width / multiple_of)
    area = num_counted * rows * columns * multiple_of**2
    if area > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        rows = max(1, math.floor(height / shrink / multiple_of))
        columns = max(1, math.floor(width / shrink / multiple_of))
    elif area < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        rows = math.ceil(height * grow / multiple_of)
        columns = math.ceil(width * grow / multiple_of)
    return rows * multiple_of, columns * multiple_of


def random_box(
    picture: Shape,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    rng: np.random.Generator,
) -> Box:
    """Draw a box by the rule of torchvision's ``RandomResizedCrop``.

    Args:
        picture: (height, width) of the picture.
        scale: Range of the box's share of the area, above 0 and up to 1.
        ratio: Range of the box's width / height.
        rng: Only its ``random()`` is used, which takes 53 bits of the generator's raw words. Other
            methods of numpy's `Generator` may draw differently in another version of numpy.

    Returns:
        Top, left, height, width.
    """
    height, width = picture
    min_log_ratio, max_log_ratio = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(NUM_ATTEMPTS):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * rng.random())
        aspect = math.exp(min_log_ratio + (max_log_ratio - min_log_ratio) * rng.random())
        box_width = round(math.sqrt(area * aspect))
        box_height = round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = int(rng.random() * (height - box_height + 1))
            left = int(rng.random() * (width - box_width + 1))
            return top, left, box_height, box_width
    # No draw fitted into the picture: take its centre, with the nearest allowed proportions.
    box_height, box_width = height, width
    if width / height < ratio[0]:
        box_height = min(height, round(width / ratio[0]))
    elif width / height > ratio[1]:
        box_width = min(width, round(height * ratio[1]))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def scaled_view(view: View, picture: Shape, factor: int) -> View:
    """Translate a view of a picture to the same picture decoded at 1/factor of its size.

    A decoded side is rounded up: at factor 8 a picture of 500x375 has 63x47 pixels. A box that ends
    at the picture's edge ends at the smaller picture's edge. Other edges are rounded to the nearest
    pixel: a box that ends at row 300 ends at row 38.
    """
    return view._replace(box=_scaled_box(view.box, picture, factor))


def _scaled_box(box: Box, picture: Shape, factor: int) -> Box:
    top, left, height, width = box
    bottom, right = (
        -(-side // factor) if end == side else round(end / factor)
        for end, side in zip((top + height, left + width), picture, strict=True)
    )
    top, left = round(top / factor), round(left / factor)
    return top, left, bottom - top, right - left


def shrink_factor(views: list[View], picture: Shape) -> int:
    """Return how many times smaller a JPEG may be decoded: 8, 4, 2 or 1.

    It is the largest factor at which every view's box still is large enough. The whole picture may
    not become smaller than the size it is resized to. A box within the picture must stay
    `INNER_MARGIN` times as large, since its edges are rounded to the smaller picture's pixels.

    libjpeg-turbo has more scales (all n/8), but only these powers of two save time.
    """
    largest = 1
    for factor in (2, 4, 8):
        for view in views:
            if not _is_large_enough(_scaled_box(view.box, picture, factor), view, picture):
                return largest
        largest = factor
    return largest


def _is_large_enough(scaled: Box, view: View, picture: Shape) -> bool:
    margin = 1.0 if view.box == (0, 0, *picture) else INNER_MARGIN
    height, width = view.resized
    return scaled[2] >= margin * height and scaled[3] >= margin * width


# -- tiles: one picture as several squares, by which vision-language models see detail -------------
#
# Three rules choose one of the allowed grids:
#
#     LlavaNextTiles        Llava-NeXT        the picture is scaled to fit into the grid, and padded
#     LlavaOnevisionTiles   LLaVA-OneVision   the same; several pictures of a sample are not cut
#     InternVLTiles         InternVL          the picture is stretched to the grid
#
# All add the whole picture as one more tile. Two more rules are `PanAndScanTiles` of Gemma 3, which
# adds crops of a long picture, and `PixtralTile`, which makes one tile of the picture's
# proportions. The choices are those of transformers; the tests compare with it.

LLAVA_NEXT_SHAPES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
"""``image_grid_pinpoints`` of the published Llava-NeXT models, for tiles of 336 pixels."""

LLAVA_ONEVISION_SHAPES = tuple(
    (rows * 384, columns * 384) for rows in range(1, 7) for columns in range(1, 7)
)
"""``image_grid_pinpoints`` of the published LLaVA-OneVision models, for tiles of 384 pixels."""


class TileRule:
    """How a picture is cut into tiles, for ``ImageDecoder(tiles=)``. A subclass says it.

    Examples:
        A picture of 600 x 800 pixels as its left and right half, of 56 pixels each:

        >>> class Halves(TileRule):
        ...     def views(self, picture, side):
        ...         return [whole_view(picture, (side, 2 * side))._replace(tile=side)]
        >>> ImageShape.from_views((600, 800), Halves().views((600, 800), 56)).num_tiles
        2
    """

    def check(self, side: int) -> None:
        """Refuse tiles of a side, in pixels, that the rule cannot make. The base takes any."""

    def views(self, picture: Shape, side: int) -> list[View]:
        """Return what tiles show of a picture of (height, width), each of `side` pixels."""
        raise NotImplementedError

    def of_several(self) -> tuple[TileRule, tuple[int, int, int]] | None:
        """Return the rule for each of several pictures of a sample, and its ``fill``.

        None: it is the same as for one.
        """
        return None


@checked({"shapes": "give (height, width) pairs in pixels"})
@dataclass(frozen=True)
class LlavaNextTiles(TileRule):
    """Cut pictures into tiles by the rule of Llava-NeXT.

    The first tile is the whole picture, stretched to a square. The others are the picture scaled to
    fit into one of `shapes`, padded, and divided row by row. The shape is the one that keeps most
    of the picture's pixels; among equals, the smallest. This is ``select_best_resolution`` of
    transformers.

    Attributes:
        shapes: Allowed (height, width) in pixels of all tiles together. Each is a multiple of the
            decoder's ``size``. ``image_grid_pinpoints`` in the settings of a model. The default
            goes with ``size=336``.

    Raises:
        ConfigError: `shapes` is empty, or an entry is not a pair of positive numbers.

    Examples:
        A picture of 600 x 800 pixels becomes the whole picture and 2 x 2 tiles of 336 pixels:

        >>> LlavaNextTiles().best((600, 800))
        (672, 672)
    """

    shapes: tuple[tuple[PositiveInt, PositiveInt], ...] = LLAVA_NEXT_SHAPES

    def __post_init__(self) -> None:
        if not self.shapes:
            raise ConfigError("shapes=(): give (height, width) pairs in pixels")

    def check(self, side: int) -> None:
        """Refuse shapes that are not a whole number of tiles.

        Args:
            side: Side of a tile in pixels.

        Raises:
            ConfigError: A shape is not a multiple of `side`; the message names it.
        """
        for shape in self.shapes:
            if shape[0] % side or shape[1] % side:
                raise ConfigError(f"shapes: {shape} is not a multiple of size={side}")

    def best(self, picture: Shape) -> Shape:
        """Return the shape that keeps most of the picture's pixels; among equals, the smallest."""
        height, width = picture
        best_shape = self.shapes[0]
        most_kept = least_wasted = 0
        for shape in self.shapes:
            scale = min(shape[1] / width, shape[0] / height)
            kept = min(int(width * scale) * int(height * scale), height * width)
            wasted = shape[0] * shape[1] - kept
            if kept > most_kept or (kept == most_kept and wasted < least_wasted):
                best_shape, most_kept, least_wasted = shape, kept, wasted
        return best_shape

    def views(self, picture: Shape, side: int) -> list[View]:
        """Return one view of the whole picture as one tile, and one of all other tiles."""
        shape = self.best(picture)
        tiles = whole_view(picture, fitting_shape(picture, shape), shape)
        return [whole_view(picture, (side, side)), tiles._replace(tile=side)]


@checked(
    {
        "shapes": "give (height, width) pairs in pixels",
        "background": "give (red, green, blue), 0 to 255",
    }
)
@dataclass(frozen=True)
class LlavaOnevisionTiles(LlavaNextTiles):
    """Cut pictures into tiles by the rule of LLaVA-OneVision.

    A picture that is alone in its sample is cut as by `LlavaNextTiles`. Each picture of a sample
    with several is one tile: it is padded to a square and resized.

    Attributes:
        shapes: Allowed (height, width) in pixels of all tiles together, as in `LlavaNextTiles`. The
            default goes with ``size=384``.
        background: RGB around a picture that is padded to a square, each 0 to 255. transformers
            takes ``image_mean`` of the processor; the default is that of CLIP.

    Raises:
        ConfigError: `shapes` is empty, or an entry is not a pair of positive numbers. Or
            `background` is not a colour.

    Examples:
        A picture of 600 x 800 pixels becomes the whole picture and 2 x 3 tiles of 384 pixels:

        >>> LlavaOnevisionTiles().best((600, 800))
        (768, 1152)
    """

    shapes: tuple[tuple[PositiveInt, PositiveInt], ...] = LLAVA_ONEVISION_SHAPES
    background: tuple[Level, Level, Level] = (122, 116, 104)

    def of_several(self) -> tuple[TileRule, tuple[int, int, int]]:
        """Return one tile, padded to a square."""
        return SquareTile(), self.background


@dataclass(frozen=True)
class SquareTile(TileRule):
    """Make one tile of a picture: it is padded to a square around its centre, and resized.

    This is ``pad_to_square`` of transformers.
    """

    def views(self, picture: Shape, side: int) -> list[View]:
        """Return one view. Its box sticks out of a picture that is not a square."""
        height, width = picture
        longest = max(picture)
        box = (-((longest - height) // 2), -((longest - width) // 2), longest, longest)
        return [View(box, (side, side), (side, side), (0, 0), tile=side)]


@checked()
@dataclass(frozen=True)
class InternVLTiles(TileRule):
    """Cut pictures into tiles by the rule of InternVL.

    The picture is stretched to the grid whose proportions are nearest to its own, and divided row
    by row. The last tile is the whole picture, stretched to a square. Where two grids are equally
    near, the larger one is taken if the picture has more than half of its pixels. This is
    ``get_optimal_tiled_canvas`` of transformers.

    Attributes:
        min_tiles: Fewest tiles of a grid, from 1 up.
        max_tiles: Most tiles of a grid. The whole picture is not counted.
        thumbnail: Whether the whole picture is added. It never is when the grid has one tile.

    Raises:
        ConfigError: Not ``1 <= min_tiles <= max_tiles``.

    Examples:
        A picture of 400 x 800 pixels becomes 1 x 2 tiles of 448 pixels, and the whole picture:

        >>> InternVLTiles().best((400, 800), 448)
        (1, 2)
    """

    min_tiles: PositiveInt = 1
    max_tiles: PositiveInt = 12
    thumbnail: bool = True

    def __post_init__(self) -> None:
        if self.min_tiles > self.max_tiles:
            raise ConfigError(
                f"min_tiles={self.min_tiles!r}, max_tiles={self.max_tiles!r}: from 1 up"
            )

    def best(self, picture: Shape, side: int) -> Shape:
        """Return the (rows, columns) of the grid for a picture."""
        height, width = picture
        best_grid = (1, 1)
        least_difference = float("inf")
        for rows, columns in _grids(self.min_tiles, self.max_tiles):
            difference = abs(width / height - columns / rows)
            has_enough_pixels = height * width > 0.5 * side * side * rows * columns
            if difference < least_difference or (
                difference == least_difference and has_enough_pixels
            ):
                best_grid, least_difference = (rows, columns), difference
        return best_grid

    def views(self, picture: Shape, side: int) -> list[View]:
        """Return one view of all tiles of the grid, and one of the whole picture as one tile."""
        rows, columns = self.best(picture, side)
        tiles = whole_view(picture, (rows * side, columns * side))._replace(tile=side)
        if not self.thumbnail or rows * columns == 1:
            return [tiles]
        return [tiles, whole_view(picture, (side, side))]


@checked()
@dataclass(frozen=True)
class PanAndScanTiles(TileRule):
    """Add crops of a long picture to the whole one, by the rule of Gemma 3's pan and scan.

    The whole picture is stretched to a square, and so are its crops, which stand side by side along
    the longer side. This is ``pan_and_scan_batched`` of transformers.

    Attributes:
        min_crop_size: Fewest pixels of a crop's side. Where crops would be smaller, there are none.
        max_crops: Most crops.
        min_ratio: A picture is cut where its longer side is so many times the other.

    Examples:
        A picture of 300 x 900 pixels gives three crops, and the whole picture:

        >>> len(PanAndScanTiles().views((300, 900), 896))
        4
    """

    min_crop_size: PositiveInt = 256
    max_crops: PositiveInt = 4
    min_ratio: PositiveFloat = 1.2

    def views(self, picture: Shape, side: int) -> list[View]:
        """Return a view of the whole picture and one of each crop, all of one tile."""
        square = (side, side)
        whole = whole_view(picture, square)._replace(tile=side)
        shortest, longest = min(picture), max(picture)
        number = min(longest // self.min_crop_size, math.floor(longest / shortest + 0.5))
        number = min(self.max_crops, max(2, number))
        length = math.ceil(longest / number)
        is_long = longest / shortest >= self.min_ratio
        if not is_long or min(length, shortest) < self.min_crop_size:
            return [whole]
        spans = [(start, min(length, longest - start)) for start in range(0, longest, length)]
        is_wide = picture[1] >= picture[0]
        boxes = [
            (0, start, shortest, extent) if is_wide else (start, 0, extent, shortest)
            for start, extent in spans
        ]
        return [whole, *(View(box, square, square, (0, 0), tile=side) for box in boxes)]


@checked()
@dataclass(frozen=True)
class PixtralTile(TileRule):
    """Make one tile of the picture's proportions, by the rule of Pixtral and Mistral 3.

    A picture that is longer than the decoder's ``size`` is scaled down to it. Both sides are then
    stretched to multiples. This is ``get_resize_output_image_size`` of transformers.

    Attributes:
        multiple_of: Both sides are multiples of it, in pixels: the model's patch size x merge size.

    Examples:
        >>> [view] = PixtralTile(28).views((480, 640), 1540)
        >>> view.shape
        (504, 644)
    """

    multiple_of: PositiveInt = 28

    def views(self, picture: Shape, side: int) -> list[View]:
        """Return one view, of the whole picture."""
        ratio = max(1.0, *(extent / side for extent in picture))
        multiple = self.multiple_of
        height, width = ((math.floor(extent / ratio) - 1) // multiple + 1 for extent in picture)
        return [whole_view(picture, (height * multiple, width * multiple))]


@lru_cache(maxsize=16)
def _grids(min_tiles: int, max_tiles: int) -> list[Shape]:
    """List (rows, columns) by number of tiles, narrow ones first: the choice depends on the order.

    Example: ``_grids(1, 2)`` is ``[(1, 1), (2, 1), (1, 2)]``.
    """
    grids = [
        (rows, columns)
        for columns in range(1, max_tiles + 1)
        for rows in range(1, max_tiles + 1)
        if min_tiles <= rows * columns <= max_tiles
    ]
    return sorted(grids, key=lambda grid: grid[0] * grid[1])
