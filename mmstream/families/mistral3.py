"""Mistral 3 and Pixtral: pictures keep their proportions, and each row of tokens ends in a mark."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from mmstream.decoding.image.geometry import ImageShape, PixtralTile as PixtralTile
from mmstream.decoding.media_shapes import MediaText
from mmstream.decoding.text.placeholders import ImageLength
from mmstream.errors import ConfigError
from mmstream.families.family import Blank, Family, Inputs, Pictures, TokenCount
from mmstream.settings import PositiveInt, checked


@checked()
def image_length(
    patch_size: PositiveInt = 14,
    merge_size: PositiveInt = 2,
    *,
    image_token: str = "[IMG]",
    image_break_token: str = "[IMG_BREAK]",
    image_end_token: str = "[IMG_END]",
) -> ImageLength:
    """Write the tokens of a picture for Mistral 3 and Pixtral: row by row, with a mark after each.

    The rule is that of transformers' ``PixtralProcessor.replace_image_token``.

    Args:
        patch_size: Side of a patch in pixels. 14 for Mistral 3, 16 for Pixtral.
        merge_size: How many patches on each side are merged into one token. 2 for Mistral 3, 1 for
            Pixtral.
        image_token: The ``image_token`` of the text decoder.
        image_break_token: What stands after each row but the last.
        image_end_token: What stands after the last row.

    Returns:
        A function for ``TextDecoder(image_length=)``. Use it with
        ``ImageDecoder.from_processor(processor)``. It raises ConfigError for a picture whose sides
        are not multiples of ``patch_size * merge_size``.

    Examples:
        >>> text = image_length()(ImageShape(56, 84, picture=(50, 80)))  # 2 x 3 squares of 28
        >>> text.text, text.lengths
        ('[IMG][IMG_BREAK][IMG][IMG_END]', (3, 3))
    """
    marks = (f"{image_token}{image_break_token}", f"{image_token}{image_end_token}")
    return partial(_by_row, side=patch_size * merge_size, marks=marks)


def _by_row(shape: ImageShape, side: int, marks: tuple[str, str]) -> MediaText:
    if shape.height % side or shape.width % side:
        raise ConfigError(
            f"image_length: a picture of {shape.width}x{shape.height} is not made of squares of "
            f"{side} pixels: give {_decoder(side)}"
        )
    rows, columns = shape.height // side, shape.width // side
    return MediaText(marks[0] * (rows - 1) + marks[1], (columns,) * rows)


def _decoder(side: int) -> str:
    """Return the decoder whose pictures have multiples of a side, for messages."""
    return f"ImageDecoder(size=1540, tiles=mm.families.mistral3.PixtralTile({side}))"


@dataclass(frozen=True)
class Mistral3(Family):
    """[num_pictures, 3, most H, most W], filled with zeros, and the sizes of the pictures."""

    takes: tuple[str, ...] = ("image",)

    def image_inputs(self, pictures: Pictures, config: Any) -> Inputs:
        """Return the pictures as one tensor, and the height and width of each in it."""
        import torch

        side = _side(config)
        sizes = [tuple(tile.shape[-2:]) for tile in pictures.tiles]
        for height, width in sizes:
            if height % side or width % side:
                raise ConfigError(
                    f"model_inputs: {config.model_type} takes pictures whose sides are multiples "
                    f"of {side} here, not {width}x{height}: {_decoder(side)}"
                )
        most = (max(height for height, _ in sizes), max(width for _, width in sizes))
        pixels = pictures.tiles[0].new_zeros(len(sizes), 3, *most)
        for filled, tile, (height, width) in zip(pixels, pictures.tiles, sizes, strict=True):
            filled[:, :height, :width] = tile
        return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes, device=pixels.device)}

    def num_tokens(self, kind: str, medium: Any, config: Any) -> TokenCount | None:
        """Return the number of squares of merged patches, without the marks of rows."""
        side, patch = _side(config), config.vision_config.patch_size
        number = sum((tile.shape[-2] // side) * (tile.shape[-1] // side) for tile in medium.tiles)
        return TokenCount(number, f"mm.families.mistral3.image_length({patch}, {side // patch})")

    def blank(self, kind: str, config: Any) -> Blank | None:
        """Return a picture of two tokens. transformers' Mistral 3 fails on one of one token."""
        side = _side(config)
        return Blank.picture(config, 2, side, 2 * side)


def _side(config: Any) -> int:
    """Return the side of a token in pixels. A Llava with Pixtral's tower merges no patches."""
    return int(config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1))


FAMILIES: dict[str, Mistral3] = {"mistral3": Mistral3()}
