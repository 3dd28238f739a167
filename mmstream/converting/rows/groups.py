"""Consecutive rows about the same medium -> one row with their spans.

    rows -> GROUPS -> spool

Dense captions have one row per span: ``{"video": "a.mp4", "start": 0, "end": 4, "caption": ...}``.
Grouped, the video is stored once: ``{"video": "a.mp4", "segments": [{"start": 0, ...}, ...]}``. The
number of the group is that of its first row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mmstream.converting.draft import KINDS
from mmstream.converting.formats.fields import MEDIA_KEYS
from mmstream.converting.formats.spans import VIDEO_ID_KEYS
from mmstream.converting.rows.spool import NumberedRow

__all__ = ["group_rows"]

MAX_SPANS = 10_000
"""Rows of a group; the next one begins another. They are in memory together."""


def group_rows(
    rows: Iterable[NumberedRow], media_keys: Sequence[str] = ()
) -> Iterator[NumberedRow]:
    """Yield (number, row) with consecutive rows about one medium joined.

    A row that stands alone, names several media, or has no value is yielded as it is.

    Args:
        rows: In the order of the file.
        media_keys: Keys that name the medium, before the usual ones.
    """
    media = (key for kind in KINDS for key in MEDIA_KEYS[kind])
    keys = (*media_keys, *media, *VIDEO_ID_KEYS)
    group: list[dict[str, Any]] = []
    first_number, medium = 0, None
    for number, row in rows:
        row_medium = _medium(row, keys)
        if group and (row_medium != medium or row_medium is None or len(group) >= MAX_SPANS):
            yield first_number, _joined(group, medium)
            group = []
        if row_medium is None:
            yield number, row
            continue
        if not group:
            first_number, medium = number, row_medium
        group.append(row)
    if group:
        yield first_number, _joined(group, medium)


def _medium(row: Any, keys: Sequence[str]) -> tuple[str, str] | None:
    """Return (key, path) of the one medium of a row, or None."""
    if not isinstance(row, dict):
        return None
    media = [(key, row[key]) for key in keys if isinstance(row.get(key), str) and row[key]]
    return media[0] if len(media) == 1 else None


def _joined(group: list[dict[str, Any]], medium: tuple[str, str] | None) -> dict[str, Any]:
    if len(group) == 1 or medium is None:
        return group[0]
    key, path = medium
    segments = [{k: v for k, v in row.items() if k != key} for row in group]
    return {key: path, "segments": segments}
