"""Small pieces of HTML: text, tables, pictures, players, and a whole page around them.

The data may come from strangers. So every string is escaped, and pictures are decoded within limits
and encoded again. The HTML refers to no other file and to no network address.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmstream.errors import DecodeError, escaped
from mmstream.media.types import BY_EXTENSION

Pixels = npt.NDArray[np.uint8]

MAX_PICTURE_BYTES = 32 * 2**20
MAX_PICTURE_PIXELS = 64 * 2**20
MAX_FILE_BYTES = 2_000_000
"""Larger recordings are named, not embedded: a notebook file holds all that it shows."""

QUIET = "color:#808080"

_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters but for tab and line ends, and those that embed or override a direction."""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
media-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
</head>
<body style="max-width:1200px;margin:2em auto;padding:0 1.2em;overflow-wrap:anywhere">
{body}
</body>
</html>
"""


def html_text(value: object, max_characters: int = 400) -> str:
    """Return a value as escaped text, cut to a length. Bytes are read as UTF-8.

    Characters that would change the direction of the text behind them, and control characters, are
    shown by their numbers.
    """
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    left_out = len(text) - max_characters
    if left_out > 0:
        text = text[:max_characters]
    text = _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    shown = html.escape(text.encode("utf-8", "replace").decode())
    return shown + (f'<span style="{QUIET}"> ... {left_out:,} more</span>' if left_out > 0 else "")


def count_text(number: int, noun: str) -> str:
    """Return a number of things: "1 shard", "12,000 shards"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size_text(num_bytes: float) -> str:
    """Return a number of bytes with its unit, such as ``12.3 kB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return count_text(round(num_bytes), "byte") if unit == "bytes" else f"{num_bytes:,.1f} {unit}"


def time_text(seconds: float) -> str:
    """Return a time for people.

    Examples:
        >>> time_text(42.3), time_text(600), time_text(9000)
        ('42 s', '10 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


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


def small_line(content: str) -> str:
    """Return a quiet line about what is above it. The caller has escaped its content."""
    return f'<div style="{QUIET};font-size:11px">{content}</div>'


def problem_html(reason: object, max_characters: int, style: str = "") -> str:
    """Return in red why something is bad, or why there is nothing to see."""
    style = f"color:#b00020;{style}".rstrip(";")
    return f'<div style="{style}">{html_text(reason, max_characters)}</div>'


def page(*parts: str) -> str:
    """Return the output of a notebook cell, with the parts below each other.

    Captions may hold dollar signs. The CSS classes keep MathJax from typesetting them.
    """
    style = "font:13px/1.45 system-ui,sans-serif"
    return f'<div class="mathjax_ignore tex2jax_ignore" style="{style}">{"".join(parts)}</div>'


def pixels_of(value: Any) -> Pixels:
    """Return the pixels of an encoded or decoded image, uint8 [H, W, 3].

    Args:
        value: the bytes of a file, or a tensor [3, H, W]. A tensor is uint8, or floating after
            normalisation: then its values are stretched to 0..255. A mask [H, W] is shown in grey
            levels, the highest number in white.

    Raises:
        DecodeError: `value` is not an image, or too large.
    """
    if isinstance(value, bytes):
        from mmstream.decoding.image.decoder import ImageDecoder

        limits = ImageDecoder(max_pixels=MAX_PICTURE_PIXELS, max_bytes=MAX_PICTURE_BYTES)
        return limits(value)
    if not hasattr(value, "detach"):
        raise DecodeError(f"no picture: {type(value).__name__}")
    tensor = value.detach().cpu()
    if tensor.ndim == 2 and "uint8" in str(tensor.dtype):
        tensor = (tensor * (255 // max(1, int(tensor.max())))).expand(3, -1, -1)
    is_floating = tensor.is_floating_point()
    array: Pixels = stretched(tensor.float().numpy()) if is_floating else tensor.numpy()
    if array.ndim != 3 or array.shape[0] != 3 or array.dtype != np.uint8:
        raise DecodeError(f"no picture: {tensor.dtype} {list(tensor.shape)}")
    return np.ascontiguousarray(array.transpose(1, 2, 0))


def stretched(values: npt.NDArray[Any]) -> Pixels:
    """Return numbers, such as those of normalised pixels, stretched to 0..255."""
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    scaled = (values - low) * (255 / max(high - low, 1e-12))
    return np.nan_to_num(scaled).astype(np.uint8)


def picture(value: Any, side: int, label: str = "") -> str:
    """Return a thumbnail of at most `side` x `side` pixels, or the reason why there is none."""
    try:
        pixels = pixels_of(value)
    except DecodeError as error:
        return problem_html(error, 200, f"max-width:{side}px")
    return picture_of_pixels(pixels, side, label)


def picture_of_pixels(pixels: Pixels, side: int, label: str) -> str:
    """Return a thumbnail of pixels, uint8 [H, W, 3]."""
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return _image(image, _data_url("image/jpeg", buffer.getvalue()), label)


def png(pixels: Pixels, label: str = "") -> str:
    """Return pixels as they are, uint8 [H, W] or [H, W, 4], for drawings: nothing is blurred."""
    if not pixels.size:
        return ""
    from PIL import Image

    image = Image.fromarray(pixels)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return _image(image, _data_url("image/png", buffer.getvalue()), label)


def _image(image: Any, source: str, label: str) -> str:
    name = html.escape(escaped(label), quote=True)
    return (
        f'<img alt="{name}" title="{name}" width="{image.width}" height="{image.height}" '
        f'style="border-radius:4px;margin:0;vertical-align:top" src="{source}">'
    )


def player(field: str, data: bytes, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return a player for the bytes of an audio or video field, or its name and size.

    Args:
        field: Name of the field. Its last extension says what it is.
        data: The bytes of the file. They go into the page as they are.
        max_bytes: Larger files are named only.
    """
    name = f"{html_text(field, 60)}: {size_text(len(data))}"
    media_type = BY_EXTENSION.get(field.rpartition(".")[2])
    kind = media_type.played_as if media_type is not None else None
    if kind is None:
        return name
    if len(data) > max_bytes:
        return f"{name}, not embedded: more than {size_text(max_bytes)}"
    return f"{media_player(kind, data)}{small_line(name)}"


def media_player(kind: str, data: bytes) -> str:
    """Return a player for a file of a media type such as ``audio/wav``."""
    source = _data_url(kind, data)
    if kind.startswith("audio/"):
        return f'<audio controls preload="metadata" src="{source}"></audio>'
    style = "max-width:100%;max-height:320px"
    return f'<video controls preload="metadata" style="{style}" src="{source}"></video>'


def details(summary: str, text: object, max_characters: int) -> str:
    """Return a text that is folded away behind its name."""
    style = "white-space:pre-wrap;max-height:24em;overflow:auto;margin:4px 0"
    shown = html_text(text, max_characters)
    return (
        f'<details style="{QUIET}"><summary>{html_text(summary, 60)}</summary>'
        f'<pre style="{style}">{shown}</pre></details>'
    )


def document(title: str, *parts: str) -> str:
    """Return a whole page that needs no other file.

    Its content security policy forbids every script, and forbids the browser to load anything.

    Args:
        title: Text of the title, not yet escaped.
        parts: The body, as `page` returns it.
    """
    return _PAGE.format(title=html.escape(escaped(title)), body="\n".join(parts))


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
