"""What a format knows about a row -> its `Draft`. Part of step 2 of a conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmstream.converting.draft import DIALOGUE_KEYS, Draft, MediaRef, RowError
from mmstream.converting.formats.fields import is_set
from mmstream.converting.url_secrets import without_secrets

__all__ = ["make_draft", "row_id", "short_path"]

CANONICAL_KEYS = ("id", *DIALOGUE_KEYS, "captions", "segments", "media_paths")
"""The keys of ``KEY.json`` with a fixed meaning. A row's own key of that name is renamed."""

SPAN_KEYS = ("start_s", "end_s")
"""What decoders of videos and recordings read of the ``json`` in training."""

MAX_MEDIA = 1000
MAX_PATH_CHARACTERS = 4096
"""Longer paths are shortened in ``media_paths``."""


def row_id(row: dict[str, Any]) -> Any:
    """Return the row's ``id``, else its ``image_id``, else None."""
    value = row.get("id")
    return row.get("image_id") if value is None else value


def make_draft(
    row: dict[str, Any],
    main: dict[str, Any],
    refs: Sequence[MediaRef],
    used: set[str],
    *,
    kept: Sequence[str] = (),
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
        used: The row's keys that the format has read, and that the ``json`` need not repeat.
        kept: Keys that the format knows as facts about the medium or the row. They are kept, and
            are not among `Draft.unread`.
        texts: See `Draft.texts`.
        fields: See `Draft.fields`.
    """
    if len(refs) > MAX_MEDIA:
        raise RowError(f"{len(refs)} media files in one row, the limit is {MAX_MEDIA}")
    paths = {"media_paths": [short_path(ref.path) for ref in refs]} if refs else {}
    content: dict[str, Any] = {"id": row_id(row), **main, **paths}
    has_time = any(ref.kind in ("video", "audio") for ref in refs)
    known = (*kept, *SPAN_KEYS) if has_time else kept
    unread = []
    for key, value in row.items():
        if key in used or key == "id":
            continue
        content[f"row_{key}" if key in CANONICAL_KEYS else key] = _without_bytes(value)
        if key not in known and is_set(value):
            unread.append(key)
    return Draft(content, tuple(refs), texts, fields or {}, tuple(unread))


def short_path(path: str) -> str:
    """Return a path as the ``json`` of a sample names it: without bytes of a file, or secrets."""
    if path.startswith("data:"):
        head = path[:100].partition(",")[0]
        return f"{head},({len(path):,} characters)"
    path = without_secrets(path)
    if len(path) <= MAX_PATH_CHARACTERS:
        return path
    half = MAX_PATH_CHARACTERS // 2
    return f"{path[:half]}...{path[-half:]}"


def _without_bytes(value: Any) -> Any:
    """Return a value with bytes and data: URLs replaced by their lengths."""
    if isinstance(value, bytes):
        return f"({len(value):,} bytes)"
    if isinstance(value, str):
        return short_path(value) if value.startswith("data:") and len(value) > 200 else value
    if isinstance(value, dict):
        return {key: _without_bytes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_bytes(item) for item in value]
    return value
