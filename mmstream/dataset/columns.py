"""The columns of a shard: what is known of each stored sample without its bytes.

    sidecar of a shard -> `read_columns` -> conditions on samples

A sidecar is a Parquet file, ``shard-000000.parquet``, with a row for each sample of the shard and
for each row that became none. `convert` writes it beside the shard, and ``mmstream index
--columns`` beside the index of any tar. Without a word about where it is from, a column is of the
sidecar. The scalars of a sample's ``json`` are columns too.

It imports pyarrow. What every worker loads imports this module where it reads columns.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mmstream.dataset.index import index_checksum
from mmstream.errors import ConfigError, ShardError, StorageError, escaped
from mmstream.storage import Store
from mmstream.storage.store import ObjectFile
from mmstream.types import IntArray

MAX_BUFFERED_BYTES = 16 << 20
"""A sidecar up to this size is read with one request."""

MAX_ROWS = 1 << 24
"""Most samples and rejects of a shard."""

INDEX_CHECKSUM = b"mmstream.index.crc32c"
"""Metadata of a sidecar that was made from a tar: which index the tar had."""

_OF_SAMPLE = (
    *("key", "shard", "index", "status", "error_message", "file", "row", "split", "id", "url"),
    *("license", "caption", "width", "height", "original_width", "original_height", "sha256"),
    *("num_bytes", "num_text_bytes", "json"),
)
"""Columns of a sidecar. `width` and `height` are as the picture is shown, after EXIF."""

_OF_MEDIUM = (
    *("kind", "rotation", "duration_s", "fps", "num_frames", "sample_rate", "num_channels"),
    "codec",
)
"""Columns of the first medium of a sample."""

_MADE = {"aspect": ("width", "height"), "num_media": ("media.list.element.kind",)}
"""Columns that are made of others."""

_NAMES = (*_OF_SAMPLE, *_OF_MEDIUM, *_MADE)

_ALWAYS = ("key", "status", "shard", "index", "file", "row")
"""Columns that tell a sidecar from a table of another program."""


_OWN = ("status", "shard", "index")
"""Columns that are always read."""


def sidecar_name(shard: str) -> str:
    """Return the name of a shard's sidecar: ``shard-000000.tar`` -> ``shard-000000.parquet``."""
    return f"{shard.removesuffix('.tar')}.parquet"


def is_sidecar(columns: Iterable[str]) -> bool:
    """Tell whether a table with these columns is a sidecar, and not one of another program."""
    return set(_ALWAYS) <= set(columns)


def open_sidecar(store: Store, shard: str) -> pq.ParquetFile:
    """Open the sidecar of a shard, to read columns of it.

    A large one is read in ranges, a small one whole.

    Raises:
        FileNotFoundError: There is none.
        ShardError: It has too many rows.
        StorageError: The storage failed after retries.
        pyarrow.ArrowException, OSError: It is damaged.
    """
    name = sidecar_name(shard)
    stat = store.stat(name)
    if stat.size <= MAX_BUFFERED_BYTES:
        parquet = pq.ParquetFile(pa.BufferReader(store.read(name)))
    else:
        parquet = pq.ParquetFile(pa.PythonFile(ObjectFile(store, name, stat), mode="r"))
    if parquet.metadata.num_rows > MAX_ROWS:
        raise ShardError(f"{store.url_of(name)}: more than {MAX_ROWS:,} rows")
    return parquet


def read_sidecar(dataset: Any, shard: int, columns: Iterable[str] | None = None) -> pa.Table:
    """Return columns of a shard's sidecar. It lies beside the index, or else beside the tar.

    Args:
        dataset: The dataset.
        shard: Position of the shard.
        columns: Their names in Parquet. Those that an old sidecar lacks are left out. Default: all.

    Returns:
        One row for each stored sample, in their order. NULLs where the sidecar lacks a sample.

    Raises:
        FileNotFoundError: There is none.
        ConfigError: Another program's table has its name.
        ShardError: It is damaged, or of another shard.
        StorageError: The storage failed after retries.
    """
    table, count = read_rows(dataset, shard, columns), int(dataset.counts[shard])
    if np.array_equal(table["index"], np.arange(count)):  # as a conversion without rejects wrote it
        return table
    rows = np.full(count, -1)  # of each sample, or none
    rows[table["index"].drop_null().to_numpy()] = np.flatnonzero(
        table["index"].is_valid().to_numpy()
    )
    return table.take(pa.array(rows, mask=rows < 0))


def read_rows(dataset: Any, shard: int, columns: Iterable[str] | None = None) -> pa.Table:
    """Return columns of a sidecar as they stand there, and ``status``, ``shard``, ``index``.

    The arguments and errors are those of `read_sidecar`.
    Rows that became no sample have no ``index``. The others have one of the shard, each once.
    """
    dataset, shard = dataset.own(shard)
    name, wanted = dataset.name_of(shard), None if columns is None else [*columns, *_OWN]
    for store in dict.fromkeys((dataset.index_store, dataset.store)):
        url = store.url_of(sidecar_name(name))
        try:
            parquet = open_sidecar(store, name)
            if not is_sidecar(parquet.schema_arrow.names):
                raise ConfigError(
                    f"{url}: a table of another program, which stays as it is; write columns "
                    f"elsewhere: {_command(dataset, 'FOLDER')}"
                )
            table = parquet.read(columns=wanted, use_threads=False)
            metadata = parquet.metadata.metadata or {}
            _require_own(dataset, shard, table, metadata.get(INDEX_CHECKSUM))
        except FileNotFoundError:
            continue
        except StorageError:
            raise
        except (pa.ArrowException, OSError, ShardError, TypeError, KeyError) as error:
            raise ShardError(
                f"{url}: damaged or of another shard ({error}); run {_command(dataset)}"
            ) from error
        return table
    raise FileNotFoundError(f"{dataset.index_store.url_of(sidecar_name(name))}: no such sidecar")


def _require_own(dataset: Any, shard: int, table: pa.Table, checksum: bytes | None) -> None:
    """Raise a ShardError where a sidecar does not fit its shard."""
    name, count = dataset.name_of(shard), int(dataset.counts[shard])
    if checksum is not None:
        offsets = dataset.shards.offsets(shard)
        if checksum != b"%08x" % index_checksum(name, offsets):
            raise ShardError("it was made of a tar with another index")
    if not pa.types.is_integer(table["index"].type):
        raise ShardError(f"its column index is of type {table['index'].type}")
    others = set(pc.unique(table["shard"]).to_pylist()) - {name}
    if others:
        raise ShardError(f"it names {escaped(min(map(str, others)))}")
    index = table["index"].drop_null().to_numpy()
    if index.size and not 0 <= index.min() <= index.max() < count:
        raise ShardError(f"it has sample {index.max()}, the shard {count} samples")
    if index.size and np.bincount(index).max() > 1:
        raise ShardError("a sample has several rows")


def read_columns(
    dataset: Any, shard: int, names: Sequence[str]
) -> dict[str, pa.Array | pa.ChunkedArray]:
    """Return columns of a shard, with a value or NULL for each stored sample, in their order.

    Args:
        dataset: The dataset.
        shard: Position of the shard.
        names: Columns of the sidecar; ``kind``, ``duration_s``, ``fps``, ``num_frames``,
            ``rotation``, ``sample_rate``, ``num_channels``, ``codec`` of the first medium;
            ``aspect``, its width by its height as shown; ``num_media``; ``json.KEY``. Any other
            name is a key of the ``json``.

    Returns:
        {name: text, int64, float64 or bool}. A key that no sample of the shard has is all NULL, of
        Arrow's type null. Of shard 0, a name without ``json.`` must be known.

    Raises:
        ConfigError: The shard has no sidecar, or one without this column; no column has a name;
            or the values of a key differ in type.
        ShardError: The sidecar is damaged, or of another shard.
        StorageError: The storage failed after retries.
    """
    sources = {name: _sources(name) for name in names}
    table = _read(dataset, shard, {source for group in sources.values() for source in group})
    shard_name = dataset.name_of(shard)
    first: Any = cache(partial(_first_media, table))
    has_keys = not all(name in _NAMES for name in names)
    contents = _contents(table, shard_name) if has_keys else []
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    for name in names:
        if name in _NAMES:
            try:
                columns[name] = _column(table, first, name)
            except (pa.ArrowException, AttributeError) as error:
                raise ShardError(
                    f"{shard_name}: the column {name} of its sidecar has another type ({error})"
                ) from error
            continue
        key = name.removeprefix("json.")
        values = [content.get(key) for content in contents]
        if shard == 0 and key == name and values.count(None) == len(values):
            _require_known(dataset, name)
        columns[name] = _typed(values, f"{shard_name}: json.{escaped(key)}")
    return columns


def read_media(dataset: Any, shard: int) -> tuple[IntArray, npt.NDArray[np.uint64]]:
    """Return how many media each stored sample has, int64 [samples], and the hashes of all.

    Raises:
        ConfigError, ShardError, StorageError: As `read_columns`.
    """
    media = _read(dataset, shard, ["media.list.element.xxh3"])["media"]
    try:
        num_media = pc.list_value_length(media).fill_null(0).to_numpy().astype(np.int64)
        hashes = pc.struct_field(pc.list_flatten(media), "xxh3").cast(pa.binary(16)).to_pylist()
        return num_media, np.frombuffer(b"".join(hashes), "<u8")[::2].astype(np.uint64)
    except (pa.ArrowException, TypeError) as error:
        name = sidecar_name(dataset.name_of(shard))
        raise ShardError(f"{name}: the hashes of its media are damaged ({error})") from error


def column_names(dataset: Any) -> list[str]:
    """Return the names of columns, those of ``json`` as the first, a middle and the last shard say.

    Raises:
        ConfigError, ShardError, StorageError: As `read_columns`.
    """
    shards = {0, dataset.num_shards // 2, dataset.num_shards - 1} if dataset.num_shards else ()
    keys: set[str] = set()
    for shard in shards:
        keys.update(*_contents(_read(dataset, shard, ["json"]), dataset.name_of(shard)))
    return [*_NAMES, *(f"json.{key}" for key in sorted(keys))]


def _read(dataset: Any, shard: int, columns: Collection[str]) -> pa.Table:
    """Return columns of a sidecar, all of them."""
    dataset, shard = dataset.own(shard)
    try:
        table = read_sidecar(dataset, shard, columns)
    except FileNotFoundError as error:
        raise ConfigError(f"{error}; run {_command(dataset)}") from None
    missing = {name.partition(".")[0] for name in columns} - set(table.column_names)
    if missing:
        url = dataset.index_store.url_of(sidecar_name(dataset.name_of(shard)))
        raise ConfigError(
            f"{url}: has no column {min(missing)}, since an older version wrote it; run "
            f"{_command(dataset)}"
        )
    return table


def _sources(name: str) -> tuple[str, ...]:
    """Return the columns of Parquet that a column is made of."""
    if name in _OF_MEDIUM:
        return (f"media.list.element.{name}",)
    return _MADE.get(name, (name if name in _OF_SAMPLE else "json",))


def _contents(table: pa.Table, shard: str) -> list[dict[str, Any]]:
    """Return the scalars of each ``json``."""
    decode = msgspec.json.Decoder(dict[str, str | int | float | bool]).decode
    try:
        return [decode(text) if text else {} for text in table["json"].to_pylist()]
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise ShardError(f"{sidecar_name(shard)}: its column json is damaged ({error})") from None


def _column(
    table: pa.Table, first_media: Callable[[], pa.StructArray], name: str
) -> pa.Array | pa.ChunkedArray:
    """Return a column that is not a key of the ``json``."""
    if name == "aspect":
        width, height = (table[side].cast(pa.float64()) for side in _MADE[name])
        return pc.divide(width, pc.if_else(pc.greater(height, 0.0), height, None))
    if name in _OF_MEDIUM:
        column = pc.struct_field(first_media(), name)
    else:
        column = table[name] if name in _OF_SAMPLE else pc.list_value_length(table["media"])
    return column.cast(pa.int64()) if pa.types.is_integer(column.type) else column


def _first_media(table: pa.Table) -> pa.StructArray:
    """Return the first medium of each sample, or NULL."""
    media = pa.chunked_array(table["media"].chunks, table["media"].type).combine_chunks()
    has_one = pc.fill_null(pc.greater(pc.list_value_length(media), 0), False)
    return media.values.take(pc.if_else(has_one, media.offsets[:-1], None))


def _typed(values: list[Any], name: str) -> pa.Array:
    """Return the values of a key as a column of one type."""
    types = set(map(type, values))
    if len({_TYPES[kind] for kind in types & _TYPES.keys()}) > 1:
        counts = Counter(_TYPES[type(value)] for value in values if value is not None)
        kinds = " and ".join(f"{kind} in {number:,}" for kind, number in counts.most_common())
        raise ConfigError(
            f"{name} is {kinds} of {len(values):,} samples; columns have one type: convert the "
            "rows again with one, or choose by a function"
        )
    if float in types:
        values = [value if value is None else float(value) for value in values]
    try:
        return pa.array(values)
    except OverflowError as error:
        raise ShardError(f"{name}: beyond 64 bits ({error}); write the sidecar again") from None


_TYPES = {str: "text", int: "a number", float: "a number", bool: "true or false"}


def without_point(value: Any) -> Any:
    """Return a whole number of 64 bits as an int: one table has 3 where another one has 3.0.

    Examples:
        >>> [without_point(value) for value in (3, 3.0, 2.5, "3.0", None)]
        [3, 3, 2.5, '3.0', None]
    """
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1 << 63
    return int(value) if is_whole else value


def _require_known(dataset: Any, name: str) -> None:
    """Raise a ConfigError for a name that no column has, as far as some shards tell."""
    names = sorted(column_names(dataset), key=lambda known: not known.startswith("json."))
    if f"json.{name}" not in names:
        short_names = {known.removeprefix("json."): known for known in reversed(names)}
        nearest = [short_names[match] for match in get_close_matches(name, short_names)]
        raise ConfigError(
            f"{escaped(name)}: no such column; {'the nearest is' if nearest else 'there are'} "
            f"{escaped(', '.join(nearest or names))}. A text stands in quotes. If only some shards "
            f"have samples with this key, name it json.{escaped(name)}"
        )


def _command(dataset: Any, folder: str | None = None) -> str:
    """Return the command that writes the sidecars of a dataset."""
    tars, output = dataset.store.url, dataset.index_store.url
    if output == tars:
        output = folder or ""
    words = ["mmstream", "index", tars, "--columns", *(["--output", output] if output else [])]
    return f"`{shlex.join(words)}`"
