"""A folder or prefix: files of rows, tars, pictures with metadata, or pictures alone.

    FOLDERS -> files of rows, a data set of tars, or one row per media file

If all media files lie in folders, the first folder of each path is its class: the file gets
``label`` and ``label_name``. The numbers of the classes follow the names in alphabetical order. If
all media files lie in folders such as train and val, these are splits, and the rule holds for each
of them. A picture with a text file of the same name beside it gets its text as ``text``. Sounds and
videos likewise.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mmstream.converting.draft import RowError
from mmstream.converting.formats.fields import kind_by_name
from mmstream.converting.formats.spans import names_tars
from mmstream.converting.rows.detect import NAMES_OF_KINDS, RowKind
from mmstream.converting.rows.fetch import SPLIT_WORDS
from mmstream.converting.rows.records import NumberedRow
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME
from mmstream.errors import ConfigError, escaped
from mmstream.storage import NotAFileError, Store, open_store
from mmstream.storage.store import TooLargeError

logger = logging.getLogger(__name__)

MAX_TEXT_BYTES = 1 << 20
"""Longest text file beside a picture."""

TEXTS_AT_ONCE = 64
"""Text files that are fetched together from an object store."""

_MAX_INFO_BYTES = 16 << 20
"""A larger ``meta/info.json`` is none of LeRobot."""

_ROW_EXTENSIONS = frozenset(
    {"jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow", "feather"}
)
_TAR_ENDINGS = (".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz")
_COMPRESSIONS = frozenset({"gz", "zst", "bz2", "xz"})
_NOT_ROWS = frozenset(
    {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "package.json"}
    | {"sizes.json"}  # counts of samples beside tars for webdataset
)


@dataclass
class FolderContent:
    """What a folder holds. Paths are relative to it, sorted folder by folder."""

    tables: list[str] = field(default_factory=list)
    """Files of rows."""
    metadata: list[str] = field(default_factory=list)
    """Those of them that describe the pictures beside them, as Hugging Face's ImageFolder."""
    transcripts: list[str] = field(default_factory=list)
    """LibriSpeech's, which name the sounds beside them."""
    tars: list[str] = field(default_factory=list)
    """Plain tars in the folder itself."""
    packed_tars: list[str] = field(default_factory=list)
    """Compressed tars in the folder itself."""
    has_manifest: bool = False
    """The folder is a data set of mmstream, or an unfinished one."""
    tarred: list[str] = field(default_factory=list)
    """Files of rows in the folder itself whose media are members of the tars beside them."""
    num_media: int = 0
    splits: list[str] = field(default_factory=list)
    """The folders train, val, test, if all media lie in these."""
    classes: dict[str | None, dict[str, int]] = field(default_factory=dict)
    """{split: {folder: number of its class}}. A split whose folders are not classes is absent."""

    def kind(self, folder: str, rows_as: RowKind | None) -> str:
        """Return what the rows of the folder are: tars, tarred, transcripts, metadata, ...

        Args:
            folder: Its URL, for messages.
            rows_as: What the caller says. None: its content says it.

        Raises:
            ConfigError: It holds nothing, may be read in two ways, or holds no such rows as
                `rows_as`.
        """
        tables = "metadata" if self.metadata and self.num_media else "tables"
        if rows_as is not None:
            of_kind = {
                "tars": self.tars or self.packed_tars or self.has_manifest,
                "media": self.num_media,
                "transcripts": self.transcripts,
            }
            if not of_kind.get(rows_as, self.tables):
                raise ConfigError(
                    f"{folder}: holds no {NAMES_OF_KINDS[rows_as]}; leave out rows_as={rows_as!r}"
                )
            return rows_as if rows_as in of_kind else tables
        has_tars = self.tars or self.has_manifest
        has_others = self.tables or self.transcripts or self.num_media
        if (has_tars and not self.tarred) or (self.packed_tars and not has_others):
            return "tars"
        if self.packed_tars:
            logger.warning(
                "%s: compressed tars are left out (%d, such as %s), since other files of rows or "
                "media lie beside them. Read the tars with rows_as='tars'",
                folder,
                len(self.packed_tars),
                escaped(self.packed_tars[0]),
            )
        if has_tars:
            return "tarred"
        if self.transcripts:
            return "transcripts"
        if tables == "tables" and self.tables and self.num_media:
            raise ConfigError(
                f"{folder}: holds files of rows, such as {escaped(self.tables[0])}, and "
                f"{self.num_media:,} media files. Name the file of rows, or make a row of each "
                "media file with rows_as='media'"
            )
        if not self.tables and not self.num_media:
            raise ConfigError(f"{folder}: holds no files of rows, no tars and no media files")
        return tables if self.tables else "media"

    def tars_to_read(self, folder: str) -> list[str]:
        """Return the tars, sorted. Of tars that differ by their compression alone, only one.

        It is the plain one, if there is one. Plain tars are never left out. A warning counts those
        that are.
        """
        stems = {_stem_of(name) for name in self.tars}
        names = list(self.tars)
        for name in self.packed_tars:
            if _stem_of(name) not in stems:
                names.append(name)
            stems.add(_stem_of(name))
        if left_out := sorted({*self.tars, *self.packed_tars}.difference(names)):
            logger.warning(
                "%s: tars of the same name but another compression are left out (%d, such as %s)",
                folder,
                len(left_out),
                escaped(left_out[0]),
            )
        return sorted(names)


def look_into(url: str, rows_as: RowKind | None = None) -> FolderContent:
    """Return what a folder or prefix holds, with all folders in it. Hidden files are left out.

    Args:
        url: Of the folder.
        rows_as: What the caller says that its rows are. None: data sets of LeRobot are refused.

    Raises:
        StorageError: An object store failed after retries.
        ConfigError: It is a data set of LeRobot, of any version.
    """
    _refuse_lerobot(url, rows_as)
    content = FolderContent()
    folders_of: dict[str, set[str]] = defaultdict(set)
    """{first folder: second folders of the paths of media files}. Empty: a file has none."""
    for path, _ in _walk(open_store(url)):
        *folders, name = path.lower().split("/")
        segments = name.split(".")
        extension = (
            segments[-2] if len(segments) > 2 and segments[-1] in _COMPRESSIONS else segments[-1]
        )
        if name.endswith(".trans.txt"):
            content.transcripts.append(path)
        elif not folders and name.endswith(_TAR_ENDINGS):
            (content.tars if segments[-1] == "tar" else content.packed_tars).append(path)
        elif not folders and name in (MANIFEST_NAME, MARKER_NAME):
            content.has_manifest = True
        elif extension in _ROW_EXTENSIONS and name not in _NOT_ROWS:
            content.tables.append(path)
            if not folders and names_tars(name):
                content.tarred.append(path)
            if segments[0] == "metadata":
                content.metadata.append(path)
        elif kind_by_name(path) is not None:
            content.num_media += 1
            first, second = [*path.split("/")[:-1], "", ""][:2]
            folders_of[first].add(second)
    if folders_of and all(top.lower() in SPLIT_WORDS for top in folders_of):
        content.splits = sorted(folders_of)
        content.classes = _classes_of({split: folders_of[split] for split in folders_of}, url)
    else:
        content.classes = _classes_of({None: set(folders_of)}, url)
    return content


def _refuse_lerobot(url: str, rows_as: RowKind | None) -> None:
    """Refuse a data set of LeRobot, unless the caller says what its rows are.

    Its tables have a row for each frame, and its videos hold many episodes. Read as a folder of
    media, it would silently become something else.
    """
    if rows_as is not None:
        return
    try:
        info = open_store(url).read("meta/info.json", max_bytes=_MAX_INFO_BYTES)
    except (FileNotFoundError, NotADirectoryError, NotAFileError, TooLargeError):
        return
    if b'"codebase_version"' in info:
        raise ConfigError(
            f"{url}: a data set of LeRobot is not read as it is; make rows of its episodes as "
            "docs/row-formats.md, under LeRobot, shows"
        )


def _stem_of(name: str) -> str:
    """Return the name of a tar without its ending: ``0`` for ``0.tar.gz``."""
    ending = next(ending for ending in _TAR_ENDINGS if name.lower().endswith(ending))
    return name[: -len(ending)]


def _classes_of(
    folders: Mapping[str | None, set[str]], url: str
) -> dict[str | None, dict[str, int]]:
    """Return the classes of each split. Their numbers are the same in all splits.

    Args:
        folders: {split: folders of its media files}. Empty: a file lies beside the folders.
        url: Of the folder, for the log.
    """
    labelled = {split: names for split, names in folders.items() if "" not in names}
    for split in folders.keys() - labelled.keys():
        if len(folders[split]) > 1:
            names = ", ".join(escaped(name) for name in sorted(folders[split] - {""})[:3])
            logger.warning(
                "%s: media files lie beside the folders (%s), so these are not classes",
                f"{url}/{split}" if split else url,
                names,
            )
    numbers = {name: i for i, name in enumerate(sorted(set().union(*labelled.values())))}
    return dict.fromkeys(labelled, numbers)


class _File(NamedTuple):
    path: str
    text_bytes: int | None
    """Size of the text file of the same name. None: there is none. 0: it is not a file."""


def _walk(store: Store, prefix: str = "", above: frozenset[str] = frozenset()) -> Iterator[_File]:
    """Yield all files, sorted folder by folder. The names of a folder are in memory.

    A FIFO, a device or a link that leads nowhere counts as a file: whoever reads it, refuses it.

    Args:
        store: The folder.
        prefix: Its path in the folder of all files: empty, or ending with a slash.
        above: Real paths of the local folders that hold it.

    Raises:
        ConfigError: A link leads back to a folder that holds it.
    """
    stats, folder_names = store.list(), store.folders()
    folders = set(folder_names)
    names = {*stats, *folders}
    local_folder = store.local_path("")
    if local_folder is not None:
        real = os.path.realpath(local_folder)
        if real in above:
            raise ConfigError(
                f"{escaped(local_folder)}: a link leads back to a folder that holds it, so the "
                "rows would never end; remove the link"
            )
        above |= {real}
        paths = Path(local_folder).iterdir()
        names.update(path.name for path in paths if not path.name.startswith("."))
    for name in sorted(names):
        if name in stats or name not in folders:  # an object store has files called as a folder
            text_name = _text_name(name)
            if text_name in stats:
                num_bytes: int | None = stats[text_name].size
            else:
                num_bytes = 0 if text_name in names - folders else None
            yield _File(f"{prefix}{name}", num_bytes)
        if name in folders:
            yield from _walk(open_store(store.url_of(name)), f"{prefix}{name}/", above)


def _text_name(path: str) -> str:
    """Return the name of the text file beside a media file: ``a.txt`` for ``a.jpg``."""
    return f"{path.rpartition('.')[0]}.txt"


def iter_media(
    url: str,
    content: FolderContent,
    split: str | None,
    encoding: str | None = None,
    root: str = "",
) -> Iterator[NumberedRow]:
    """Yield (number, row) of each media file of a folder, or of one of its splits.

    If some of the files have a text beside them and others have none, the log says so.

    Args:
        url: Of the folder.
        content: Of the folder.
        split: Its folder. None: all files.
        encoding: Of the texts. None: UTF-8.
        root: What stands before the paths in rows: empty, or a folder and a slash.

    Raises:
        StorageError: An object store failed after retries.
    """
    store = open_store(url)
    start, prefix = store, ""
    if split is not None:
        start, prefix = open_store(store.url_of(split)), f"{split}/"
    classes = content.classes.get(split, {})
    files = (file for file in _walk(start, prefix) if kind_by_name(file.path) is not None)
    number, num_of = 0, Counter[type]()
    with ThreadPoolExecutor(TEXTS_AT_ONCE) if store.access.concurrent else nullcontext() as pool:
        read = pool.map if pool is not None else map
        while batch := list(islice(files, TEXTS_AT_ONCE)):
            texts = read(lambda file: _text_of(store, file, encoding), batch)
            for file, text in zip(batch, texts, strict=True):
                number += 1
                num_of[type(text)] += 1
                if not isinstance(text, RowError):
                    row = _media_row(file.path, classes, prefix, text)
                    yield number, row | {str(kind_by_name(file.path)): f"{root}{file.path}"}
                else:
                    yield number, text
    if num_of[str] and num_of[type(None)]:
        logger.warning(
            "%s: %d of %d media files have no text file beside them; they become samples "
            "without a text",
            *(start.url, num_of[type(None)], number),
        )


def _media_row(path: str, classes: dict[str, int], prefix: str, text: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {str(kind_by_name(path)): path}
    class_name = path.removeprefix(prefix).split("/")[0]
    row |= {"label": classes[class_name], "label_name": class_name} if classes else {}
    return row if text is None else {**row, "text": text}


def _text_of(store: Store, file: _File, encoding: str | None) -> str | RowError | None:
    """Return the text beside a media file, or why it cannot be read. None: there is none."""
    if file.text_bytes is None:
        return None
    path = _text_name(file.path)
    name = path.rpartition("/")[2]
    if file.text_bytes > MAX_TEXT_BYTES:
        return RowError(f"{name}: a text of more than {MAX_TEXT_BYTES} bytes")
    try:
        return store.read(path).decode(encoding or "utf-8-sig").removeprefix("\ufeff").strip()
    except UnicodeDecodeError:
        return RowError(f"{name}: not {encoding or 'UTF-8'}; name its encoding with encoding=NAME")
    except (FileNotFoundError, NotAFileError):
        return RowError(f"{name}: no file, or a link that leads nowhere")


def with_folder(rows: Iterable[NumberedRow], prefix: str) -> Iterator[NumberedRow]:
    """Yield the rows of a file of metadata, with paths relative to the folder of all rows.

    Args:
        rows: Rows with ``file_name``, or several keys that end so, relative to their own folder.
        prefix: This folder, relative to that of all rows: empty, or ending with a slash.
    """
    for number, row in rows:
        if prefix and isinstance(row, dict):
            names = (key for key in row if key.endswith(("file_name", "file_names")))
            row = row | {key: _joined(row[key], prefix) for key in names}
        yield number, row


def _joined(value: Any, prefix: str) -> Any:
    if isinstance(value, list):
        return [_joined(item, prefix) for item in value]
    return prefix + value if isinstance(value, str) else value
