"""What all row formats share: typed values, media keys, the id. Part of step 2 of a conversion.

Every mistake in a row is detected here or in the formats. It becomes a `RowError` that names the
key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from mmstream.converting.draft import DIALOGUE_KEYS, KINDS, Draft, Kind, MediaRef, RowError

__all__ = ["expect", "make_draft", "media_of", "row_id", "short_path", "texts_of"]

T = TypeVar("T")

MEDIA_KEYS: dict[Kind, tuple[str, ...]] = {
    "image": ("images", "image", "image_path", "file_name"),
    "video": ("videos", "video", "video_path"),
    "audio": ("audios", "audio", "audio_path"),
}
ID_KEYS = ("id", "image_id")
CANONICAL_KEYS = ("id", *DIALOGUE_KEYS, "captions", "segments", "media_paths")
"""The keys of ``KEY.json`` with a fixed meaning. A row's own key of that name is renamed."""

MAX_MEDIA = 1000
MAX_PATH_CHARACTERS = 4096
"""Longer paths are shortened in ``media_paths``."""

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
    """Return `value` if it has the type `kind`. Otherwise raise a RowError that says it in JSON."""
    if not isinstance(value, kind):
        raise RowError(f"{name}: expected {_JSON_NAMES[kind]}, found {_JSON_NAMES[type(value)]}")
    return value


def texts_of(value: Any, name: str) -> tuple[str, ...]:
    """Return the texts of a string or a list of strings: at least one, and none of them blank."""
    texts = value if isinstance(value, list) else [value]
    if not texts:
        raise RowError(f"{name} is empty")
    for i, text in enumerate(texts):
        text_name = f"{name}[{i}]" if isinstance(value, list) else name
        if not expect(text, str, text_name).strip():
            raise RowError(f"{text_name} is empty")
    return tuple(texts)


def media_of(row: dict[str, Any]) -> tuple[dict[Kind, list[MediaRef]], set[str]]:
    """Return {kind: media files} of a row, and the keys that name them.

    If a row has several keys of a kind, the first one in `MEDIA_KEYS` counts. Null, an empty string
    and an empty list count as no key.
    """
    media: dict[Kind, list[MediaRef]] = {}
    used: set[str] = set()
    for kind in KINDS:
        key = next((k for k in MEDIA_KEYS[kind] if row.get(k) not in (None, "", [])), None)
        if key is None:
            continue
        value = row[key]
        if not isinstance(value, str | list):
            value_type = _JSON_NAMES[type(value)]
            raise RowError(f"{key}: expected a path or a list of paths, found {value_type}")
        media[kind] = [MediaRef(kind, path) for path in texts_of(value, key)]
        used.add(key)
    return media, used


def row_id(row: dict[str, Any]) -> Any:
    """Return the row's ``id``, else its ``image_id``, else None."""
    return next((row[k] for k in ID_KEYS if row.get(k) is not None), None)


def make_draft(
    row: dict[str, Any],
    main: dict[str, Any],
    refs: Sequence[MediaRef],
    used: set[str],
    *,
    texts: tuple[str, ...] = (),
    fields: Mapping[str, bytes] | None = None,
) -> Draft:
    """Return a draft. Its ``json`` holds id, `main`, media_paths, then the row's other keys.

    ``media_paths`` has the path of each media field as the row gives it, so that a sample can be
    traced to its files. A row's own key with a name in `CANONICAL_KEYS` is kept as ``row_KEY``.

    Args:
        row: The parsed row.
        main: What the format made of it.
        refs: Its media files.
        used: The row's keys that the format has read. The others are kept, and are `Draft.unread`.
        texts: See `Draft.texts`.
        fields: See `Draft.fields`.
    """
    if len(refs) > MAX_MEDIA:
        raise RowError(f"{len(refs)} media files in one row, the limit is {MAX_MEDIA}")
    paths = {"media_paths": [short_path(ref.path) for ref in refs]} if refs else {}
    content: dict[str, Any] = {"id": row_id(row), **main, **paths}
    others = {key: value for key, value in row.items() if key not in used and key != "id"}
    for key, value in others.items():
        content[f"row_{key}" if key in CANONICAL_KEYS else key] = value
    return Draft(content, tuple(refs), texts, fields or {}, tuple(others))


def short_path(path: str) -> str:
    """Return a path as the ``json`` of a sample names it: never with the bytes of a file in it."""
    if path.startswith("data:"):
        head = path[:MAX_PATH_CHARACTERS].partition(",")[0]
        return f"{head},({len(path)} characters)"
    if len(path) <= MAX_PATH_CHARACTERS:
        return path
    half = MAX_PATH_CHARACTERS // 2
    return f"{path[:half]}...{path[-half:]}"
