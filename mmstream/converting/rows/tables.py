"""Rows in files of text that are not JSONL: tables, transcripts, COCO's annotations, JSON values.

    a plain file of text -> TABLES -> spool; JSON values -> a line each

Tables are csv, tsv, and others with ``;`` or ``|`` between the cells. The first line names the
columns. Cells are quoted as RFC 4180 says, so a cell may hold line ends. Cells are text: ``007``
and ``42`` stay as they are. Empty cells are absent keys. A cell that begins with ``[`` or ``{`` is
parsed as JSON, or as Python writes lists, where it is that. Two published kinds of tables have no
line of names. They are recognised by their cells: a caption and a URL (CC3M, CC12M), and a picture
with the number of its caption, ``a.jpg#0`` (Flickr).

Transcripts of LibriSpeech and LJSpeech have one row per line:

    84-121123-0000 GO DO YOU HEAR                               84/121123/84-121123.trans.txt
    -> {"id": "84-121123-0000", "audio": "84/121123/84-121123-0000.flac", "text": "GO DO YOU HEAR"}

    LJ001-0001|Printing, in 1440|Printing, in fourteen forty    LJSpeech-1.1/metadata.csv
    -> {"id": "LJ001-0001", "audio": "LJSpeech-1.1/wavs/LJ001-0001.wav",
        "text": "Printing, in fourteen forty", "raw_text": "Printing, in 1440"}

The sound lies beside the transcript, or in ``wavs`` beside it. Its path is relative to the folder
of the media. Quotes of LJSpeech are part of the text.

COCO's annotation files are pictures and annotations, joined on ``image_id`` to one row per picture:

    {"images": [{"id", "file_name", ...}], "annotations": [{"image_id", "caption" | "bbox", ...}]}

Captions become ``{"image", "captions": [...]}``. Boxes become ``objects``, as they are, with the
name of their category. Pictures without annotations are rows too, and will be rejected or labelled
by their format. The whole file is in memory, as for every tool that reads it.

JSON values that are not lines are those of an array, or objects after each other over several
lines. The whole file is in memory. msgspec splits an array, all at once. Arrays that it does not
take, such as those with NaN, and the objects of a stream are parsed one after the other.

A file that is one JSON object may have the rows inside:

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

import csv
import io
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec

from mmstream.converting.draft import RowError
from mmstream.converting.formats.fields import kind_by_name, value_of_text
from mmstream.converting.formats.formats import recognise
from mmstream.converting.formats.spans import has_spans
from mmstream.converting.rows.records import BOM, MAX_ROW_BYTES, NumberedRow
from mmstream.errors import ConfigError, escaped
from mmstream.media.fields import decode_json, is_json, json_object
from mmstream.media.types import BY_EXTENSION
from mmstream.storage import is_remote
from mmstream.storage.store import local_path

logger = logging.getLogger(__name__)

DELIMITERS = {",": "csv", "\t": "tsv", ";": "csv with ;", "|": "csv with |"}

_HEAD_RECORDS = 20
_URL = re.compile(r"https?://\S+", re.IGNORECASE)
_NUMBERED_FILE = re.compile(r"(\S+\.(?:jpe?g|png|webp|gif))#\d+", re.IGNORECASE)
_MEDIA_FILE = re.compile(rf"\S+\.({'|'.join(BY_EXTENSION)})\b", re.IGNORECASE)


def delimiters_of(head: str, *, is_cut: bool) -> list[str]:
    """Return the delimiters with which the beginning of a text is a table.

    Every record must then have as many cells as the first one, and at least two. Where several do,
    those that come inside longer cells of another are left out.

    Args:
        head: The text.
        is_cut: More of it follows, so the last record counts for nothing.
    """
    with _long_cells():
        return [
            delimiter
            for delimiter in DELIMITERS
            if _is_table(head, delimiter, csv.QUOTE_MINIMAL, is_cut)
            or (delimiter == "\t" and _is_table(head, delimiter, csv.QUOTE_NONE, is_cut))
        ]


def _is_table(head: str, delimiter: str, quoting: Literal[0, 3], is_cut: bool) -> bool:
    lines = io.StringIO(head, newline="")  # as a file has them: U+2028 ends no line
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting)
    try:
        records = list(islice(reader, _HEAD_RECORDS + 1))
    except csv.Error:
        return False
    records = [record for record in records if record]
    if is_cut or len(records) > 2:  # the last one may be cut off
        records = records[:-1]
    counts = {len(record) for record in records}
    return len(records) >= 2 and len(counts) == 1 and counts.pop() >= 2


def iter_table(path: Path, delimiter: str, rows: str) -> Iterator[NumberedRow]:
    """Yield (number, row) of each record. Numbers count from 1, without the line of names.

    A record with too many or too few cells, or with damaged quotes, has a `RowError`.

    Raises:
        ConfigError: A column that is named twice, no line of names, or a quote that is never
            closed.
    """
    with _long_cells(), _open_text(path) as file:
        is_quoted = delimiter != "\t" or _has_whole_quotes(path)  # else quotes are part of texts
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
        reader = csv.reader(file, delimiter=delimiter, quoting=quoting, strict=True)
        records = _records(reader, rows)
        first = next(records, None)
        if first is None or isinstance(first, RowError):
            raise ConfigError(f"{rows}: holds no rows; the first line must name the columns")
        names, is_row = _column_names(first, rows)
        for number, record in enumerate(chain([first], records) if is_row else records, 1):
            yield number, _row(record, names)


@contextmanager
def _long_cells() -> Iterator[None]:
    """Let the csv module read cells of any length. It allows 131,072 characters otherwise."""
    before = csv.field_size_limit(MAX_ROW_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _open_text(path: Path) -> TextIO:
    """Open a table. Bytes that are not UTF-8 make rejects of their rows, in the spool."""
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline="")


def _has_whole_quotes(path: Path) -> bool:
    """Tell whether the quotes of a file are those of RFC 4180, and no text of their own."""
    with _open_text(path) as file:
        try:
            for _ in csv.reader(file, delimiter="\t", strict=True):
                pass
        except csv.Error:
            return False
    return True


def _records(reader: Any, rows: str) -> Iterator[list[str] | RowError]:
    """Yield the cells of each record. Blank lines are none."""
    while True:
        line = reader.line_num + 1
        try:
            record = next(reader, None)
        except csv.Error as error:
            if "expected after" in str(error):
                yield RowError(f"damaged quotes: {error} (line {line})")
                continue
            raise ConfigError(
                f"{rows}: a quote is opened in line {line} and never closed ({error}); mend it"
            ) from None
        if record is None:
            return
        if record:
            yield record


def _column_names(record: Sequence[str], rows: str) -> tuple[list[str], bool]:
    """Return the names of the columns. True: the first record has none, and is a row already."""
    names = [name.strip() for name in record]
    is_data = [_is_data(name) for name in names]
    if not any(is_data):
        require_different(list(filter(None, names)), rows)
        if not any(names):
            raise ConfigError(f"{rows}: the first line names no columns")
        return names, False
    if len(names) != 2 or all(is_data):
        raise ConfigError(
            f"{rows}: the first line is data, not names of columns; put a line in front, such as "
            "image,caption"
        )
    media_name = "url" if any(map(_URL.fullmatch, names)) else "image"
    return [media_name if data else "caption" for data in is_data], True


def require_different(names: Sequence[Any], rows: str) -> None:
    """Raise a ConfigError if two columns have one name: a row would keep one of them."""
    doubled = [name for i, name in enumerate(names) if name in names[:i]]
    if doubled:
        raise ConfigError(f"{rows}: two columns are named {escaped(doubled[0])!r}; rename one")


def _is_data(cell: str) -> bool:
    return bool(_URL.fullmatch(cell) or _NUMBERED_FILE.fullmatch(cell) or _MEDIA_FILE.match(cell))


def _row(record: list[str] | RowError, names: Sequence[str]) -> dict[str, Any] | RowError:
    if isinstance(record, RowError):
        return record
    if len(record) != len(names):
        return RowError(f"{len(record)} cells, but {len(names)} columns")
    row = {
        name: value_of_text(cell) for name, cell in zip(names, record, strict=True) if name and cell
    }
    image = row.get("image")
    numbered = _NUMBERED_FILE.fullmatch(image) if isinstance(image, str) else None
    return {**row, "image": numbered[1]} if numbered else row


_TRANSCRIPTS = (
    (re.compile(r"(?P<id>\d+-\d+-\d+) (?P<text>\S.*)"), "{}.flac"),  # LibriSpeech
    (
        re.compile(r"(?P<id>\w+[_-]\d+)\|(?P<raw_text>[^|]*)\|(?P<text>\s*[^|\s][^|]*)"),
        "wavs/{}.wav",  # LJSpeech
    ),
)
"""(pattern of a line, the audio file that it names, in the folder of the transcripts)."""


def is_transcripts(head: bytes) -> bool:
    """Tell by its beginning whether a text holds transcripts. Its last line may be cut off."""
    text = head.decode(errors="replace")
    lines = [line.rstrip("\r\n") for line in io.StringIO(text, newline="")]
    whole = lines[:-1] if len(lines) > 1 else lines
    return bool(whole) and any(all(map(line.fullmatch, whole)) for line, _ in _TRANSCRIPTS)


def iter_transcripts(path: Path, url: str, root: str | None) -> Iterator[NumberedRow]:
    """Yield (number, row) of each line.

    Args:
        path: A plain text file.
        url: Where it came from. The sound lies beside it.
        root: Folder or prefix that the rows' media are relative to. None: that of `url`.
    """
    folder = "." if root is None else _folder_in(root, url)
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            yield number, _transcript_row(line.rstrip("\r\n"), folder)


def _transcript_row(line: str, folder: str) -> dict[str, str] | RowError:
    for pattern, audio in _TRANSCRIPTS:
        if match := pattern.fullmatch(line):
            fields = match.groupdict()
            path = os.path.normpath(f"{folder}/{audio.format(match['id'])}")
            return {"id": fields.pop("id"), "audio": path, "text": fields.pop("text"), **fields}
    return RowError(
        "expected an id such as 84-121123-0000, a blank, and a text; or LJ001-0001|text|text"
    )


def _folder_in(root: str, url: str) -> str:
    """Return the folder of a file, relative to the root of the media."""
    if is_remote(root):
        return url.rpartition("/")[0].removeprefix(root).strip("/") or "."
    return os.path.relpath(os.path.realpath(Path(local_path(url)).parent), root)


MAX_WHOLE_BYTES = 4 << 30
"""A larger file of JSON is read by its lines: others are in memory whole."""


class Coco(msgspec.Struct):
    """The parts of an annotation file that are used."""

    images: list[dict[str, Any]]
    annotations: list[dict[str, Any]]
    categories: list[dict[str, Any]] = []


def parse_coco(path: Path) -> Coco | None:
    """Return the content of an annotation file. None: the file is something else."""
    if path.stat().st_size > MAX_WHOLE_BYTES:
        return None
    try:
        coco = decode_json(path.read_bytes().removeprefix(BOM), Coco)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    is_joined = all("image_id" in annotation for annotation in coco.annotations[:1])
    return coco if is_joined and all("id" in image for image in coco.images[:1]) else None


def iter_coco(path: Path, rows: str) -> Iterator[NumberedRow]:
    """Yield (number, row) of each picture, in the order of ``images``.

    Raises:
        ConfigError: It is not an annotation file, two pictures have one id, or an annotation is of
            none of them.
    """
    coco = parse_coco(path)
    if coco is None:
        raise ConfigError(
            f"{rows}: no annotation file of COCO: it needs the lists images, each with an id, and "
            "annotations, each with an image_id"
        )
    # As text, because a stranger's id may be a list, which no dict takes as a key.
    names = {str(category.get("id")): category.get("name") for category in coco.categories}
    annotations: dict[str, list[dict[str, Any]]] = {}
    for image in coco.images:
        if str(image.get("id")) in annotations:
            raise ConfigError(f"{rows}: two images have the id {image.get('id')!r}")
        annotations[str(image.get("id"))] = []
    for annotation in coco.annotations:
        if str(annotation.get("image_id")) not in annotations:
            raise ConfigError(
                f"{rows}: an annotation has image_id {annotation.get('image_id')!r}, which no "
                "image has; the file is damaged or was cut"
            )
        annotations[str(annotation.get("image_id"))].append(annotation)
    for number, image in enumerate(coco.images, 1):
        yield number, _coco_row(image, annotations[str(image.get("id"))], names)


def _coco_row(
    image: dict[str, Any], annotations: list[dict[str, Any]], names: dict[str, Any]
) -> dict[str, Any] | RowError:
    path = image.get("file_name")
    if not isinstance(path, str):
        return RowError("image without file_name")
    others = {key: value for key, value in image.items() if key not in ("id", "file_name")}
    row: dict[str, Any] = {"id": image.get("id"), "image": path, **others}
    captions = [note["caption"] for note in annotations if "caption" in note]
    objects = [_object(note, names) for note in annotations if "caption" not in note]
    if captions:
        row["captions"] = captions
    if objects:
        row["objects"] = objects
    return row


def _object(annotation: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in annotation.items() if key != "image_id"}
    name = names.get(str(annotation.get("category_id")))
    return {"category": name, **kept} if name is not None else kept


_BLANKS = re.compile(r"[ \t\r\n]*")


class NotJSONError(ValueError):
    """The file is not a JSON array, or no stream of JSON objects. The message names the line."""


def write_lines(path: Path, target: Path, limit: int | None) -> Path:
    """Write each value of a JSON array or stream as one line. Return `target`.

    Raises:
        NotJSONError: The file is damaged, up to the last value that is asked for; or too large.
    """
    with target.open("wb") as file:
        for value in islice(iter_values(path), limit):
            # A line end is white space in JSON: inside a string it would not have parsed.
            file.write(value.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n")
    return target


def iter_values(path: Path) -> Iterator[bytes]:
    """Yield the bytes of each item of a JSON array, or of each object of a stream.

    Raises:
        NotJSONError: As it is reached.
    """
    if path.stat().st_size > MAX_WHOLE_BYTES:
        raise NotJSONError(
            f"more than {MAX_WHOLE_BYTES >> 30} GiB; write one object per line, as `jq -c '.[]'` "
            "does"
        )
    data = path.read_bytes().removeprefix(BOM)
    try:
        items = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        yield from _values_of(data.decode("utf-8", "surrogateescape"))
    else:
        yield from map(bytes, items)


def first_value(path: Path) -> bytes:
    """Return the first of the values, from the beginning of a file; empty if there is none.

    Raises:
        NotJSONError: It is damaged, or longer than a row may be.
    """
    with path.open("rb") as file:
        head = file.read(MAX_ROW_BYTES).removeprefix(BOM)
    return next(_values_of(head.decode("utf-8", "surrogateescape")), b"")


def _values_of(text: str) -> Iterator[bytes]:
    """Yield the values of an array with a NaN or a fault, or of a stream, one after the other."""
    decoder = json.JSONDecoder(parse_int=float)  # an int of thousands of digits is not JSON there
    position = _behind_blanks(text, 0)
    is_array = text[position : position + 1] == "["
    mark = "," if is_array else ""
    position += is_array
    while is_array or _behind_blanks(text, position) < len(text):
        start = _behind_blanks(text, position)
        try:
            _, stop = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            raise NotJSONError(f"{error.msg}, line {error.lineno}") from None
        except RecursionError:
            raise _fault("a value is nested too deeply", text, start) from None
        yield text[start:stop].encode("utf-8", "surrogateescape")
        position = _behind_blanks(text, stop)
        if is_array and text[position : position + 1] == "]":
            end = _behind_blanks(text, position + 1)
            if end < len(text):
                raise _fault(f"{text[end:][:20]!r} follows the array", text, end)
            return
        if not text.startswith(mark, position):
            raise _fault("a comma or the end of the array is missing", text, position)
        position += len(mark)


def _behind_blanks(text: str, position: int) -> int:
    blanks = _BLANKS.match(text, position)
    return position if blanks is None else blanks.end()


def _fault(what: str, text: str, position: int) -> NotJSONError:
    line = 1 + text.count("\n", 0, position)
    return NotJSONError(f"{what}, line {line}")


_LINE_BYTES = 1 << 20
_SHOWN_COLUMNS = 5
_FORMATS_WITHOUT_LISTS = (None, "captions", "laion", "labels", "text", "webvid", "speech")
"""Formats whose rows do not hold several lists. None: no row of a format."""


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
    if len(columns) < 2 or _format_of(value) not in _FORMATS_WITHOUT_LISTS:
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


def _format_of(value: dict[str, Any]) -> str | None:
    """Return the format that an object is a row of, or None."""
    try:
        return recognise(value)
    except RowError:
        return None


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
    video_ids = {str(video.get("video_id")) for video in videos}
    for video_id in (video_id for video_id in captions if video_id not in video_ids):
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
    """Return the object that a file holds, if it holds nothing else. Otherwise None, or no keys."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.readline(_LINE_BYTES).removeprefix(BOM).strip()
        remainder = file.read(_LINE_BYTES).strip()
    if not first.startswith(b"{") or size > MAX_WHOLE_BYTES or (remainder and is_json(first)):
        return None
    return json_object(path.read_bytes())


def _is_row(value: dict[str, Any]) -> bool:
    lists = [rows for rows in value.values() if isinstance(rows, list) and _are_objects(rows)]
    if any("segments" in row for rows in lists for row in rows[:1]):
        return False  # GigaSpeech: "audios" is not a list of paths here
    return _format_of(value) is not None
