"""The texts, pictures and fields of a sample or batch, for people to read.

    samples.py, notebook.py -> contents.py -> markup.py

A sample may be raw or decoded, a batch on the host or on a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from mmstream.display.file_kinds import file_kind
from mmstream.display.markup import html_text, size_text, table
from mmstream.errors import escaped
from mmstream.types import IGNORED_LABEL

MAX_FIELDS = 40

CAPTION_NAMES = ("caption", "text")
"""Where foreign tars keep a caption in ``json``."""


def describe(fields: Mapping[str, Any]) -> str:
    """Return a sample or batch as one line of text: key or size, and the kinds of its fields."""
    key = fields.get("__key__")
    name = f"batch of {len(key)}" if isinstance(key, list) else f"sample {escaped(key)}"
    public = islice(((n, v) for n, v in fields.items() if n[:2] != "__"), MAX_FIELDS)
    return f"<{name}: {', '.join(f'{escaped(n)} {kind_of(v)}' for n, v in public)}>"


def row_json(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object in ``json``, parsed or not; empty if there is none."""
    from mmstream.decoding.fields import json_object

    return json_object(sample.get("json"))


def messages_of(sample: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the turns of the conversation in ``json``, parsed or not; empty if there is none."""
    turns = row_json(sample).get("messages")
    return [turn for turn in turns if isinstance(turn, Mapping)] if isinstance(turns, list) else []


def fields_named(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the fields that parts of messages name, in their order."""
    return [
        part["field"]
        for turn in messages
        if isinstance(turn.get("content"), list)
        for part in turn["content"]
        if isinstance(part, Mapping) and isinstance(part.get("field"), str)
    ]


def address_of(sample: Mapping[str, Any]) -> str:
    """Return ``shard[index]`` of a sample, or what of it is known."""
    lineage = sample.get("__lineage__")
    shard = str(sample.get("__url__", "")).rpartition("/")[2]
    return f"{shard}[{lineage.index}]" if lineage is not None else shard


def text_of(sample: Mapping[str, Any]) -> object:
    """Return the caption of a sample, or the texts of the first turns of its conversation."""
    if isinstance(sample.get("txt"), str | bytes):
        return sample["txt"]
    row = row_json(sample)
    caption = next((row[name] for name in CAPTION_NAMES if isinstance(row.get(name), str)), None)
    if caption is not None:
        return caption
    words = []
    for turn in messages_of(sample)[:4]:
        content = turn.get("content", "")
        parts = content if isinstance(content, list) else [{"text": content}]
        words += [str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part]
    return " / ".join(words)


def pictures_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pictures of a sample by field: bytes, or tensors if they are decoded."""
    from mmstream.decoding.fields import image_fields

    by_field = {
        name: sample[name] for name in image_fields(dict(sample)) if _is_picture(sample[name])
    }
    if "image" not in sample:
        return by_field
    decoded = sample["image"] if isinstance(sample["image"], list) else [sample["image"]]
    named = fields_named(messages_of(sample))
    names = image_fields(dict.fromkeys(named))
    if len(names) != len(decoded):
        names = ["image"] if len(decoded) == 1 else [f"image {i}" for i in range(len(decoded))]
    return dict(zip(names, decoded, strict=True)) | by_field


def batch_pictures(batch: Mapping[str, Any]) -> list[list[Any]]:
    """Return the pictures of each row of a batch."""
    from mmstream.decoding.fields import image_fields

    pictures: list[list[Any]] = [[] for _ in batch["__key__"]]
    images = batch.get("image")
    rows = batch["image_row"].tolist() if "image_row" in batch else range(len(pictures))
    for row, image in zip(rows, () if images is None else images, strict=False):
        pictures[row].append(image)
    for name in image_fields(batch):
        for row, data in enumerate(batch[name]):
            pictures[row] += [data] if _is_picture(data) else []
    return pictures


def _is_picture(value: Any) -> bool:
    """Tell whether a field of a picture holds a file, pixels, or a mask."""
    return isinstance(value, bytes) or (hasattr(value, "detach") and value.ndim in (2, 3))


def row_of(value: Any, row: int) -> Any:
    """Return one row of a field of a batch; None if the field is no list or is too short."""
    return value[row] if isinstance(value, list) and row < len(value) else None


def field_table(fields: Mapping[str, Any]) -> str:
    """Return a table of fields: the kind of each, and the range or start of its values."""
    public = islice(((n, v) for n, v in fields.items() if n[:2] != "__"), MAX_FIELDS)
    rows = [(html_text(n, 60), html_text(kind_of(v), 120), _values(n, v)) for n, v in public]
    if not any(values for _, _, values in rows):
        return table([row[:2] for row in rows])
    return table(rows, ("field", "kind", "values"))


def kind_of(value: Any) -> str:
    """Return the kind of a value: ``uint8 [16, 3, 64, 64]``, ``12.3 kB``, ``list of 16``."""
    if isinstance(value, bytes):
        return f"{size_text(len(value))} {file_kind(value)}".rstrip()
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        device = str(getattr(value, "device", "cpu"))
        on_device = "" if device == "cpu" else f" on {device}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{on_device}"
    if isinstance(value, list | tuple | dict):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _values(name: str, value: Any) -> str:
    if name == "attention_mask" and hasattr(value, "shape") and _count(value):
        return f"{100 * (1 - float(value.sum()) / _count(value)):.0f} % padding"
    if name == "labels" and hasattr(value, "shape"):
        return f"{int((value != IGNORED_LABEL).sum())} tokens to learn"
    if hasattr(value, "dtype") and hasattr(value, "min") and _count(value):
        return f"{float(value.min()):.4g} to {float(value.max()):.4g}"
    if isinstance(value, bytes):
        return html_text(value, 100) if value and not file_kind(value) and _is_text(value) else ""
    return html_text(value, 100) if isinstance(value, str | int | float | dict) else ""


def _is_text(value: bytes) -> bool:
    return value[:100].decode("utf-8", "ignore").replace("\n", " ").isprintable()


def _count(value: Any) -> int:
    return int(value.numel() if hasattr(value, "numel") else value.size)
