"""Small pieces of HTML: text, tables, pictures and audio players.

The data may come from strangers. So every string is escaped, and pictures are decoded within limits
and encoded again. The HTML refers to no other file and to no network address.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmstream.errors import DecodeError, escaped

__all__ = [
    "AUDIO_TYPES",
    "Pixels",
    "html_text",
    "page",
    "picture",
    "pixels_of",
    "player",
    "size_text",
    "table",
]

Pixels = npt.NDArray[np.uint8]

MAX_PICTURE_BYTES = 32 * 2**20
MAX_PICTURE_PIXELS = 64 * 2**20
MAX_AUDIO_BYTES = 2 * 2**20
"""Larger recordings are named, not embedded: a notebook file holds all that it shows."""

AUDIO_TYPES = {"wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac"}

QUIET = "color:#808080"


def html_text(value: object, max_characters: int = 400) -> str:
    """Return a value as escaped text, cut to a length. Bytes are read as UTF-8."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    left_out = len(text) - max_characters
    if left_out > 0:
        text = text[:max_characters]
    shown = html.escape(text.encode("utf-8", "replace").decode())
    return shown + (f'<span style="{QUIET}"> ... {left_out:,} more</span>' if left_out > 0 else "")


def size_text(num_bytes: float) -> str:
    """Return a number of bytes with its unit, such as ``12.3 kB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:,.0f} {unit}" if unit == "bytes" else f"{num_bytes:,.1f} {unit}"


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return a table. Its cells are HTML: the caller has escaped them."""
    cell = "text-align:left;padding:2px 14px 2px 0;vertical-align:top"
    lines = [
        "<tr>" + "".join(f'<td style="{cell}">{item}</td>' for item in row) + "</tr>"
        for row in rows
    ]
    if head:
        names = "".join(f'<th style="{cell};{QUIET};font-weight:normal">{n}</th>' for n in head)
        lines.insert(0, f"<tr>{names}</tr>")
    return f'<table style="border-collapse:collapse;font-size:inherit">{"".join(lines)}</table>'


def page(*parts: str) -> str:
    """Return the output of a notebook cell, with the parts below each other.

    Captions may hold dollar signs. The CSS classes keep MathJax from typesetting them.
    """
    style = "font:13px/1.45 system-ui,sans-serif"
    return f'<div class="mathjax_ignore tex2jax_ignore" style="{style}">{"".join(parts)}</div>'


def pixels_of(value: Any) -> Pixels:
    """Return the pixels of an encoded or decoded image, uint8 [H, W, 3].

    Args:
        value: the bytes of a file, an `EncodedImage`, or a tensor [3, H, W]. A tensor is uint8, or
            floating after normalisation: then its values are stretched to 0..255.

    Raises:
        DecodeError: `value` is not an image, or too large.
    """
    if isinstance(value, bytes):
        from mmstream.decoding.image.decoder import ImageDecoder

        limits = ImageDecoder(max_pixels=MAX_PICTURE_PIXELS, max_bytes=MAX_PICTURE_BYTES)
        return limits(value)
    if hasattr(value, "plan"):  # an `EncodedImage`, which the GPU would decode
        value = value.decode()
    if not hasattr(value, "detach"):
        raise DecodeError(f"no picture: {type(value).__name__}")
    array = value.detach().cpu()
    if array.is_floating_point():
        low = float(array.min())
        high = float(array.max())
        array = ((array.float() - low) * (255 / max(high - low, 1e-12))).byte()
    if array.ndim != 3 or array.shape[0] != 3 or "uint8" not in str(array.dtype):
        raise DecodeError(f"no picture: {array.dtype} {list(array.shape)}")
    pixels: Pixels = array.permute(1, 2, 0).contiguous().numpy()
    return pixels


def picture(value: Any, side: int, label: str = "") -> str:
    """Return a thumbnail of at most `side` x `side` pixels, or the reason why there is none."""
    try:
        pixels = pixels_of(value)
    except DecodeError as error:
        return f'<div style="color:#b00020;max-width:{side}px">{html_text(error, 200)}</div>'
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    name = html.escape(escaped(label), quote=True)
    source = _data_url("image/jpeg", buffer.getvalue())
    return (
        f'<img alt="{name}" title="{name}" width="{image.width}" height="{image.height}" '
        f'style="border-radius:4px;margin:0;vertical-align:top" src="{source}">'
    )


def player(field: str, data: bytes) -> str:
    """Return an audio player for the bytes of a ``wav``, ``mp3`` or ``flac`` field."""
    kind = AUDIO_TYPES.get(field.rpartition(".")[2])
    if kind is None or len(data) > MAX_AUDIO_BYTES:
        return f"{html_text(field)}: {size_text(len(data))}"
    return f'<audio controls preload="metadata" src="{_data_url(kind, data)}"></audio>'


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
