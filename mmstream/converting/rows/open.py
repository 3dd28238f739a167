"""Step 1 of a conversion: whatever holds the rows -> a `RowSource`.

ROWS -> plan -> formats -> media -> shard

What the caller named as rows: files, patterns, folders, or the rows themselves.

what the caller named -> INPUTS -> files of rows, folders of media -> plain files
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
from typing import Any, TypeAlias

from mmstream.converting.rows.detect import NAMES_OF_KINDS, RowKind, RowOptions
from mmstream.converting.rows.fetch import (
    STDIN,
    InputFile,
    are_readable,
    copy_tars,
    download,
    expand,
    holds_tar,
    short_names,
    with_splits,
)
from mmstream.converting.rows.folders import FolderContent, MediaFolder, look_into
from mmstream.converting.rows.plain_files import PlainFiles
from mmstream.converting.rows.records import RowSource, require_rows
from mmstream.converting.rows.samples import SampleSource
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
    return "stdin" if path == STDIN else split_url(path.rstrip("/"))[1]


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
    content = look_into(url)
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
