"""Convert's second step, the parts that all formats share: typed values, media keys, the id.

Every mistake that a row can hold is found here or in the formats and becomes a `RowError` that
names the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from mmstream.converting.draft import KINDS, Kind, MediaRef, RowError

__all__ = ["content_of", "expect", "media_of", "row_id", "texts_of"]

T = TypeVar("T")

MEDIA_KEYS: dict[Kind, tuple[str, ...]] = {
    "image": ("images", "image", "image_path", "file_name"),
    "video": ("videos", "video", "video_path"),
    "audio": ("audios", "audio", "audio_path"),
}
ID_KEYS = ("id", "image_id")
CANONICAL_KEYS = ("id", "messages", "captions", "media_paths")
"""What a reader of ``KEY.json`` may rely on: a row's own keys never stand in their place."""

MAX_MEDIA = 1000

_JSON_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def expect(value: Any, kind: type[T], name: str) -> T:
    """Return `value` when it has the type `kind`; else a RowError in JSON's words."""
    if not isinstance(value, kind):
        raise RowError(f"{name}: expected {_JSON_NAMES[kind]}, found {_JSON_NAMES[type(value)]}")
    return value


def texts_of(value: Any, name: str) -> tuple[str, ...]:
    """Return the texts of a string or a list of strings; there is one, and none is blank."""
    texts = value if isinstance(value, list) else [value]
    if not texts:
        raise RowError(f"{name} is empty")
    for i, text in enumerate(texts):
        place = f"{name}[{i}]" if isinstance(value, list) else name
        if not expect(text, str, place).strip():
            raise RowError(f"{place} is empty")
    return tuple(texts)


def media_of(row: dict[str, Any]) -> tuple[dict[Kind, list[MediaRef]], set[str]]:
    """Return {kind: references} named by the row's own keys, and the keys that named them.

    Of several keys for one kind the first of `MEDIA_KEYS` counts. A null, an empty string and an
    empty list name nothing.
    """
    media: dict[Kind, list[MediaRef]] = {}
    used: set[str] = set()
    for kind in KINDS:
        key = next((k for k in MEDIA_KEYS[kind] if row.get(k) not in (None, "", [])), None)
        if key is None:
            continue
        value = row[key]
        if not isinstance(value, str | list):
            found = _JSON_NAMES[type(value)]
            raise RowError(f"{key}: expected a path or a list of paths, found {found}")
        media[kind] = [MediaRef(kind, path) for path in texts_of(value, key)]
        used.add(key)
    return media, used


def row_id(row: dict[str, Any]) -> Any:
    """Return the row's own id: ``id``, else ``image_id``, else None."""
    return next((row[k] for k in ID_KEYS if row.get(k) is not None), None)


def content_of(
    row: dict[str, Any], main: dict[str, Any], refs: Sequence[MediaRef], used: set[str]
) -> dict[str, Any]:
    """Return what ``KEY.json`` will hold: id, `main`, media_paths, then the row's other keys.

    ``media_paths`` are the paths as the row named them, one a media field, so that a sample can be
    traced to its files. Other keys of the `CANONICAL_KEYS` are kept as ``row_KEY``.
    """
    if len(refs) > MAX_MEDIA:
        raise RowError(f"{len(refs)} media files in one row, the limit is {MAX_MEDIA}")
    paths = {"media_paths": [ref.path for ref in refs]} if refs else {}
    content: dict[str, Any] = {"id": row_id(row), **main, **paths}
    for key, value in row.items():
        if key not in used and key != "id":
            content[f"row_{key}" if key in CANONICAL_KEYS else key] = value
    return content
