"""Media that stand in the text of a row: ``data:`` URLs and plain base64.

references -> DATA_URLS
"""

from __future__ import annotations

import binascii
import re
from urllib.parse import unquote_to_bytes

from mmstream.converting.draft import RowError

__all__ = ["decode_base64", "decode_data_url", "is_base64", "is_data_url"]

_DATA_URL = re.compile(r"data:([^,;]{0,100})((?:;[^,;]{0,200}){0,8}),", re.IGNORECASE)

_BASE64_STARTS = (
    "/9j/",  # JPEG
    "iVBORw0KGgo",  # PNG
    "R0lGODdh",  # GIF
    "R0lGODlh",
    "UklGR",  # WebP, WAV, AVI
    "T2dnUw",  # Ogg
    "ZkxhQw",  # FLAC
    "SUQz",  # MP3
)
"""How base64 begins of files whose type is known by their first bytes."""
MIN_BASE64_CHARS = 64
"""A shorter text is a path. No media file is that small."""
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
_HEAD_CHARS = 1024
"""What lies behind the beginning is not looked at: a path is not that long."""
MAX_ESCAPES = 1 << 18
"""Most percent signs of a ``data:`` URL. Each costs a third of a microsecond."""


def is_data_url(text: str) -> bool:
    """Tell whether a text is a ``data:`` URL."""
    return text[:5].lower() == "data:"


def is_base64(text: str) -> bool:
    """Tell whether a text in place of a path is a media file in base64."""
    return (
        len(text) >= MIN_BASE64_CHARS
        and text.startswith(_BASE64_STARTS)
        and _BASE64.fullmatch(text, 0, _HEAD_CHARS) is not None
    )


def decode_data_url(url: str) -> bytes:
    """Return the bytes of a ``data:`` URL (RFC 2397). Its type is not trusted.

    Raises:
        RowError: It is damaged.
    """
    match = _DATA_URL.match(url)
    if match is None:
        raise RowError("a data: URL without a comma")
    text = url[match.end() :]
    if text.count("%") > MAX_ESCAPES:
        raise RowError(f"a data: URL of more than {MAX_ESCAPES:,} percent signs; use base64")
    if not match[2].lower().endswith(";base64"):
        return unquote_to_bytes(text)
    return decode_base64(unquote_to_bytes(text).decode("latin-1") if "%" in text else text)


def decode_base64(text: str) -> bytes:
    """Return the bytes of base64, with or without padding and line ends, in either alphabet.

    Raises:
        RowError: It is damaged.
    """
    text = "".join(text.split()).rstrip("=")
    if "-" in text or "_" in text:
        text = text.replace("-", "+").replace("_", "/")
    try:
        return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
    except ValueError as error:  # also characters outside ASCII
        raise RowError(f"damaged base64: {error}") from None
