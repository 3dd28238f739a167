"""What every source of rows gives; rows in plain local files; samples of another data set.

    a file, a table, a set of shards, an iterable -> ROW SOURCE -> plan -> row ranges -> formats

A `RowSource` is opened once, in the main process. It has the number of rows, the rows of a shard,
and what decides the split of a row: a group, an id, or the content. Each job of a shard gets a
`RowRange`, which can be pickled and read in another process.

Plain local files hold lines of JSON, or records of a spool. A plain local JSONL file is read where
it lies. Everything else that holds text, such as a gzipped file, a JSON array or a csv, is copied
once to a temporary folder (``TMPDIR``). All processes then read these files by the offsets of their
rows. The offsets lie in the temporary folder too, 8 bytes per row, and are mapped: their number is
a stranger's choice, since a kilobyte of gzip may be a million empty rows.

Rows are numbered through over all files. With files of 2 and 3 rows, rows 2 to 4 are those of the
second file. Its rejects name their numbers 1 to 3 there. A file of n rows has n + 1 offsets, so
row r of file f has the offsets r + f and r + f + 1.

Rows that have no lines of their own go into a spool: those of csv, COCO, a folder, an iterable, and
grouped rows. A record is MessagePack: the row's number in its file, its value, and the reason why
it has none. MessagePack is JSON with bytes. So a row may hold the bytes of a picture.

Samples of another data set are in tars that mmstream, webdataset or img2dataset wrote:

    tars -> SAMPLES (a `RowSource`) -> plan -> shards of another size, order or split

A sample is written again as it is: the same key, the same fields, byte for byte. Samples that the
bad list names are left out. Untrusted tars may use the same keys. Of two samples with one key in
a shard, the second one gets its number after its key: ``0001-7``. Side by side they would be read
as one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from mmstream.converting.draft import LeftOutError, RowError, StoredSample, unreadable
from mmstream.dataset.columns import without_point
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.keys import read_keys
from mmstream.errors import ChecksumError, ConfigError, MMStreamError, SampleError, escaped
from mmstream.media.fields import decode_json, is_too_deep, json_object
from mmstream.tar.samples import is_reserved
from mmstream.types import IntArray

logger = logging.getLogger(__name__)


class Row(msgspec.Struct, frozen=True):
    """One row as its source gives it."""

    index: int
    """0-based number of the row over all files of the source. It decides the sample's key."""
    file: str
    """Name of its file, for the rejects."""
    number: int
    """Number in its file, from 1: the line that an editor shows, or the item of an array."""
    value: Any
    """The parsed row, a `StoredSample` of another dataset, or a `RowError` that says why it cannot
    be read."""


class RowRange(ABC):
    """The rows of one shard. It can be pickled."""

    @property
    def is_temporary(self) -> bool:
        """Whether some of them are in temporary files of this machine."""
        return False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self) -> Iterator[Row]:
        """Yield the rows in order. One of them is in memory at a time.

        Raises:
            MMStreamError: The source changed since it was opened.
        """

    def detached(self) -> RowRange:
        """Return the same rows without temporary files of this machine.

        Rows of a temporary copy are read into memory. Files that the caller named are not.
        """
        return HeldRows(tuple(self.read())) if self.is_temporary else self


@dataclass(frozen=True)
class HeldRows(RowRange):
    """The rows of one shard in memory."""

    rows: tuple[Row, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def read(self) -> Iterator[Row]:
        """Yield the rows in order."""
        return iter(self.rows)


ROWS_AT_ONCE = 1 << 20
"""Rows that are selected together. A row group of Parquet starts again for each selection."""


class RowSource(ABC):
    """All rows of a conversion."""

    name: str
    """What the caller named: a file's base name, such as ``rows.jsonl``."""
    splits: Mapping[str, range]
    """{split: its rows} where the source has splits, such as the folders train and val. They cover
    all rows. Empty: it has none."""

    @property
    @abstractmethod
    def sha256(self) -> str:
        """Checksum of the content of all rows. It goes into the plan."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Number of rows, those that will be rejected included."""

    @abstractmethod
    def select(self, rows: IntArray | range) -> RowRange:
        """Return rows by their 0-based indexes, in the given order."""

    def read(self) -> Iterator[Row]:
        """Yield all rows in order."""
        for start in range(0, self.num_rows, ROWS_AT_ONCE):
            yield from self.select(range(start, min(self.num_rows, start + ROWS_AT_ONCE))).read()

    @abstractmethod
    def identities(self, field: str | None) -> Iterator[tuple[bytes, bool]]:
        """Yield the identity of every row, and whether it is the value of `field`."""

    def id_hashes(self, field: str | None = None) -> npt.NDArray[np.uint64]:
        """Return uint64 [num_rows]: the first 64 bits of the SHA-256 of every row's identity.

        A row's identity decides its split. It is the value of `field`, where the row has it; else
        its ``id``, else its ``image_id``, else its content. 5, 5.0 and "5" are the same.

        Args:
            field: Key of a group, such as ``speaker``. None: every row is on its own.

        Raises:
            ConfigError: No row has the field.
        """
        hashes = np.empty(self.num_rows, dtype="<u8")
        num_grouped = 0
        for number, (identity, is_grouped) in enumerate(self.identities(field)):
            hashes[number] = int.from_bytes(hashlib.sha256(identity).digest()[:8], "little")
            num_grouped += is_grouped
        if field is not None and not num_grouped:
            raise ConfigError(f"split_by={escaped(field)!r}: no row has this key")
        if field is not None and num_grouped < self.num_rows:
            logger.warning(
                "split_by=%r: %d of %d rows lack this key; each of them is split by its own id",
                escaped(field),
                self.num_rows - num_grouped,
                self.num_rows,
            )
        return hashes


def encodable(name: str) -> str:
    """Return a name of a file or a key, with escapes in place of bytes that are not UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


ID_KEYS = ("id", "image_id")
"""The keys that identify a row, the first one first."""


def identity_of(value: Any, field: str | None = None) -> tuple[bytes, bool]:
    """Return the identity of a parsed row, and whether it is the value of `field`.

    The numbers 5 and 5.0 and the text "5" are the same. Without `field` and without an id, the
    identity is the row itself, as compact JSON.

    Examples:
        >>> identity_of({"id": 5, "speaker": "ann"}), identity_of({"id": "5"}, "speaker")
        ((b'5', False), (b'5', False))
        >>> identity_of({"id": 5.0})
        (b'5', False)
        >>> identity_of({"id": 5, "speaker": "ann"}, "speaker")
        (b'ann', True)
    """
    if isinstance(value, dict):
        for key in (field, *ID_KEYS) if field else ID_KEYS:
            row_id = without_point(value.get(key))
            if row_id is not None:
                is_text = isinstance(row_id, str)
                return row_id.encode() if is_text else msgspec.json.encode(row_id), key == field
    return msgspec.json.encode(value), False


NumberedRow = tuple[int, Any]
"""(number of the row in its file from 1, its value or a `RowError`)."""


class _Spooled(msgspec.Struct, array_like=True):
    number: int
    value: Any
    reason: str | None


def write_spool(
    rows: Iterable[NumberedRow], path: Path, offsets: BinaryIO, limit: int | None = None
) -> tuple[int, str]:
    """Write rows to a new file, and their offsets. Return their number and their checksum.

    Args:
        rows: JSON values that may also hold bytes. One of them is in memory at a time.
        path: The new file.
        offsets: Where int64 [num_rows + 1] byte offsets are written.
        limit: Most rows. No more are taken from `rows`.
    """
    digest = hashlib.sha256()
    position = num_rows = 0
    encoder = msgspec.msgpack.Encoder()
    with path.open("wb") as file:
        np.array([0], np.int64).tofile(offsets)
        for number, value in islice(rows, limit):
            spooled = _Spooled(number, value, None)
            if isinstance(value, RowError):
                spooled = _Spooled(number, None, str(value))
            try:
                record = encoder.encode(spooled)
            except UnicodeEncodeError as error:
                reason = f"{escaped(error.object, 80)}: text that is not UTF-8: {error.reason}"
                record = encoder.encode(_Spooled(number, None, reason))
            except Exception as error:  # nested too deeply, a number of more than 64 bits
                record = encoder.encode(_Spooled(number, None, str(unreadable("row", error))))
            digest.update(record)
            file.write(record)
            position += len(record)
            num_rows += 1
            offsets.write(position.to_bytes(8, sys.byteorder))
    return num_rows, digest.hexdigest()


MAX_ROW_BYTES = 64 << 20
"""A longer line is rejected. No real row is as long, but a file without line ends is."""

MAX_OPEN_FILES = 32
"""Files of rows that a process keeps open."""

BOM = b"\xef\xbb\xbf"
_BLOCK = 4 << 20
_BATCH = 4096


@dataclass(frozen=True)
class RecordFile:
    """A plain local file, as a process reads it."""

    path: str
    name: str
    """Name of the caller's file, for the rejects."""
    stamp: tuple[int, int]
    """Size and mtime of the file when it was scanned. If they change, reading stops."""
    first_row: int
    """Index of its first row over all files."""
    is_spool: bool
    """True: its records were written by `write_spool`. False: lines of JSON."""
    is_temporary: bool
    """True: the file goes when the conversion ends."""
    num_rows: int
    sha256: str
    """Checksum of the bytes of its rows."""


@dataclass(frozen=True)
class RecordRange(RowRange):
    """The rows of one shard, by their bytes in plain files."""

    files: tuple[RecordFile, ...]
    """The files that hold rows of the shard."""
    file_of_row: npt.NDArray[np.int32]
    """int32 [n] position in `files`."""
    indexes: IntArray
    """int64 [n] 0-based numbers of the rows over all files."""
    starts: IntArray
    """int64 [n] byte offsets of the rows."""
    stops: IntArray
    """int64 [n] byte offsets after the rows."""

    def __len__(self) -> int:
        return len(self.indexes)

    def read(self) -> Iterator[Row]:
        """Yield the rows in order. A line that cannot be parsed has a `RowError` as its value.

        Raises:
            MMStreamError: A file changed since it was scanned.
        """
        for file, index, record in self.records():
            yield row_of(file, index, record)

    @property
    def is_temporary(self) -> bool:
        """Whether some of the files go when the conversion ends."""
        return any(file.is_temporary for file in self.files)

    def records(self) -> Iterator[tuple[RecordFile, int, bytes | None]]:
        """Yield (file, index, bytes of the row). A row over the limit is None."""
        with ExitStack() as opened:
            handles: dict[int, BinaryIO] = {}
            for number, index, start, stop in self._bounds():
                file = self.files[number]
                if number not in handles:
                    if len(handles) >= MAX_OPEN_FILES:
                        opened.close()
                        handles.clear()
                    if stamp_of(Path(file.path)) != file.stamp:
                        raise MMStreamError(
                            f"{file.path}: changed during the conversion; convert again with "
                            "rerun=mm.Rerun(overwrite=True)"
                        )
                    handles[number] = opened.enter_context(Path(file.path).open("rb"))
                if stop - start > MAX_ROW_BYTES and not file.is_spool:
                    yield file, index, None
                    continue
                handles[number].seek(start)
                yield file, index, handles[number].read(stop - start)

    def _bounds(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (file, index, start, stop). Python's own numbers exist for a few at a time."""
        columns = (self.file_of_row, self.indexes, self.starts, self.stops)
        for i in range(0, len(self), _BATCH):
            yield from zip(*(column[i : i + _BATCH].tolist() for column in columns), strict=True)


def row_of(file: RecordFile, index: int, record: bytes | None) -> Row:
    """Return a row by its bytes. None: it is over the limit."""
    if file.is_spool and record is not None:
        spooled = msgspec.msgpack.decode(record, type=_Spooled)
        value = spooled.value if spooled.reason is None else RowError(spooled.reason)
        return Row(index, file.name, spooled.number, value)
    line = None if record is None else record.strip()
    return Row(index, file.name, index - file.first_row + 1, parse_row(line))


@dataclass(frozen=True)
class RecordSource(RowSource):
    """Scanned files of rows."""

    name: str
    files: tuple[RecordFile, ...]
    offsets: IntArray
    """int64 [num_rows + number of files] byte offsets of the rows in their files, each file's with
    the end of its last row: a map of a temporary file."""
    splits: Mapping[str, range] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Number of rows. A line end at the end of a file does not start another row."""
        return len(self.offsets) - len(self.files)

    @property
    def sha256(self) -> str:
        """Checksum of the rows: of the plain file, or of the list of all files with theirs."""
        return joint_sha256((file.name, file.num_rows, file.sha256) for file in self.files)

    def select(self, rows: IntArray | range) -> RecordRange:
        """Return rows by their numbers from 0, in the given order."""
        index = np.asarray(rows, dtype=np.int64)
        first_rows = np.array([file.first_row for file in self.files])
        file_of_row = np.searchsorted(first_rows, index, side="right") - 1
        starts = np.array(self.offsets[index + file_of_row])
        stops = np.array(self.offsets[index + file_of_row + 1])
        used, position = np.unique(file_of_row, return_inverse=True)
        files = tuple(self.files[number] for number in used.tolist())
        return RecordRange(files, position.astype(np.int32), index, starts, stops)

    def identities(self, field: str | None) -> Iterator[tuple[bytes, bool]]:
        """Yield the identity of every row (see `RowSource`). A batch of offsets is in memory."""
        for start in range(0, self.num_rows, _BATCH):
            rows = self.select(range(start, min(self.num_rows, start + _BATCH)))
            for file, index, record in rows.records():
                yield _identity(file, index, record, field)


def joint_sha256(files: Iterator[tuple[str, int, str]]) -> str:
    """Return one checksum of (name, number of rows, checksum) of several files.

    Where one file ends and the next begins is part of it. That of a single file is its own.
    """
    listed = list(files)
    if len(listed) == 1:
        return listed[0][2]
    return hashlib.sha256(msgspec.json.encode(listed)).hexdigest()


class _Ids(msgspec.Struct):
    id: Any = None
    image_id: Any = None


def _identity(
    file: RecordFile, index: int, record: bytes | None, field: str | None
) -> tuple[bytes, bool]:
    if file.is_spool or field is not None:
        value = row_of(file, index, record).value
        is_known = field is None or (
            isinstance(value, dict) and any(value.get(k) is not None for k in (field, *ID_KEYS))
        )
        if is_known and not isinstance(value, RowError):  # by a key, and not by its bytes
            return identity_of(value, field)
        if file.is_spool:
            return record or b"", False
    line = (record or b"").strip()
    try:
        ids = decode_json(line, _Ids)
        row_id = ids.id if ids.id is not None else ids.image_id
        if row_id is None:
            return msgspec.json.format(line, indent=-1), False  # without white space
        return identity_of({"id": row_id})
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return line, False  # it will be rejected, in the split that its bytes hash into


def parse_row(line: bytes | None) -> Any:
    """Return the JSON value of a line, or a `RowError` that says why there is none."""
    if line is None:
        return RowError(f"a line of more than {MAX_ROW_BYTES} bytes")
    if not line:
        return LeftOutError("empty row")
    try:
        value = decode_json(line)
    except UnicodeDecodeError as error:
        position = max(0, line.find(error.object)) + error.start
        return RowError(f"not UTF-8: {error.reason} (byte {position})")
    except msgspec.MsgspecError as error:
        return RowError(f"not JSON: {error}")
    except RecursionError:
        return RowError("not JSON: nested too deeply")
    return RowError("not JSON: nested too deeply") if is_too_deep(line, value) else value


def scan_lines(path: Path, offsets: BinaryIO, limit: int | None = None) -> tuple[int, str]:
    """Write the offsets of all lines of a file. Return their number and the file's checksum.

    A file with the lines ``{}`` and ``[1]`` has 3 + 4 bytes. Its offsets are 0, 3, 7. One empty
    line at the end of the file, as editors leave it, is not a row.

    Args:
        path: The file of rows.
        offsets: Where int64 [num_rows + 1] byte offsets are written.
        limit: Most lines. What follows them is not read, and is not part of the checksum.
    """
    digest = hashlib.sha256()
    num_rows = size = 0
    with path.open("rb") as file:
        first = last = len(BOM) if file.read(len(BOM)) == BOM else 0
        file.seek(0)
        np.array([first], np.int64).tofile(offsets)
        while (limit is None or num_rows < limit) and (block := file.read(_BLOCK)):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + (size + 1)
            if limit is not None and num_rows + len(ends) >= limit:
                ends = ends[: limit - num_rows]
                block = block[: int(ends[-1]) - size]
            digest.update(block)
            ends.astype(np.int64, copy=False).tofile(offsets)
            num_rows += len(ends)
            last = int(ends[-1]) if len(ends) else last
            size += len(block)
        if last < size:
            np.array([size], np.int64).tofile(offsets)
            num_rows += 1
        elif limit is None and num_rows > 1 and _ends_with_empty_line(file, size):
            offsets.seek(-np.dtype(np.int64).itemsize, os.SEEK_CUR)
            offsets.truncate()
            num_rows -= 1
    return num_rows, digest.hexdigest()


def _ends_with_empty_line(file: BinaryIO, size: int) -> bool:
    """Tell whether the last line is empty, and the one before it is not."""
    file.seek(max(0, size - 6))
    tail = file.read(6).replace(b"\r", b"")
    return tail.endswith(b"\n\n") and not tail.endswith(b"\n\n\n")


def stamp_of(path: Path) -> tuple[int, int]:
    """Return what changes when a file does: its size, and its time of change in nanoseconds."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def ranges_of_splits(
    splits: Sequence[tuple[str | None, int]], limit: int | None = None
) -> dict[str, range]:
    """Return {split: its rows} from (split, number of rows) of files in order.

    Files of one split follow each other. Without splits, the result is empty. No rows come after
    the limit.
    """
    ranges: dict[str, range] = {}
    start = 0
    for split, num_rows in splits:
        stop = start + num_rows if limit is None else min(limit, start + num_rows)
        if split is not None:
            ranges[split] = range(ranges.get(split, range(start, stop)).start, stop)
        start = stop
    return ranges


def text_row(line: bytes | None) -> Any:
    """Return the row of a line of plain text: ``{"text": LINE}``. Otherwise as `parse_row`."""
    if not line:
        return parse_row(line)
    try:
        return {"text": line.decode()}
    except UnicodeDecodeError as error:
        return RowError(f"not UTF-8: {error.reason} (byte {error.start})")


def iter_lines(
    path: Path, parse: Callable[[bytes | None], Any] = parse_row
) -> Iterator[NumberedRow]:
    """Yield (number from 1, parsed row or `RowError`) of each line of a plain file.

    Args:
        path: Of the file.
        parse: What a line is. It gets None for one that is too long.
    """
    with path.open("rb") as file:
        if file.read(len(BOM)) != BOM:
            file.seek(0)
        number = 0
        while line := file.readline(MAX_ROW_BYTES + 1):
            number += 1
            is_long = len(line) > MAX_ROW_BYTES
            yield number, parse(None if is_long else line.strip())
            while is_long and not line.endswith(b"\n") and line:
                line = file.readline(MAX_ROW_BYTES)


# -- samples of another data set -------------------------------------------------------------------

SAMPLES_AT_ONCE = 64
"""Samples that are fetched together from an object store."""

KEYS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class SampleRange(RowRange):
    """The samples of one shard."""

    dataset: Dataset
    indexes: IntArray
    """int64 [n] 0-based numbers of the rows."""
    shards: IntArray
    """int64 [n] positions of their shards in the data set."""
    positions: IntArray
    """int64 [n] positions of the samples in these shards."""
    is_temporary: bool = False
    """The tars are copies in a temporary folder of this machine."""

    def __len__(self) -> int:
        return len(self.indexes)

    def read(self) -> Iterator[Row]:
        """Yield the samples in order. One that cannot be read has a `RowError` as its value.

        The keys of the shard are in memory.

        Raises:
            ShardError: A shard is missing, or is another one than its index.
            StorageError: The storage failed after retries.
        """
        keys: set[str] = set()
        for number, value in enumerate(self._values()):
            index = int(self.indexes[number])
            if isinstance(value, StoredSample):
                while value.key in keys:
                    value = StoredSample(f"{value.key}-{index + 1}", value.fields)
                keys.add(value.key)
            name = encodable(self.dataset.name_of(int(self.shards[number])))
            yield Row(index, name, int(self.positions[number]) + 1, value)

    def _values(self) -> Iterator[StoredSample | RowError]:
        refs = zip(self.shards.tolist(), self.positions.tolist(), strict=True)
        if not self.dataset.store.access.concurrent:
            yield from (self._value(ref) for ref in refs)
            return
        listed = list(refs)
        with ThreadPoolExecutor(SAMPLES_AT_ONCE) as pool:
            for start in range(0, len(listed), SAMPLES_AT_ONCE):
                yield from pool.map(self._value, listed[start : start + SAMPLES_AT_ONCE])

    def _value(self, ref: tuple[int, int]) -> StoredSample | RowError:
        try:
            sample = self.dataset.read(*ref)
        except (SampleError, ChecksumError) as error:
            return RowError(str(error))
        fields = {name: bytes(data) for name, data in sample.items() if not is_reserved(name)}
        return StoredSample(str(sample["__key__"]), fields)


@dataclass(frozen=True)
class SampleSource(RowSource):
    """A data set of tars."""

    name: str
    dataset: Dataset
    limit: int | None = None
    is_temporary: bool = False
    """The tars are copies in a temporary folder of this machine."""
    splits: Mapping[str, range] = field(default_factory=dict)

    @cached_property
    def left_out(self) -> IntArray:
        """int64 [num_bad], ascending: numbers of the bad samples, over all shards."""
        return np.sort(self._starts[self.dataset.bad[:, 0]] + self.dataset.bad[:, 1])

    @cached_property
    def _starts(self) -> IntArray:
        """int64 [num_shards]: number of the first sample of each shard."""
        counts = self.dataset.counts
        starts: IntArray = np.cumsum(counts) - counts
        return starts

    @property
    def num_rows(self) -> int:
        """Number of samples that are not bad, up to the limit."""
        total = len(self.dataset) - len(self.left_out)
        return total if self.limit is None else min(total, self.limit)

    @property
    def sha256(self) -> str:
        """Checksum of the list of shards with their sizes and checksums, and of the bad list."""
        shards = [
            (encodable(shard.name), shard.num_samples, shard.num_bytes, shard.sha256)
            for shard in self.dataset.manifest.shards
        ]
        return hashlib.sha256(
            msgspec.json.encode([shards, self.left_out.tolist(), self.limit])
        ).hexdigest()

    def select(self, rows: IntArray | range) -> SampleRange:
        """Return samples by their numbers from 0, in the given order.

        With samples 1 and 2 of 5 bad, the rows 0, 1 and 2 are the samples 0, 3 and 4: the bad
        numbers less the bad ones before them are 1 and 1, and rows from there on move by 2.
        """
        index = np.asarray(rows, dtype=np.int64)
        before = self.left_out - np.arange(len(self.left_out))
        number = index + np.searchsorted(before, index, side="right")
        shards = np.searchsorted(self._starts, number, side="right") - 1
        positions = number - self._starts[shards]
        return SampleRange(self.dataset, index, shards, positions, self.is_temporary)

    def identities(self, field: str | None) -> Iterator[tuple[bytes, bool]]:
        """Yield the identity of every sample, which is its key.

        With `field`, it is the value of this key in the sample's ``json``, and all samples are
        read; otherwise one header of each.
        """
        for start in range(0, self.num_rows, KEYS_AT_ONCE):
            rows = self.select(range(start, min(self.num_rows, start + KEYS_AT_ONCE)))
            if field is None:
                refs = list(zip(rows.shards.tolist(), rows.positions.tolist(), strict=True))
                for ref, key in zip(refs, read_keys(self.dataset.shards, refs), strict=True):
                    yield (key if key is not None else str(ref)).encode("utf-8", "replace"), False
                continue
            for row in rows.read():
                if isinstance(row.value, StoredSample):
                    content = json_object(row.value.fields.get("json"))
                    own_key = row.value.key.encode("utf-8", "replace")
                    has_field = content.get(field) is not None
                    yield identity_of(content, field) if has_field else (own_key, False)
                else:
                    yield str((row.file, row.number)).encode(), False
