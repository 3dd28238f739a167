"""What a sample or a batch holds, for people: its words, its pictures, its fields.

Used by `display` and `report`; a sample may be raw or decoded, a batch on the host or a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from mmstream.display.markup import html_text, size_text, table

__all__ = [
    "MAX_FIELDS",
    "batch_pictures",
    "describe",
    "field_table",
    "kind_of",
    "messages_of",
    "pictures_of",
    "row_of",
    "text_of",
]

MAX_FIELDS = 40


def describe(fields: Mapping[str, Any]) -> str:
    """Return a sample or a batch as one line of text: its key or size, and its fields."""
    key = fields.get("__key__")
    name = f"batch of {len(key)}" if isinstance(key, list) else f"sample {key}"
    public = islice(((n, v) for n, v in fields.items() if n[:2] != "__"), MAX_FIELDS)
    return f"<{name}: {', '.join(f'{n} {kind_of(v)}' for n, v in public)}>"


def messages_of(sample: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the turns of a conversation, from ``json`` parsed or not; empty without any."""
    row = sample.get("json")
    if isinstance(row, bytes):
        import msgspec

        try:
            row = msgspec.json.decode(row)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return []
    turns = row.get("messages") if isinstance(row, Mapping) else None
    return [turn for turn in turns if isinstance(turn, Mapping)] if isinstance(turns, list) else []


def text_of(sample: Mapping[str, Any]) -> object:
    """Return what a sample says: its caption, or the words of its conversation."""
    if isinstance(sample.get("txt"), str | bytes):
        return sample["txt"]
    words = []
    for turn in messages_of(sample)[:4]:
        content = turn.get("content", "")
        parts = content if isinstance(content, list) else [{"text": content}]
        words += [str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part]
    return " / ".join(words)


def pictures_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pictures of a sample by field: bytes, or tensors once they are decoded."""
    from mmstream.decoding.fields import image_fields

    if "image" not in sample:
        return {
            name: sample[name]
            for name in image_fields(dict(sample))
            if isinstance(sample[name], bytes)
        }
    decoded = sample["image"] if isinstance(sample["image"], list) else [sample["image"]]
    named = [
        part["field"]
        for turn in messages_of(sample)
        if isinstance(turn.get("content"), list)
        for part in turn["content"]
        if isinstance(part, dict) and isinstance(part.get("field"), str)
    ]
    names = image_fields(dict.fromkeys(named))
    if len(names) != len(decoded):
        names = ["image"] if len(decoded) == 1 else [f"image {i}" for i in range(len(decoded))]
    return dict(zip(names, decoded, strict=True))


def batch_pictures(batch: Mapping[str, Any]) -> list[list[Any]]:
    """Return the pictures of each row."""
    found: list[list[Any]] = [[] for _ in batch["__key__"]]
    images = batch.get("image")
    if images is None:
        for name in pictures_of(dict.fromkeys(batch, b"")):
            for row, data in enumerate(batch[name]):
                found[row] += [data] if isinstance(data, bytes) else []
        return found
    rows = batch["image_row"].tolist() if "image_row" in batch else range(len(found))
    for row, image in zip(rows, images, strict=False):
        found[row].append(image)
    return found


def row_of(value: Any, row: int) -> Any:
    """Return a row of a batch's field that is a list; None where it lacks."""
    return value[row] if isinstance(value, list) and row < len(value) else None


def field_table(fields: Mapping[str, Any]) -> str:
    """Return a table of fields: what each is, and the range or start of its values."""
    public = islice(((n, v) for n, v in fields.items() if n[:2] != "__"), MAX_FIELDS)
    rows = [(html_text(n, 60), html_text(kind_of(v), 120), _values(n, v)) for n, v in public]
    if not any(values for _, _, values in rows):
        return table([row[:2] for row in rows])
    return table(rows, ("field", "kind", "values"))


def kind_of(value: Any) -> str:
    """Return what a field's value is: ``uint8 [16, 3, 64, 64]``, ``12.3 kB``, ``list of 16``."""
    if isinstance(value, bytes):
        return size_text(len(value))
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        device = str(getattr(value, "device", "cpu"))
        place = "" if device == "cpu" else f" on {device}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{place}"
    if isinstance(value, list | tuple | dict):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _values(name: str, value: Any) -> str:
    if name == "attention_mask" and hasattr(value, "shape") and _count(value):
        return f"{100 * (1 - float(value.sum()) / _count(value)):.0f} % padding"
    if name == "labels" and hasattr(value, "shape"):
        return f"{int((value != -100).sum())} tokens to learn"
    if hasattr(value, "dtype") and hasattr(value, "min") and _count(value):
        return f"{float(value.min()):.4g} to {float(value.max()):.4g}"
    return html_text(value, 100) if isinstance(value, str | int | float | dict) else ""


def _count(value: Any) -> int:
    return int(value.numel() if hasattr(value, "numel") else value.size)
