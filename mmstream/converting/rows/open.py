"""Step 1 of a conversion: whatever holds the rows -> a `RowSource`.

ROWS -> plan -> formats -> media -> shard
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mmstream.converting.rows.lines import open_lines
from mmstream.converting.rows.source import RowSource

__all__ = ["open_rows"]


@contextmanager
def open_rows(rows: str) -> Iterator[RowSource]:
    """Open the rows. Temporary copies, if some are needed, are removed after the block.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigError: It has no rows, or its content is damaged or of an unknown kind.
        StorageError: A remote file could not be read, or it is a folder, a FIFO or a device.
    """
    with open_lines(rows) as source:
        yield source
