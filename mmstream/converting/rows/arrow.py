"""Rows in Arrow's own files: streams, as Hugging Face's ``save_to_disk`` writes them, and Feather.

    Arrow -> ARROW -> spool

A stream has no list of its batches, so the rows are copied once. The file is mapped, and a batch of
any size is read some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from mmstream.converting.rows.parquet import BATCH_ROWS, rows_of_batch
from mmstream.converting.rows.spool import NumberedRow
from mmstream.errors import ConfigError, escaped

__all__ = ["is_arrow", "iter_arrow"]

_FILE_MAGIC = b"ARROW1"
_STREAM_MAGIC = b"\xff\xff\xff\xff"
"""How each message of a stream begins. Its length follows."""


def is_arrow(head: bytes) -> bool:
    """Tell by its beginning whether a file is one of Arrow."""
    return head.startswith((_FILE_MAGIC, _STREAM_MAGIC))


def iter_arrow(path: Path, rows: str) -> Iterator[NumberedRow]:
    """Yield (number, row) of every row of a file.

    Args:
        path: A local file.
        rows: How messages name it.

    Raises:
        ConfigError: The file is damaged or cut off.
    """
    number = 0
    try:
        with pa.memory_map(str(path)) as file:
            for batch in _batches(file):
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    for row in rows_of_batch(batch.slice(start, BATCH_ROWS)):
                        number += 1
                        yield number, row
    except (pa.ArrowException, EOFError, OSError) as error:
        raise ConfigError(
            f"{rows}: damaged Arrow behind row {number} ({escaped(error)}); fetch or write it again"
        ) from None


def _batches(file: Any) -> Iterator[Any]:
    if file.read(len(_FILE_MAGIC)) == _FILE_MAGIC:
        reader = pa.ipc.open_file(file)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        file.seek(0)
        yield from pa.ipc.open_stream(file)
