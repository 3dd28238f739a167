"""A file that is one JSON object with the rows inside -> its rows.

    {"dataset": "GigaSpeech", "audios": [{"aid": ..., "segments": [...]}, ...]}     a list of rows
    {"v_x1": {"timestamps": [...], "sentences": [...]}, "v_x2": {...}}     rows by name: ActivityNet
    {"a.jpg": ["a cat", "a small cat"], "b.jpg": "a dog"}                  texts by media file
    {"videos": [{"video_id": "video0"}, ...],
     "sentences": [{"video_id": "video0", "caption": "a cat"}, ...]}       MSR-VTT, joined

Rows by name are of a known format, or all have the same keys.

An object that is a row of a known format is that row. The whole file is in memory once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from mmstream.converting.draft import RowError
from mmstream.converting.formats.formats import recognise
from mmstream.converting.formats.media_values import kind_by_name
from mmstream.converting.rows.spool import NumberedRow
from mmstream.errors import escaped

__all__ = ["rows_inside", "single_object"]

MAX_NESTED_BYTES = 2 << 30
"""A larger file is read as lines. It would be in memory whole."""

_LINE_BYTES = 1 << 20


def rows_inside(value: Any) -> Iterator[NumberedRow] | None:
    """Return (number, row) of each row inside an object. None: it is a row itself.

    A text by its media file is a row of both. Rows by name have this name as ``id``, and as
    ``video_id`` where they are spans of a video.
    """
    if not isinstance(value, dict):
        return None
    if _is_joined(value):
        return enumerate(_captioned_videos(value["videos"], value["sentences"]), 1)
    if _is_row(value):
        return None
    if _are_captions(value):
        return enumerate(
            ({str(kind_by_name(name)): name, "captions": texts} for name, texts in value.items()), 1
        )
    lists = [rows for rows in value.values() if isinstance(rows, list) and _are_objects(rows)]
    if len(lists) == 1:
        return iter(enumerate(lists[0], 1))
    named = list(value.values())
    if not _are_objects(named):
        return None
    is_alike = len(named) > 1 and all(row.keys() == named[0].keys() for row in named)
    if not is_alike and not _is_row(_named(*next(iter(value.items())))):
        return None
    return ((i, _named(name, row)) for i, (name, row) in enumerate(value.items(), 1))


def _is_joined(value: dict[str, Any]) -> bool:
    """Tell whether an object has videos, and sentences that name them by their ids."""
    lists = value.get("videos"), value.get("sentences")
    return all(
        isinstance(items, list) and _are_objects(items) and "video_id" in items[0]
        for items in lists
    )


def _captioned_videos(
    videos: list[dict[str, Any]], sentences: list[dict[str, Any]]
) -> Iterator[dict[str, Any] | RowError]:
    """Yield a row of each video, the file ``ID.mp4``, with all of its sentences.

    A sentence without a caption is left out. Sentences of no video are a reject.
    """
    captions: dict[str, list[Any]] = {}
    for sentence in sentences:
        texts = captions.setdefault(str(sentence.get("video_id")), [])
        if sentence.get("caption") is not None:
            texts.append(sentence["caption"])
    for video in videos:
        row = {"video": f"{video.get('video_id')}.mp4", **video}
        texts = captions.get(str(video.get("video_id")), [])
        yield {**row, "captions": texts} if texts else row
    known = {str(video.get("video_id")) for video in videos}
    for video_id in (video_id for video_id in captions if video_id not in known):
        yield RowError(f"sentences: video_id {escaped(video_id, 40)}: no video has this id")


def _are_captions(value: dict[str, Any]) -> bool:
    """Tell whether all keys are names of media files, and the first one has texts."""
    texts = next(iter(value.values()), None)
    first = texts[0] if isinstance(texts, list) and texts else texts
    return isinstance(first, str) and all(kind_by_name(name) is not None for name in value)


def _named(name: str, row: dict[str, Any]) -> dict[str, Any]:
    named = {"id": name, **row}
    return {"video_id": name, **named} if "timestamps" in row else named


def _are_objects(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values)


def single_object(path: Path) -> Any:
    """Return the object that a file holds, if it holds nothing else. Otherwise None."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.readline(_LINE_BYTES).strip()
        rest = file.read(_LINE_BYTES).strip()
    if not first.startswith(b"{") or size > MAX_NESTED_BYTES or (rest and _parses(first)):
        return None
    try:
        return msgspec.json.decode(path.read_bytes())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _parses(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


def _is_row(value: dict[str, Any]) -> bool:
    lists = [rows for rows in value.values() if isinstance(rows, list) and _are_objects(rows)]
    if any("segments" in row for rows in lists for row in rows[:1]):
        return False  # GigaSpeech: "audios" is no list of paths here
    try:
        recognise(value)
    except RowError:
        return False
    return True
