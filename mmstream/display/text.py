"""Numbers, files and values in a few words of plain text.

Place in the flow: messages and reports of the whole package use them, so nothing here imports torch
or the templates.
"""

from __future__ import annotations

import codecs
import reprlib
from collections.abc import Mapping
from itertools import islice
from typing import Any

from mmstream.errors import DecodeError, escaped
from mmstream.media.fields import list_of_frame
from mmstream.media.types import sniff

MAX_FIELDS = 40
"""Fields of a sample or batch that are named."""

MAX_VALUE_CHARACTERS = 60
"""Longest value in the line of a sample."""

# -- numbers ---------------------------------------------------------------------------------------


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


# -- files and values ------------------------------------------------------------------------------

_NAMES = {"jpg": "JPEG", "webp": "WebP", "webm": "WebM"}
"""Names of types that are not their extension in upper case."""

_OTHER_TYPES = (
    (b"\x93NUMPY", "NPY"),
    (b"%PDF", "PDF"),
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "zip"),
)


def file_kind(data: bytes) -> str:
    """Return the type of a file and the size of an image, or "" where the bytes do not tell.

    Examples:
        >>> file_kind(b"%PDF-1.7"), file_kind(b"a cat on a mat")
        ('PDF', '')
    """
    media_type = sniff(data[:64])
    if media_type is None:
        return next((kind for magic, kind in _OTHER_TYPES if data.startswith(magic)), "")
    name = _NAMES.get(media_type.extension, media_type.extension.upper())
    return name + _image_size(data) if media_type.kind == "image" else name


def _image_size(data: bytes) -> str:
    """Return `` 640x480`` from the header of an image, or "" where it does not tell."""
    from mmstream.media.image import header_shape  # with Pillow, where images are shown
    from mmstream.media.limits import Limits

    try:
        shape = header_shape(data, Limits.start(1 << 40, 1 << 50, None))
    except DecodeError:
        return ""
    return "" if shape is None else f" {shape[1]}x{shape[0]}"


def kind_of(value: Any) -> str:
    """Return the kind of a value: ``uint8 [16, 3, 64, 64]``, ``12.3 kB JPEG``, ``list of 16``."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{size_text(len(value))} {file_kind(bytes(value))}".rstrip()
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        device = str(getattr(value, "device", "cpu"))
        on_device = "" if device == "cpu" else f" on {device}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{on_device}"
    if isinstance(value, list | tuple | dict):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def start_of_text(data: bytes) -> str | None:
    """Return the first characters of bytes that are text in UTF-8. None: they are not."""
    try:  # this decoder takes a last character that was cut off
        text = codecs.getincrementaldecoder("utf-8")().decode(data[:MAX_VALUE_CHARACTERS])
    except UnicodeDecodeError:
        return None
    return text if text.replace("\n", " ").replace("\t", " ").isprintable() else None


class _ShortRepr(reprlib.Repr):
    """A ``repr`` that is cut to a few words. What is not text or a number is named by its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 1
        self.maxstring = MAX_VALUE_CHARACTERS

    def repr_bytes(self, data: bytes, level: int) -> str:  # noqa: ARG002 - of reprlib
        """Return short text itself, the start of a longer one, or the kind of a file."""
        text = None if file_kind(data) else start_of_text(data)
        if text is None:
            return f"<{kind_of(data)}>"
        if len(data) <= MAX_VALUE_CHARACTERS and text.isascii():
            return repr(data)
        return f"<{size_text(len(data))} {text!r}...>"

    def repr_instance(self, value: Any, level: int) -> str:
        """Return a number itself, and the kind of everything else."""
        if isinstance(value, bytearray | memoryview):
            return self.repr_bytes(bytes(value), level)
        is_plain = value is None or isinstance(value, bool | int | float)
        return repr(value) if is_plain else f"<{kind_of(value)}>"


_SHORT_REPR = _ShortRepr()


def value_text(value: Any) -> str:
    """Return a value of a sample in a few words: short text itself, for large values their kind.

    Examples:
        >>> value_text(b"a cat"), value_text(bytes(2000)), value_text({"id": 3})
        ("b'a cat'", '<2.0 kB>', "{'id': 3}")
    """
    return _SHORT_REPR.repr(value)


# -- samples and batches ---------------------------------------------------------------------------


def public_fields(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the first fields of a sample or batch whose names do not begin with ``__``.

    The frames of a list are left out: the list stands for them.
    """
    public = (
        (name, value)
        for name, value in fields.items()
        if name[:2] != "__" and list_of_frame(name) not in fields
    )
    return list(islice(public, MAX_FIELDS))


def describe(fields: Mapping[str, Any]) -> str:
    """Return a sample or batch as one line of text: key or size, and the kinds of its fields."""
    key = fields.get("__key__")
    name = f"batch of {len(key)}" if isinstance(key, list) else f"sample {escaped(key)}"
    kinds = [f"{escaped(name)} {kind_of(value)}" for name, value in public_fields(fields)]
    return f"<{name}: {', '.join(kinds)}>"
