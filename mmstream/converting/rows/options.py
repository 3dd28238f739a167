"""How rows are read: the options that the files of this package need."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmstream.converting.rows.detect import RowKind

__all__ = ["RowOptions"]


@dataclass(frozen=True)
class RowOptions:
    """How rows are read. `RowReading` has checked what the caller says."""

    rows_as: RowKind | None = None
    """What the rows lie in. None: their content says it."""
    limit: int | None = None
    """Only the first so many rows."""
    group_spans: bool = False
    """Consecutive rows about the same medium are one row, with the key "segments"."""
    run_length: int = 5000
    """Rows that are read together: those of a shard, or 1 where they are shuffled."""
    media_keys: tuple[str, ...] = field(default=(), compare=False)
    """Keys that name the medium of a row, for `group_spans`, before the usual ones."""
