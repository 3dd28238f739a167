"""Images that are made smaller, or encoded in another format.

    load -> IMAGES -> the bytes that are stored

An image that needs no change keeps its bytes. Others are decoded by the strict decoder of training,
turned upright, resized with training's filter, and encoded. JPEGs are decoded at a half, a quarter
or an eighth where that is still twice the result.

Never silently wrong: what cannot be kept is a reject (animations, 16 bits a channel) or written
down here. Transparency is kept in PNG and WebP, and laid on white in JPEG. Colour profiles are kept
with the numbers of the pixels. CMYK becomes RGB as in training, without a profile. EXIF is dropped
after its orientation was applied.

Pillow's warnings of odd metadata are kept off the screen: a TIFF may cause one a tag.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageFile, TiffImagePlugin

from mmstream.converting.options import ImageFormat, MediaOptions
from mmstream.errors import DecodeError
from mmstream.media.image import JPEG_START, decode_bytes, plugin_of, read_header
from mmstream.media.limits import Limits
from mmstream.media.orientation import upright
from mmstream.media.pillow import decode_with_pillow, to_rgb, with_alpha
from mmstream.media.types import Shape

Pixels = NDArray[np.uint8]
"""uint8 [H, W, C], upright: grey (1), RGB (3) or RGBA (4)."""

_STORED_AS: dict[str, ImageFormat] = {"jpg": "jpg", "webp": "webp", "avif": "jpg", "heic": "jpg"}
"""The format of a resized image, by that of its file, where none is asked for. All others: PNG."""

_ICC_MARKER = b"\xff\xe2"
_ICC_NAME = b"ICC_PROFILE\0"
_ICC_PIECE_BYTES = 65_519
"""Most bytes of a colour profile in one segment of a JPEG: 65,533 less its name and two numbers."""
_MAX_PROFILE_BYTES = 1 << 20
_SRGB = (b"sRGB IEC61966", "sRGB IEC61966".encode("utf-16-be"))
"""Descriptions of profiles that say what an image without a profile is anyway."""


def target_of(extension: str, shape: Shape | None, options: MediaOptions) -> ImageFormat | None:
    """Return the format that an image must be encoded in. None: it needs no change.

    Args:
        extension: Type of the file.
        shape: (height, width). None: not known before it is decoded.
        options: What is asked for.
    """
    wanted = options.image_format
    if wanted is not None and wanted != extension:
        return wanted
    side = options.max_image_side
    if side is not None and (shape is None or max(shape) > side):
        return wanted or _STORED_AS.get(extension, "png")
    return None


def encode(
    data: bytes,
    extension: str,
    shape: Shape | None,
    target: ImageFormat,
    options: MediaOptions,
    limits: Limits,
) -> tuple[bytes, Shape, Shape]:
    """Decode an image, make it small enough, and encode it. The same bytes every time.

    Args:
        data: The file.
        extension: Its type.
        shape: Its (height, width) upright, or None where its header does not tell.
        target: The format to encode it in.
        options: Largest side, and quality.
        limits: Of decoding it.

    Returns:
        The bytes that are stored, their (height, width), and that of the upright original.

    Raises:
        DecodeError: It is damaged, exceeds a limit, or cannot be kept as it is shown.
        Exception: What an encoder raises, such as for a side that its format cannot have.
    """
    if extension == "jpg":
        pixels, profile = _decode_jpeg(data, shape, limits, options)
    else:
        pixels, profile = _decode_others(data, extension, limits)
    original = shape or (pixels.shape[0], pixels.shape[1])
    size = _fitting(original, options.max_image_side)
    if pixels.shape[:2] != size:
        pixels = _resized(pixels, size)
    if target == "jpg":
        return _encode_jpeg(pixels, profile, options), size, original
    settings: dict[str, Any] = {}
    if target == "webp":
        is_lossless = extension == "webp" and data[12:16] == b"VP8L"
        settings = {"quality": options.quality, "lossless": is_lossless, "method": 4}
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    file = io.BytesIO()
    image.save(file, target.upper(), icc_profile=profile, **settings)
    return file.getvalue(), size, original


def _fitting(shape: Shape, side: int | None) -> Shape:
    """Return the shape of which the longer side is at most `side`.

    480x640 becomes 192x256 with 256: 480 * 256 / 640 is 192.
    """
    longest = max(shape)
    if side is None or longest <= side:
        return shape
    height, width = (max(1, (length * side + longest // 2) // longest) for length in shape)
    return height, width


def _factor(shape: Shape | None, options: MediaOptions) -> int:
    """Return how many times smaller a JPEG may be decoded, so that it is still twice the result."""
    side = options.max_image_side
    if side is None or shape is None:
        return 1
    return next((f for f in (8, 4, 2) if max(shape) >= 2 * side * f), 1)


def _decode_jpeg(
    data: bytes, shape: Shape | None, limits: Limits, options: MediaOptions
) -> tuple[Pixels, bytes | None]:
    """Return the pixels, of which there may be fewer than in the file, and the colour profile."""
    pixels, _ = decode_bytes(data, limits, _factor(shape, options))
    profile, is_grey = _jpeg_profile(data)
    if is_grey:
        pixels = np.ascontiguousarray(pixels[:, :, :1])
    return pixels, profile


def _jpeg_profile(data: bytes) -> tuple[bytes | None, bool]:
    """Return the colour profile of a JPEG, and whether it is grey."""
    segments, _ = read_header(data)
    num_components = next((s.payload[5] for s in segments if s.marker in (0xC0, 0xC1, 0xC2)), 3)
    pieces = [
        s.payload[len(_ICC_NAME) :]
        for s in segments
        if s.marker == _ICC_MARKER[1] and s.payload.startswith(_ICC_NAME)
    ]
    pieces.sort(key=lambda piece: piece[0] if piece else 0)
    profile = b"".join(piece[2:] for piece in pieces)
    return _kept_profile(profile, is_grey=num_components == 1), num_components == 1


def _decode_others(data: bytes, extension: str, limits: Limits) -> tuple[Pixels, bytes | None]:
    profiles: list[bytes | None] = []

    def convert(image: Image.Image) -> Pixels:
        _require_keepable(image, data)
        pixels = _pixels_of(image)
        profile = image.info.get("icc_profile")
        is_rgb = image.mode not in ("CMYK", "YCbCr", "LAB")
        profiles.append(
            _kept_profile(profile, pixels.shape[2] == 1)
            if isinstance(profile, bytes) and is_rgb
            else None
        )
        return pixels

    if extension == "png":
        decode_bytes(data, limits)  # its checksums
    with unwarned:
        picture = decode_with_pillow(_plugin(data, extension), data, limits, convert=convert)
    return np.ascontiguousarray(upright(picture.pixels, picture.orientation)), profiles[0]


def _plugin(data: bytes, extension: str) -> Callable[[io.BytesIO], ImageFile.ImageFile]:
    if extension == "tiff":
        return TiffImagePlugin.TiffImageFile
    if extension == "heic":
        try:
            from pillow_heif import HeifImageFile
        except ImportError:
            raise DecodeError(
                "heic needs a library that is not installed: pip install pillow-heif"
            ) from None
        return HeifImageFile
    return plugin_of(data)


def _require_keepable(image: Image.Image, data: bytes) -> None:
    """Refuse what would be lost silently."""
    if getattr(image, "is_animated", False):
        raise DecodeError(
            "an animation, or several pictures: only the first one could be stored in another form"
        )
    is_deep_png = image.format == "PNG" and data[24] == 16
    if is_deep_png or image.mode.startswith(("I", "F")):
        raise DecodeError("more than 8 bits a channel: they would be lost in another form")


def _pixels_of(image: Image.Image) -> Pixels:
    """Return the pixels of a loaded picture: uint8 [H, W, 1], [H, W, 3] or [H, W, 4]."""
    layer = with_alpha(image)
    if layer is not None:
        return np.array(layer)
    if image.mode in ("1", "L"):
        return np.array(image.convert("L"))[:, :, None]
    return to_rgb(image)


def _kept_profile(profile: bytes, is_grey: bool) -> bytes | None:
    """Return a colour profile that the stored image needs, or None.

    Its bytes 16 to 20 name its colours. That of a CMYK file does not fit RGB pixels.
    """
    fits = profile[16:20] == (b"GRAY" if is_grey else b"RGB ") and profile[36:40] == b"acsp"
    if not fits or len(profile) > _MAX_PROFILE_BYTES:
        return None
    return None if any(name in profile for name in _SRGB) else profile


def _resized(pixels: Pixels, shape: Shape) -> Pixels:
    """Return smaller pixels, by an antialiased bicubic filter."""
    if pixels.shape[2] == 3:
        # Loads torch, so not at the top. Its filter is five times as fast as Pillow's.
        from mmstream.decoding.image.geometry import whole_view
        from mmstream.decoding.image.resize import render

        return render(pixels, whole_view((pixels.shape[0], pixels.shape[1]), shape), "bicubic", 0)
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    resized = np.array(image.resize((shape[1], shape[0]), Image.Resampling.BICUBIC))
    return resized[:, :, None] if resized.ndim == 2 else resized


def _encode_jpeg(pixels: Pixels, profile: bytes | None, options: MediaOptions) -> bytes:
    if pixels.shape[2] == 4:
        pixels = to_rgb(Image.fromarray(pixels))
    colorspace, subsampling = ("GRAY", "Gray") if pixels.shape[2] == 1 else ("RGB", "420")
    data: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels), options.quality, colorspace, subsampling
    )
    return data if profile is None else _with_profile(data, profile)


def _with_profile(jpeg: bytes, profile: bytes) -> bytes:
    """Return a JPEG with a colour profile, right after its first two segments (SOI and JFIF)."""
    pieces = [
        profile[start : start + _ICC_PIECE_BYTES]
        for start in range(0, len(profile), _ICC_PIECE_BYTES)
    ]
    segments = [
        _ICC_MARKER
        + (len(piece) + 16).to_bytes(2, "big")
        + _ICC_NAME
        + bytes((number, len(pieces)))
        + piece
        for number, piece in enumerate(pieces, 1)
    ]
    start = len(JPEG_START)
    if jpeg[2:4] == b"\xff\xe0":
        start += 2 + int.from_bytes(jpeg[4:6], "big")
    return jpeg[:start] + b"".join(segments) + jpeg[start:]


class _Unwarned:
    """A context manager for any number of threads at once.

    `warnings.catch_warnings` is for one thread. With two threads, the filters could stay off for
    good. So the first one to enter changes the filters of the process, and the last
    one to leave restores them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._filters = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.simplefilter("ignore")
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                self._filters.__exit__(None, None, None)


unwarned = _Unwarned()
