"""A file that is one JSON object with the rows inside -> its rows.

    {"dataset": "GigaSpeech", "audios": [{"aid": ..., "segments": [...]}, ...]}     a list of rows
    {"v_x1": {"timestamps": [...], "sentences": [...]}, "v_x2": {...}}     rows by name: ActivityNet
    {"database": {"x1": {"annotations": [{"segment": [41, 54], "sentence": "..."}]}, ...}}  YouCook2
    {"image_urls": ["https://...", ...], "captions": ["a cat", ...]}       columns: SBU
    {"image": {"0": "a.jpg", "1": "b.jpg"}, "text": {"0": "a cat", ...}}   columns of pandas
    {"a.jpg": ["a cat", "a small cat"], "b.jpg": "a dog"}                  texts by media file
    {"videos": [{"video_id": "video0"}, ...],
     "sentences": [{"video_id": "video0", "caption": "a cat"}, ...]}       MSR-VTT, joined

Rows by name are of a known format, or all have the same keys. Columns are lists of one length, at
least two items long, or objects with the same numbers as keys; the log says that they are columns.

An object that is a row of a known format is that row. The whole file is in memory once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from mmstream.converting.draft import RowError
from mmstream.converting.formats.formats import recognise
from mmstream.converting.formats.media_values import kind_by_name
from mmstream.converting.formats.spans import has_spans
from mmstream.converting.rows.json_text import decode_json, is_json
from mmstream.converting.rows.records import BOM
from mmstream.converting.rows.spool import NumberedRow
from mmstream.errors import escaped

__all__ = ["rows_inside", "single_object"]

MAX_NESTED_BYTES = 2 << 30
"""A larger file is read as lines. It would be in memory whole."""

_LINE_BYTES = 1 << 20
_SHOWN_COLUMNS = 5

logger = logging.getLogger(__name__)


def rows_inside(value: Any) -> Iterator[NumberedRow] | None:
    """Return (number, row) of each row inside an object. None: it is a row itself.

    A text by its media file is a row of both. Rows by name have this name as ``id``, and as
    ``video_id`` where they are spans of a video.
    """
    if not isinstance(value, dict):
        return None
    if (columns := _columns(value)) is not None:
        return enumerate(columns, 1)
    if _is_joined(value):
        return enumerate(_captioned_videos(value["videos"], value["sentences"]), 1)
    if _is_row(value):
        return None
    if _are_captions(value):
        return enumerate(
            ({str(kind_by_name(name)): name, "captions": texts} for name, texts in value.items()), 1
        )
    lists = [rows for rows in value.values() if isinstance(rows, list) and _are_objects(rows)]
    if len(lists) == 1 and not isinstance(value.get("database"), dict):
        return iter(enumerate(lists[0], 1))
    database = value.get("database")
    if isinstance(database, dict):
        value = database
    named = list(value.values())
    if not _are_objects(named):
        return None
    is_alike = len(named) > 1 and all(row.keys() == named[0].keys() for row in named)
    if not is_alike and not _is_row(_named(*next(iter(value.items())))):
        return None
    return ((i, _named(name, row)) for i, (name, row) in enumerate(value.items(), 1))


def _columns(value: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the rows of an object that holds columns. None: it holds none.

    One document or conversation may hold lists of one length too. So formats whose rows are made of
    lists go first.
    """
    columns = list(value.values())
    if len(columns) < 2 or _is_row_of_lists(value):
        return None
    if all(isinstance(column, dict) for column in columns):
        numbers = columns[0].keys()
        if not numbers or not all(number.isdecimal() for number in numbers):
            return None
        if any(column.keys() != numbers for column in columns):
            return None
        columns = [[column[number] for number in numbers] for column in columns]
    elif not all(isinstance(column, list) for column in columns):
        return None
    if len({len(column) for column in columns}) > 1 or len(columns[0]) < 2:
        return None
    logger.warning(
        "an object of lists of one length is read as columns: %d rows of %s",
        len(columns[0]),
        ", ".join(escaped(name, 40) for name in list(value)[:_SHOWN_COLUMNS]),
    )
    return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]


def _is_row_of_lists(value: dict[str, Any]) -> bool:
    """Tell whether an object is a row of a format whose rows hold several lists."""
    try:
        return recognise(value) not in ("captions", "laion", "labels", "text", "webvid", "speech")
    except RowError:
        return False


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
    address = row.get("video_url")
    if isinstance(address, str) and kind_by_name(address) is None:  # of a page with the video
        named = {"url" if key == "video_url" else key: item for key, item in named.items()}
    has_times = "timestamps" in row or has_spans(row)
    return {"video_id": name, **named} if has_times else named


def _are_objects(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values)


def single_object(path: Path) -> Any:
    """Return the object that a file holds, if it holds nothing else. Otherwise None."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.readline(_LINE_BYTES).removeprefix(BOM).strip()
        rest = file.read(_LINE_BYTES).strip()
    if not first.startswith(b"{") or size > MAX_NESTED_BYTES or (rest and is_json(first)):
        return None
    try:
        return decode_json(path.read_bytes().removeprefix(BOM))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _is_row(value: dict[str, Any]) -> bool:
    lists = [rows for rows in value.values() if isinstance(rows, list) and _are_objects(rows)]
    if any("segments" in row for rows in lists for row in rows[:1]):
        return False  # GigaSpeech: "audios" is no list of paths here
    try:
        recognise(value)
    except RowError:
        return False
    return True
