"""`SampleDict`: the dict that users get as a sample. It shows itself in one line.

Place in the flow: `Dataset` and `Pipeline.take` return it. Samples inside a pipeline are plain
dicts, because a dict of one's own takes twice the time to make.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from mmstream.display.contents import file_kind
from mmstream.display.markup import size_text
from mmstream.errors import escaped

MAX_SHOWN_FIELDS = 20
MAX_VALUE_CHARACTERS = 60
MAX_LINE_CHARACTERS = 1000


class SampleDict(dict[str, Any]):
    """A sample: a dict in every respect, but for how it is shown.

    Its ``repr`` is one line and never the bytes of a file. In a notebook it shows its pictures and
    its text.

    Examples:
        >>> dataset = mm.open_dataset("shards/")
        >>> dataset[0]
        {'__key__': '000000001', ...'jpg': <... JPEG ...>, ...}
    """

    __slots__ = ()

    def __repr__(self) -> str:
        shown = [
            f"{_name_text(name)}: {_own_text(name, value) or value_text(value)}"
            for name, value in islice(self.items(), MAX_SHOWN_FIELDS)
        ]
        if len(self) > MAX_SHOWN_FIELDS:
            shown.append(f"... {len(self) - MAX_SHOWN_FIELDS:,} more")
        return f"{{{escaped(', '.join(shown), MAX_LINE_CHARACTERS)}}}"

    def _repr_html_(self) -> str | None:
        from mmstream.display.samples import sample_html

        is_sample = isinstance(self.get("__key__"), str)  # not what a collate function made of it
        return sample_html(self) if is_sample else None

    def copy(self) -> SampleDict:
        """Return a shallow copy."""
        return SampleDict(self)


def _own_text(name: str, value: Any) -> str:
    """Return the end of the shard's URL, or the sample's position in it; "" for other fields."""
    if name == "__url__" and isinstance(value, str) and len(value) > MAX_VALUE_CHARACTERS:
        return repr("..." + value[-MAX_VALUE_CHARACTERS:])
    if name == "__lineage__" and hasattr(value, "index") and hasattr(value, "shard"):
        return f"<shard {value.shard}, index {value.index}>"
    return ""


def value_text(value: Any) -> str:
    """Return a value of a sample in a few words: short text itself, for large values their kind.

    Examples:
        >>> value_text(b"a cat"), value_text(bytes(2000)), value_text({"id": 3})
        ("b'a cat'", '<2.0 kB>', "{'id': 3}")
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return _bytes_text(bytes(value) if len(value) <= MAX_VALUE_CHARACTERS else value)
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"<{str(value.dtype).removeprefix('torch.')} {list(value.shape)}>"
    if isinstance(value, str):
        return _cut(repr(value[:MAX_VALUE_CHARACTERS]), len(value))
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, dict | list | tuple):
        return _container_text(value)
    return f"<{type(value).__name__}>"


def _bytes_text(data: Any) -> str:
    head = bytes(data[: 1 << 16])
    kind = file_kind(head if len(head) == len(data) else bytes(data))
    if kind:
        return f"<{size_text(len(data))} {kind}>"
    try:
        text = head[:MAX_VALUE_CHARACTERS].decode()
    except UnicodeDecodeError as error:
        is_cut = error.start > MAX_VALUE_CHARACTERS - 4 and len(head) > MAX_VALUE_CHARACTERS
        text = head[: error.start].decode() if is_cut else "\0"
    if not text.replace("\n", " ").replace("\t", " ").isprintable():
        return f"<{size_text(len(data))}>"
    if len(data) <= MAX_VALUE_CHARACTERS and text.isascii():
        return repr(bytes(data))
    return f"<{size_text(len(data))} {text!r}...>"


def _container_text(value: Any) -> str:
    """Return a list or dict whose values are short; else how many it has."""
    many = {dict: "{{...}} of {}", list: "[...] of {}", tuple: "(...) of {}"}
    kind = next(kind for kind in many if isinstance(value, kind))
    short = many[kind].format(len(value))
    if len(value) > 4:
        return short
    items = value.items() if isinstance(value, dict) else enumerate(value)
    words = []
    for name, item in items:
        if not (item is None or isinstance(item, str | bool | int | float)):
            return short
        words.append(f"{_name_text(name)}: " * isinstance(value, dict) + value_text(item))
    text = ", ".join(words)
    if len(text) > 2 * MAX_VALUE_CHARACTERS:
        return short
    return f"{{{text}}}" if isinstance(value, dict) else f"[{text}]"


def _name_text(name: object) -> str:
    return _cut(repr(str(name)[:MAX_VALUE_CHARACTERS]), len(str(name)))


def _cut(shown: str, num_characters: int) -> str:
    """Mark text that was cut."""
    return shown + "..." * (num_characters > MAX_VALUE_CHARACTERS)
