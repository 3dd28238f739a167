"""A local folder: files of rows, tars, pictures with metadata, or pictures alone.

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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mmstream.converting.draft import RowError
from mmstream.converting.formats.tarred import names_tars
from mmstream.converting.rows.fetch import SPLIT_WORDS
from mmstream.converting.rows.spool import NumberedRow
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME
from mmstream.decoding.fields import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from mmstream.errors import ConfigError, escaped

__all__ = [
    "FolderContent",
    "MediaFolder",
    "iter_media",
    "look_into",
    "with_folder",
    "with_media_prefix",
]

logger = logging.getLogger(__name__)

MAX_TEXT_BYTES = 1 << 20
"""Longest text file beside a picture."""

_ROW_EXTENSIONS = frozenset(
    {"jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow", "feather"}
)
_COMPRESSIONS = frozenset({"gz", "zst", "bz2", "xz"})
_NOT_ROWS = frozenset(
    {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "package.json"}
)
_MORE_IMAGES = frozenset({"tif", "tiff", "heic"})


@dataclass
class FolderContent:
    """What a folder holds. Paths are relative to it, sorted folder by folder."""

    tables: list[str] = field(default_factory=list)
    """Files of rows."""
    metadata: list[str] = field(default_factory=list)
    """Those of them that describe the pictures beside them, as Hugging Face's ImageFolder."""
    transcripts: list[str] = field(default_factory=list)
    """LibriSpeech's, which name the sounds beside them."""
    has_tars: bool = False
    """There are tars, or a manifest, in the folder itself."""
    tarred: list[str] = field(default_factory=list)
    """Files of rows in the folder itself whose media are members of the tars beside them."""
    num_media: int = 0
    splits: list[str] = field(default_factory=list)
    """The folders train, val, test, if all media lie in these."""
    classes: dict[str | None, dict[str, int]] = field(default_factory=dict)
    """{split: {folder: number of its class}}. A split whose folders are no classes is absent."""

    def kind(
        self, folder: str
    ) -> Literal["tars", "tarred", "transcripts", "metadata", "tables", "media"]:
        """Return what the rows of the folder are.

        Raises:
            ConfigError: It holds nothing, or may be read in two ways.
        """
        if self.has_tars:
            return "tarred" if self.tarred else "tars"
        if self.transcripts:
            return "transcripts"
        if self.metadata and self.num_media:
            return "metadata"
        if self.tables and self.num_media:
            raise ConfigError(
                f"{folder}: holds files of rows, such as {escaped(self.tables[0])}, and "
                f"{self.num_media:,} media files. Name the file of rows, or make a row of each "
                "media file with rows_as='media'"
            )
        if not self.tables and not self.num_media:
            raise ConfigError(f"{folder}: holds no files of rows, no tars and no media files")
        return "tables" if self.tables else "media"


@dataclass(frozen=True)
class MediaFolder:
    """A folder of media among several files and folders."""

    folder: Path
    name: str
    """How rejects name it."""
    content: FolderContent
    prefix: str
    """Where it lies in the folder of all media: empty, or ending with a slash."""


def look_into(folder: Path) -> FolderContent:
    """Return what a folder holds. Hidden files are left out."""
    content = FolderContent()
    folders_of: dict[str, set[str]] = defaultdict(set)
    """{first folder: second folders of the paths of media files}. Empty: a file has none."""
    for path in _walk(folder, ""):
        parts = path.split("/")
        name = parts[-1].lower()
        words = name.split(".")
        extension = words[-2] if len(words) > 2 and words[-1] in _COMPRESSIONS else words[-1]
        if name.endswith(".trans.txt"):
            content.transcripts.append(path)
        elif len(parts) == 1 and (words[-1] == "tar" or name in (MANIFEST_NAME, MARKER_NAME)):
            content.has_tars = True
        elif extension in _ROW_EXTENSIONS and name not in _NOT_ROWS:
            content.tables.append(path)
            if len(parts) == 1 and names_tars(name):
                content.tarred.append(path)
            if words[0] == "metadata":
                content.metadata.append(path)
        elif _media_kind(path) is not None:
            content.num_media += 1
            folders = [*parts[:-1], "", ""]
            folders_of[folders[0]].add(folders[1])
    if folders_of and all(top.lower() in SPLIT_WORDS for top in folders_of):
        content.splits = sorted(folders_of)
        content.classes = _classes_of({split: folders_of[split] for split in folders_of}, folder)
    else:
        content.classes = _classes_of({None: set(folders_of)}, folder)
    return content


def _classes_of(
    folders: Mapping[str | None, set[str]], folder: Path
) -> dict[str | None, dict[str, int]]:
    """Return the classes of each split. Their numbers are the same in all splits.

    Args:
        folders: {split: folders of its media files}. Empty: a file lies beside the folders.
        folder: For the log.
    """
    labelled = {split: names for split, names in folders.items() if "" not in names}
    for split in folders.keys() - labelled.keys():
        if len(folders[split]) > 1:
            names = ", ".join(escaped(name) for name in sorted(folders[split] - {""})[:3])
            logger.warning(
                "%s: media files lie beside the folders (%s), so these are no classes",
                folder / (split or ""),
                names,
            )
    numbers = {name: i for i, name in enumerate(sorted(set().union(*labelled.values())))}
    return dict.fromkeys(labelled, numbers)


def _walk(folder: Path, prefix: str) -> Iterator[str]:
    """Yield the paths of all files, sorted folder by folder. A folder's names are in memory."""
    with os.scandir(folder) as entries:
        listed = sorted((entry.name, entry.is_dir()) for entry in entries)
    for name, is_folder in listed:
        if name.startswith("."):
            continue
        if is_folder:
            yield from _walk(folder / name, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}"


def _media_kind(path: str) -> str | None:
    extension = path.rpartition(".")[2].lower()
    if extension in IMAGE_EXTENSIONS or extension in _MORE_IMAGES:
        return "image"
    if extension in VIDEO_EXTENSIONS:
        return "video"
    return "audio" if extension in AUDIO_EXTENSIONS else None


def iter_media(folder: Path, content: FolderContent, split: str | None) -> Iterator[NumberedRow]:
    """Yield (number, row) of each media file of a folder, or of one of its splits.

    If some of the files have a text beside them and others have none, the log says so.
    """
    classes = content.classes.get(split, {})
    number = num_texts = num_errors = 0
    start, prefix = (folder / split, f"{split}/") if split is not None else (folder, "")
    for path in _walk(start, prefix):
        kind = _media_kind(path)
        if kind is None:
            continue
        number += 1
        row = _media_row(folder, path, kind, classes, prefix)
        num_texts += isinstance(row, dict) and "text" in row
        num_errors += isinstance(row, RowError)
        yield number, row
    num_missing = number - num_texts - num_errors
    if num_texts and num_missing:
        logger.warning(
            "%s: %d of %d media files have no text file beside them; they become samples "
            "without a text",
            start,
            num_missing,
            number,
        )


def _media_row(
    folder: Path, path: str, kind: str, classes: dict[str, int], prefix: str
) -> dict[str, Any] | RowError:
    row: dict[str, Any] = {kind: path}
    class_name = path.removeprefix(prefix).split("/")[0]
    if classes:
        row |= {"label": classes[class_name], "label_name": class_name}
    text = (folder / path).with_suffix(".txt")
    try:
        if text.stat().st_size > MAX_TEXT_BYTES:
            return RowError(f"{text.name}: a text of more than {MAX_TEXT_BYTES} bytes")
        row["text"] = text.read_text("utf-8-sig").strip()
    except FileNotFoundError:
        pass
    except UnicodeDecodeError:
        return RowError(f"{text.name}: not UTF-8")
    return row


def with_media_prefix(rows: Iterable[NumberedRow], prefix: str) -> Iterator[NumberedRow]:
    """Yield rows of media files with a folder before their paths."""
    for number, row in rows:
        if isinstance(row, dict):
            kinds = row.keys() & {"image", "video", "audio"}
            row = row | {kind: prefix + row[kind] for kind in kinds}
        yield number, row


def with_folder(rows: Iterable[NumberedRow], prefix: str) -> Iterator[NumberedRow]:
    """Yield the rows of a file of metadata, with paths relative to the folder of all rows.

    Args:
        rows: Rows with ``file_name``, or several keys that end so, relative to their own folder.
        prefix: This folder, relative to that of all rows: empty, or ending with a slash.
    """
    for number, row in rows:
        if prefix and isinstance(row, dict):
            row = {key: _joined(key, value, prefix) for key, value in row.items()}
        yield number, row


def _joined(key: str, value: Any, prefix: str) -> Any:
    if not key.endswith(("file_name", "file_names")):
        return value
    if isinstance(value, list):
        return [_joined(key, item, prefix) for item in value]
    return prefix + value if isinstance(value, str) else value
