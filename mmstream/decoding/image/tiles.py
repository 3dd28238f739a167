"""Tiles: one picture as several squares, by which vision-language models see detail.

Place in the flow: `decoder.py` asks here how to cut a picture of a given size. Three rules choose
one of the allowed grids:

    LlavaNextTiles        Llava-NeXT        the picture is scaled to fit into the grid, and padded
    LlavaOnevisionTiles   LLaVA-OneVision   the same; several pictures of a sample are not cut
    InternVLTiles         InternVL          the picture is stretched to the grid

All add the whole picture as one more tile. Two more rules are `PanAndScanTiles` of Gemma 3, which
adds crops of a long picture, and `PixtralTile`, which makes one tile of the picture's proportions.
The choices are those of transformers; the tests compare with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from mmstream.decoding.image.geometry import View, fitting_shape, whole_view
from mmstream.errors import ConfigError
from mmstream.media.types import Shape
from mmstream.settings import Level, PositiveFloat, PositiveInt, checked

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

        >>> from mmstream.decoding.image.geometry import ImageShape
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
        ratio = max(extent / side for extent in picture)
        if ratio > 1:
            picture_height, picture_width = (math.floor(extent / ratio) for extent in picture)
        else:
            picture_height, picture_width = picture
        multiple = self.multiple_of
        height, width = ((extent - 1) // multiple + 1 for extent in (picture_height, picture_width))
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
