"""Image files of any known format: their sizes by the headers, and upright RGB pixels.

Place in the flow: converter, statistics, notebooks and `ImageDecoder` read images here:

    first bytes say the format -> `jpeg` or `pillow` decodes -> `orientation` turns the picture

The name of the field does not matter: a PNG called ``.jpg`` is decoded as a PNG.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, PngImagePlugin

from mmstream.errors import DecodeError
from mmstream.media.jpeg import decode_jpeg, readable_header
from mmstream.media.limits import Limits, out_of_memory_refused
from mmstream.media.orientation import upright, upright_bytes
from mmstream.media.pillow import (
    FORMATS,
    check_png,
    decode_with_pillow,
    has_late_metadata,
    pillow_shape,
    to_numbers,
    to_rgb,
)
from mmstream.media.types import Shape

JPEG_START = b"\xff\xd8"
"""The first bytes of every JPEG: its marker "start of image"."""


def decode_bytes(
    data: bytes | memoryview,
    limits: Limits,
    factor: int = 1,
    check_shape: Callable[[int, int], None] | None = None,
) -> tuple[NDArray[np.uint8], int]:
    """Decode an image of any known format.

    Args:
        data: The file.
        limits: Limits on pixels, memory and time.
        factor: How many times smaller a JPEG may be decoded: 1, 2, 4 or 8.
        check_shape: As in `decode_with_pillow`. Not used for a JPEG.

    Returns:
        The pixels: uint8 [H, W, 3], RGB, upright, C-contiguous. And the factor that was used. It is
        1 where the format, or the kind of JPEG, cannot be decoded smaller.

    Raises:
        DecodeError: The bytes are not a whole image, or exceed a limit.
    """
    if data[:2] == JPEG_START:
        return decode_jpeg(data, limits, factor)
    return _decode_other(bytes(data), limits, check_shape, to_rgb), 1


@out_of_memory_refused("image")
def decode_whole(data: bytes, limits: Limits) -> NDArray[np.uint8]:
    """Decode an image at its full size; as `decode_bytes`, and too little memory is its error."""
    return decode_bytes(data, limits)[0]


def decode_mask(
    data: bytes | memoryview,
    limits: Limits,
    check_shape: Callable[[int, int], None] | None,
) -> NDArray[np.uint8]:
    """Decode a picture of class numbers.

    Args:
        data: The file.
        limits: Limits on pixels, memory and time.
        check_shape: As in `decode_with_pillow`.

    Returns:
        The numbers as they are stored: uint8 [H, W, 1], upright, C-contiguous.

    Raises:
        DecodeError: The bytes are not a whole image, exceed a limit, or are not a mask.
    """
    if data[:2] == JPEG_START:
        raise DecodeError("a JPEG does not keep class numbers exactly: masks are PNG files")
    return _decode_other(bytes(data), limits, check_shape, to_numbers)


def _decode_other(
    data: bytes,
    limits: Limits,
    check_shape: Callable[[int, int], None] | None,
    convert: Callable[[Image.Image], NDArray[np.uint8]],
) -> NDArray[np.uint8]:
    """Decode an image that is not a JPEG, and turn it upright; arguments as of its callers."""
    plugin = plugin_of(data)
    if plugin is PngImagePlugin.PngImageFile:
        check_png(data)
    picture = decode_with_pillow(plugin, data, limits, check_shape, convert)
    height, width, _ = picture.pixels.shape
    limits.check_memory(upright_bytes(height, width, picture.orientation), height, width)
    return upright(picture.pixels, picture.orientation)


def header_shape(data: bytes | memoryview, limits: Limits) -> Shape | None:
    """Read the (height, width) of the upright image from its header, without judging the file.

    Returns:
        The shape that `decode_bytes` gives at factor 1, if it succeeds. None where the header alone
        does not tell: libjpeg or Pillow refuse it, or the orientation may follow a PNG's pixels.

    Raises:
        DecodeError: The format is not known, or the header exceeds a limit.
    """
    if data[:2] == JPEG_START:
        header = readable_header(data)
        return header.picture if header is not None and min(header.stored) > 0 else None
    data = bytes(data)
    plugin = plugin_of(data)
    if plugin is PngImagePlugin.PngImageFile and has_late_metadata(data):
        return None
    return pillow_shape(plugin, data, limits)


def plugin_of(data: bytes) -> Callable[[io.BytesIO], ImageFile.ImageFile]:
    """Return the class of the Pillow plugin that the first bytes ask for."""
    for image_format in FORMATS:
        if re.match(image_format.first_bytes, data):
            return image_format.plugin
    if not data:
        raise DecodeError("empty, not an image")
    raise DecodeError(f"not an image of a known format: starts with {data[:12]!r}")
