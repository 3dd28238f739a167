"""PNG, WebP, BMP, GIF and AVIF to pixels, by Pillow; and the one rule that makes anything RGB.

Part of the decode stage, called by `decoding.image.formats` with the plugin that the first bytes
name. The plugin's class is called directly: `Image.open` would try every format Pillow knows (some
of which start other programs), and would measure pictures by a process-wide limit instead of the
decoder's.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from mmstream.decoding.image.orientation import SIDEWAYS, exif_orientation, xmp_orientation
from mmstream.errors import DecodeError

_PNG_SIGNATURE_BYTES = 8
_PNG_ORIENTING = (b"exif\0", b"xmp\0", b"XML:com.adobe.xmp\0")
"""Keywords of text chunks in which Pillow finds metadata."""
_MAX_REASON_CHARS = 160


class Picture(NamedTuple):
    """uint8 [H, W, 3] RGB as stored, and the orientation its metadata asks for (None: upright)."""

    pixels: NDArray[np.uint8]
    orientation: int | None


def decode_with_pillow(
    plugin: Callable[[io.BytesIO], ImageFile.ImageFile], data: bytes, max_pixels: int
) -> Picture:
    """Decode the first frame of an image.

    Args:
        plugin: The class of a Pillow plugin, such as ``PngImagePlugin.PngImageFile``.
        data: The file.
        max_pixels: Larger pictures are refused from their header, before their pixels are decoded.

    Returns:
        The pixels as RGB, and the orientation.

    Raises:
        DecodeError: Whatever Pillow raised, warnings included where the process turns them into
            errors; or the picture is too large.
    """
    try:
        with plugin(io.BytesIO(data)) as image:
            check_pixels(image.height, image.width, max_pixels)
            image.load()
            return Picture(to_rgb(image), _orientation(image))
    except (DecodeError, MemoryError):
        raise
    except Exception as error:  # Pillow raises SyntaxError, OSError, ValueError, struct.error, ...
        reason = one_line(error) or type(error).__name__
        format_name = plugin.__name__.removesuffix("ImageFile").upper()
        raise DecodeError(f"{format_name}: {reason}") from None


def pillow_shape(
    plugin: Callable[[io.BytesIO], ImageFile.ImageFile], data: bytes
) -> tuple[int, int] | None:
    """Read the (height, width) of an upright image from its header; None where Pillow cannot."""
    try:
        with plugin(io.BytesIO(data)) as image:
            height, width = image.height, image.width
            return (width, height) if _orientation(image) in SIDEWAYS else (height, width)
    except MemoryError:
        raise
    except Exception:
        return None


def to_rgb(image: Image.Image) -> NDArray[np.uint8]:
    """Turn a loaded picture of any mode into RGB.

    Grey is repeated, palettes are looked up, transparency (alpha, or a transparent colour) is laid
    on white, 16-bit channels keep their high byte, CMYK is converted without a profile.

    Returns:
        uint8 [H, W, 3], C-contiguous.
    """
    if image.mode.startswith("I;16"):  # convert("RGB") would clip at 255 instead
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, layer)
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def check_png(data: bytes) -> None:
    """Check the picture data's checksums, which Pillow skips.

    Args:
        data: A PNG file.

    Raises:
        DecodeError: An IDAT chunk is cut short or does not match its CRC.
    """
    view = memoryview(data)
    for start, stop in _png_chunks(data):
        if data.startswith(b"IDAT", start):
            if stop + 4 > len(data):
                raise DecodeError("PNG: truncated picture data")
            if zlib.crc32(view[start:stop]) != int.from_bytes(view[stop : stop + 4], "big"):
                raise DecodeError("PNG: damaged picture data (wrong checksum)")


def has_late_metadata(data: bytes) -> bool:
    """Tell whether a PNG may say behind its picture data which way up it is."""
    seen = False
    for start, _ in _png_chunks(data):
        if data.startswith(b"IDAT", start):
            seen = True
        elif seen and (
            data.startswith(b"eXIf", start) or data.startswith(_PNG_ORIENTING, start + 4)
        ):
            return True
    return False


def _png_chunks(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield where each chunk's name and payload start and stop."""
    position = _PNG_SIGNATURE_BYTES
    while position + 8 <= len(data):
        stop = position + 8 + int.from_bytes(data[position : position + 4], "big")
        yield position + 4, stop
        position = stop + 4


def check_pixels(height: int, width: int, max_pixels: int) -> None:
    """Refuse a picture without pixels or with too many, as its header declares them.

    Raises:
        DecodeError: Says the size and the limit.
    """
    if height < 1 or width < 1:
        raise DecodeError(f"picture of {width}x{height} has no pixels")
    if height * width > max_pixels:
        raise DecodeError(f"picture of {width}x{height} exceeds max_pixels={max_pixels}")


def one_line(error: Exception) -> str:
    """An error's message as one short line."""
    return " ".join(str(error).split())[:_MAX_REASON_CHARS]


def _orientation(image: Image.Image) -> int | None:
    exif = image.info.get("exif")
    found = exif_orientation(exif) if isinstance(exif, bytes) else None
    if found is not None:
        return found
    xmp = image.info.get("xmp") or image.info.get("XML:com.adobe.xmp")
    if isinstance(xmp, str):
        xmp = xmp.encode()
    return xmp_orientation(xmp) if isinstance(xmp, bytes) else None
