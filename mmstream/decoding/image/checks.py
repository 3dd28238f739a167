"""Settings of the image decoder that make no sense are refused here, before any IO.

Part of the decode stage, called when an `decoding.image.ImageDecoder` is made.
"""

from __future__ import annotations

from typing import Any

from mmstream.decoding.image.tiles import InternVLTiles, LlavaNextTiles
from mmstream.errors import ConfigError

_CHOICES = {
    "resize": (None, "shortest", "exact", "letterbox", "max_pixels", "native"),
    "crop": (None, "center", "random"),
    "crop_rounding": ("even", "down"),
    "interpolation": ("bilinear", "bicubic"),
    "scaled_decoding": (False, True),
    "device": ("cpu", "cuda"),
}


def check_settings(decoder: Any) -> None:
    """Refuse a decoder's impossible settings.

    Raises:
        ConfigError: Names the setting, and says what to give instead.
    """
    sides = decoder.size if isinstance(decoder.size, tuple) else (decoder.size, decoder.size)
    if decoder.size is not None and not (len(sides) == 2 and all(map(_is_count, sides))):
        raise ConfigError(f"size={decoder.size!r}: give a side in pixels or (height, width)")
    for name in ("max_pixels", "max_bytes", "multiple_of"):
        if not _is_count(getattr(decoder, name)):
            raise ConfigError(f"{name}={getattr(decoder, name)!r}: give a number from 1 up")
    for name, choices in _CHOICES.items():
        value = getattr(decoder, name)
        if not isinstance(value, bool | str | None) or value not in choices:
            raise ConfigError(f"{name}={value!r}: give one of {', '.join(map(repr, choices))}")
    if len(decoder.fill) != 3 or not all(type(c) is int and 0 <= c <= 255 for c in decoder.fill):
        raise ConfigError(f"fill={decoder.fill!r}: give (red, green, blue), 0 to 255")
    _check_ranges(decoder)
    _check_together(decoder)
    _check_resize_size(decoder)


def _check_ranges(decoder: Any) -> None:
    for name, most in (("scale", 1.0), ("ratio", float("inf")), ("pixel_budget", float("inf"))):
        low, high = getattr(decoder, name)
        if not 0 < low <= high <= most:
            raise ConfigError(f"{name}={(low, high)!r}: give (low, high), above zero and in order")
    if not 0 <= decoder.flip <= 1:
        raise ConfigError(f"flip={decoder.flip!r}: give a probability, such as 0.5")


def _check_together(decoder: Any) -> None:
    """Check what does not go with what."""
    resize, size, crop = decoder.resize, decoder.size, decoder.crop
    if size is None and (resize in ("shortest", "exact", "letterbox") or crop == "random"):
        raise ConfigError(f"resize={resize!r}, crop={crop!r}: give a size too")
    if size is not None and resize in ("max_pixels", "native"):
        raise ConfigError(f'resize={resize!r} goes without size; or resize="shortest"')
    if crop == "random" and resize not in ("shortest", None):
        raise ConfigError(f'crop="random" does not go with resize={resize!r}')
    if crop is None and isinstance(size, tuple) and resize in ("shortest", None):
        raise ConfigError(f"size={size}: without a crop give one number, the shorter side")
    if decoder.tiles is None:
        return
    if not isinstance(decoder.tiles, LlavaNextTiles | InternVLTiles):
        raise ConfigError(f"tiles={decoder.tiles!r}: give LlavaNextTiles() or InternVLTiles()")
    if not isinstance(size, int) or resize is not None or crop == "random" or decoder.flip:
        raise ConfigError("tiles go with one number as size, and neither resize, crop nor flip")
    if decoder.device != "cpu":
        raise ConfigError('tiles are cut by the CPU: device="cpu"')
    decoder.tiles.check(size)


def _check_resize_size(decoder: Any) -> None:
    resize_size, shape = decoder.resize_size, decoder.output_shape
    if resize_size is None:
        return
    if not _is_count(resize_size) or shape is None:
        raise ConfigError(f"resize_size={resize_size!r}: give pixels, together with size")
    if decoder.crop != "center" or decoder.resize not in ("shortest", None):
        raise ConfigError(f"resize_size={resize_size} goes with a centre crop only")
    if resize_size < max(shape):
        raise ConfigError(f"resize_size={resize_size} is below size={decoder.size}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
