"""JSON as programs write it: Python's ``NaN`` and ``Infinity`` are null.

a line, a value, a file of JSON -> JSON TEXT -> parsed values
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

__all__ = ["decode_json", "is_json"]

_STRING_OR_NAN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|-?\bInfinity\b|\bNaN\b', re.DOTALL)


def decode_json(text: bytes, type: Any = Any) -> Any:
    """Return the value of a JSON text. NaN and infinite numbers, which JSON lacks, are null.

    ``json.dumps`` writes them, and rows from Python have null for them, too.

    Raises:
        msgspec.DecodeError: It is no JSON, or not of this type.
        UnicodeDecodeError: It is not UTF-8.
        RecursionError: It is nested too deeply.

    Examples:
        >>> decode_json(b'{"score": NaN, "text": "NaN"}')
        {'score': None, 'text': 'NaN'}
    """
    try:
        return msgspec.json.decode(text, type=type)
    except msgspec.DecodeError:
        plain = _STRING_OR_NAN.sub(_null_or_same, text) if _may_have_nan(text) else text
        if plain == text:
            raise
    return msgspec.json.decode(plain, type=type)


def is_json(text: bytes) -> bool:
    """Tell whether a text is one JSON value, however deep."""
    try:
        decode_json(text, msgspec.Raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    except RecursionError:
        pass
    return True


def _may_have_nan(text: bytes) -> bool:
    return b"NaN" in text or b"Infinity" in text


def _null_or_same(match: re.Match[bytes]) -> bytes:
    return match[0] if match[0].startswith(b'"') else b"null"
