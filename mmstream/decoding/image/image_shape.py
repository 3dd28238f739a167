"""The shape that an image will have after decoding, known from its header alone.

`ImageDecoder` gives it. The text decoder needs it to count the tokens of an image.
"""

from __future__ import annotations

from typing import NamedTuple

from mmstream.decoding.image.geometry import Shape, View

__all__ = ["ImageShape"]


class ImageShape(NamedTuple):
    """What an `ImageDecoder` makes of a picture."""

    height: int
    """Of the result, or of each of the tiles."""
    width: int
    picture: Shape
    """(height, width) of the picture itself, upright."""
    num_tiles: int = 1
    """With the whole picture, where it is one more tile."""
    grid: Shape = (1, 1)
    """(rows, columns) of the tiles that the picture is cut into."""

    @classmethod
    def of(cls, picture: Shape, views: list[View]) -> ImageShape:
        """Return the shape of a picture's results, as they are planned."""
        for view in views:
            if view.tile is not None:
                side = view.tile
                rows, columns = view.shape[0] // side, view.shape[1] // side
                return cls(side, side, picture, rows * columns + len(views) - 1, (rows, columns))
        return cls(*views[0].shape, picture)
