"""Step 1 of a conversion: whatever holds the rows -> a `RowSource`.

ROWS -> plan -> formats -> media -> shard
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from mmstream.converting.rows.coco import iter_coco, parse_coco
from mmstream.converting.rows.compressed import compression_of, decompress
from mmstream.converting.rows.detect import (
    HEAD_BYTES,
    ROW_KINDS,
    RowKind,
    is_tar,
    refuse_wrong_kind,
    text_kind,
)
from mmstream.converting.rows.fetch import (
    SPLIT_ORDER,
    STDIN,
    InputFile,
    download,
    expand,
    local_path,
    read_head,
    short_names,
    split_of,
    with_splits,
)
from mmstream.converting.rows.folders import FolderContent, iter_media, look_into, with_folder
from mmstream.converting.rows.groups import group_rows
from mmstream.converting.rows.json_values import NotJSONError, write_lines
from mmstream.converting.rows.nested import rows_inside, single_object
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
    require_rows,
    scan_lines,
    stamp_of,
)
from mmstream.converting.rows.samples import SampleSource
from mmstream.converting.rows.source import RowSource
from mmstream.converting.rows.spool import NumberedRow, write_spool
from mmstream.converting.rows.tables import iter_table
from mmstream.converting.rows.transcripts import iter_transcripts
from mmstream.dataset.manifest import MANIFEST_NAME
from mmstream.errors import ConfigError, StorageError
from mmstream.storage import is_remote, open_store, split_url
from mmstream.tar.header import BLOCK
from mmstream.wrong_arguments import refuse_bools

__all__ = ["RowKind", "RowOptions", "Rows", "file_names", "input_urls", "media_folder", "open_rows"]

logger = logging.getLogger(__name__)

Rows: TypeAlias = str | os.PathLike[str] | Iterable[Any]
"""What `mm.convert` takes: a path or URL, several of them, or the rows themselves."""


@dataclass(frozen=True)
class RowOptions:
    """How rows are read. Impossible options raise ConfigError."""

    rows_as: RowKind | None = None
    """What the rows lie in. None: their content says it."""
    limit: int | None = None
    """Only the first so many rows."""
    group_spans: bool = False
    """Consecutive rows about the same medium are one row, with the key "segments"."""
    run_length: int = 5000
    """Rows that are read together: those of a shard, or 1 where they are shuffled."""
    media_keys: tuple[str, ...] = field(default=(), compare=False)
    """Keys that name the medium of a row, for `group_spans`, before the usual ones."""

    def __post_init__(self) -> None:
        refuse_bools(limit=self.limit)
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit={self.limit}: must be 1 or more")
        if self.rows_as is not None and self.rows_as not in ROW_KINDS:
            raise ConfigError(f"rows_as={self.rows_as!r}: must be one of {', '.join(ROW_KINDS)}")


@contextmanager
def open_rows(rows: Rows, options: RowOptions | None = None) -> Iterator[RowSource]:
    """Open the rows. Temporary copies, if some are needed, are removed after the block.

    Raises:
        FileNotFoundError: There is no such file, or no file fits a pattern.
        ConfigError: There are no rows, or their content is damaged, of an unknown kind, or of
            several.
        StorageError: A remote file could not be read, it is a FIFO or a device, or the temporary
            folder is full.
    """
    with tempfile.TemporaryDirectory(prefix="mmstream-rows-") as folder:
        try:
            source = _open(rows, Path(folder), options or RowOptions())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise StorageError(
                f"{folder}: no space left for the copy of the rows; set TMPDIR to a folder with "
                "more space"
            ) from None
        require_rows(source.name, source.num_rows)
        yield source


def _name_of(rows: Rows) -> str:
    """Return how messages and the plan name the rows: the base name of a file, for example."""
    if isinstance(rows, str | os.PathLike):
        name = os.fspath(rows)
        return "stdin" if name == STDIN else split_url(name.rstrip("/"))[1]
    return "rows"


def media_folder(rows: Rows) -> str | None:
    """Return the local folder that media paths are relative to, unless the caller names one.

    It is the folder of a file of rows, or the folder that was named. Of several files it is the
    innermost folder that holds all of them. For rows from Python and standard input it is the
    current folder. Remote rows have none.
    """
    names = file_names(rows)
    if names is None:
        return str(Path.cwd())
    if any(is_remote(name) for name in names):
        return None
    folders = []
    for name in names:
        path = Path(local_path(name))
        is_folder = name == STDIN or path.is_dir()
        folder = Path("." if name == STDIN else path if is_folder else path.parent)
        while set("*?[{") & set(str(folder)) and not folder.exists():
            folder = folder.parent
        folders.append(os.path.realpath(folder))
    return os.path.commonpath(folders)


def file_names(rows: Rows) -> list[str] | None:
    """Return the names of files that the caller gave. None: the rows themselves were given."""
    if isinstance(rows, str | os.PathLike):
        return [os.fspath(rows)]
    if not isinstance(rows, list | tuple) or not rows:
        return None
    is_named = all(isinstance(item, str | os.PathLike) for item in rows)
    return [os.fspath(item) for item in rows] if is_named else None


def input_urls(rows: Rows) -> list[str]:
    """Return the files and folders that the rows are read from. Rows from Python have none.

    Raises:
        FileNotFoundError: A pattern fits no file.
    """
    return [url for url in expand(file_names(rows) or []) if url != STDIN]


def _open(rows: Rows, folder: Path, options: RowOptions) -> RowSource:
    names = file_names(rows)
    if names is None:
        return _Opener(folder, "rows", options).open_python(rows)
    urls = expand(names)
    name = _name_of(rows) if isinstance(rows, str | os.PathLike) else _name_of(names[0])
    opener = _Opener(folder, name, options, media_folder(rows))
    if len(urls) == 1 and urls[0] != STDIN and _is_folder(urls[0]):
        return _open_folder(urls[0].rstrip("/") or "/", name, opener, options)
    if options.rows_as == "tars" or _are_tars(urls):
        return SampleSource.open(urls, name, options.limit)
    short = short_names(urls)
    return opener.open([InputFile(url, name) for url, name in zip(urls, short, strict=True)])


def _is_folder(url: str) -> bool:
    if not is_remote(url):
        return Path(local_path(url)).is_dir()
    folder, name = split_url(url)
    return not name or (not open_store(folder).exists(name) and bool(open_store(url).list()))


def _are_tars(urls: Sequence[str]) -> bool:
    """Tell whether the first file is a tar. Then all must be."""
    return urls[0] != STDIN and is_tar(read_head(urls[0], 2 * BLOCK))


def _open_folder(url: str, name: str, opener: _Opener, options: RowOptions) -> RowSource:
    """Return the source of a folder's rows."""
    if is_remote(url):
        names = sorted(open_store(url).list())
        if MANIFEST_NAME in names or any(each.endswith(".tar") for each in names):
            return SampleSource.open(url, name, options.limit)
        files = [InputFile(f"{url}/{each}", each) for each in names]
        return opener.open(with_splits(files, names))
    folder = Path(local_path(url))
    content = look_into(folder)
    kind = options.rows_as if options.rows_as in ("media", "tars") else content.kind(url)
    if kind == "tars":
        return SampleSource.open(str(folder), name, options.limit)
    if kind == "media":
        return opener.open_media(folder, content)
    paths = {"metadata": content.metadata, "transcripts": content.transcripts}.get(
        str(kind), content.tables
    )
    files = [
        InputFile(
            str(folder / path),
            path,
            folder=path[: path.rfind("/") + 1] if kind == "metadata" else "",
        )
        for path in paths
    ]
    return opener.open(with_splits(files, paths))


class _Opener:
    """Turns files of rows into plain local files, one after the other."""

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

    def open_python(self, rows: Any) -> RowSource:
        """Return the source of rows from Python. They are taken one by one, once."""
        with self._offsets_path.open("wb") as offsets:
            for split, split_rows in named_splits(rows).items():
                if self._rows_left != 0:
                    file = InputFile("", split or "rows", split)
                    self._add_spool(iter_python_rows(split_rows), file, offsets)
        return self._source()

    def open_media(self, folder: Path, content: FolderContent) -> RowSource:
        """Return the source of a folder of media: a row for each file."""
        splits: list[tuple[str | None, str | None]] = [(None, None)]
        if content.splits:
            splits = [(split_of(subfolder), subfolder) for subfolder in content.splits]
            splits.sort(key=lambda pair: SPLIT_ORDER.index(str(pair[0])))
        if len(splits) == 1 and splits[0][0] is not None:
            logger.warning(
                "%s: holds the split %s only; its data set is DEST/%s. Name %s for a data set "
                "at DEST itself",
                folder,
                content.splits[0],
                splits[0][0],
                folder / content.splits[0],
            )
        with self._offsets_path.open("wb") as offsets:
            for split, subfolder in splits:
                if self._rows_left != 0:
                    file = InputFile("", subfolder or folder.name, split)
                    self._add_spool(iter_media(folder, content, subfolder), file, offsets)
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
            self._add_spool(iter_parquet(ParquetFile.open(file)), file, offsets)
            return
        path = self._plain(file)
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

    def _plain(self, file: InputFile) -> Path:
        """Return a local, plain file with the content of a file of rows."""
        path = Path(local_path(file.url))
        if file.url == STDIN or is_remote(file.url):
            path = download(file.url, self._new_path())
            head = read_head(str(path), HEAD_BYTES)
        else:
            head = read_head(file.url, HEAD_BYTES)
        compression = compression_of(head)
        if compression is None:
            return path
        plain = decompress(path, self._new_path(), compression, file.url)
        if self._is_temporary(path):
            path.unlink()
        return plain

    def _kind(self, path: Path, file: InputFile) -> tuple[RowKind, str]:
        match self._options.rows_as:
            case "csv":
                return "csv", ","
            case "tsv":
                return "tsv", "\t"
            case "jsonl" | "json" | "coco" as kind:
                refuse_wrong_kind(read_head(str(path), HEAD_BYTES), file.url)
                return kind, ""
        head = read_head(str(path), HEAD_BYTES)
        if head.startswith(PARQUET_MAGIC):
            return "parquet", ""
        if is_tar(head):
            raise ConfigError(
                f"{file.url}: this is a tar among other files, or a compressed one; name tars "
                "alone, and unpack them with `mmstream index --repack`"
            )
        return text_kind(path, file.url)

    def _unrolled(self, path: Path, url: str) -> tuple[Path, RowKind]:
        target = self._new_path()
        try:
            write_lines(path, target, self._rows_left)
        except NotJSONError as error:
            raise ConfigError(f"{url}: not a JSON array of rows: {error}") from None
        if self._is_temporary(path):
            path.unlink()
        return target, "jsonl"

    def _parsed(
        self, path: Path, kind: RowKind, delimiter: str, file: InputFile
    ) -> Iterator[NumberedRow]:
        if kind == "parquet":
            return iter_parquet(ParquetFile.open(InputFile(str(path), file.name)))
        if kind == "transcripts":
            return iter_transcripts(path, local_path(file.url), self._root)
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
        return iter_lines(path)
