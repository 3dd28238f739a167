"""The texts, pictures and fields of a sample or batch, for people to read.

    samples.py, notebook.py -> contents.py -> markup.py

A sample may be raw or decoded, a batch on the host or on a device.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from mmstream.display.markup import html_text, size_text, table
from mmstream.errors import escaped
from mmstream.media.types import sniff
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


# -- what a file is, from its first bytes ----------------------------------------------------------
#
# Nothing is decoded, and nothing heavy is imported: it must be cheap enough for a ``repr``. The
# sizes of pictures are those in the file, before any rotation.

MAX_JPEG_SEGMENTS = 200
"""Segments of a JPEG to look at. Its size stands in one of the first."""

_NAMES = {"jpg": "JPEG", "webp": "WebP", "webm": "WebM"}
"""Names of types that are not their extension in upper case."""

_OTHER = (
    (b"\x93NUMPY", "NPY"),
    (b"%PDF", "PDF"),
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "zip"),
)


def file_kind(data: bytes) -> str:
    """Return the type of a file and the size of a picture, or "" where the bytes do not tell.

    Examples:
        >>> file_kind(b"GIF89a" + bytes([64, 1, 240, 0]))
        'GIF 320x240'
        >>> file_kind(b"a cat on a mat")
        ''
    """
    media_type = sniff(data[:64])
    if media_type is None:
        return next((kind for magic, kind in _OTHER if data.startswith(magic)), "")
    extension = media_type.extension
    try:
        size = _SIZES[extension](data) if extension in _SIZES else ""
    except struct.error:  # the file ends within its header
        return ""
    return f"{_NAMES.get(extension, extension.upper())}{size}"


def _jpeg_size(data: bytes) -> str:
    """Return `` 640x480`` from the frame header of a JPEG, or "" where there is none.

    A segment is FF, its marker, and its length as big-endian u16, which counts itself. Frame
    headers are the markers C0 to CF, but for C4, C8 and CC.
    """
    offset = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        if offset + 4 > len(data) or data[offset] != 0xFF:
            return ""
        marker, length = struct.unpack_from(">xBH", data, offset)
        if marker == 0xFF:  # a fill byte
            offset += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, offset + 5)
            return f" {width}x{height}"
        offset += 2 + length
    return ""


def _webp_size(data: bytes) -> str:
    chunk = data[12:16]
    if chunk == b"VP8X":
        width, height = (int.from_bytes(data[i : i + 3], "little") + 1 for i in (24, 27))
    elif chunk == b"VP8 ":
        width, height = (n & 0x3FFF for n in struct.unpack_from("<HH", data, 26))
    elif chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        return ""
    return f" {width}x{height}"


def _wav_length(data: bytes) -> str:
    """Return `` 1.2 s``, from the bytes per second in the header and the size of the file."""
    (bytes_per_s,) = struct.unpack_from("<I", data, 28)
    return f" {len(data) / bytes_per_s:.1f} s" if data[12:16] == b"fmt " and bytes_per_s else ""


def _bmp_size(data: bytes) -> str:
    width, height = struct.unpack_from("<ii", data, 18)
    return f" {width}x{abs(height)}"


_SIZES: dict[str, Callable[[bytes], str]] = {
    "jpg": _jpeg_size,
    "png": lambda data: " {}x{}".format(*struct.unpack_from(">II", data, 16)),
    "gif": lambda data: " {}x{}".format(*struct.unpack_from("<HH", data, 6)),
    "webp": _webp_size,
    "bmp": _bmp_size,
    "wav": _wav_length,
}
"""What the header tells beside the type: `` 640x480`` of a picture, `` 1.2 s`` of a sound."""
