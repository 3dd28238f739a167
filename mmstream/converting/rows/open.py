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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from mmstream.converting.rows.arrow import is_arrow, iter_arrow
from mmstream.converting.rows.coco import iter_coco, parse_coco
from mmstream.converting.rows.compressed import compression_of, decompress
from mmstream.converting.rows.detect import (
    HEAD_BYTES,
    NAMES_OF_KINDS,
    ROW_KINDS,
    RowKind,
    is_tar,
    refuse_wrong_kind,
    require_text_kind,
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
from mmstream.converting.rows.folders import (
    FolderContent,
    MediaFolder,
    iter_media,
    look_into,
    with_folder,
    with_media_prefix,
)
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
        if options.rows_as is not None:
            raise ConfigError(
                f"rows_as={options.rows_as!r}: has no effect on rows from Python; leave it out"
            )
        return _Opener(folder, "rows", options).open_python(rows)
    urls = expand(names)
    name = _name_of(rows) if isinstance(rows, str | os.PathLike) else _name_of(names[0])
    opener = _Opener(folder, name, options, media_folder(rows))
    if len(urls) == 1 and urls[0] != STDIN and _is_folder(urls[0]):
        return _open_folder(urls[0].rstrip("/") or "/", name, opener, options)
    if any(_is_local_folder(url) for url in urls):
        return opener.open_inputs(_inputs_of(urls, options.rows_as, media_folder(rows)))
    if _are_tars(urls):
        _require_kind(options.rows_as, "tars", urls[0])
        return SampleSource.open(urls, name, options.limit)
    if options.rows_as == "tars":
        raise ConfigError(f"{urls[0]}: is no tar; leave out rows_as='tars'")
    return opener.open(
        [InputFile(url, name) for url, name in zip(urls, short_names(urls), strict=True)]
    )


def _inputs_of(
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
        if not _is_local_folder(url):
            inputs.append(InputFile(url, name))
            continue
        folder = Path(local_path(url))
        content = look_into(folder)
        kind = _folder_kind(url, content, rows_as)
        prefix = os.path.relpath(os.path.realpath(folder), root) + "/"
        prefix = "" if prefix == "./" else prefix
        files = [] if kind in ("tars", "media") else _files_in(folder, content, kind, prefix)
        has_splits = len({file.split for file in files}) > 1
        if kind == "tars" or has_splits or (kind == "media" and content.splits):
            held = "tars of samples" if kind == "tars" else "data sets of splits"
            raise ConfigError(f"{url}: holds {held}; convert it alone")
        if kind == "media":
            inputs.append(MediaFolder(folder, name, content, prefix))
        inputs += [replace(file, name=f"{name}/{file.name}") for file in files]
    return inputs


def _is_local_folder(url: str) -> bool:
    return url != STDIN and not is_remote(url) and Path(local_path(url)).is_dir()


def _require_kind(rows_as: RowKind | None, kind: RowKind, url: str) -> None:
    """Refuse `rows_as` where the content is clearly something else.

    Raises:
        ConfigError: It is.
    """
    if rows_as not in (None, kind):
        raise ConfigError(f"{url}: is {NAMES_OF_KINDS[kind]}, not rows_as={rows_as!r}")


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
    kind = _folder_kind(url, content, options.rows_as)
    if kind == "tars":
        return SampleSource.open(str(folder), name, options.limit)
    if kind == "media":
        return opener.open_media(folder, content)
    return opener.open(_files_in(folder, content, kind, ""))


def _folder_kind(url: str, content: FolderContent, rows_as: RowKind | None) -> str:
    """Return what the rows of a folder are.

    Raises:
        ConfigError: It holds nothing, may be read in two ways, or holds no such rows as `rows_as`.
    """
    if rows_as is None:
        return content.kind(url)
    if rows_as in ("tars", "media", "transcripts"):
        has = {
            "tars": content.has_tars,
            "media": content.num_media,
            "transcripts": content.transcripts,
        }[rows_as]
        kind: str = rows_as
    else:
        has = content.tables
        kind = "metadata" if content.metadata and content.num_media else "tables"
    if not has:
        raise ConfigError(
            f"{url}: holds no {NAMES_OF_KINDS[rows_as]}; leave out rows_as={rows_as!r}"
        )
    return kind


def _files_in(folder: Path, content: FolderContent, kind: str, prefix: str) -> list[InputFile]:
    """Return the files of rows of a folder.

    Args:
        folder: Where they lie.
        content: Of the folder.
        kind: What the rows are.
        prefix: Of the folder in that of all media: empty, or ending with a slash.
    """
    paths = {"metadata": content.metadata, "transcripts": content.transcripts}.get(
        kind, content.tables
    )
    files = [
        InputFile(
            str(folder / path),
            path,
            folder=prefix + path[: path.rfind("/") + 1] if kind == "metadata" else "",
        )
        for path in paths
    ]
    return with_splits(files, paths)


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
                rows = with_media_prefix(iter_media(each.folder, content, None), each.prefix)
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
            _require_kind(self._options.rows_as, "parquet", file.url)
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
            _require_kind(self._options.rows_as, "parquet", file.url)
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
        rows_as = self._options.rows_as
        head = read_head(str(path), HEAD_BYTES)
        if head.startswith(PARQUET_MAGIC):
            _require_kind(rows_as, "parquet", file.url)
            return "parquet", ""
        if is_arrow(head):
            _require_kind(rows_as, "arrow", file.url)
            return "arrow", ""
        if is_tar(head):
            raise ConfigError(
                f"{file.url}: this is a tar among other files, or a compressed one; name tars "
                "alone, and unpack them with `mmstream index --repack`"
            )
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
