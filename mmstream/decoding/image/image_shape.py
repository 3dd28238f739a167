"""The shape that an image will have after decoding, known from its header alone.

Place in the flow: `ImageDecoder.prepared_shape` makes it. `decoding.text` counts the tokens of an
image with it, before any picture is decoded.
"""

from __future__ import annotations

from typing import NamedTuple

from mmstream.decoding.image.geometry import Shape, View


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
