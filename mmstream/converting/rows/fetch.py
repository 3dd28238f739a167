"""Names of rows -> files: patterns, folders of URLs, standard input, downloads.

what the caller named -> FETCH -> detect
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mmstream.dataset.open import expand_braces
from mmstream.errors import ConfigError, StorageError, escaped
from mmstream.storage import is_remote, open_file, open_store, split_url
from mmstream.storage.urls import require_no_secret

__all__ = [
    "SPLIT_WORDS",
    "STDIN",
    "InputFile",
    "download",
    "expand",
    "local_path",
    "read_head",
    "short_names",
    "split_of",
    "with_splits",
]

STDIN = "-"
"""The name of standard input."""

_BLOCK = 16 << 20
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
}
"""Words in names of files and folders that name a split, as Hugging Face's datasets read them."""

SPLIT_ORDER = ("train", "validation", "test")


@dataclass(frozen=True)
class InputFile:
    """A file that the caller named."""

    url: str
    """Local path, URL, or ``-``."""
    name: str
    """How rejects name it: the shortest end of its path that no other file has."""
    split: str | None = None
    folder: str = ""
    """For metadata of a folder: where the file lies in it, empty or with a slash at the end."""
    copy: Path | None = None
    """A local copy of standard input, which can be read once only."""


def local_path(name: str) -> str:
    """Return a local path without ``file://``, and with the home folder for ``~``."""
    path = name.removeprefix("file://")
    return os.path.expanduser(path) if path.startswith("~") else path  # noqa: PTH111


def expand(names: Sequence[str]) -> list[str]:
    """Return the files of names, patterns and braces, in the order of the caller.

    The files of one pattern are sorted by code points. A name that exists stands for itself,
    whatever characters it has.

    Raises:
        FileNotFoundError: A pattern fits no file.
        ConfigError: A name comes twice, or a URL's pattern is not in its last part.
    """
    urls: list[str] = []
    for name in names:
        require_no_secret(name)
        if name == STDIN or (not is_remote(name) and Path(local_path(name)).exists()):
            urls.append(name)
            continue
        for pattern in expand_braces(name):
            urls += _matches(pattern)
    doubled = next((url for url, count in Counter(urls).items() if count > 1), None)
    if doubled is not None:
        raise ConfigError(f"{escaped(doubled)}: is named twice, so its rows would come twice")
    return urls


def _matches(pattern: str) -> list[str]:
    if not re.search(r"[*?\[]", pattern):
        return [pattern]
    if is_remote(pattern):
        folder, last = split_url(pattern)
        if re.search(r"[*?\[]", folder):
            raise ConfigError(f"{pattern}: in a URL, only the last part may be a pattern")
        store = open_store(folder)
        urls = [store.url_of(name) for name in store.list() if fnmatch.fnmatchcase(name, last)]
    else:
        paths = glob.glob(local_path(pattern), recursive=True)  # noqa: PTH207 - takes any path
        urls = [path for path in paths if Path(path).is_file()]
    if not urls:
        raise FileNotFoundError(f"{pattern}: no file fits this pattern")
    return sorted(urls)


def short_names(urls: Sequence[str]) -> list[str]:
    """Return the shortest ends of paths that are different for all of them.

    Examples:
        >>> short_names(["data/a.jsonl", "data/b.jsonl"]), short_names(["x/a.csv", "y/a.csv"])
        (['a.jsonl', 'b.jsonl'], ['x/a.csv', 'y/a.csv'])
    """
    parts = [url.rstrip("/").split("/") for url in urls]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(words[-length:]) for words in parts]
        if len(set(names)) == len(names):
            return names
    return list(urls)


def split_of(path: str) -> str | None:
    """Return the split that a path names, by its last word that is one: ``data/train-0.csv``."""
    words = re.split(r"[^A-Za-z]+", path.lower())
    return next((SPLIT_WORDS[word] for word in reversed(words) if word in SPLIT_WORDS), None)


def with_splits(files: Sequence[InputFile], paths: Sequence[str]) -> list[InputFile]:
    """Return files of a folder with their splits, sorted by them; as they are if they have none.

    Args:
        files: In the order of the folder.
        paths: Of each file in the folder.

    Raises:
        ConfigError: Some files are of a split and others are not.
    """
    splits = [split_of(path) for path in paths]
    if len(set(splits)) < 2:
        return list(files)
    if None in splits:
        strange = next(f.url for f, split in zip(files, splits, strict=True) if split is None)
        named = next(f.url for f, split in zip(files, splits, strict=True) if split)
        raise ConfigError(
            f"{escaped(named)} is of a split, and {escaped(strange)} is of none; name the files "
            "that belong together"
        )
    listed = [replace(file, split=split) for file, split in zip(files, splits, strict=True)]
    return sorted(listed, key=lambda file: SPLIT_ORDER.index(str(file.split)))


def read_head(url: str, num_bytes: int) -> bytes:
    """Return the first bytes of a file.

    Raises:
        FileNotFoundError: There is no such file.
        StorageError: It could not be read, or it is a folder, a FIFO or a device.
    """
    if is_remote(url):
        folder, name = split_url(url)
        store = open_store(folder)
        size = store.size(name)
        try:
            return store.read_range(name, 0, min(num_bytes, size))
        except StorageError:
            if size > _BLOCK:
                raise
        # Some servers know no ranges. They send whole files, as `download` asks for them.
        return store.read_range(name, 0, size)[:num_bytes]
    try:
        with os.fdopen(open_file(local_path(url)), "rb") as file:
            return file.read(num_bytes)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{url}: no such file of rows; pass JSONL, JSON, csv, tsv, Parquet, tars or a folder"
        ) from None


def download(url: str, target: Path) -> Path:
    """Write a remote file, or standard input, to `target`. Return it.

    Raises:
        StorageError: It could not be read, or it was replaced meanwhile.
    """
    with target.open("wb") as file:
        if url == STDIN:
            shutil.copyfileobj(sys.stdin.buffer, file, _BLOCK)
            return target
        folder, name = split_url(url)
        store = open_store(folder)
        known = {name: store.stat(name)}
        size = known[name].size
        for start in range(0, size, _BLOCK):
            stop = min(size, start + _BLOCK)
            data = store.read_ranges([(name, start, stop)], known)[0]
            if isinstance(data, OSError):  # be it that the file is another one now
                raise data
            file.write(data)
    return target
