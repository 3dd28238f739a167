"""What every source of rows gives: its number of rows, and the rows of a shard.

    a file, a table, a set of shards, an iterable -> ROW SOURCE -> plan -> row ranges -> formats

A `RowSource` is opened once, in the main process. Each job of a shard gets a `RowRange`, which can
be pickled and read in another process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from mmstream.types import IntArray

__all__ = ["Row", "RowRange", "RowSource"]


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


class RowRange(Protocol):
    """The rows of one shard. It can be pickled."""

    def __len__(self) -> int: ...

    def read(self) -> Iterator[Row]:
        """Yield the rows in order. One of them is in memory at a time.

        Raises:
            MMStreamError: The source changed since it was opened.
        """
        ...

    def detached(self) -> RowRange:
        """Return the same rows without temporary files of this machine.

        Rows of a temporary copy are read into memory. Files that the caller named are not.
        """
        ...


class RowSource(Protocol):
    """All rows of a conversion."""

    @property
    def name(self) -> str:
        """What the caller named: a file's base name, such as ``rows.jsonl``."""
        ...

    @property
    def sha256(self) -> str:
        """Checksum of the content of all rows. It goes into the plan."""
        ...

    @property
    def num_rows(self) -> int:
        """Number of rows, those that will be rejected included."""
        ...

    @property
    def splits(self) -> Mapping[str, range]:
        """{split: its rows} where the source has splits, such as the folders train and val.

        They cover all rows. Empty: it has none.
        """
        ...

    def select(self, rows: IntArray | range) -> RowRange:
        """Return rows by their 0-based indexes, in the given order."""
        ...

    def id_hashes(self, field: str | None = None) -> npt.NDArray[np.uint64]:
        """Return uint64 [num_rows]: the first 64 bits of the SHA-256 of every row's identity.

        A row's identity decides its split. It is the value of `field`, where the row has it; else
        its ``id``, else its ``image_id``, else its content. 5 and "5" are the same.

        Args:
            field: Key of a group, such as ``speaker``. None: every row is on its own.

        Raises:
            ConfigError: No row has the field.
        """
        ...
