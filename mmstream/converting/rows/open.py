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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from mmstream.converting.draft import KINDS, LeftOutError
from mmstream.converting.formats.fields import MEDIA_KEYS
from mmstream.converting.formats.spans import VIDEO_ID_KEYS
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
    MediaFolder,
    iter_media,
    look_into,
    with_folder,
    with_media_prefix,
)
from mmstream.converting.rows.records import (
    NumberedRow,
    RecordFile,
    RecordSource,
    RowSource,
    encodable,
    iter_lines,
    ranges_of_splits,
    require_rows,
    scan_lines,
    stamp_of,
    text_row,
    write_spool,
)
from mmstream.converting.rows.samples import SampleSource
from mmstream.converting.rows.tables import (
    NotJSONError,
    iter_coco,
    iter_table,
    iter_transcripts,
    parse_coco,
    rows_inside,
    single_object,
    write_lines,
)
from mmstream.dataset.manifest import MANIFEST_NAME
from mmstream.errors import ConfigError, StorageError, escaped
from mmstream.storage import NotAFileError, is_remote, open_store, split_url
from mmstream.storage.store import TooLargeError
from mmstream.storage.urls import local_path

logger = logging.getLogger(__name__)


@contextmanager
def open_rows(
    rows: Rows, options: RowOptions | None = None, root: str | None = None
) -> Iterator[RowSource]:
    """Open the rows. Temporary copies, if some are needed, are removed after the block.

    Args:
        rows: What the caller named.
        options: How they are read.
        root: Their `media_folder`, where it is known already. None: it is looked for.

    Raises:
        FileNotFoundError: There is no such file, or no file fits a pattern.
        ConfigError: There are no rows, or their content is damaged, of an unknown kind, or of
            several.
        StorageError: A remote file could not be read, it is a FIFO or a device, or the temporary
            folder is full.
    """
    with tempfile.TemporaryDirectory(prefix="mmstream-rows-") as folder:
        try:
            source = _open(rows, Path(folder), options or RowOptions(), root)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise StorageError(
                f"{folder}: no space left for the copy of the rows; set TMPDIR to a folder with "
                "more space"
            ) from None
        require_rows(source.name, source.num_rows)
        yield source


def _open(rows: Rows, folder: Path, options: RowOptions, root: str | None) -> RowSource:
    names = file_names(rows)
    if names is None:
        for option in ("rows_as", "encoding"):
            if (given := getattr(options, option)) is not None:
                raise ConfigError(
                    f"{option}={given!r}: has no effect on rows from Python; leave it out"
                )
        return PlainFiles(folder, "rows", options).open_python(rows)
    urls = expand(names)
    name = _name_of(names[0])
    root = root or media_folder(rows)
    plain_files = PlainFiles(folder, name, options, root)
    is_remote_folder = is_remote(urls[0]) and root is not None
    if len(urls) == 1 and (is_remote_folder or is_local_folder(urls[0])):
        return _open_folder(urls[0], name, folder, plain_files, options)
    if any(is_local_folder(url) for url in urls):
        inputs = inputs_of(urls, options.rows_as, root)
        return plain_files.open_inputs(
            [_held(each, folder) if isinstance(each, InputFile) else each for each in inputs]
        )
    names_of_files = zip(urls, short_names(urls), strict=True)
    files = [_held(InputFile(url, short_name), folder) for url, short_name in names_of_files]
    if holds_tar(str(files[0].copy or urls[0])):
        options.require_kind("tars", urls[0])
        return _open_tars(files, name, folder, options)
    if options.rows_as == "tars":
        raise ConfigError(f"{urls[0]}: is no tar; leave out rows_as='tars'")
    return plain_files.open(files)


def _held(file: InputFile, folder: Path) -> InputFile:
    """Return a file, standard input with a copy: it can be read once only."""
    if file.url != STDIN:
        return file
    return replace(file, name="stdin", copy=download(STDIN, folder / "stdin"))


def _open_tars(
    files: Sequence[InputFile], name: str, folder: Path, options: RowOptions
) -> SampleSource:
    """Return the source of tars of samples. Those that cannot be read at any place are copied."""
    if are_readable(files):
        return SampleSource.open([file.url for file in files], name, options.limit)
    copies = copy_tars(files, folder, options.limit)
    return SampleSource.open(copies, name, options.limit, is_temporary=True)


def _name_of(path: str) -> str:
    """Return how messages and the plan name the rows: the base name of the first file."""
    return "stdin" if path == STDIN else encodable(split_url(path.rstrip("/"))[1])


def _open_folder(
    url: str, name: str, temporary: Path, plain_files: PlainFiles, options: RowOptions
) -> RowSource:
    """Return the source of a folder's rows.

    Args:
        url: Of the folder.
        name: How the plan names the rows.
        temporary: Folder for copies.
        plain_files: Reads everything but tars of samples.
        options: How rows are read.
    """
    url = local_path(url).rstrip("/") or "/"
    if is_remote(url) and open_store(url).exists(MANIFEST_NAME):
        options.require_kind("tars", url)  # too large to be listed, perhaps
        return SampleSource.open(url, name, options.limit)
    if options.rows_as is None:
        refuse_lerobot(url)
    content = look_into(url, temporary / "listing" if is_remote(url) else None)
    kind = folder_kind(url, content, options.rows_as)
    if kind == "tars":
        if content.has_manifest:
            return SampleSource.open(url, name, options.limit)
        return _open_tars(_tars_in(url, content), name, temporary, options)
    if kind == "media":
        return plain_files.open_media(url, content)
    return plain_files.open(files_in(url, content, kind, ""))


def _tars_in(url: str, content: FolderContent) -> list[InputFile]:
    """Return the tars of a folder. A warning counts those that are left out."""
    tars = content.tars_to_read()
    doubled = sorted({*content.tars, *content.packed_tars}.difference(tars))
    if doubled:
        logger.warning(
            "%s: tars of the same name but another compression are left out (%d, such as %s)",
            url,
            len(doubled),
            escaped(doubled[0]),
        )
    return [InputFile(f"{url.rstrip('/')}/{tar}", tar) for tar in tars]


_LEROBOT_INFO = "meta/info.json"
_MAX_INFO_BYTES = 16 << 20
"""A larger file is none of LeRobot."""

Rows: TypeAlias = str | os.PathLike[str] | Iterable[Any]
"""What `mm.convert` takes: a path or URL, several of them, or the rows themselves."""


def file_names(rows: Rows) -> list[str] | None:
    """Return the names of files that the caller gave. None: the rows themselves were given.

    Raises:
        ConfigError: A name is empty.
    """
    items = [rows] if isinstance(rows, str | os.PathLike) else rows
    if not isinstance(items, list | tuple) or not items:
        return None
    if not all(isinstance(item, str | os.PathLike) for item in items):
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
    return any(store.list_all())


def is_local_folder(url: str) -> bool:
    """Tell whether a name is that of a folder on this machine."""
    return url != STDIN and not is_remote(url) and Path(local_path(url)).is_dir()


def inputs_of(
    urls: Sequence[str], rows_as: RowKind | None, root: str | None
) -> list[InputFile | MediaFolder]:
    """Return the files and folders of media of several files and folders, in their order.

    Args:
        urls: What the caller named. Folders lie on this machine.
        rows_as: What the rows lie in.
        root: Folder that media are relative to. It holds all that was named. None: some of it is
            remote.

    Raises:
        ConfigError: A folder holds tars or several splits, which belong to data sets of their own,
            or comes with URLs.
    """
    if root is None:
        raise ConfigError("rows: local folders and URLs together; convert them apart")
    inputs: list[InputFile | MediaFolder] = []
    for url, name in zip(urls, short_names(urls), strict=True):
        if not is_local_folder(url):
            inputs.append(InputFile(url, name))
            continue
        folder = local_path(url)
        if rows_as is None:
            refuse_lerobot(folder)
        content = look_into(folder)
        kind = folder_kind(url, content, rows_as)
        prefix = os.path.relpath(os.path.realpath(folder), root) + "/"
        prefix = "" if prefix == "./" else prefix
        files = [] if kind in ("tars", "media") else files_in(folder, content, kind, prefix)
        has_splits = len({file.split for file in files}) > 1
        if kind == "tars" or has_splits or (kind == "media" and content.splits):
            held = "tars of samples" if kind == "tars" else "data sets of splits"
            raise ConfigError(f"{url}: holds {held}; convert it alone")
        if kind == "media":
            inputs.append(MediaFolder(folder, name, content, prefix))
        inputs += [replace(file, name=f"{name}/{file.name}") for file in files]
    return inputs


def refuse_lerobot(url: str) -> None:
    """Refuse a folder or prefix that is a data set of LeRobot, of any version.

    Its tables are rows of frames, and its videos hold many episodes. Read as a folder of media, it
    would become something else without a word.

    Raises:
        ConfigError: It is one.
    """
    try:
        info = open_store(url).read(_LEROBOT_INFO, max_bytes=_MAX_INFO_BYTES)
    except (FileNotFoundError, NotADirectoryError, NotAFileError, TooLargeError):
        return
    if b'"codebase_version"' in info:
        raise ConfigError(
            f"{url}: a data set of LeRobot is not read as it is; make rows of its episodes with "
            "the function in docs/row-formats.md, under LeRobot"
        )


def folder_kind(url: str, content: FolderContent, rows_as: RowKind | None) -> str:
    """Return what the rows of a folder are.

    Raises:
        ConfigError: It holds nothing, may be read in two ways, or holds no such rows as `rows_as`.
    """
    if rows_as is None:
        kind: str = content.kind(url)
        if content.packed_tars and kind != "tars":
            logger.warning(
                "%s: compressed tars are left out (%d, such as %s), since other files of rows or "
                "media lie beside them. Read the tars with rows_as='tars'",
                url,
                len(content.packed_tars),
                escaped(content.packed_tars[0]),
            )
        return kind
    if rows_as in ("tars", "media", "transcripts"):
        has = {
            "tars": content.tars or content.packed_tars or content.has_manifest,
            "media": content.num_media,
            "transcripts": content.transcripts,
        }[rows_as]
        kind = rows_as
    else:
        has = content.tables
        kind = "metadata" if content.metadata and content.num_media else "tables"
    if not has:
        raise ConfigError(
            f"{url}: holds no {NAMES_OF_KINDS[rows_as]}; leave out rows_as={rows_as!r}"
        )
    return kind


def files_in(url: str, content: FolderContent, kind: str, prefix: str) -> list[InputFile]:
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
        self._files: list[RecordFile] = []
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
            num_rows,
            sha256,
        )
        self._files.append(record_file)
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
