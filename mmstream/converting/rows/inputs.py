"""What the caller named as rows: files, patterns, folders, or the rows themselves.

what the caller named -> INPUTS -> files of rows, folders of media -> plain files
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from mmstream.converting.rows.detect import NAMES_OF_KINDS, RowKind
from mmstream.converting.rows.fetch import (
    STDIN,
    InputFile,
    expand,
    local_path,
    short_names,
    with_splits,
)
from mmstream.converting.rows.folders import FolderContent, MediaFolder, look_into
from mmstream.converting.rows.lerobot import is_lerobot
from mmstream.dataset.manifest import MANIFEST_NAME
from mmstream.errors import ConfigError, escaped
from mmstream.storage import is_remote, open_store, split_url

__all__ = [
    "Rows",
    "file_names",
    "files_in",
    "folder_kind",
    "input_urls",
    "inputs_of",
    "is_local_folder",
    "media_folder",
]

logger = logging.getLogger(__name__)

Rows: TypeAlias = str | os.PathLike[str] | Iterable[Any]
"""What `mm.convert` takes: a path or URL, several of them, or the rows themselves."""


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
        if rows_as is None and is_lerobot(folder):
            raise ConfigError(f"{url}: holds a data set of LeRobot; convert it alone")
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
