"""InternVL: pictures in tiles of one size, each of which takes the same number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from mmstream.decoding.image.geometry import ImageShape, InternVLTiles as InternVLTiles
from mmstream.decoding.text.placeholders import ImageLength
from mmstream.families.family import Blank, Family, Inputs, Pictures, TokenCount, side_of
from mmstream.settings import PositiveInt, checked


@checked()
def image_length(tile_length: PositiveInt = 256) -> ImageLength:
    """Count the tokens of an image for InternVL.

    Every tile takes the same number. The rule is that of transformers'
    ``InternVLProcessor.replace_image_token``, without its two marks around an image: put those into
    the chat template.

    Args:
        tile_length: Tokens per tile.

    Returns:
        A function for ``TextDecoder(image_length=)``. Use it with
        ``ImageDecoder(size=448, tiles=InternVLTiles())``.

    Examples:
        >>> length = image_length()
        >>> length(ImageShape(448, 448, picture=(400, 800), num_tiles=3, grid=(1, 2)))
        768
    """
    return partial(_by_tile, tile_length=tile_length)


def _by_tile(shape: ImageShape, tile_length: int) -> int:
    return shape.num_tiles * tile_length


@dataclass(frozen=True)
class InternVL(Family):
    """Tiles of all rows one after another, [num_tiles, 3, S, S]."""

    takes: tuple[str, ...] = ("image",)

    def image_inputs(self, pictures: Pictures, config: Any) -> Inputs:
        """Return the tiles as one tensor."""
        return {"pixel_values": pictures.stacked(config.model_type)}

    def num_tokens(self, kind: str, medium: Any, config: Any) -> TokenCount | None:
        """Return the tokens of all tiles."""
        length = _tile_length(config, *medium.tiles[0].shape[-2:])
        return TokenCount(
            len(medium.tiles) * length, f"mm.families.internvl.image_length({length})"
        )

    def blank(self, kind: str, config: Any) -> Blank | None:
        """Return a picture of one tile."""
        side = side_of(config.vision_config.image_size)
        return Blank.picture(config, _tile_length(config, side, side), side, side)


def _tile_length(config: Any, height: int, width: int) -> int:
    patch = side_of(config.vision_config.patch_size)
    return int((height // patch) * (width // patch) * config.downsample_ratio**2)


FAMILIES: dict[str, Family] = {"internvl": InternVL()}
