"""Rows in lines: JSONL, gzipped JSONL, a JSON array -> the byte range of each row.

    a file of rows -> LINES (a `RowSource`) -> plan -> formats

A file of rows may be JSONL, gzipped JSONL, or a JSON array, local or behind a URL. Anything but
plain local JSONL is copied once to a temporary folder as plain JSONL. The folder (``TMPDIR``) needs
the size of the plain rows.

All processes then read that file by its line offsets. They lie in the temporary folder too, 8 bytes
per row, and are mapped: their number is a stranger's choice, since a kilobyte of gzip may be a
million empty rows.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from mmstream.converting.draft import RowError
from mmstream.converting.rows.source import Row
from mmstream.dataset.picture_hint import picture_hint
from mmstream.decoding.fields import is_too_deep
from mmstream.errors import ConfigError, MMStreamError
from mmstream.storage import NotAFileError, is_remote, open_file, open_store, split_url
from mmstream.types import IntArray

__all__ = ["MAX_ROW_BYTES", "LineRange", "LineSource", "open_lines", "parse_row"]

MAX_ROW_BYTES = 64 << 20
"""A longer line is rejected. No real row is as long, but a file without line ends is."""

MAX_ARRAY_BYTES = 4 << 30
MAX_ARRAY_COMMAS = 1 << 27
"""A larger JSON array is refused: it is in memory whole, and each item takes 64 bytes more. The
commas bound the number of items before they are parsed."""

BOM = b"\xef\xbb\xbf"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
_BLOCK = 4 << 20


@dataclass(frozen=True)
class LineRange:
    """The rows of one shard, by their bytes in a plain JSONL file: a `RowRange`."""

    path: str
    file: str
    """Name of the caller's file, for the rejects."""
    stamp: tuple[int, int]
    """Size and mtime of the file when it was scanned. If they change, reading stops."""
    numbers: IntArray
    """int64 [n] row numbers from 1: the line that an editor shows."""
    starts: IntArray
    """int64 [n] byte offsets of the rows."""
    stops: IntArray
    """int64 [n] byte offsets behind the rows."""

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self) -> Iterator[Row]:
        """Yield the rows in order. A line that cannot be parsed has a `RowError` as its value.

        Raises:
            MMStreamError: The file changed since it was scanned.
        """
        for number, line in _read_lines(self):
            yield Row(number - 1, self.file, number, parse_row(line))


@dataclass(frozen=True)
class LineSource:
    """A scanned file of rows: a `RowSource`."""

    path: str
    """A plain local JSONL file: the caller's own, or a temporary copy."""
    name: str
    """Base name of the caller's file."""
    sha256: str
    """Checksum of the plain JSONL file."""
    stamp: tuple[int, int]
    """Size and mtime of the plain JSONL file."""
    offsets: IntArray
    """int64 [num_rows + 1] byte offsets of the rows, and of the end of the last one: a map of a
    temporary file."""

    @property
    def num_rows(self) -> int:
        """Number of rows. A line end at the end of the file does not start another row."""
        return len(self.offsets) - 1

    def select(self, rows: IntArray | range) -> LineRange:
        """Return rows by their numbers from 0, in the given order."""
        index = np.asarray(rows)
        starts, stops = np.array(self.offsets[index]), np.array(self.offsets[index + 1])
        return LineRange(self.path, self.name, self.stamp, index + 1, starts, stops)

    def id_hashes(self) -> npt.NDArray[np.uint64]:
        """Return uint64 [num_rows]: the first 64 bits of the SHA-256 of every row's identity."""
        hashes = np.empty(self.num_rows, dtype="<u8")
        for start in range(0, self.num_rows, 4096):
            numbers = range(start, min(self.num_rows, start + 4096))
            for number, (_, line) in zip(numbers, _read_lines(self.select(numbers)), strict=True):
                digest = hashlib.sha256(_identity(line or b"")).digest()
                hashes[number] = int.from_bytes(digest[:8], "little")
        return hashes


class _Ids(msgspec.Struct):
    id: Any = None
    image_id: Any = None


def _identity(line: bytes) -> bytes:
    """Return what decides the split of a row: its id (5 and "5" are the same), else its content."""
    try:
        ids = msgspec.json.decode(line, type=_Ids)
        row_id = ids.id if ids.id is not None else ids.image_id
        if row_id is None:
            return msgspec.json.format(line, indent=-1)  # without the white space of a JSON array
        return row_id.encode() if isinstance(row_id, str) else msgspec.json.encode(row_id)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return line  # it will be rejected, in the split that its bytes hash into


def parse_row(line: bytes | None) -> Any:
    """Return the JSON value of a line, or a `RowError` that says why there is none."""
    if line is None:
        return RowError(f"a line of more than {MAX_ROW_BYTES} bytes")
    if not line:
        return RowError("empty row")
    try:
        value = msgspec.json.decode(line)
    except UnicodeDecodeError as error:
        position = max(0, line.find(error.object)) + error.start
        return RowError(f"not UTF-8: {error.reason} (byte {position})")
    except msgspec.MsgspecError as error:
        return RowError(f"not JSON: {error}")
    except RecursionError:
        return RowError("not JSON: nested too deeply")
    return RowError("not JSON: nested too deeply") if is_too_deep(line, value) else value


def _read_lines(rows: LineRange) -> Iterator[tuple[int, bytes | None]]:
    """Yield (row number from 1, line without its end). A line over the limit is None."""
    if _stamp(Path(rows.path)) != rows.stamp:
        raise MMStreamError(
            f"{rows.path}: changed during the conversion; convert again with overwrite=True"
        )
    with Path(rows.path).open("rb") as file:
        for number, start, stop in _bounds(rows):
            if stop - start > MAX_ROW_BYTES:
                yield number, None
                continue
            file.seek(start)
            yield number, file.read(stop - start).strip()


def _bounds(rows: LineRange) -> Iterator[tuple[int, int, int]]:
    """Yield (number, start, stop) of each row. Python's own numbers exist for a few at a time."""
    for i in range(0, len(rows), 4096):
        columns = (column[i : i + 4096] for column in (rows.numbers, rows.starts, rows.stops))
        yield from zip(*(column.tolist() for column in columns), strict=True)


@contextmanager
def open_lines(rows: str) -> Iterator[LineSource]:
    """Scan a file of rows. Its temporary copy, if one is needed, is removed after the block.

    A file that starts with ``[`` is read as a JSON array if it parses as one. The whole file is
    then in memory while its rows are written to the copy.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigError: It has no rows, a damaged gzip, UTF-16, or a JSON array that does not parse.
        StorageError: A remote file could not be read, or it is a folder, a FIFO or a device.
    """
    name = split_url(rows.rstrip("/"))[1]
    with tempfile.TemporaryDirectory(prefix="mmstream-rows-") as folder:
        path = Path(rows.removeprefix("file://"))
        if is_remote(rows):
            path = _download(rows, Path(folder, "remote"))
        else:
            _require_file(path, rows)
        if _head(path)[:2] == b"\x1f\x8b":
            path = _unzip(path, Path(folder, "plain"), rows)
        if _head(path).startswith(UTF16):
            raise ConfigError(f"{rows}: is UTF-16; save it as UTF-8")
        if _head(path).removeprefix(BOM).lstrip()[:1] == b"[":
            path = _unroll_array(path, Path(folder, "lines"), rows)
        stamp = _stamp(path)
        offsets, sha256 = _scan(path, Path(folder, "offsets"))
        if len(offsets) < 2:
            raise ConfigError(f"{rows}: holds no rows; write one JSON object per line")
        yield LineSource(str(path.absolute()), name, sha256, stamp, offsets)


def _require_file(path: Path, rows: str) -> None:
    """Raise an error where rows are missing or no file. A FIFO could be read only once."""
    try:
        os.close(open_file(str(path)))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{rows}: no such file of rows; pass a JSONL or JSON file"
        ) from None
    except NotAFileError:
        if hint := picture_hint(path):
            raise NotAFileError(f"{rows}: a folder; a file is needed{hint}") from None
        raise


def _scan(path: Path, target: Path) -> tuple[IntArray, str]:
    """Return the offsets of all lines, and the checksum of the file, in one pass.

    A file with the lines ``{}`` and ``[1]`` has 3 + 4 bytes. Its offsets are 0, 3, 7.

    Args:
        path: The file of rows.
        target: Where the offsets are written. The result is a map of this file.
    """
    digest = hashlib.sha256()
    first = last = len(BOM) if _head(path).startswith(BOM) else 0
    size = 0
    with path.open("rb") as file, target.open("wb") as offsets:
        np.array([first], np.int64).tofile(offsets)
        while block := file.read(_BLOCK):
            digest.update(block)
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + (size + 1)
            ends.astype(np.int64, copy=False).tofile(offsets)
            last = int(ends[-1]) if len(ends) else last
            size += len(block)
        if last != size:
            np.array([size], np.int64).tofile(offsets)
    if size == first:
        return np.zeros(1, np.int64), digest.hexdigest()
    return np.memmap(target, np.int64, "r"), digest.hexdigest()


def _download(url: str, target: Path) -> Path:
    folder, name = split_url(url)
    store = open_store(folder)
    known = {name: store.stat(name)}
    size = known[name].size
    with target.open("wb") as file:
        for start in range(0, size, _BLOCK * 4):
            stop = min(size, start + _BLOCK * 4)
            data = store.read_ranges([(name, start, stop)], known)[0]
            if isinstance(data, OSError):  # be it that the file is another one now
                raise data
            file.write(data)
    return target


def _unzip(path: Path, target: Path, rows: str) -> Path:
    try:
        with gzip.open(path) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, _BLOCK)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{rows}: damaged gzip ({error}); fetch or write it again") from None
    return target


def _unroll_array(path: Path, target: Path, rows: str) -> Path:
    """Write the rows of a JSON array to `target`, one per line. Return the file to read.

    A JSONL file whose first row is a list also starts with ``[``. It is returned as it is.
    """
    is_jsonl = re.search(r"\.(jsonl|ndjson)\b", rows, re.IGNORECASE) is not None
    if path.stat().st_size > MAX_ARRAY_BYTES or _count_commas(path) > MAX_ARRAY_COMMAS:
        if is_jsonl:
            return path
        raise ConfigError(
            f"{rows}: a JSON array of more than {MAX_ARRAY_BYTES >> 30} GiB or "
            f"{MAX_ARRAY_COMMAS:,} commas would take too much memory; write one row per line, "
            "such as with `jq -c '.[]' rows.json > rows.jsonl`"
        )
    data = path.read_bytes().removeprefix(BOM)
    try:
        items = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        if is_jsonl:
            return path
        position = re.search(r"byte (\d+)", str(error))
        line = data.count(b"\n", 0, int(position[1])) + 1 if position else data.count(b"\n") + 1
        raise ConfigError(f"{rows}: not a JSON array of rows: {error}, line {line}") from None
    with target.open("wb") as file:
        for item in items:
            # A line end is white space in JSON: inside a string it would not have parsed.
            file.write(bytes(item).replace(b"\n", b" ") + b"\n")
    return target


def _count_commas(path: Path) -> int:
    num_commas = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            num_commas += block.count(b",")
    return num_commas


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(64)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
