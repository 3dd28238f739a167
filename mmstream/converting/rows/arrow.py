"""Rows in Arrow's own files, in Parquet, and from Python, as JSON values and bytes.

Arrow's files are streams, as Hugging Face's ``save_to_disk`` writes them, and Feather. A stream has
no list of its batches, so the rows are copied once to a spool. One batch is in memory at a time. No
file is mapped: another program may shorten it meanwhile, and a map would end this process. The
offsets of a stranger's file may lead anywhere in memory. So every batch is validated before a value
of it is read.

Parquet files are read where they lie, local or behind URLs. Each job reads the row groups that hold
its rows, some rows at a time. So a row group of any size takes little memory. But rows cannot be
skipped: a shard that begins in the middle of a row group decodes what lies before. Where row groups
are much longer than shards, or rows are shuffled, the rows are copied once to a spool instead (see
`mmstream.converting.rows.open`). Null says that a row lacks the key. The checksum of a file is that
of its size and its footer, which lists the sizes of all pages and the smallest and largest values:
the content itself is not read twice.

Rows from Python are iterables of dicts, tables, and data sets of Hugging Face. Nothing of
`datasets` or `pandas` is imported: their objects are known by their methods.

Values become what JSON knows, and bytes. Everything else is an error of its row. NaN and missing
values of pandas are null. Times are text, as ISO 8601 writes them. NumPy's numbers and arrays are
numbers and lists. A picture of Pillow becomes ``{"bytes": ..., "path": ...}``: its file's own bytes
as long as nobody has touched the picture, otherwise PNG, which loses nothing.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import io
import math
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mmstream.converting.draft import RowError, unreadable
from mmstream.converting.formats.fields import MEDIA_KEYS
from mmstream.converting.formats.formats import CHAT_KEYS
from mmstream.converting.rows.fetch import InputFile
from mmstream.converting.rows.records import (
    ID_KEYS,
    NumberedRow,
    Row,
    RowRange,
    RowSource,
    identity_of,
    joint_sha256,
)
from mmstream.converting.rows.tables import require_different
from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.media.fields import MAX_JSON_DEPTH
from mmstream.storage import ObjectStat, Store, open_store, split_url
from mmstream.storage.store import ObjectFile, local_path
from mmstream.types import IntArray

_FILE_MAGIC = b"ARROW1"
_STREAM_MAGIC = b"\xff\xff\xff\xff"
"""How each message of a stream begins. Its length follows."""

_BYTES_OF = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


def is_arrow(head: bytes) -> bool:
    """Tell by its beginning whether a file is one of Arrow."""
    return head.startswith((_FILE_MAGIC, _STREAM_MAGIC))


def iter_arrow(path: Path, rows: str) -> Iterator[NumberedRow]:
    """Yield (number, row) of every row of a file.

    Args:
        path: A local file.
        rows: How messages name it.

    Raises:
        ConfigError: The file is damaged or cut off, or changes its size meanwhile.
    """
    size = path.stat().st_size
    with pa.OSFile(str(path)) as file:
        yield from enumerate(rows_of_batches(_batches(file), rows), 1)
    if path.stat().st_size != size:  # a stream may end after any batch
        raise ConfigError(
            f"{rows}: changed its size while it was read; convert again when it is whole"
        )


def rows_of_batches(batches: Iterable[pa.RecordBatch], rows: str) -> Iterator[Any]:
    """Yield the rows of batches, some of them in memory at a time.

    Raises:
        ConfigError: An offset or an index leads out of its buffer, or the file is cut off.
    """
    number = 0
    try:
        for batch in batches:
            require_different(batch.schema.names, rows)
            batch.validate()  # of lengths and numbers of buffers, without which there is no view
            for column in batch.columns:
                _layout(column).validate(full=True)
            for start in range(0, batch.num_rows, BATCH_ROWS):
                for row in rows_of_batch(batch.slice(start, BATCH_ROWS)):
                    number += 1
                    yield row
            del batch  # before the next one is read
    except ConfigError:
        raise
    except Exception as error:  # Arrow raises many, and names of columns may not be UTF-8
        raise ConfigError(
            f"{rows}: damaged Arrow after row {number} ({escaped(error)}); fetch or write it again"
        ) from None


def _layout(column: pa.Array) -> pa.Array:
    """Return a column with bytes in place of texts and numbers.

    So its validation says that every offset and index is right, and nothing about single values:
    a text that is not UTF-8 is an error of its row.
    """
    try:
        return column.view(_plain_type(column.type))
    except pa.ArrowException:  # of a type that cannot be seen as another
        return column


def _plain_type(kind: Any) -> Any:
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if kind in _BYTES_OF:
        return _BYTES_OF[kind]
    for is_kind, plain_kind in _NESTED:
        if is_kind(kind):
            return plain_kind(kind)
    is_number = pa.types.is_primitive(kind) or pa.types.is_decimal(kind)
    return pa.binary(kind.bit_width // 8) if is_number and kind.bit_width >= 8 else kind


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(_plain_type(field.type))


_NESTED: tuple[tuple[Callable[[Any], bool], Callable[[Any], Any]], ...] = (
    (pa.types.is_struct, lambda kind: pa.struct(map(_plain_field, kind))),
    (
        pa.types.is_union,
        lambda kind: pa.union(map(_plain_field, kind), kind.mode, kind.type_codes),
    ),
    (
        pa.types.is_map,
        lambda kind: pa.map_(_plain_field(kind.key_field), _plain_field(kind.item_field)),
    ),
    (
        pa.types.is_fixed_size_list,
        lambda kind: pa.list_(_plain_field(kind.value_field), kind.list_size),
    ),
    (pa.types.is_list, lambda kind: pa.list_(_plain_field(kind.value_field))),
    (pa.types.is_large_list, lambda kind: pa.large_list(_plain_field(kind.value_field))),
    (pa.types.is_list_view, lambda kind: pa.list_view(_plain_field(kind.value_field))),
    (pa.types.is_large_list_view, lambda kind: pa.large_list_view(_plain_field(kind.value_field))),
    (
        pa.types.is_dictionary,
        lambda kind: pa.dictionary(kind.index_type, _plain_type(kind.value_type), kind.ordered),
    ),
    (
        pa.types.is_run_end_encoded,
        lambda kind: pa.run_end_encoded(kind.run_end_type, _plain_type(kind.value_type)),
    ),
)
"""(test of a type that holds others, the same type with plain ones)."""


def _batches(file: Any) -> Iterator[Any]:
    if file.read(len(_FILE_MAGIC)) == _FILE_MAGIC:
        reader = pa.ipc.open_file(file)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        file.seek(0)
        yield from pa.ipc.open_stream(file)


_MAX_INTEGER = 1 << 63
_IMAGE_KEYS = ("image", "images", "img", "photo", "picture")
_MEDIA_AND_IDS = {*("id", "image_id"), *(key for keys in MEDIA_KEYS.values() for key in keys)}
_PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")


def plain_row(row: Any) -> Any:
    """Return a row as JSON values and bytes, or the `RowError` that says which of them is none."""
    try:
        return plain(row, "row")
    except RowError as error:
        return error
    except Exception as error:  # a value may be an object of any class, whose methods may raise
        return unreadable("row", error)


def plain(value: Any, name: str, depth: int = 0) -> Any:
    """Return a value as JSON values and bytes.

    Args:
        value: Any object.
        name: Its name in messages.
        depth: Lists and dicts around it.

    Raises:
        RowError: It is no such value, such as a set, or nested too deeply.
    """
    if value is None or type(value) is str or isinstance(value, bool):
        return value
    if depth > MAX_JSON_DEPTH:
        raise RowError(f"{name}: nested too deeply")
    if isinstance(value, dict | Mapping):
        return {_key(key, name): plain(item, str(key), depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, np.ndarray | np.generic):
        return plain(_listed(value, name), name, depth + 1)
    for kinds, convert in _CONVERTERS:
        if isinstance(value, kinds):
            return convert(value, name)
    pillow = sys.modules.get("PIL.Image")  # whoever has a picture has imported Pillow
    if pillow is not None and isinstance(value, pillow.Image):
        return _picture(value, name)
    if type(value).__name__ in ("NAType", "NaTType"):  # what pandas has for missing values
        return None
    raise RowError(f"{name}: a {type(value).__name__} is not a JSON value, bytes or picture")


def _listed(value: np.ndarray[Any, Any] | np.generic, name: str) -> Any:
    """Return an array as lists, or a number of NumPy as Python's. An image is not a list."""
    if isinstance(value, np.ndarray):
        key = name.partition("[")[0].lower()
        is_image = value.dtype == np.uint8 and value.ndim == 3 and value.shape[-1] in (1, 3, 4)
        if is_image or (key in _IMAGE_KEYS and value.ndim > 1 and value.dtype.kind in "uif"):
            raise RowError(
                f"{name}: a NumPy array of pixels; pass PIL.Image.fromarray(array), or the bytes "
                "of an image file"
            )
    return value.tolist()


def table_row(row: Any) -> Any:
    """Return a row of a table as JSON values and bytes, without nulls, or its `RowError`.

    A row that has nothing but media keeps the nulls of chats: it lost its text.
    """
    value = without_nulls(plain_row(row))
    if isinstance(value, dict) and value.keys() <= _MEDIA_AND_IDS:
        value |= dict.fromkeys(row.keys() & CHAT_KEYS)
    return value


def without_nulls(value: Any) -> Any:
    """Return a value of a table without the keys that are null.

    A table has every column in every row, so a null there says that the row lacks the key. In lists
    a null stays.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _key(key: Any, name: str) -> str:
    if not isinstance(key, str):
        raise RowError(f"{name}: the key {key!r} is not text")
    return str.__str__(key)


def _integer(value: int, name: str) -> int:
    if not -_MAX_INTEGER <= value < 2 * _MAX_INTEGER:
        raise RowError(f"{name}: an integer of more than 64 bits")
    return int(value)


def _picture(image: Any, name: str) -> dict[str, Any]:
    try:
        path = os.path.basename(os.fsdecode(getattr(image, "filename", "") or ""))  # noqa: PTH119
        return {"bytes": _original_bytes(image) or _png(image, name), "path": path or None}
    except RowError:
        raise
    except Exception as error:  # it is closed, has no pixels, or its file is damaged
        raise RowError(f"{name}: a picture that cannot be stored: {escaped(error)}") from None


def _png(image: Any, name: str) -> bytes:
    if image.mode not in _PNG_MODES:
        raise RowError(
            f"{name}: a picture in mode {image.mode}, which PNG cannot hold; convert it, or "
            "pass the bytes of its file"
        )
    buffer = io.BytesIO()
    exif = image.getexif()
    image.save(buffer, "PNG", **({"exif": exif} if exif else {}))
    return buffer.getvalue()


def _original_bytes(image: Any) -> bytes | None:
    """Return the bytes of a picture's file. None: it may be another picture than its first one."""
    file = getattr(image, "fp", None)
    if file is None or not getattr(image, "tile", None) or image.tell():
        return None
    try:
        position = file.tell()
        file.seek(0)
        data = file.read()
        file.seek(position)
    except (OSError, ValueError):
        return None
    return data if isinstance(data, bytes) else None


def _finite(value: float, _name: str) -> float | None:
    return float(value) if math.isfinite(value) else None


_CONVERTERS: tuple[tuple[Any, Callable[[Any, str], Any]], ...] = (
    (str, lambda value, _: str.__str__(value)),  # of a subclass, such as an enumeration's
    (int, _integer),
    (float, _finite),
    (bytes, lambda value, _: bytes(value)),
    ((bytearray, memoryview), lambda value, _: bytes(value)),
    (
        (datetime.datetime, datetime.date, datetime.time),
        lambda value, _: value.isoformat() if value == value else None,  # pandas has a NaT
    ),
    (datetime.timedelta, lambda value, _: value.total_seconds()),
    (decimal.Decimal, lambda value, name: _finite(float(value), name)),
    (uuid.UUID, lambda value, _: str(value)),
    (os.PathLike, lambda value, _: os.fspath(value)),
)


PARQUET_MAGIC = b"PAR1"

_DAMAGE = (pa.ArrowException, EOFError, OSError, UnicodeDecodeError)
"""What Arrow raises for damaged files, among them OSErrors without a number, and names of columns
that are not UTF-8."""

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
    column_names: tuple[str, ...]
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
                reader = _reader(handle)
                metadata, names = reader.metadata, reader.schema_arrow.names
            except _DAMAGE as error:
                _raise_of_storage(error)
                raise ConfigError(
                    f"{file.url}: damaged Parquet ({escaped(error)}); fetch or write it again"
                ) from None
            handle.seek(-8, io.SEEK_END)
            footer_size = int.from_bytes(handle.read(4), "little") + 8
            handle.seek(-min(footer_size, stat.size), io.SEEK_END)
            digest = hashlib.sha256(stat.size.to_bytes(8, "little") + handle.read(footer_size))
            require_different(names, file.url)
        sizes = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        return ParquetFile(
            *(store, file_name, file.name, stat, digest.hexdigest(), sizes, tuple(names)),
            file.split,
        )

    def rows(self, group: int, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Yield the rows of a row group, in order, with all columns or some."""
        return (row for batch in self.batches(group, columns) for row in rows_of_batch(batch))

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
class ParquetRange(RowRange):
    """The rows of one shard."""

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


def _rows_of_run(run: _Run) -> Iterator[tuple[int, Any]]:
    start, last = 0, int(run.offsets[-1])
    batches = run.file.batches(run.group)
    for batch in batches:
        stop = start + batch.num_rows
        first, end = np.searchsorted(run.offsets, [start, stop]).tolist()
        if first < end:
            wanted = run.offsets[first:end] - start
            # Slices cost nothing; `take` copies, and knows not all types of columns.
            for part in np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1):
                rows = rows_of_batch(batch.slice(int(part[0]), len(part)))
                yield from enumerate(rows, start + int(part[0]))
        start = stop
        if start > last:
            batches.close()  # type: ignore[attr-defined]
            return


def rows_of_batch(batch: Any) -> list[Any]:
    """Return the rows of an Arrow batch or table as JSON values and bytes, without nulls.

    A row with a value that Python cannot hold, such as a text that is not UTF-8, is a `RowError`.
    """
    try:
        return [table_row(row) for row in batch.to_pylist(maps_as_pydicts="strict")]
    except Exception as error:
        if batch.num_rows == 1:
            return [unreadable("row", error)]
    return [row for i in range(batch.num_rows) for row in rows_of_batch(batch.slice(i, 1))]


@dataclass(frozen=True)
class ParquetSource(RowSource):
    """Parquet files."""

    name: str
    files: tuple[ParquetFile, ...]
    limit: int | None = None
    splits: Mapping[str, range] = field(default_factory=dict)

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
        groups = list(self._groups())
        starts = np.array([first_index for _, _, first_index, _ in groups], np.int64)
        group_of_row = np.searchsorted(starts, index, side="right") - 1
        is_new = np.ones(len(index), bool)
        is_new[1:] = (np.diff(group_of_row) != 0) | (np.diff(index) <= 0)
        bounds = [*np.flatnonzero(is_new).tolist(), len(index)]
        runs = []
        for begin, end in pairwise(bounds):
            number = int(group_of_row[begin])
            runs.append(_Run(*groups[number], index[begin:end] - starts[number]))
        return ParquetRange(tuple(runs))

    def _groups(self) -> Iterator[tuple[ParquetFile, int, int, int]]:
        """Yield (file, group, index of its first row over all files and in its file) of each."""
        file_start = 0
        for file in self.files:
            firsts = accumulate(file.group_sizes, initial=0)
            for group, (size, first) in enumerate(zip(file.group_sizes, firsts, strict=False)):
                if size:
                    yield file, group, file_start + first, first
            file_start += file.num_rows

    def identities(self, field: str | None) -> Iterator[tuple[bytes, bool]]:
        """Yield the identity of every row (see `RowSource`).

        Only the columns of ids are read, where every row has one.
        """
        keys = ID_KEYS if field is None else (field, *ID_KEYS)
        groups = ((file, group) for file in self.files for group in range(len(file.group_sizes)))
        rows = (row for file, group in groups for row in _identified(file, group, keys))
        for row in islice(rows, self.num_rows):
            yield identity_of(None if isinstance(row, RowError) else row, field)


def _identified(file: ParquetFile, group: int, keys: Sequence[str]) -> Iterable[Any]:
    """Return what identifies each row of a group: its ids, or whole rows where one has none."""
    if columns := [key for key in keys if key in file.column_names]:
        rows = list(file.rows(group, columns))
        if all(isinstance(row, dict) and row for row in rows):
            return rows
    return file.rows(group)


def iter_parquet(file: ParquetFile) -> Iterator[NumberedRow]:
    """Yield (number, row) of every row of a file."""
    groups = range(len(file.group_sizes))
    return enumerate((row for group in groups for row in file.rows(group)), 1)


def named_splits(rows: Any) -> dict[str | None, Any]:
    """Return {split: rows}: those of a ``DatasetDict``, or all rows under None.

    Raises:
        ConfigError: `rows` is nothing that holds rows.
    """
    if isinstance(rows, Mapping):
        if rows and all(_is_dataset(item) for item in rows.values()):
            return {str(split): item for split, item in rows.items()}
        raise ConfigError("rows: a dict; pass an iterable of dicts, such as a list of them")
    has_items = isinstance(rows, Iterable) and getattr(rows, "ndim", 1) > 0  # arrays may be scalars
    if not (has_items or _is_dataset(rows) or hasattr(rows, "to_batches")):
        raise ConfigError(
            f"rows: of type {type(rows).__name__}; pass a path, a URL, or an iterable of dicts"
        )
    return {None: rows}


def _is_dataset(rows: Any) -> bool:
    return hasattr(rows, "with_format") and hasattr(rows, "iter")


def python_rows(rows: Any) -> Iterator[Any]:
    """Yield each row, with JSON values and bytes only.

    A data set of Hugging Face is read as it is stored: pictures and sounds are not decoded.
    """
    if _is_dataset(rows) and getattr(rows, "features", ()) is None:
        yield from map(table_row, rows.with_format(None))  # a stream: no two rows need be alike
    elif _is_dataset(rows):
        for table in rows.with_format("arrow").iter(BATCH_ROWS):
            yield from rows_of_batch(table)
    elif hasattr(rows, "to_batches"):  # a table of Arrow
        yield from rows_of_batches(rows.to_batches(), "rows")
    elif hasattr(rows, "iloc") and hasattr(rows, "to_dict"):  # a DataFrame of pandas
        names = list(rows.columns)
        require_different(names, "rows")
        for values in rows.itertuples(index=False, name=None):
            yield table_row(dict(zip(names, values, strict=True)))
    else:
        for row in rows:
            if hasattr(row, "to_pylist") and hasattr(row, "num_rows"):  # batches, tables of Arrow
                batches = row.to_batches() if hasattr(row, "to_batches") else [row]
                yield from rows_of_batches(batches, "rows")
            else:
                yield plain_row(row)
