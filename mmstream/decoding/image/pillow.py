"""PNG, WebP, BMP, GIF and AVIF files -> pixels with Pillow.

Place in the flow: `formats.py` calls it with the plugin that the first bytes of a file ask for.
`jpeg.py` calls it for the few JPEGs that libjpeg's API does not know.

The plugin's class is called directly. ``Image.open`` would try every format that Pillow knows, and
some of those start other programs. It would also apply a limit of the process, not the decoder's.
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
"""Keywords of PNG text chunks that Pillow reads an orientation from."""
_MAX_REASON_CHARS = 160


class Picture(NamedTuple):
    """A decoded file, not yet turned upright."""

    pixels: NDArray[np.uint8]
    """uint8 [H, W, 3], RGB, as stored."""
    orientation: int | None
    """1 to 8 as the metadata says. None: upright."""


def decode_with_pillow(
    plugin: Callable[[io.BytesIO], ImageFile.ImageFile], data: bytes, max_pixels: int
) -> Picture:
    """Decode the first frame of an image.

    Args:
        plugin: The class of a Pillow plugin, such as ``PngImagePlugin.PngImageFile``.
        data: The file.
        max_pixels: Limit on height x width, checked before any pixel is decoded.

    Raises:
        DecodeError: Pillow raised an error, or the picture is too large. Warnings count where the
            process turns them into errors.
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
    """Read the (height, width) of the upright image from its header. None where Pillow cannot."""
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

    Grey is repeated. Palettes are looked up. Transparency (alpha, or a transparent colour) is laid
    on white. 16-bit channels keep their high byte. CMYK is converted without a profile.

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
    """Check the checksums of a PNG's picture data, which Pillow does not check.

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
    """Tell whether a PNG may state its orientation after its picture data."""
    is_after_pixels = False
    for start, _ in _png_chunks(data):
        if data.startswith(b"IDAT", start):
            is_after_pixels = True
        elif is_after_pixels and (
            data.startswith(b"eXIf", start) or data.startswith(_PNG_ORIENTING, start + 4)
        ):
            return True
    return False


def _png_chunks(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the range of each chunk's name and payload, for which its checksum is."""
    position = _PNG_SIGNATURE_BYTES
    while position + 8 <= len(data):
        # A chunk has the length of its payload (4), its name (4), the payload, a checksum (4).
        stop = position + 8 + int.from_bytes(data[position : position + 4], "big")
        yield position + 4, stop
        position = stop + 4


def check_pixels(height: int, width: int, max_pixels: int) -> None:
    """Refuse a picture without pixels, or with more than the limit.

    Raises:
        DecodeError: Names the size and the limit.
    """
    if height < 1 or width < 1:
        raise DecodeError(f"picture of {width}x{height} has no pixels")
    if height * width > max_pixels:
        raise DecodeError(f"picture of {width}x{height} exceeds max_pixels={max_pixels}")


def one_line(error: Exception) -> str:
    """Return an error's message as one short line."""
    return " ".join(str(error).split())[:_MAX_REASON_CHARS]


def _orientation(image: Image.Image) -> int | None:
    """Return the orientation that the metadata asks for: EXIF's, else XMP's."""
    exif = image.info.get("exif")
    exif_value = exif_orientation(exif) if isinstance(exif, bytes) else None
    if exif_value is not None:
        return exif_value
    xmp = image.info.get("xmp") or image.info.get("XML:com.adobe.xmp")
    if isinstance(xmp, str):
        xmp = xmp.encode()
    return xmp_orientation(xmp) if isinstance(xmp, bytes) else None
