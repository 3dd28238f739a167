"""How many tokens a picture takes in the text, by the rules of the common vision-language models.

Part of the decode stage: `decoding.image` says from a picture's header what it will become
(`ImageShape`), a function says how many vectors the model makes of that, and
`decoding.text.placeholders` puts as many tokens into the text. Each function here returns such
a function, which travels to worker processes; one of your own is a function of a module, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from mmstream.decoding.image.image_shape import ImageShape
from mmstream.errors import ConfigError

__all__ = ["ImageLength", "internvl_length", "llava_next_length", "qwen_vl_length"]


ImageLength: TypeAlias = Callable[[ImageShape], int]
"""Says how many tokens a picture takes, from 1 up."""


def qwen_vl_length(patch_size: int = 14, merge_size: int = 2) -> ImageLength:
    """Count a token for each square of merged patches: Qwen2-VL, Qwen2.5-VL.

    Qwen3-VL: ``patch_size=16``. Goes with ``ImageDecoder(resize="max_pixels", multiple_of=)``, a
    multiple of patch_size * merge_size. As transformers' ``Qwen2VLProcessor.replace_image_token``
    counts: the product of ``image_grid_thw``, by the square of ``merge_size``.
    """
    return partial(_merged, side=patch_size * merge_size)


def llava_next_length(patch_size: int = 14) -> ImageLength:
    """Count a token for each patch that shows some of the picture: Llava-NeXT.

    Counts the patches of the whole picture as one tile, then those of all tiles without their
    padding, and one mark at the end of each row. Use with ``ImageDecoder(size=336,
    tiles=LlavaNextTiles())``. The rule is ``LlavaNextProcessor._get_number_of_features`` of
    transformers with the "default" features, which have no class token.
    """
    return partial(_unpadded, patch_size=patch_size)


def internvl_length(tile_length: int = 256) -> ImageLength:
    """Count as many tokens for each tile: InternVL.

    Goes with ``ImageDecoder(size=448, tiles=InternVLTiles())``. As transformers'
    ``InternVLProcessor.replace_image_token`` counts, without its two marks around an image: those
    belong into the chat template.
    """
    return partial(_by_tile, tile_length=tile_length)


def _merged(shape: ImageShape, side: int) -> int:
    if shape.height % side or shape.width % side:
        raise ConfigError(
            f"image_length: a picture of {shape.width}x{shape.height} is not made of squares of "
            f'{side} pixels: give ImageDecoder(resize="max_pixels", multiple_of={side})'
        )
    return shape.height // side * (shape.width // side)


def _unpadded(shape: ImageShape, patch_size: int) -> int:
    side = shape.height // patch_size
    rows, columns = (count * side for count in shape.grid)
    height, width = shape.picture
    # What is left after padding of the same number of patches, rounded down, on both sides. The
    # order of operations and the seven digits decide at halves: they are those of the model.
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    return side * side + rows * (columns + 1)


def _by_tile(shape: ImageShape, tile_length: int) -> int:
    return shape.num_tiles * tile_length
