"""How many tokens an image takes in the text, by the rules of common vision-language models.

Place in the flow: `ImageDecoder.prepared_shape` reads from an image's header which shape it will
have. A function of this module says how many vectors a model makes of that shape. `placeholders.py`
then puts as many tokens into the text.

Each public function here returns such a function, for ``TextDecoder(image_length=)``. It can be
pickled, so that it travels to worker processes. A function of your own must be defined in a module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from mmstream.decoding.image.image_shape import ImageShape
from mmstream.errors import ConfigError
from mmstream.wrong_arguments import PositiveInt, checked

ImageLength: TypeAlias = Callable[[ImageShape], int]
"""Says how many tokens an image of a shape takes, from 1 up."""


@checked()
def qwen_vl_length(patch_size: PositiveInt = 14, merge_size: PositiveInt = 2) -> ImageLength:
    """Count the tokens of an image for Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

    An image takes one token per square of merged patches. The rule is that of transformers'
    ``Qwen2VLProcessor.replace_image_token``: the product of ``image_grid_thw`` divided by
    ``merge_size`` squared.

    Args:
        patch_size: Side of a patch in pixels. 14 for Qwen2-VL and Qwen2.5-VL, 16 for Qwen3-VL.
        merge_size: How many patches on each side are merged into one token.

    Returns:
        A function for ``TextDecoder(image_length=)``. Use it with ``ImageDecoder(resize=
        "max_pixels", multiple_of=patch_size * merge_size)``. It raises ConfigError for an image
        whose sides are not multiples.

    Examples:
        >>> length = qwen_vl_length()
        >>> length(ImageShape(476, 644, picture=(480, 640)))  # 17 x 23 squares of 28 pixels
        391
    """
    return partial(_merged_patches, side=patch_size * merge_size)


@checked()
def llava_next_length(patch_size: PositiveInt = 14) -> ImageLength:
    """Count the tokens of an image for Llava-NeXT.

    An image takes one token per patch of the whole picture as one tile. It takes one more per patch
    of its other tiles that is not padding, and one at the end of each row of these. The rule is
    ``LlavaNextProcessor._get_number_of_features`` of transformers, with the "default" features,
    which have no class token.

    Args:
        patch_size: Side of a patch in pixels.

    Returns:
        A function for ``TextDecoder(image_length=)``. Use it with
        ``ImageDecoder(size=336, tiles=LlavaNextTiles())``.

    Examples:
        >>> length = llava_next_length()
        >>> shape = ImageShape(336, 336, picture=(480, 640), num_tiles=5, grid=(2, 2))
        >>> length(shape)  # 24 x 24 patches, and 36 rows of 48 patches and a mark
        2340
    """
    return partial(_unpadded_patches, patch_size=patch_size)


@checked()
def llava_onevision_length(patch_size: PositiveInt = 14, max_tiles: PositiveInt = 9) -> ImageLength:
    """Count the tokens of an image for LLaVA-OneVision.

    A picture that is alone in its sample takes tokens as for Llava-NeXT, see `llava_next_length`.
    Where its tiles have many more patches than `max_tiles` whole ones, the model shrinks them. Each
    of several pictures takes one token per patch of its tile, and one at the end. The rule is that
    of transformers' ``LlavaOnevisionProcessor.replace_image_token``.

    Args:
        patch_size: Side of a patch in pixels.
        max_tiles: The number in the model's ``vision_aspect_ratio``, "anyres_max_9".

    Returns:
        A function for ``TextDecoder(image_length=)``. Use it with
        ``ImageDecoder(size=384, tiles=LlavaOnevisionTiles())``.

    Examples:
        >>> length = llava_onevision_length()
        >>> shape = ImageShape(384, 384, picture=(480, 640), num_tiles=5, grid=(2, 2))
        >>> length(shape)  # 27 x 27 patches, and 40 rows of 54 patches and a mark
        2929
        >>> length(ImageShape(384, 384, picture=(480, 640)))  # beside another picture
        730
    """
    return partial(_shrunk_patches, patch_size=patch_size, max_tiles=max_tiles)


@checked()
def internvl_length(tile_length: PositiveInt = 256) -> ImageLength:
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
        >>> length = internvl_length()
        >>> length(ImageShape(448, 448, picture=(400, 800), num_tiles=3, grid=(1, 2)))
        768
    """
    return partial(_by_tile, tile_length=tile_length)


def _merged_patches(shape: ImageShape, side: int) -> int:
    if shape.height % side or shape.width % side:
        raise ConfigError(
            f"image_length: a picture of {shape.width}x{shape.height} is not made of squares of "
            f'{side} pixels: give ImageDecoder(resize="max_pixels", multiple_of={side})'
        )
    return shape.height // side * (shape.width // side)


def _unpadded_patches(shape: ImageShape, patch_size: int) -> int:
    """Count patches and marks at the ends of rows, without a limit."""
    side = shape.height // patch_size
    rows, columns = _unpadded_grid(shape, side)
    return side * side + rows * (columns + 1)


def _shrunk_patches(shape: ImageShape, patch_size: int, max_tiles: int) -> int:
    """Count patches and marks at the ends of rows, of which the model keeps a limited number."""
    side = shape.height // patch_size
    if shape.num_tiles == 1:
        return side * side + 1
    rows, columns = _unpadded_grid(shape, side)
    ratio = math.sqrt(rows * columns / (max_tiles * side**2))
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return side * side + rows * (columns + 1)


def _unpadded_grid(shape: ImageShape, side: int) -> tuple[int, int]:
    """Return the rows and columns of patches that are not padding, of tiles of `side` patches.

    Example: a picture of 480x640 pixels in a grid of 2x2 tiles of 336 pixels, with patches of 14. A
    tile has 24x24 patches, the grid 48x48. The picture is as wide as the grid, and fills 36 of its
    48 rows: 480 * 48 / 640. So it takes 24 * 24 + 36 * (48 + 1) = 2340 tokens of Llava-NeXT.
    """
    rows, columns = (count * side for count in shape.grid)
    height, width = shape.picture
    # Both sides lose the same number of padding patches, rounded down: hence // 2 * 2. The order of
    # operations and the seven digits are those of the model: they decide where a half is rounded.
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    return rows, columns


def _by_tile(shape: ImageShape, tile_length: int) -> int:
    return shape.num_tiles * tile_length
