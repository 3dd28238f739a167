"""Files of rows -> plain local files that all processes read: the `RecordSource` of a conversion.

    files of rows, folders of media, rows from Python -> PLAIN FILES -> records

A plain local JSONL file is one already. Others are fetched, unpacked or parsed into a temporary
folder. Parquet is left where it lies if its row groups are short.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mmstream.converting.draft import LeftOutError
from mmstream.converting.rows.arrow import is_arrow, iter_arrow
from mmstream.converting.rows.coco import iter_coco, parse_coco
from mmstream.converting.rows.compressed import plain_file
from mmstream.converting.rows.detect import (
    HEAD_BYTES,
    RowKind,
    is_tar,
    refuse_wrong_kind,
    require_kind,
    require_text_kind,
    text_kind,
)
from mmstream.converting.rows.fetch import (
    SPLIT_ORDER,
    STDIN,
    InputFile,
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
from mmstream.converting.rows.groups import group_rows
from mmstream.converting.rows.json_values import NotJSONError, write_lines
from mmstream.converting.rows.lerobot import iter_episodes
from mmstream.converting.rows.nested import rows_inside, single_object
from mmstream.converting.rows.options import RowOptions
from mmstream.converting.rows.parquet import (
    PARQUET_MAGIC,
    ParquetFile,
    ParquetSource,
    iter_parquet,
)
from mmstream.converting.rows.python_rows import iter_python_rows, named_splits
from mmstream.converting.rows.records import (
    RecordFile,
    RecordSource,
    RowFile,
    iter_lines,
    ranges_of_splits,
    scan_lines,
    stamp_of,
    text_row,
)
from mmstream.converting.rows.source import RowSource
from mmstream.converting.rows.spool import NumberedRow, write_spool
from mmstream.converting.rows.tables import iter_table
from mmstream.converting.rows.transcripts import iter_transcripts
from mmstream.errors import ConfigError

__all__ = ["PlainFiles"]

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
                rows = with_media_prefix(iter_media(each.url, content, None), each.prefix)
                self._add_spool(rows, InputFile("", each.name), offsets)
        return self._source()

    def open_python(self, rows: Any) -> RowSource:
        """Return the source of rows from Python. They are taken one by one, once."""
        with self._offsets_path.open("wb") as offsets:
            for split, split_rows in named_splits(rows).items():
                if self._rows_left != 0:
                    file = InputFile("", split or "rows", split)
                    self._add_spool(iter_python_rows(split_rows), file, offsets)
        return self._source()

    def open_lerobot(self, url: str) -> RowSource:
        """Return the source of a data set of LeRobot: a row for each episode."""
        with self._offsets_path.open("wb") as offsets:
            self._add_spool(iter_episodes(url), InputFile("", self._name), offsets)
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
                    self._add_spool(iter_media(url, content, subfolder), file, offsets)
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
            require_kind(self._options.rows_as, "parquet", file.url)
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
            require_kind(self._options.rows_as, "parquet", file.url)
            self._add_spool(iter_parquet(ParquetFile.open(file)), file, offsets)
            return
        path = plain_file(file, self._new_path(), self._folder / "download")
        kind, delimiter = self._kind(path, file)
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

    def _kind(self, path: Path, file: InputFile) -> tuple[RowKind, str]:
        rows_as = self._options.rows_as
        head = read_head(str(path), HEAD_BYTES)
        if head.startswith(PARQUET_MAGIC):
            require_kind(rows_as, "parquet", file.url)
            return "parquet", ""
        if is_arrow(head):
            require_kind(rows_as, "arrow", file.url)
            return "arrow", ""
        if is_tar(head):
            raise ConfigError(f"{file.url}: this is a tar among other files; name tars alone")
        if rows_as is None:
            return text_kind(path, file.url)
        refuse_wrong_kind(head, file.url)
        require_text_kind(rows_as, path, file.url)
        return rows_as, {"csv": ",", "tsv": "\t"}.get(rows_as, "")

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
