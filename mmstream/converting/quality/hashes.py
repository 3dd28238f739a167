"""Hashes of what a sample holds, and the rule that says what its text is.

    fields of a sample -> HASHES -> sidecar, duplicates

The rule needs the fields alone. So samples of a conversion and samples of any other tar have the
same hashes where they say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from xxhash import xxh3_128_digest

__all__ = ["content_hash", "text_of"]

_DIALOGUES = ("messages", "conversations", "chosen", "rejected")
_TEXTS = ("captions", "caption", "text")


def content_hash(data: bytes | bytearray | memoryview) -> bytes:
    """Return 16 bytes that tell contents apart: xxh3 of 128 bits.

    Two different contents have the same hash with a chance of 2^-128. It is no protection against
    somebody who makes such contents on purpose.
    """
    return xxh3_128_digest(data)


def text_of(fields: Mapping[str, Any]) -> bytes | None:
    r"""Return the text of a sample in UTF-8, or None if it has none.

    It is what its ``json`` says: all texts of a conversation, or all captions, with a line end
    between them. Without such a ``json``, it is the field ``txt``.

    Args:
        fields: {field: bytes} of the sample. Other values are ignored.

    Examples:
        >>> text_of({"jpg": b"", "txt": b"a cat", "json": b'{"captions": ["a cat", "a pet"]}'})
        b'a cat\na pet'
        >>> text_of({"txt": b"a cat"})
        b'a cat'
    """
    data = fields.get("json")
    if isinstance(data, bytes):
        text = "\n".join(_texts(_parsed(data)))
        if text:
            return text.encode("utf-8", "surrogatepass")
    text_field = fields.get("txt", fields.get("text"))
    return text_field if isinstance(text_field, bytes) and text_field else None


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (ValueError, RecursionError):  # a stranger's file; it has no text then
        return {}


def _texts(content: Mapping[str, Any]) -> Iterator[str]:
    is_dialogue = False
    for name in _DIALOGUES:
        turns = content.get(name)
        for turn in turns if isinstance(turns, list) else ():
            is_dialogue = True
            yield from _texts_of_turn(turn)
    if is_dialogue:
        return
    for name in _TEXTS:
        value = content.get(name)
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) for text in texts):
            yield from (text for text in texts if isinstance(text, str))
            return


def _texts_of_turn(turn: Any) -> Iterator[str]:
    """Yield the texts of a message: ``content`` (text, or parts), or LLaVA's ``value``."""
    if not isinstance(turn, dict):
        return
    content = turn.get("content", turn.get("value"))
    for item in content if isinstance(content, list) else [content]:
        text = item.get("text") if isinstance(item, dict) else item
        if isinstance(text, str):
            yield text
