"""How one picture becomes its result, as another picture of the same geometry did.

Place in the flow: `decoding.by_field` plans a follower like its leader, and `ImageDecoder.decode`
takes the plan.
"""

from __future__ import annotations

from typing import NamedTuple

from mmstream.decoding.image.geometry import Shape, View


class Plan(NamedTuple):
    """How one picture becomes its result."""

    picture: Shape
    """(height, width) of the picture when it is upright."""
    view: View
    """How the result is made of the upright picture."""
