"""Every format but JPEG -> pixels with Pillow. `FORMATS` lists them.

Place in the flow: `image.py` calls it with the plugin that the first bytes of a file ask for.
It does so too for the few JPEGs that libjpeg's API does not know.

The plugin's class is called directly. ``Image.open`` would try every format that Pillow knows, and
some of those start other programs. It would also apply a limit of the process, not the decoder's.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from mmstream.errors import DecodeError
from mmstream.media.limits import Limits
from mmstream.media.orientation import SIDEWAYS, picture_orientation

_PNG_SIGNATURE_BYTES = 8
_RAW_EXIF, _XMP = "Raw profile type exif", "XML:com.adobe.xmp"
_PNG_ORIENTING = (b"exif\0", b"xmp\0", *(f"{name}\0".encode() for name in (_RAW_EXIF, _XMP)))
"""Keywords of PNG text chunks that Pillow reads an orientation from."""
_MAX_REASON_CHARS = 160

MAX_PNG_CHUNKS = 100_000
"""Most chunks of a PNG. Encoders write picture data in chunks of 8 KiB and more."""
MAX_METADATA_CHUNKS = 500
"""Most chunks of a PNG that hold no picture data. Pillow may inflate 1 MiB of each."""
MAX_METADATA_BYTES = 16 * 2**20
"""Most bytes in the chunks of a PNG that hold no picture data. Pillow makes several copies."""
_FRAME_CHUNKS = (b"IDAT", b"fdAT", b"fcTL")
"""Chunks of a PNG that hold the data of a picture, or start the next frame of an animation."""

MAX_READS_TO_OPEN = 20_000
"""Most reads until Pillow has opened a file: two for each piece of metadata before the picture."""
MAX_RLE_PIXELS = 2**23
"""Most pixels of a run-length encoded BMP, which Pillow decodes in Python, pixel by pixel."""
MAX_RLE_BYTES = 2**22
"""Most bytes of a run-length encoded BMP."""

WHOLE_PIXELS = 2**20
"""Larger pictures are converted to RGB in bands, so that no second copy of them is needed."""
BAND_PIXELS = 2**18

_NARROW_MODES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2, "I;16N": 2}
"""Bytes per pixel of Pillow's modes. All others have 4."""


class Memory(NamedTuple):
    """What a plugin needs at its peak besides Pillow's own picture. Measured."""

    bytes_per_pixel: int = 0
    file_copies: int = 0
    """Copies of the whole file. Most plugins read it piece by piece."""


class PillowFormat(NamedTuple):
    """A format that Pillow decodes. `mmstream.media.types` says what its files are called."""

    name: str
    """Pillow's."""
    first_bytes: bytes
    """A regular expression."""
    plugin: type[ImageFile.ImageFile]
    memory: Memory


FORMATS = (
    PillowFormat("PNG", rb"\x89PNG\r\n\x1a\n", PngImagePlugin.PngImageFile, Memory()),
    # What the frame leaves behind.
    PillowFormat("GIF", rb"GIF8[79]a", GifImagePlugin.GifImageFile, Memory(1)),
    # Two canvases, the frame, and its copy.
    PillowFormat("WEBP", rb"(?s)RIFF....WEBP", WebPImagePlugin.WebPImageFile, Memory(10, 4)),
    PillowFormat("BMP", rb"BM", BmpImagePlugin.BmpImageFile, Memory()),
    # Planes of up to 16 bits with alpha, RGBA, and its copy.
    PillowFormat("AVIF", rb"(?s)....ftypavi[fs]", AvifImagePlugin.AvifImageFile, Memory(17, 4)),
)
"""The formats besides JPEG. The first one whose first bytes match decodes a file."""

_MEMORY = {
    **{image_format.name: image_format.memory for image_format in FORMATS},
    "JPEG": Memory(8),  # the coefficients of a progressive file
    "TIFF": Memory(),  # these two are only converted
    "HEIF": Memory(),
}
_MAX_MEMORY = Memory(17, 4)
"""For a plugin that is not listed."""


class Picture(NamedTuple):
    """A decoded file, not yet turned upright."""

    pixels: NDArray[np.uint8]
    """uint8 [H, W, 3], RGB, as stored. Of a mask: uint8 [H, W, 1], class numbers."""
    orientation: int | None
    """1 to 8 as the metadata says. None: upright."""


class _LimitedFile(io.BytesIO):
    """A file that is not read any more when the time is over, or read in too many pieces.

    Pillow takes most formats in pieces of at most 64 KiB, so reading is where it can be ended.
    """

    def __init__(self, data: bytes, limits: Limits, format_name: str) -> None:
        super().__init__(data)
        self._limits = limits
        self._format_name = format_name
        self._reads_left = MAX_READS_TO_OPEN

    def read(self, size: int | None = -1, /) -> bytes:
        self._limits.deadline.check()
        self._reads_left -= 1
        if self._reads_left == 0:
            max_pieces = MAX_READS_TO_OPEN // 2
            raise DecodeError(f"{self._format_name}: metadata in more than {max_pieces} pieces")
        return super().read(size)

    def end_of_header(self) -> None:
        """Read on without a limit on pieces."""
        self._reads_left = -1


def decode_with_pillow(
    plugin: Callable[[io.BytesIO], ImageFile.ImageFile],
    data: bytes,
    limits: Limits,
    check_shape: Callable[[int, int], None] | None = None,
    convert: Callable[[Image.Image], NDArray[np.uint8]] | None = None,
) -> Picture:
    """Decode the first frame of an image.

    Args:
        plugin: The class of a Pillow plugin, such as ``PngImagePlugin.PngImageFile``.
        data: The file.
        limits: Limits on pixels and memory, checked before any pixel is decoded, and on time.
        check_shape: Called with the height and width that the header states, before any pixel is
            decoded. It raises a DecodeError where their result exceeds a limit.
        convert: What makes an array of a loaded picture. None: `to_rgb`.

    Raises:
        DecodeError: Pillow raised an error, or the picture exceeds a limit. Warnings count where
            the process turns them into errors.
    """
    format_name = _format_name(plugin)
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # no deadline counts the time of libavif's own threads
    try:
        file = _LimitedFile(data, limits, format_name)
        with plugin(file) as image:
            file.end_of_header()
            _check_cost(image, len(data), limits)
            if check_shape is not None:
                check_shape(image.height, image.width)
            packing = image.tile[0][3] if image.tile else None
            image.load()
            limits.deadline.check()
            spread = _SPREAD_LEVELS.get(packing, 1) if isinstance(packing, str) else 1
            _scale_colour_key(image.info, spread, is_deep=packing == "RGB;16B")
            if convert is to_numbers:
                return Picture(to_numbers(image) // spread, _orientation(image))
            return Picture((convert or to_rgb)(image), _orientation(image))
    except (DecodeError, MemoryError):
        raise
    except Exception as error:  # Pillow raises SyntaxError, OSError, ValueError, struct.error, ...
        reason = one_line(error) or type(error).__name__
        raise DecodeError(f"{format_name}: {reason}") from None


def _format_name(plugin: Callable[[io.BytesIO], ImageFile.ImageFile]) -> str:
    return plugin.__name__.removesuffix("ImageFile").upper()


def _check_cost(image: ImageFile.ImageFile, num_bytes: int, limits: Limits) -> None:
    """Refuse an opened picture that exceeds a limit. No pixel of it is decoded yet.

    Example: Pillow holds an RGB picture in 4 bytes per pixel, and the result has 3. So a PNG of
    10 megapixels needs 70 MB. A WebP needs 10 bytes per pixel more, 170 MB.
    """
    height, width = image.height, image.width
    limits.check_picture(height, width)
    memory = _MEMORY.get(image.format or "", _MAX_MEMORY)
    per_pixel = _NARROW_MODES.get(image.mode, 4) + 3 + memory.bytes_per_pixel
    if image.tile and image.tile[0][0] == "bmp_rle":
        per_pixel += 2
        if height * width > MAX_RLE_PIXELS or num_bytes > MAX_RLE_BYTES:
            raise DecodeError(
                f"run-length encoded picture of {width}x{height}, {num_bytes} bytes exceeds "
                f"{MAX_RLE_PIXELS} pixels or {MAX_RLE_BYTES} bytes"
            )
    need = height * width * per_pixel + num_bytes * memory.file_copies
    limits.check_memory(need, height, width)


def pillow_shape(
    plugin: Callable[[io.BytesIO], ImageFile.ImageFile], data: bytes, limits: Limits
) -> tuple[int, int] | None:
    """Read the (height, width) of the upright image from its header. None where Pillow cannot."""
    try:
        with plugin(_LimitedFile(data, limits, _format_name(plugin))) as image:
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
    if image.height * image.width <= WHOLE_PIXELS:
        return _band_to_rgb(image)
    rows = max(1, BAND_PIXELS // image.width)
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        pixels[top : top + rows] = _band_to_rgb(band)
    return pixels


_SPREAD_LEVELS = {"L;2": 85, "L;4": 17}
"""Pillow spreads grey levels of 2 and 4 bits over 0 to 255. Class 3 of 2 bits becomes 3 x 85."""


def to_numbers(image: Image.Image) -> NDArray[np.uint8]:
    """Return the class numbers of a loaded mask: grey levels, or numbers of palette entries.

    Returns:
        uint8 [H, W, 1], C-contiguous.

    Raises:
        DecodeError: The picture has colours, or more than 8 bits.
    """
    if image.mode in ("L", "P", "1"):
        return np.array(image).astype(np.uint8, copy=False)[:, :, None]
    if image.mode == "LA":
        return np.array(image.getchannel("L"))[:, :, None]
    if image.mode in ("RGB", "RGBA"):
        levels, *others = (np.asarray(image.getchannel(name)) for name in "RGB")
        if all(np.array_equal(levels, other) for other in others):  # grey, stored as colours
            return np.array(levels)[:, :, None]
        raise DecodeError(
            "a mask has one class number per pixel, and this picture has colours: decode it with "
            'ImageDecoder(interpolation="nearest") and map its colours to numbers'
        )
    raise DecodeError(
        f"a mask of mode {image.mode}, not of 8 bits: decode it with a function of your own"
    )


def _scale_colour_key(info: dict[Any, Any], spread: int, is_deep: bool) -> None:
    """Bring the transparent colour of a PNG to the levels that Pillow gave its pixels.

    Pillow leaves it as the file has it. Of colours with 16 bits it keeps the high byte.
    """
    colour = info.get("transparency")
    if isinstance(colour, int) and spread > 1:
        info["transparency"] = (colour & (255 // spread)) * spread
    elif isinstance(colour, tuple) and is_deep:
        info["transparency"] = tuple(level >> 8 for level in colour)


def with_alpha(image: Image.Image) -> Image.Image | None:
    """Return a loaded picture with its transparency as RGBA. None: it states none.

    Transparency is alpha, a palette with alpha, or a transparent colour.
    """
    if not image.has_transparency_data:
        return None
    if not image.mode.startswith("I;16"):
        return image.convert("RGBA")
    numbers = np.asarray(image)
    grey, opaque = numbers >> 8, 255 * (numbers != image.info["transparency"])
    return Image.fromarray(np.dstack((grey, grey, grey, opaque)).astype(np.uint8))


def _band_to_rgb(image: Image.Image) -> NDArray[np.uint8]:
    layer = with_alpha(image)
    if layer is not None:
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, layer)
    elif image.mode.startswith("I;16"):  # convert("RGB") would clip at 255 instead
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    elif image.mode in ("1", "L"):  # ten times as fast as convert("RGB")
        channel = image.convert("L")
        image = Image.merge("RGB", (channel, channel, channel))
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def check_png(data: bytes) -> None:
    """Check the checksums of a PNG's picture data, which Pillow does not check.

    Args:
        data: A PNG file.

    Raises:
        DecodeError: An IDAT chunk is cut short or does not match its CRC. Or there are too many
            chunks.
    """
    view = memoryview(data)
    for start, stop in _png_chunks(data):
        if data.startswith(b"IDAT", start):
            if stop + 4 > len(data):
                raise DecodeError("PNG: truncated picture data")
            if zlib.crc32(view[start:stop]) != int.from_bytes(view[stop : stop + 4], "big"):
                raise DecodeError("PNG: damaged picture data (wrong checksum)")


def has_late_metadata(data: bytes) -> bool:
    """Tell whether a PNG may state its orientation after its picture data.

    Raises:
        DecodeError: There are too many chunks.
    """
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
    """Yield the range of each chunk's name and payload, for which its checksum is.

    Raises:
        DecodeError: There are too many chunks, or too many bytes of metadata.
    """
    position = _PNG_SIGNATURE_BYTES
    num_chunks = num_metadata_chunks = num_metadata_bytes = 0
    while position + 8 <= len(data):
        # A chunk has the length of its payload (4), its name (4), the payload, a checksum (4).
        start, stop = position + 4, position + 8 + int.from_bytes(data[position : position + 4])
        num_chunks += 1
        if num_chunks > MAX_PNG_CHUNKS:
            raise DecodeError(f"PNG: more than {MAX_PNG_CHUNKS} chunks")
        if not data.startswith(_FRAME_CHUNKS, start):
            num_metadata_chunks += 1
            num_metadata_bytes += min(stop, len(data)) - start
            if num_metadata_chunks > MAX_METADATA_CHUNKS:
                raise DecodeError(f"PNG: more than {MAX_METADATA_CHUNKS} chunks of metadata")
            if num_metadata_bytes > MAX_METADATA_BYTES:
                raise DecodeError(f"PNG: more than {MAX_METADATA_BYTES} bytes of metadata")
        yield start, stop
        position = stop + 4


def one_line(error: Exception) -> str:
    """Return an error's message as one short line."""
    text = " ".join(str(error).split()).removesuffix(" (0 bytes not processed)")
    return text[:_MAX_REASON_CHARS]


def _orientation(image: Image.Image) -> int | None:
    """Return the orientation that the metadata asks for, where Pillow looks for it.

    ImageMagick keeps the EXIF of a PNG as text: hexadecimal digits after three lines. A TIFF is
    turned by Pillow itself.
    """
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return None
    info = image.info
    exif, xmp = info.get("exif"), info.get(_XMP) or info.get("xmp")
    if exif is None and _RAW_EXIF in info:
        try:
            exif = bytes.fromhex("".join(info[_RAW_EXIF].split("\n")[3:]))
        except ValueError:
            exif = None
    return picture_orientation(exif, xmp.encode() if isinstance(xmp, str) else xmp)
