"""Convert's first step: a file of rows, as byte ranges that any process can read alone.

Whatever the rows come as (JSONL, gzipped, a JSON array, behind a URL), from here on they are a
plain local JSONL file and the offsets of its lines: 8 bytes a row in memory. What is not plain and
local is written once to a temporary folder (``TMPDIR``), which takes the size of the plain rows.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from mmstream.errors import ConfigError, MMStreamError
from mmstream.storage import is_remote, open_store, split_url

__all__ = ["MAX_ROW_BYTES", "RowFile", "RowRange", "open_rows", "read_rows"]

MAX_ROW_BYTES = 64 << 20
"""A longer line is a reject: no text row is, and a file without line ends is no JSONL."""

BOM = b"\xef\xbb\xbf"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
_BLOCK = 4 << 20


@dataclass(frozen=True)
class RowRange:
    """Rows of one shard: all that a process needs to read them."""

    path: str
    stamp: tuple[int, int]
    """Size and mtime of the file when it was scanned; another one is refused."""
    numbers: npt.NDArray[np.int64]
    """int64 [n] row numbers, 1-based: the line that an editor shows."""
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class RowFile:
    """A scanned file of rows."""

    path: str
    """A plain local JSONL: the caller's file, or a temporary copy of it."""
    name: str
    """Base name of the caller's file."""
    sha256: str
    """Of the plain rows."""
    stamp: tuple[int, int]
    offsets: npt.NDArray[np.int64]
    """int64 [num_rows + 1] byte offsets of the rows and of the end."""

    @property
    def num_rows(self) -> int:
        """Lines of the file; a line end behind the last one starts no further row."""
        return len(self.offsets) - 1

    def select(self, rows: npt.NDArray[np.int64]) -> RowRange:
        """Return the rows of these 0-based numbers, in this order."""
        return RowRange(self.path, self.stamp, rows + 1, self.offsets[rows], self.offsets[rows + 1])


def read_rows(rows: RowRange) -> Iterator[tuple[int, bytes | None]]:
    """Yield (1-based row number, the line without its end); None for a line over the limit.

    Raises:
        MMStreamError: the file changed since it was scanned.
    """
    if _stamp(Path(rows.path)) != rows.stamp:
        raise MMStreamError(
            f"{rows.path}: changed during the conversion; convert again with overwrite=True"
        )
    with Path(rows.path).open("rb") as file:
        ranges = (rows.numbers.tolist(), rows.starts.tolist(), rows.stops.tolist())
        for number, start, stop in zip(*ranges, strict=True):
            if stop - start > MAX_ROW_BYTES:
                yield number, None
                continue
            file.seek(start)
            yield number, file.read(stop - start).strip()


@contextmanager
def open_rows(rows: str) -> Iterator[RowFile]:
    """Scan a file of rows; its temporary copy, where one is needed, lives as long as the block.

    A file whose first character is ``[`` is a JSON array when it parses as one. Such a file is
    held in memory whole while it is unrolled.

    Raises:
        FileNotFoundError: no such file.
        ConfigError: no rows in it, a damaged gzip, UTF-16, or a JSON array that does not parse.
        StorageError: a remote file could not be read.
    """
    name = split_url(rows.rstrip("/"))[1]
    with tempfile.TemporaryDirectory(prefix="mmstream-rows-") as folder:
        path = Path(rows.removeprefix("file://"))
        if is_remote(rows):
            path = _download(rows, Path(folder, "remote"))
        elif not path.is_file():
            raise FileNotFoundError(f"{rows}: no such file of rows")
        if _head(path)[:2] == b"\x1f\x8b":
            path = _unzip(path, Path(folder, "plain"), rows)
        if _head(path).startswith(UTF16):
            raise ConfigError(f"{rows}: is UTF-16, as Windows writes it; save it as UTF-8")
        if _head(path).removeprefix(BOM).lstrip()[:1] == b"[":
            path = _unroll(path, Path(folder, "lines"), rows)
        stamp = _stamp(path)
        offsets, sha256 = _scan(path)
        if len(offsets) < 2:
            raise ConfigError(f"{rows}: holds no rows")
        yield RowFile(str(path.absolute()), name, sha256, stamp, offsets)


def _scan(path: Path) -> tuple[npt.NDArray[np.int64], str]:
    """Return the offsets of all lines and the file's checksum, in one pass."""
    digest, size, ends = hashlib.sha256(), 0, []
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + (size + 1))
            size += len(block)
    first = len(BOM) if _head(path).startswith(BOM) else 0
    if size == first:
        return np.zeros(1, np.int64), digest.hexdigest()
    starts = np.concatenate([np.array([first]), *ends])
    last = [] if starts[-1] == size else [size]
    return np.concatenate([starts, np.array(last, np.int64)]), digest.hexdigest()


def _download(url: str, target: Path) -> Path:
    folder, name = split_url(url)
    store = open_store(folder)
    size = store.size(name)
    with target.open("wb") as file:
        for start in range(0, size, _BLOCK * 4):
            file.write(store.read_range(name, start, min(size, start + _BLOCK * 4)))
    return target


def _unzip(path: Path, target: Path, rows: str) -> Path:
    try:
        with gzip.open(path) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, _BLOCK)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{rows}: damaged gzip: {error}") from None
    return target


def _unroll(path: Path, target: Path, rows: str) -> Path:
    """Write a JSON array as one line a row; a JSONL file that begins with a list stays as it is."""
    data = path.read_bytes().removeprefix(BOM)
    try:
        items = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        if re.search(r"\.(jsonl|ndjson)\b", rows, re.IGNORECASE):
            return path
        position = re.search(r"byte (\d+)", str(error))
        line = data.count(b"\n", 0, int(position[1])) + 1 if position else data.count(b"\n") + 1
        raise ConfigError(f"{rows}: not a JSON array of rows: {error}, line {line}") from None
    with target.open("wb") as file:
        for item in items:
            # Inside a JSON string a line end is an error, and outside it is white space.
            file.write(bytes(item).replace(b"\n", b" ") + b"\n")
    return target


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(64)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
