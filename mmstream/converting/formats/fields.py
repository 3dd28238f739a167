"""Typed values of a row. Part of step 2 of a conversion.

Every mistake in a row is detected here or in the formats. It becomes a `RowError` that names the
key.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from mmstream.converting.draft import Kind, RowError
from mmstream.errors import escaped

__all__ = [
    "MEDIA_KEYS",
    "expect",
    "first_key",
    "has_media",
    "is_set",
    "items_of",
    "json_name",
    "number_of",
    "seconds_of",
    "text_of",
    "texts_of",
    "value_of_text",
]

T = TypeVar("T")

MEDIA_KEYS: dict[Kind, tuple[str, ...]] = {
    "image": (
        *("images", "image", "image_path", "image_paths", "file_name"),
        *("image_url", "image_urls", "image_base64_str", "image_base64"),
        *("img", "img_path", "image_file"),
    ),
    "video": ("videos", "video", "video_path", "video_url"),
    "audio": ("audios", "audio", "audio_path", "audio_filepath", "audio_url"),
}
"""The keys of a row that name its media files. The first one that is set counts."""

MAX_NUMBER_CHARACTERS = 40
MAX_PARSED_CHARACTERS = 1 << 20
"""A longer text stays one, whatever it begins with."""

_JSON_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
_TIME = re.compile(r"(?:(\d{1,4}):)?(\d{1,4}):(\d{1,4}(?:[.,]\d+)?)")


def json_name(value: Any) -> str:
    """Return the type of a value, in the words of JSON."""
    return _JSON_NAMES.get(type(value)) or type(value).__name__


def expect(value: Any, kind: type[T], name: str) -> T:
    """Return `value` if it has the type `kind`. Otherwise raise a RowError that says it in JSON."""
    if not isinstance(value, kind):
        raise RowError(f"{name}: expected {_JSON_NAMES[kind]}, found {json_name(value)}")
    return value


def is_set(value: Any) -> bool:
    """Tell whether a key has a value. Null, an empty string and an empty list count as none."""
    return value is not None and value != "" and value != []


def first_key(row: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """Return the first of `keys` that a row has with a value, or None."""
    if row.keys().isdisjoint(keys):  # most formats are ruled out here, many times for each row
        return None
    for key in keys:
        if is_set(row.get(key)):
            return key
    return None


def has_media(row: Mapping[str, Any]) -> bool:
    """Tell whether a row names media files."""
    return any(first_key(row, keys) is not None for keys in MEDIA_KEYS.values())


def items_of(value: Any) -> list[Any]:
    """Return the items of a list; any other value is a list of itself."""
    return value if isinstance(value, list) else [value]


def text_of(value: Any, name: str) -> str:
    """Return a text that is not blank."""
    if not expect(value, str, name).strip():
        raise RowError(f"{name} is empty")
    return str(value)


def texts_of(value: Any, name: str) -> tuple[str, ...]:
    """Return the texts of a string or a list of strings: at least one, and none of them blank."""
    if not isinstance(value, list):
        return (text_of(value, name),)
    if not value:
        raise RowError(f"{name} is empty")
    return tuple(text_of(text, f"{name}[{i}]") for i, text in enumerate(value))


def value_of_text(text: str) -> Any:
    """Return the list or object that a text is, as JSON or as Python writes it. Else the text."""
    if text[:1] not in ("[", "{") or len(text) > MAX_PARSED_CHARACTERS:
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text)
        msgspec.json.encode(value)  # a set or bytes is no JSON
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, list | dict) else text


def number_of(value: Any, name: str) -> float:
    """Return a finite number. A table gives it as text."""
    number = value
    if isinstance(value, str) and len(value) <= MAX_NUMBER_CHARACTERS:
        try:
            number = float(value)
        except ValueError:
            number = None
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not abs(number) < 2**63 or not math.isfinite(number):
        shown = repr(value)[:60] if isinstance(value, str | float) else json_name(value)
        raise RowError(f"{name}: expected a number, found {escaped(shown)}")
    return float(number)


def seconds_of(value: Any, name: str) -> float:
    """Return a time in seconds. It is a number, or ``HH:MM:SS.mmm``, or ``MM:SS``."""
    time = _TIME.fullmatch(value.strip()) if isinstance(value, str) and len(value) < 40 else None
    if time is not None:
        hours, minutes, seconds = time.groups()
        return int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds.replace(",", "."))
    number = number_of(value, name)
    if number < 0:
        raise RowError(f"{name}: {number:g} s is before the beginning")
    return number
