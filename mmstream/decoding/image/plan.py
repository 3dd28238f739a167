"""What will become of an image, planned from its header before it is decoded."""

from __future__ import annotations

from typing import NamedTuple

from mmstream.decoding.image.geometry import Shape, View
from mmstream.decoding.image.orientation import SIDEWAYS

__all__ = ["Plan"]

MAX_SHRINK = 32
"""Times smaller that CUDA's antialiased resize makes a picture; libjpeg does the rest cheaply."""


class Plan(NamedTuple):
    """What becomes of a picture."""

    stored: Shape
    """(height, width) as the file has it."""
    orientation: int | None
    view: View
    """Of the upright picture."""

    @property
    def picture(self) -> Shape:
        """(height, width) of the picture upright."""
        return self.stored[::-1] if self.orientation in SIDEWAYS else self.stored

    @property
    def is_steep(self) -> bool:
        """Whether the picture becomes smaller than CUDA's resize can make it."""
        box, resized = self.view.box[2:], self.view.resized
        return any(have > MAX_SHRINK * want for have, want in zip(box, resized, strict=True))
