"""How a GPU turns one JPEG into its result, planned from the header of the file.

Place in the flow: `ImageDecoder.plan` makes a plan. It travels beside the file (`encoded.py`) to
the process that holds the GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from mmstream.decoding.image.geometry import Shape, View
from mmstream.decoding.image.orientation import SIDEWAYS

__all__ = ["Plan", "is_steep"]

MAX_SHRINK = 32
"""How many times smaller CUDA's antialiased resize can make a side. For more, libjpeg is cheap."""


class Plan(NamedTuple):
    """How a GPU turns one JPEG into its result."""

    stored: Shape
    """(height, width) as the file stores the picture."""
    orientation: int | None
    """1 to 8 as the EXIF standard counts them. None: upright."""
    view: View
    """How the result is made of the upright picture."""

    @property
    def picture(self) -> Shape:
        """(height, width) of the picture when it is upright."""
        return self.stored[::-1] if self.orientation in SIDEWAYS else self.stored


def is_steep(view: View) -> bool:
    """Tell whether a picture becomes smaller than CUDA's resize can make it."""
    box_height, box_width = view.box[2:]
    height, width = view.resized
    return box_height > MAX_SHRINK * height or box_width > MAX_SHRINK * width
