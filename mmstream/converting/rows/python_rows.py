"""Rows from Python: iterables of dicts, tables, data sets of Hugging Face -> numbered rows.

    mm.convert(rows=iterable) -> PYTHON ROWS -> spool

Nothing of `datasets` or `pandas` is imported: their objects are known by their methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mmstream.converting.rows.parquet import rows_of_batch
from mmstream.converting.rows.spool import NumberedRow
from mmstream.converting.rows.values import plain_row, without_nulls
from mmstream.errors import ConfigError

__all__ = ["iter_python_rows", "named_splits"]

BATCH_ROWS = 32
FRAME_ROWS = 1000


def named_splits(rows: Any) -> dict[str | None, Any]:
    """Return {split: rows}: those of a ``DatasetDict``, or all rows under None.

    Raises:
        ConfigError: `rows` is nothing that holds rows.
    """
    if isinstance(rows, Mapping):
        if rows and all(_is_dataset(item) for item in rows.values()):
            return {str(split): item for split, item in rows.items()}
        raise ConfigError("rows: a dict; pass an iterable of dicts, such as a list of them")
    if not (isinstance(rows, Iterable) or _is_dataset(rows) or hasattr(rows, "to_batches")):
        raise ConfigError(
            f"rows: of type {type(rows).__name__}; pass a path, a URL, or an iterable of dicts"
        )
    return {None: rows}


def _is_dataset(rows: Any) -> bool:
    return hasattr(rows, "with_format") and hasattr(rows, "iter")


def iter_python_rows(rows: Any) -> Iterator[NumberedRow]:
    """Yield (number, row) of each row, with JSON values and bytes only.

    A data set of Hugging Face is read as it is stored: pictures and sounds are not decoded.
    """
    yield from enumerate(_rows(rows), 1)


def _rows(rows: Any) -> Iterator[Any]:
    if _is_dataset(rows):
        for table in rows.with_format("arrow").iter(BATCH_ROWS):
            yield from rows_of_batch(table)
    elif hasattr(rows, "to_batches"):  # a table of Arrow
        for batch in rows.to_batches(max_chunksize=BATCH_ROWS):
            yield from rows_of_batch(batch)
    elif hasattr(rows, "iloc") and hasattr(rows, "to_dict"):  # a DataFrame of pandas
        for start in range(0, len(rows), FRAME_ROWS):
            for row in rows.iloc[start : start + FRAME_ROWS].to_dict("records"):
                yield without_nulls(plain_row(row))
    else:
        for row in rows:
            if hasattr(row, "to_pylist") and hasattr(row, "num_rows"):  # batches of Arrow
                yield from rows_of_batch(row)
            else:
                yield plain_row(row)
