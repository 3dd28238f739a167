"""One picture as several: the grids of tiles by which vision-language models see detail.

Part of the decode stage: `decoding.image` asks how to cut a picture of a given size. Two
rules are in use, and both are a list of allowed grids and a choice among them:

    LlavaNextTiles   Llava-NeXT   fits into the best of a list of shapes, padded
    InternVLTiles    InternVL     stretched to the grid with the nearest proportions

Both add the whole picture as one more tile. The choices are those of transformers (tested).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mmstream.decoding.image.geometry import Shape, View, fitting, whole
from mmstream.errors import ConfigError

__all__ = ["InternVLTiles", "LlavaNextTiles"]

LLAVA_NEXT = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


@dataclass(frozen=True)
class LlavaNextTiles:
    """Llava-NeXT: the whole picture first, then tiles of the shape that wastes least.

    Attributes:
        shapes: Allowed (height, width) of all tiles together, multiples of the decoder's ``size``;
            ``image_grid_pinpoints`` in the model's settings.
    """

    shapes: tuple[Shape, ...] = LLAVA_NEXT

    def __post_init__(self) -> None:
        if not self.shapes or any(len(shape) != 2 or min(shape) < 1 for shape in self.shapes):
            raise ConfigError(f"shapes={self.shapes!r}: give (height, width) pairs in pixels")

    def check(self, side: int) -> None:
        """Refuse shapes that are no whole number of tiles.

        Raises:
            ConfigError: Says which.
        """
        for shape in self.shapes:
            if shape[0] % side or shape[1] % side:
                raise ConfigError(f"shapes: {shape} is no multiple of size={side}")

    def best(self, picture: Shape) -> Shape:
        """Return the shape that keeps most of the picture's pixels; of equals, the smallest."""
        height, width = picture
        best, most, least = self.shapes[0], 0, 0
        for shape in self.shapes:
            scale = min(shape[1] / width, shape[0] / height)
            kept = min(int(width * scale) * int(height * scale), height * width)
            wasted = shape[0] * shape[1] - kept
            if kept > most or (kept == most and wasted < least):
                best, most, least = shape, kept, wasted
        return best

    def views(self, picture: Shape, side: int) -> list[View]:
        """Return the whole picture as one tile, and the tiles as one view."""
        best = self.best(picture)
        tiles = whole(picture, fitting(picture, best), best)
        return [whole(picture, (side, side)), tiles._replace(tile=side)]


@dataclass(frozen=True)
class InternVLTiles:
    """InternVL: tiles of the grid with the nearest proportions, then the whole picture.

    Attributes:
        min_tiles: Of a grid.
        max_tiles: Of a grid; the whole picture is not counted.
        thumbnail: Add the whole picture as the last tile, unless there is only one.
    """

    min_tiles: int = 1
    max_tiles: int = 12
    thumbnail: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.min_tiles <= self.max_tiles:
            raise ConfigError(f"min_tiles={self.min_tiles}, max_tiles={self.max_tiles}: from 1 up")

    def check(self, side: int) -> None:
        """Accept any side: the grids are counted in tiles."""

    def best(self, picture: Shape, side: int) -> Shape:
        """Return (rows, columns).

        Of equally near grids the later, larger one is taken while the picture has more than half
        its pixels.
        """
        height, width = picture
        best, least = (1, 1), float("inf")
        for rows, columns in _grids(self.min_tiles, self.max_tiles):
            away = abs(width / height - columns / rows)
            enough = height * width > 0.5 * side * side * rows * columns
            if away < least or (away == least and enough):
                best, least = (rows, columns), away
        return best

    def views(self, picture: Shape, side: int) -> list[View]:
        """Return the tiles as one view, and the whole picture as one tile."""
        rows, columns = self.best(picture, side)
        tiles = whole(picture, (rows * side, columns * side))._replace(tile=side)
        if not self.thumbnail or rows * columns == 1:
            return [tiles]
        return [tiles, whole(picture, (side, side))]


@lru_cache(maxsize=16)
def _grids(fewest: int, most: int) -> list[Shape]:
    """List (rows, columns) with the number of tiles, narrow ones first: ties depend on it."""
    grids = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if fewest <= rows * columns <= most
    ]
    return sorted(grids, key=lambda grid: grid[0] * grid[1])
