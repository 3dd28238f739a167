"""Step 1 of a conversion: whatever holds the rows -> a `RowSource`.

    what the caller named -> OPEN -> plan -> formats -> media -> shard

Files, patterns, folders, or the rows themselves may be named. Files of rows become plain local
files that all processes read. A plain local JSONL file is one already. Others are fetched, unpacked
or parsed into a temporary folder. Parquet is left where it lies if its row groups are short.

Consecutive rows about the same medium may become one row with their spans. Dense captions have one
row per span: ``{"video": "a.mp4", "start": 0, "end": 4, "caption": ...}``. Grouped, the video is
stored once: ``{"video": "a.mp4", "segments": [{"start": 0, ...}, ...]}``. The number of the group
is that of its first row.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from mmstream.converting.draft import KINDS, LeftOutError
from mmstream.converting.formats.fields import MEDIA_KEYS
from mmstream.converting.formats.spans import VIDEO_ID_KEYS
from mmstream.converting.options import RowReading
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
    NAMES_OF_KINDS,
    RowKind,
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
    are_readable,
    copy_tars,
    download,
    expand,
    holds_tar,
    plain_file,
    read_head,
    short_names,
    split_of,
    with_splits,
)
from mmstream.converting.rows.folders import (
    FolderContent,
    iter_media,
    look_into,
    with_folder,
)
from mmstream.converting.rows.records import (
    NumberedRow,
    RecordFile,
    RecordSource,
    RowSource,
    SampleSource,
    encodable,
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
    rows_inside,
    single_object,
    write_lines,
)
from mmstream.dataset.manifest import MANIFEST_NAME
from mmstream.dataset.open import open_dataset
from mmstream.errors import ConfigError, StorageError
from mmstream.settings import refuse_broken
from mmstream.storage import is_remote, open_store, split_url
from mmstream.storage.store import local_path

logger = logging.getLogger(__name__)


@contextmanager
def open_rows(
    rows: Rows,
    reading: RowReading | None = None,
    root: str | None = None,
    run_length: int = 5000,
) -> Iterator[RowSource]:
    """Open the rows. Temporary copies, if some are needed, are removed after the block.

    Args:
        rows: What the caller named.
        reading: How they are read.
        root: Their `media_folder`, where it is known already. None: it is looked for.
        run_length: Rows that are read together: those of a shard, or 1 where they are shuffled.

    Raises:
        FileNotFoundError: There is no such file, or no file fits a pattern.
        ConfigError: There are no rows, or their content is damaged, of an unknown kind, or of
            several.
        StorageError: A remote file could not be read, it is a FIFO or a device, or the temporary
            folder is full.
    """
    with tempfile.TemporaryDirectory(prefix="mmstream-rows-") as folder:
        try:
            source = _open(rows, Path(folder), reading or RowReading(), root, run_length)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise StorageError(
                f"{folder}: no space left for the copy of the rows; set TMPDIR to a folder with "
                "more space"
            ) from None
        if not source.num_rows:
            raise ConfigError(f"{source.name}: holds no rows; write one JSON object per line")
        yield source


def _open(
    rows: Rows, folder: Path, reading: RowReading, root: str | None, run_length: int
) -> RowSource:
    names = file_names(rows)
    if names is None:
        for option in ("rows_as", "encoding"):
            if (value := getattr(reading, option)) is not None:
                raise ConfigError(
                    f"{option}={value!r}: has no effect on rows from Python; leave it out"
                )
        splits = named_splits(rows).items()
        return PlainFiles(folder, "rows", reading, run_length).open(
            [
                InputFile("", split or "rows", split, rows=enumerate(python_rows(split_rows), 1))
                for split, split_rows in splits
            ]
        )
    urls = expand(names)
    name = "stdin"  # so messages and the plan name the rows
    if names[0] != STDIN:
        name = encodable(split_url(names[0].rstrip("/"))[1])
    root = root or media_folder(rows)
    plain_files = PlainFiles(folder, name, reading, run_length, root)
    is_remote_folder = is_remote(urls[0]) and root is not None
    if len(urls) == 1 and (is_remote_folder or is_local_folder(urls[0])):
        return _open_folder(urls[0], plain_files, reading)
    inputs = _inputs_of(urls, folder, reading, root)
    if not any(map(is_local_folder, urls)):
        if holds_tar(str(inputs[0].copy or urls[0])):
            _require_kind(reading, "tars", urls[0])
            return _open_tars(inputs, name, folder, reading)
        if reading.rows_as == "tars":
            raise ConfigError(f"{urls[0]}: is not a tar; leave out rows_as='tars'")
    return plain_files.open(inputs)


def _open_tars(
    files: Sequence[InputFile], name: str, folder: Path, reading: RowReading
) -> SampleSource:
    """Return the source of tars of samples. Those that cannot be read at any place are copied."""
    if are_readable(files):
        return SampleSource(name, open_dataset([file.url for file in files]), reading.limit)
    copies = copy_tars(files, folder, reading.limit)
    return SampleSource(name, open_dataset(copies), reading.limit, is_temporary=True)


def _require_kind(reading: RowReading, kind: RowKind, url: str) -> None:
    """Refuse `rows_as` and `encoding` where the content is clearly something else."""
    name, encoding = NAMES_OF_KINDS[kind], reading.encoding
    refuse_broken(
        (
            reading.rows_as not in (None, kind),
            f"{url}: is {name}, not rows_as={reading.rows_as!r}",
        ),
        (
            encoding is not None,
            f"{url}: is {name}, where encoding={encoding!r} has no effect; leave it out",
        ),
    )


def _open_folder(url: str, plain_files: PlainFiles, reading: RowReading) -> RowSource:
    """Return the source of a folder's rows. Everything but tars of samples is read as files."""
    name, temporary = plain_files.name, plain_files.folder
    url = local_path(url).rstrip("/") or "/"
    if is_remote(url) and open_store(url).exists(MANIFEST_NAME):
        _require_kind(reading, "tars", url)  # too large to be listed, perhaps
        return SampleSource(name, open_dataset(url), reading.limit)
    content = look_into(url, reading.rows_as)
    kind = content.kind(url, reading.rows_as)
    if kind == "tars" and content.has_manifest:
        return SampleSource(name, open_dataset(url), reading.limit)
    if kind == "tars":
        tars = content.tars_to_read(url)
        files = [InputFile(f"{url.rstrip('/')}/{tar}", tar) for tar in tars]
        return _open_tars(files, name, temporary, reading)
    if kind != "media":
        return plain_files.open(files_in(url, content, kind))
    if len(content.splits) == 1:
        only_split = content.splits[0]
        logger.warning(
            "%s: holds the split %s only; its data set is DEST/%s. Name %s for a data set at DEST "
            "itself",
            url,
            only_split,
            split_of(only_split),
            f"{url}/{only_split}",
        )
    inputs = []
    subfolders: Sequence[str | None] = content.splits or (None,)
    for subfolder in subfolders:
        split = subfolder and split_of(subfolder)
        rows = iter_media(url, content, subfolder, reading.encoding)
        inputs.append(InputFile("", subfolder or name, split, rows=rows))
    if content.splits:
        inputs.sort(key=lambda file: SPLIT_ORDER.index(str(file.split)))
    return plain_files.open(inputs)


Rows: TypeAlias = str | os.PathLike[str] | Iterable[Any]
"""What `mm.convert` takes: a path or URL, several of them, or the rows themselves."""


def file_names(rows: Rows) -> list[str] | None:
    """Return the names of files that the caller gave. None: the rows themselves were given.

    Raises:
        ConfigError: A name is empty.
    """
    items = [rows] if isinstance(rows, str | os.PathLike) else rows
    is_listed = isinstance(items, list | tuple) and len(items) > 0
    if not is_listed or not all(isinstance(item, str | os.PathLike) for item in items):
        return None
    if "" in items:
        raise ConfigError("rows: the name of a file is empty; pass a path, a URL, or the rows")
    return [os.fspath(item) for item in items]


def input_urls(rows: Rows) -> list[str]:
    """Return the files and folders that the rows are read from. Rows from Python have none.

    Raises:
        FileNotFoundError: A pattern fits no file.
    """
    return [url for url in expand(file_names(rows) or []) if url != STDIN]


def media_folder(rows: Rows) -> str | None:
    """Return the folder that media paths are relative to, unless the caller names one.

    It is the folder of a file of rows, or the folder that was named. Of several files it is the
    innermost folder that holds all of them. For rows from Python and standard input it is the
    current folder. Of remote rows, a single folder has itself, and others have none.
    """
    names = file_names(rows)
    if names is None:
        return str(Path.cwd())
    if any(is_remote(name) for name in names):
        is_folder = len(names) == 1 and _is_remote_folder(names[0])
        return names[0].rstrip("/") if is_folder else None
    folders = []
    for name in names:
        path = Path(local_path(name))
        folder = Path("." if name == STDIN else path if path.is_dir() else path.parent)
        while set("*?[{") & set(str(folder)) and not folder.exists():
            folder = folder.parent
        folders.append(os.path.realpath(folder))
    return os.path.commonpath(folders)


def _is_remote_folder(url: str) -> bool:
    """Tell whether a URL is that of a folder. A pattern is none."""
    folder, name = split_url(url)
    if set("*?[{") & set(name) or (name and open_store(folder).exists(name)):
        return False
    store = open_store(url)
    if not name or store.exists(MANIFEST_NAME):  # a data set may be too large to be listed
        return True
    return bool(store.list() or store.folders())


def is_local_folder(url: str) -> bool:
    """Tell whether a name is that of a folder on this machine."""
    return url != STDIN and not is_remote(url) and Path(local_path(url)).is_dir()


def _inputs_of(
    urls: Sequence[str], folder: Path, reading: RowReading, root: str | None
) -> list[InputFile]:
    """Return the inputs of several files and local folders, in their order.

    Args:
        urls: What the caller named.
        folder: Temporary folder.
        reading: How rows are read.
        root: Folder that media are relative to. It holds all that was named. None: some of it is
            remote.

    Raises:
        ConfigError: A folder holds tars or several splits, which belong to data sets of their own,
            or comes with URLs.
    """
    names = dict(zip(urls, short_names(urls), strict=True))
    paths = {url: local_path(url) for url in urls if is_local_folder(url)}
    if paths and root is None:
        raise ConfigError("rows: local folders and URLs together; convert them apart")
    contents = {url: look_into(path, reading.rows_as) for url, path in paths.items()}
    kinds = {url: contents[url].kind(paths[url], reading.rows_as) for url in paths}
    media = [content for url, content in contents.items() if kinds[url] == "media"]
    classes = {name for content in media for name in content.classes.get(None, {})}
    numbers = {name: number for number, name in enumerate(sorted(classes))}
    inputs: list[InputFile] = []
    for url, name in names.items():
        if url not in contents:
            is_stdin = url == STDIN  # it can be read once only
            file = InputFile(url, "stdin" if is_stdin else name)
            inputs.append(replace(file, copy=download(url, folder / "stdin")) if is_stdin else file)
            continue
        path, content, kind = paths[url], contents[url], kinds[url]
        prefix = os.path.relpath(os.path.realpath(path), root) + "/"
        prefix = "" if prefix == "./" else prefix
        if kind == "tars":
            raise ConfigError(f"{url}: holds tars of samples; convert it alone")
        files = files_in(path, content, kind, prefix) if kind != "media" else []
        if len({file.split for file in files}) > 1 or (kind == "media" and content.splits):
            raise ConfigError(f"{url}: holds data sets of splits; convert it alone")
        inputs += [replace(file, name=f"{name}/{file.name}") for file in files]
        if kind == "media":
            if None in content.classes:
                content = replace(content, classes={None: numbers})
            rows = iter_media(path, content, None, reading.encoding, prefix)
            inputs.append(InputFile("", name, rows=rows))
    return inputs


def files_in(url: str, content: FolderContent, kind: str, prefix: str = "") -> list[InputFile]:
    """Return the files of rows of a folder.

    Args:
        url: Of the folder.
        content: Of the folder.
        kind: What the rows are.
        prefix: Of the folder in that of all media: empty, or ending with a slash.
    """
    paths_of = {
        "metadata": content.metadata,
        "transcripts": content.transcripts,
        "tarred": content.tarred,
    }
    paths = paths_of.get(kind, content.tables)
    files = [
        InputFile(
            f"{url}/{path}" if is_remote(url) else str(Path(url, path)),
            path,
            folder=prefix + path[: path.rfind("/") + 1] if kind == "metadata" else "",
        )
        for path in paths
    ]
    return with_splits(files, paths)


class PlainFiles:
    """Turns inputs of rows into plain local files, one after the other.

    Args:
        folder: Temporary folder for copies. It must live as long as the rows are read.
        name: How the plan and messages name the rows.
        reading: How rows are read.
        run_length: As in `open_rows`.
        root: Folder or prefix that media are relative to. None: there is none.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        reading: RowReading,
        run_length: int,
        root: str | None = None,
    ) -> None:
        self.folder, self.name = folder, name
        self._reading, self._run_length, self._root = reading, run_length, root
        self._files: list[RecordFile] = []
        self._splits: list[tuple[str | None, int]] = []
        self._num_rows = 0
        self._numbers = count(1)

    def open(self, inputs: Sequence[InputFile]) -> RowSource:
        """Return the source of some inputs."""
        if (tables := self._parquet_in_place(inputs)) is not None:
            limit = self._reading.limit
            splits = ranges_of_splits([(table.split, table.num_rows) for table in tables], limit)
            return ParquetSource(self.name, tuple(tables), limit, splits)
        offsets_path = self.folder / "offsets"
        with offsets_path.open("wb") as offsets:
            for file in inputs:
                if self._rows_left != 0:
                    self._add_file(file, offsets)
        size = offsets_path.stat().st_size
        mapped = np.memmap(offsets_path, np.int64, "r") if size else np.zeros(0, np.int64)
        splits = ranges_of_splits(self._splits)
        return RecordSource(self.name, tuple(self._files), mapped, splits)

    def _parquet_in_place(self, files: Sequence[InputFile]) -> list[ParquetFile] | None:
        """Return Parquet files that are best read where they lie, otherwise None.

        A shard that begins within a row group decodes the rows before it too. So no row group may
        be longer than two shards.
        """
        if self._reading.group_spans or any(file.folder for file in files):
            return None
        tables = []
        for file in files:
            if not _is_parquet(file):
                return None
            _require_kind(self._reading, "parquet", file.url)
            tables.append(ParquetFile.open(file))
            if max(tables[-1].group_sizes, default=0) > 2 * self._run_length:
                return None
        return tables

    @property
    def _rows_left(self) -> int | None:
        limit = self._reading.limit
        return None if limit is None else limit - self._num_rows

    def _new_path(self) -> Path:
        return self.folder / f"rows-{next(self._numbers)}"

    def _add_file(self, file: InputFile, offsets: BinaryIO) -> None:
        if file.rows is not None:
            self._add_spool(file.rows, file, offsets)
            return
        if _is_parquet(file):
            _require_kind(self._reading, "parquet", file.url)
            self._add_spool(iter_parquet(ParquetFile.open(file)), file, offsets)
            return
        path = plain_file(file, self._new_path(), self.folder / "download")
        path, kind, delimiter = self._kind(path, file)
        if kind == "json":
            path, kind = self._with_lines(path, file.url), "jsonl"
        if kind == "jsonl" and (inside := rows_inside(single_object(path))) is not None:
            self._add_spool(inside, file, offsets)
            return
        if kind == "jsonl" and not self._reading.group_spans and not file.folder:
            num_rows, sha256 = scan_lines(path, offsets, self._rows_left)
            self._add(path, file, num_rows, sha256, is_spool=False)
            return
        self._add_spool(self._parsed(path, kind, delimiter, file), file, offsets)
        if self._is_temporary(path):
            path.unlink()

    def _add_spool(self, rows: Iterable[NumberedRow], file: InputFile, offsets: BinaryIO) -> None:
        path = self._new_path()
        rows = with_folder(rows, file.folder)
        if self._reading.group_spans:
            rows = group_rows(rows, [*(self._reading.columns or {}).values()])
        num_rows, sha256 = write_spool(rows, path, offsets, self._rows_left)
        self._add(path, file, num_rows, sha256, is_spool=True)

    def _add(
        self, path: Path, file: InputFile, num_rows: int, sha256: str, *, is_spool: bool
    ) -> None:
        record_file = RecordFile(
            str(path.absolute()),
            file.name,
            stamp_of(path),
            self._num_rows,
            is_spool,
            self._is_temporary(path),
            num_rows,
            sha256,
        )
        self._files.append(record_file)
        self._splits.append((file.split, num_rows))
        self._num_rows += num_rows

    def _is_temporary(self, path: Path) -> bool:
        return path.parent == self.folder

    def _kind(self, path: Path, file: InputFile) -> tuple[Path, RowKind, str]:
        """Return a file that holds the same in UTF-8, what it is, and the delimiter of a table."""
        rows_as, encoding = self._reading.rows_as, self._reading.encoding
        head = read_head(str(path), HEAD_BYTES)
        binary: RowKind | None = "arrow" if is_arrow(head) else None
        binary = "parquet" if head.startswith(PARQUET_MAGIC) else binary
        if binary is not None:
            _require_kind(self._reading, binary, file.url)
            return path, binary, ""
        if is_tar(head):
            raise ConfigError(f"{file.url}: this is a tar among other files; name tars alone")
        if encoding is not None:
            path = write_utf8(path, self._new_path(), encoding, file.url)
            head = read_head(str(path), HEAD_BYTES)
        refuse_wrong_kind(head, file.url)
        warn_of_encoding(head, file.url, encoding)
        if rows_as is None:
            return path, *text_kind(path, head, file.url)
        require_text_kind(rows_as, head, file.url)
        return path, rows_as, {"csv": ",", "tsv": "\t"}.get(rows_as, "")

    def _with_lines(self, path: Path, url: str) -> Path:
        """Return a file with a line for each value of a JSON array or stream."""
        target = self._new_path()
        try:
            write_lines(path, target, self._rows_left)
        except NotJSONError as error:
            raise ConfigError(f"{url}: not a JSON array of rows: {error}") from None
        if self._is_temporary(path):
            path.unlink()
        return target

    def _parsed(
        self, path: Path, kind: RowKind, delimiter: str, file: InputFile
    ) -> Iterator[NumberedRow]:
        """Return the rows of a file that is not JSONL, or that is not read by its lines."""
        readers: dict[str, Callable[[], Iterator[NumberedRow]]] = {
            "parquet": lambda: iter_parquet(ParquetFile.open(InputFile(str(path), file.name))),
            "arrow": lambda: iter_arrow(path, file.url),
            "transcripts": lambda: iter_transcripts(path, file.url, self._root),
            "csv": lambda: iter_table(path, delimiter, file.url),
            "tsv": lambda: iter_table(path, delimiter, file.url),
            "coco": lambda: iter_coco(path, file.url),
            "lines": lambda: (
                row for row in iter_lines(path, text_row) if not isinstance(row[1], LeftOutError)
            ),
            "jsonl": lambda: iter_lines(path),
        }
        return readers[kind]()


def _is_parquet(file: InputFile) -> bool:
    """Tell whether an input is a plain Parquet file, which may be remote."""
    if file.rows is not None or file.url == STDIN:
        return False
    return read_head(file.url, len(PARQUET_MAGIC)) == PARQUET_MAGIC


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

    def medium_or_number(numbered: NumberedRow) -> Any:
        number, row = numbered
        media = [(key, row[key]) for key in keys if isinstance(row, dict) and row.get(key)]
        names = [(key, value) for key, value in media if isinstance(value, str)]
        return names[0] if len(names) == 1 else number

    for medium, group in groupby(rows, key=medium_or_number):
        while spans := list(islice(group, MAX_SPANS)):
            number, row = spans[0]
            if len(spans) > 1:
                key, path = medium
                segments = [{k: v for k, v in row.items() if k != key} for _, row in spans]
                row = {key: path, "segments": segments}
            yield number, row
