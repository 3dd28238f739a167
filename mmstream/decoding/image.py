"""Image bytes to uint8 RGB of a fixed or the native size, straight into a row of the batch.

Part of the decode stage: sniff -> `jpeg` or `pillow` -> `orientation` -> `resize`. The first bytes
say what a file is, never its name: a PNG called ``.jpg`` decodes. Pictures stay uint8 on the CPU;
normalisation belongs to the device.

What becomes of odd pictures: EXIF orientation (or XMP's, without EXIF) is applied for every format
that carries one; grey is repeated, CMYK and palettes become RGB, transparency is laid on white,
16-bit channels keep their high byte, colour profiles are ignored, of an animation the first frame
is taken. Damaged and truncated pictures are refused: JPEG by the list in `mmstream.decoding.jpeg`,
PNG also by the checksums of its picture data, the others as their libraries in Pillow notice.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    ImageFile,
    PngImagePlugin,
    WebPImagePlugin,
)

from mmstream.decoding.jpeg import decode_jpeg
from mmstream.decoding.orientation import upright
from mmstream.decoding.pillow import check_png, decode_with_pillow
from mmstream.decoding.resize import resize_and_crop
from mmstream.errors import ConfigError, DecodeError

MAX_PIXELS = 128 * 2**20
MAX_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class ImageDecoder:
    """Decode one image: a callable from bytes to a uint8 array.

    Holds four numbers and no state: it can be pickled, and called from many threads at once (JPEG,
    the common case, decodes and resizes outside the GIL).

    Attributes:
        size: Side of the square result, or its (height, width). The picture is scaled until it just
            covers it, up or down, keeping its proportions, and the centre is cut out. None keeps
            the native size.
        resize_size: Scale the shorter side to this instead, before the cut: ``size=224,
            resize_size=256`` is torchvision's usual pair. At least the larger side of ``size``.
        max_pixels: Limit on height x width, checked from the header before any pixel is decoded,
            and on the picture that resizing makes of a very long one. Default 128 Mi, 384 MiB as
            RGB.
        max_bytes: Limit on the encoded image. Default 256 MiB.

    Raises:
        ConfigError: A size or limit below one, of the wrong type, or ``resize_size`` without or
            below ``size``.
    """

    size: int | tuple[int, int] | None = None
    resize_size: int | None = None
    max_pixels: int = MAX_PIXELS
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        sides = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        if self.size is not None and not (len(sides) == 2 and all(map(_is_count, sides))):
            raise ConfigError(f"size={self.size!r}: give a side in pixels or (height, width)")
        for name in ("max_pixels", "max_bytes"):
            if not _is_count(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r}: give a number from 1 up")
        if self.resize_size is None:
            return
        if not _is_count(self.resize_size) or self.output_shape is None:
            raise ConfigError(f"resize_size={self.resize_size!r}: give pixels, together with size")
        if self.resize_size < max(self.output_shape):
            raise ConfigError(f"resize_size={self.resize_size} is below size={self.size}")

    @property
    def output_shape(self) -> tuple[int, int] | None:
        """(height, width) of every result, or None where it differs from image to image."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    def __call__(self, data: bytes, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Decode one image.

        Args:
            data: The encoded file: JPEG, PNG, WebP, BMP, GIF or AVIF.
            out: uint8 [height, width, 3], C-contiguous, to receive the result; only with ``size``.
                After a DecodeError its content is undefined.

        Returns:
            uint8 [H, W, 3], RGB, C-contiguous, writable: ``out`` where it was given.

        Raises:
            DecodeError: The bytes are not a whole image, or exceed a limit; the reason in one line.
            ConfigError: ``out`` is not an array for this decoder's result.
        """
        shape = self.output_shape
        if out is not None and not (
            shape and out.shape == (*shape, 3) and out.dtype == np.uint8 and out.flags.c_contiguous
        ):
            raise ConfigError(f"out: {out.dtype} {out.shape} cannot hold a result of {shape}")
        if len(data) > self.max_bytes:
            raise DecodeError(f"image of {len(data)} bytes exceeds max_bytes={self.max_bytes}")
        image = _decode(data, self.max_pixels)
        if shape is None:
            return image
        return resize_and_crop(image, shape, self.resize_size, max_pixels=self.max_pixels, out=out)


def _decode(data: bytes, max_pixels: int) -> NDArray[np.uint8]:
    if data.startswith(b"\xff\xd8"):
        return decode_jpeg(data, max_pixels)
    plugin = _plugin(data)
    if plugin is PngImagePlugin.PngImageFile:
        check_png(data)
    picture = decode_with_pillow(plugin, data, max_pixels)
    return upright(picture.pixels, picture.orientation)


def _plugin(data: bytes) -> Callable[[io.BytesIO], ImageFile.ImageFile]:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImagePlugin.PngImageFile
    if data.startswith((b"GIF87a", b"GIF89a")):
        return GifImagePlugin.GifImageFile
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WebPImagePlugin.WebPImageFile
    if data.startswith(b"BM"):
        return BmpImagePlugin.BmpImageFile
    if data[4:12] in (b"ftypavif", b"ftypavis"):
        return AvifImagePlugin.AvifImageFile
    if not data:
        raise DecodeError("empty, not an image")
    raise DecodeError(f"not an image of a known format: starts with {data[:12]!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
