"""Files of rows -> plain local files that all processes read: the `RecordSource` of a conversion.

    files of rows, folders of media, rows from Python -> PLAIN FILES -> records

A plain local JSONL file is one already. Others are fetched, unpacked or parsed into a temporary
folder. Parquet is left where it lies if its row groups are short.

Consecutive rows about the same medium -> one row with their spans.

    rows -> GROUPS -> spool

Dense captions have one row per span: ``{"video": "a.mp4", "start": 0, "end": 4, "caption": ...}``.
Grouped, the video is stored once: ``{"video": "a.mp4", "segments": [{"start": 0, ...}, ...]}``. The
number of the group is that of its first row.

A file that is one JSON object with the rows inside -> its rows.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mmstream.converting.draft import KINDS, LeftOutError, RowError
from mmstream.converting.formats.fields import MEDIA_KEYS, kind_by_name
from mmstream.converting.formats.formats import recognise
from mmstream.converting.formats.spans import VIDEO_ID_KEYS, has_spans
from mmstream.converting.rows.arrow import (
    PARQUET_MAGIC,
    ParquetFile,
    ParquetSource,
    is_arrow,
    iter_arrow,
    iter_parquet,
    named_splits,
    python_rows,
)
from mmstream.converting.rows.detect import (
    HEAD_BYTES,
    RowKind,
    RowOptions,
    is_tar,
    refuse_wrong_kind,
    require_text_kind,
    text_kind,
    warn_of_encoding,
    write_utf8,
)
from mmstream.converting.rows.fetch import (
    SPLIT_ORDER,
    STDIN,
    InputFile,
    plain_file,
    read_head,
    split_of,
)
from mmstream.converting.rows.folders import (
    FolderContent,
    MediaFolder,
    iter_media,
    with_folder,
    with_media_prefix,
)
from mmstream.converting.rows.records import (
    BOM,
    NumberedRow,
    RecordFile,
    RecordSource,
    RowFile,
    RowSource,
    iter_lines,
    ranges_of_splits,
    scan_lines,
    stamp_of,
    text_row,
    write_spool,
)
from mmstream.converting.rows.tables import (
    NotJSONError,
    iter_coco,
    iter_table,
    iter_transcripts,
    parse_coco,
    write_lines,
)
from mmstream.decoding.fields import is_json, json_object
from mmstream.errors import ConfigError, escaped

logger = logging.getLogger(__name__)


class PlainFiles:
    """Turns files of rows into plain local files, one after the other.

    Args:
        folder: Temporary folder for copies. It must live as long as the rows are read.
        name: How the plan and messages name the rows.
        options: How rows are read.
        root: Folder or prefix that media are relative to. None: there is none.
    """

    def __init__(
        self, folder: Path, name: str, options: RowOptions, root: str | None = None
    ) -> None:
        self._folder, self._name, self._options, self._root = folder, name, options, root
        self._offsets_path = folder / "offsets"
        self._files: list[RowFile] = []
        self._splits: list[tuple[str | None, int]] = []
        self._num_rows = self._num_paths = 0

    def open(self, files: Sequence[InputFile]) -> RowSource:
        """Return the source of some files."""
        if (tables := self._parquet_in_place(files)) is not None:
            return ParquetSource.of(self._name, tables, self._options.limit)
        with self._offsets_path.open("wb") as offsets:
            for file in files:
                if self._rows_left != 0:
                    self._add_file(file, offsets)
        return self._source()

    def open_inputs(self, inputs: Sequence[InputFile | MediaFolder]) -> RowSource:
        """Return the source of files and folders of media. Their classes are numbered together."""
        folders = [each for each in inputs if isinstance(each, MediaFolder)]
        names = {name for each in folders for name in each.content.classes.get(None, {})}
        classes = {name: i for i, name in enumerate(sorted(names))}
        with self._offsets_path.open("wb") as offsets:
            for each in inputs:
                if self._rows_left == 0:
                    break
                if isinstance(each, InputFile):
                    self._add_file(each, offsets)
                    continue
                content = each.content
                if None in content.classes:
                    content = replace(content, classes={None: classes})
                rows = iter_media(each.url, content, None, self._options.encoding)
                rows = with_media_prefix(rows, each.prefix)
                self._add_spool(rows, InputFile("", each.name), offsets)
        return self._source()

    def open_python(self, rows: Any) -> RowSource:
        """Return the source of rows from Python. They are taken one by one, once."""
        with self._offsets_path.open("wb") as offsets:
            for split, split_rows in named_splits(rows).items():
                if self._rows_left != 0:
                    file = InputFile("", split or "rows", split)
                    self._add_spool(enumerate(python_rows(split_rows), 1), file, offsets)
        return self._source()

    def open_media(self, url: str, content: FolderContent) -> RowSource:
        """Return the source of a folder of media: a row for each file."""
        splits: list[tuple[str | None, str | None]] = [(None, None)]
        if content.splits:
            splits = [(split_of(subfolder), subfolder) for subfolder in content.splits]
            splits.sort(key=lambda pair: SPLIT_ORDER.index(str(pair[0])))
        if len(splits) == 1 and splits[0][0] is not None:
            logger.warning(
                "%s: holds the split %s only; its data set is DEST/%s. Name %s for a data set "
                "at DEST itself",
                url,
                content.splits[0],
                splits[0][0],
                f"{url}/{content.splits[0]}",
            )
        with self._offsets_path.open("wb") as offsets:
            for split, subfolder in splits:
                if self._rows_left != 0:
                    file = InputFile("", subfolder or self._name, split)
                    rows = iter_media(url, content, subfolder, self._options.encoding)
                    self._add_spool(rows, file, offsets)
        return self._source()

    def _parquet_in_place(self, files: Sequence[InputFile]) -> list[ParquetFile] | None:
        """Return Parquet files that are best read where they lie, otherwise None.

        A shard that begins within a row group decodes the rows before it too. So no row group may
        be longer than two shards.
        """
        if self._options.group_spans or any(file.url == STDIN or file.folder for file in files):
            return None
        tables = []
        for file in files:
            if read_head(file.url, len(PARQUET_MAGIC)) != PARQUET_MAGIC:
                return None
            self._options.require_kind("parquet", file.url)
            tables.append(ParquetFile.open(file))
            if max(tables[-1].group_sizes, default=0) > 2 * self._options.run_length:
                return None
        return tables

    def _source(self) -> RecordSource:
        size = self._offsets_path.stat().st_size
        offsets = np.memmap(self._offsets_path, np.int64, "r") if size else np.zeros(0, np.int64)
        splits = ranges_of_splits(self._splits)
        return RecordSource(self._name, tuple(self._files), offsets, splits)

    @property
    def _rows_left(self) -> int | None:
        limit = self._options.limit
        return None if limit is None else limit - self._num_rows

    def _new_path(self) -> Path:
        self._num_paths += 1
        return self._folder / f"rows-{self._num_paths}"

    def _add_file(self, file: InputFile, offsets: BinaryIO) -> None:
        if file.url != STDIN and read_head(file.url, len(PARQUET_MAGIC)) == PARQUET_MAGIC:
            self._options.require_kind("parquet", file.url)
            self._add_spool(iter_parquet(ParquetFile.open(file)), file, offsets)
            return
        path = plain_file(file, self._new_path(), self._folder / "download")
        path, kind, delimiter = self._kind(path, file)
        if kind == "json":
            path, kind = self._unrolled(path, file.url)
        if kind == "jsonl" and (inside := rows_inside(single_object(path))) is not None:
            self._add_spool(inside, file, offsets)
            return
        if kind == "jsonl" and not self._options.group_spans and not file.folder:
            num_rows, sha256 = scan_lines(path, offsets, self._rows_left)
            self._add(path, file, num_rows, sha256, is_spool=False)
            return
        self._add_spool(self._parsed(path, kind, delimiter, file), file, offsets)
        if self._is_temporary(path):
            path.unlink()

    def _add_spool(self, rows: Iterable[NumberedRow], file: InputFile, offsets: BinaryIO) -> None:
        path = self._new_path()
        rows = with_folder(rows, file.folder)
        if self._options.group_spans:
            rows = group_rows(rows, self._options.media_keys)
        num_rows, sha256 = write_spool(rows, path, offsets, self._rows_left)
        self._add(path, file, num_rows, sha256, is_spool=True)

    def _add(
        self, path: Path, file: InputFile, num_rows: int, sha256: str, *, is_spool: bool
    ) -> None:
        record_file = RecordFile(
            str(path.absolute()),
            "stdin" if file.url == STDIN else file.name,
            stamp_of(path),
            self._num_rows,
            is_spool,
            self._is_temporary(path),
        )
        self._files.append(RowFile(record_file, num_rows, sha256))
        self._splits.append((file.split, num_rows))
        self._num_rows += num_rows

    def _is_temporary(self, path: Path) -> bool:
        return path.parent == self._folder

    def _kind(self, path: Path, file: InputFile) -> tuple[Path, RowKind, str]:
        """Return a file that holds the same in UTF-8, what it is, and the delimiter of a table."""
        rows_as, encoding = self._options.rows_as, self._options.encoding
        head = read_head(str(path), HEAD_BYTES)
        if head.startswith(PARQUET_MAGIC):
            self._options.require_kind("parquet", file.url)
            return path, "parquet", ""
        if is_arrow(head):
            self._options.require_kind("arrow", file.url)
            return path, "arrow", ""
        if is_tar(head):
            raise ConfigError(f"{file.url}: this is a tar among other files; name tars alone")
        if encoding is not None:
            path = write_utf8(path, self._new_path(), encoding, file.url)
            head = read_head(str(path), HEAD_BYTES)
        refuse_wrong_kind(head, file.url)
        warn_of_encoding(head, file.url, encoding)
        if rows_as is None:
            return path, *text_kind(path, file.url)
        require_text_kind(rows_as, path, file.url)
        return path, rows_as, {"csv": ",", "tsv": "\t"}.get(rows_as, "")

    def _unrolled(self, path: Path, url: str) -> tuple[Path, RowKind]:
        target = self._new_path()
        try:
            write_lines(path, target, self._rows_left)
        except NotJSONError as error:
            hint = " (this looks like Python's lists: write it with json.dumps)"
            head = b"".join(read_head(str(path), HEAD_BYTES).split())
            is_python = head.startswith((b"[{'", b"[['"))
            raise ConfigError(
                f"{url}: not a JSON array of rows: {error}{hint if is_python else ''}"
            ) from None
        if self._is_temporary(path):
            path.unlink()
        return target, "jsonl"

    def _parsed(
        self, path: Path, kind: RowKind, delimiter: str, file: InputFile
    ) -> Iterator[NumberedRow]:
        if kind == "parquet":
            return iter_parquet(ParquetFile.open(InputFile(str(path), file.name)))
        if kind == "arrow":
            return iter_arrow(path, file.url)
        if kind == "transcripts":
            return iter_transcripts(path, file.url, self._root)
        if kind in ("csv", "tsv"):
            return iter_table(path, delimiter, file.url)
        if kind == "coco":
            coco = parse_coco(path)
            if coco is None:
                raise ConfigError(
                    f"{file.url}: no annotation file of COCO: it needs the lists images, each "
                    "with an id, and annotations, each with an image_id"
                )
            return iter_coco(coco, file.url)
        if kind == "lines":
            lines = iter_lines(path, text_row)
            return ((i, row) for i, row in lines if not isinstance(row, LeftOutError))
        return iter_lines(path)


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


MAX_NESTED_BYTES = 2 << 30
"""A larger file is read as lines. It would be in memory whole."""

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
    """Return the object that a file holds, if it holds nothing else. Otherwise None, or no keys."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.readline(_LINE_BYTES).removeprefix(BOM).strip()
        rest = file.read(_LINE_BYTES).strip()
    if not first.startswith(b"{") or size > MAX_NESTED_BYTES or (rest and is_json(first)):
        return None
    return json_object(path.read_bytes())


def _is_row(value: dict[str, Any]) -> bool:
    lists = [rows for rows in value.values() if isinstance(rows, list) and _are_objects(rows)]
    if any("segments" in row for rows in lists for row in rows[:1]):
        return False  # GigaSpeech: "audios" is no list of paths here
    return _format_of(value) is not None
