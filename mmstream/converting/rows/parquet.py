"""Rows in Parquet files, read where they lie: local or behind URLs.

    Parquet -> PARQUET (a `RowSource`) -> plan -> formats

Each job reads the row groups that hold its rows, some rows at a time. So a row group of any size
takes little memory. But rows cannot be skipped: a shard that begins in the middle of a row group
decodes what lies before. Where row groups are much longer than shards, or rows are shuffled, the
rows are copied once to a spool instead (see `mmstream.converting.rows.plain_files`).

Null says that a row lacks the key. The checksum of a file is that of its size and its footer, which
lists the sizes of all pages and the smallest and largest values: the content itself is not read
twice.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mmstream.converting.draft import RowError
from mmstream.converting.rows.fetch import InputFile, local_path
from mmstream.converting.rows.identity import ID_KEYS, hash_ids, identity_of
from mmstream.converting.rows.records import joint_sha256, ranges_of_splits
from mmstream.converting.rows.source import Row
from mmstream.converting.rows.spool import NumberedRow
from mmstream.converting.rows.values import plain_row, without_nulls
from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.storage import ObjectStat, Store, open_store, split_url
from mmstream.storage.object_file import ObjectFile
from mmstream.types import IntArray

__all__ = ["PARQUET_MAGIC", "ParquetFile", "ParquetSource", "iter_parquet", "rows_of_batch"]

PARQUET_MAGIC = b"PAR1"

_DAMAGE = (pa.ArrowException, EOFError, OSError)
"""What Arrow raises for damaged files, among them OSErrors without a number."""

BATCH_ROWS = 32
"""Rows that are decoded at a time: with pictures, some MB."""


@dataclass(frozen=True)
class ParquetFile:
    """A Parquet file, as a process reads it."""

    store: Store
    file_name: str
    """In the store."""
    name: str
    """How rejects name it."""
    stat: ObjectStat
    """Size and version when it was opened. If they change, reading stops."""
    sha256: str
    """Checksum of its size and its footer."""
    group_sizes: tuple[int, ...]
    """Rows of each row group."""
    split: str | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return sum(self.group_sizes)

    @staticmethod
    def open(file: InputFile) -> ParquetFile:
        """Return what the footer of a file says.

        Raises:
            ConfigError: It is damaged, cut off or encrypted.
            StorageError: It could not be read.
        """
        folder, file_name = split_url(local_path(file.url))
        store = open_store(folder)
        stat = store.stat(file_name)
        with ObjectFile(store, file_name, stat) as handle:
            try:
                metadata = _reader(handle).metadata
            except _DAMAGE as error:
                _raise_of_storage(error)
                raise ConfigError(
                    f"{file.url}: damaged Parquet ({escaped(error)}); fetch or write it again"
                ) from None
            handle.seek(-8, io.SEEK_END)
            footer_size = int.from_bytes(handle.read(4), "little") + 8
            handle.seek(-min(footer_size, stat.size), io.SEEK_END)
            digest = hashlib.sha256(stat.size.to_bytes(8, "little") + handle.read(footer_size))
        sizes = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        return ParquetFile(store, file_name, file.name, stat, digest.hexdigest(), sizes, file.split)

    def batches(self, group: int, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Yield a row group as record batches, in order.

        Raises:
            MMStreamError: The file is damaged, or changed since it was opened.
        """
        url = self.store.url_of(self.file_name)
        with ObjectFile(self.store, self.file_name, self.stat) as handle:
            try:
                yield from _reader(handle).iter_batches(
                    BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False
                )
            except _DAMAGE as error:
                _raise_of_storage(error)
                raise MMStreamError(
                    f"{url}: row group {group} is damaged ({escaped(error)}); write it again"
                ) from error

    def column_names(self) -> list[str]:
        """Return the names of its columns."""
        with ObjectFile(self.store, self.file_name, self.stat) as handle:
            return list(_reader(handle).schema_arrow.names)


def _raise_of_storage(error: Exception) -> None:
    """Raise an error again that is the storage's, and not the file's."""
    if isinstance(error, MMStreamError) or getattr(error, "errno", None) is not None:
        raise error


def _reader(handle: Any) -> Any:
    return pq.ParquetFile(handle, pre_buffer=False, buffer_size=1 << 20)


@dataclass(frozen=True)
class _Run:
    """Ascending rows of one row group."""

    file: ParquetFile
    group: int
    first_index: int
    """Index of the group's first row, over all files."""
    first_in_file: int
    """The same, in its file."""
    offsets: IntArray
    """int64 [n], ascending: which rows of the group."""


@dataclass(frozen=True)
class ParquetRange:
    """The rows of one shard: a `RowRange`."""

    runs: tuple[_Run, ...]

    def __len__(self) -> int:
        return sum(len(run.offsets) for run in self.runs)

    def read(self) -> Iterator[Row]:
        """Yield the rows in order.

        Raises:
            MMStreamError: A file is damaged, or changed since it was opened.
        """
        for run in self.runs:
            for offset, value in _rows_of_run(run):
                number = run.first_in_file + offset + 1
                yield Row(run.first_index + offset, run.file.name, number, value)

    def detached(self) -> ParquetRange:
        """Return the rows themselves: they lie in files of the caller."""
        return self


def _rows_of_run(run: _Run) -> Iterator[tuple[int, Any]]:
    start, last = 0, int(run.offsets[-1])
    batches = run.file.batches(run.group)
    for batch in batches:
        stop = start + batch.num_rows
        first, end = np.searchsorted(run.offsets, [start, stop]).tolist()
        if first < end:
            wanted = run.offsets[first:end]
            rows = rows_of_batch(batch.take((wanted - start).tolist()))
            yield from zip(wanted.tolist(), rows, strict=True)
        start = stop
        if start > last:
            batches.close()  # type: ignore[attr-defined]
            return


def rows_of_batch(batch: Any) -> list[Any]:
    """Return the rows of an Arrow batch or table as JSON values and bytes, without nulls."""
    return [_row(row) for row in batch.to_pylist(maps_as_pydicts="lossy")]


def _row(row: Any) -> Any:
    value = plain_row(row)
    return value if isinstance(value, RowError) else without_nulls(value)


@dataclass(frozen=True)
class ParquetSource:
    """Parquet files: a `RowSource`."""

    name: str
    files: tuple[ParquetFile, ...]
    limit: int | None = None
    splits: Mapping[str, range] = field(default_factory=dict)

    @staticmethod
    def of(name: str, files: Sequence[ParquetFile], limit: int | None) -> ParquetSource:
        """Return the source of some files."""
        counts: list[tuple[str | None, int]] = []
        left = limit
        for file in files:
            num_rows = file.num_rows if left is None else min(left, file.num_rows)
            counts.append((file.split, num_rows))
            left = None if left is None else left - num_rows
        return ParquetSource(name, tuple(files), limit, ranges_of_splits(counts))

    @property
    def num_rows(self) -> int:
        """Number of rows, up to the limit."""
        total = sum(file.num_rows for file in self.files)
        return total if self.limit is None else min(total, self.limit)

    @property
    def sha256(self) -> str:
        """Checksum of the sizes and footers of all files."""
        return joint_sha256((file.name, file.num_rows, file.sha256) for file in self.files)

    def select(self, rows: IntArray | range) -> ParquetRange:
        """Return rows by their numbers from 0, in the given order."""
        index = np.asarray(rows, dtype=np.int64)
        groups, starts, firsts = self._groups()
        group_of_row = np.searchsorted(starts, index, side="right") - 1
        is_new = np.ones(len(index), bool)
        is_new[1:] = (np.diff(group_of_row) != 0) | (np.diff(index) <= 0)
        bounds = [*np.flatnonzero(is_new).tolist(), len(index)]
        runs = []
        for begin, end in pairwise(bounds):
            number = int(group_of_row[begin])
            file, group = groups[number]
            offsets = index[begin:end] - starts[number]
            runs.append(_Run(file, group, int(starts[number]), firsts[number], offsets))
        return ParquetRange(tuple(runs))

    def _groups(self) -> tuple[list[tuple[ParquetFile, int]], IntArray, list[int]]:
        """Return (file, group), index of its first row over all files and in its file, of each."""
        groups: list[tuple[ParquetFile, int]] = []
        starts: list[int] = []
        firsts: list[int] = []
        start = 0
        for file in self.files:
            first = 0
            for group, size in enumerate(file.group_sizes):
                if size:
                    groups.append((file, group))
                    starts.append(start)
                    firsts.append(first)
                start += size
                first += size
        return groups, np.array(starts, np.int64), firsts

    def id_hashes(self, field: str | None = None) -> npt.NDArray[np.uint64]:
        """Return uint64 [num_rows]: the hash of every row's identity (see `RowSource`).

        Only the columns of ids are read, where every row has one.
        """
        return hash_ids(self._identities(field), self.num_rows, field)

    def _identities(self, field: str | None) -> Iterator[tuple[bytes, bool]]:
        left = self.num_rows
        for file in self.files:
            keys = [field] if field is not None else []
            names = file.column_names()
            columns = [key for key in (*keys, *ID_KEYS) if key in names]
            for group in range(len(file.group_sizes)):
                for value in _identified(file, group, columns):
                    if left <= 0:
                        return
                    left -= 1
                    yield identity_of(value, field)


def _identified(file: ParquetFile, group: int, columns: list[str]) -> Iterator[Any]:
    """Yield what identifies each row of a group: its ids, or the whole row where it has none."""
    has_ids = bool(columns)
    if has_ids:
        for batch in file.batches(group, columns):
            rows = rows_of_batch(batch)
            has_ids = has_ids and all(isinstance(row, dict) and row for row in rows)
    for batch in file.batches(group, columns if has_ids else None):
        yield from (None if isinstance(row, RowError) else row for row in rows_of_batch(batch))


def iter_parquet(file: ParquetFile) -> Iterator[NumberedRow]:
    """Yield (number, row) of every row of a file."""
    number = 0
    for group in range(len(file.group_sizes)):
        for batch in file.batches(group):
            for row in rows_of_batch(batch):
                number += 1
                yield number, row
