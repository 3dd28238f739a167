"""How rows are read: the options that the files of this package need."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmstream.converting.rows.detect import ROW_KINDS, RowKind
from mmstream.errors import ConfigError
from mmstream.wrong_arguments import refuse_bools

__all__ = ["RowOptions"]


@dataclass(frozen=True)
class RowOptions:
    """How rows are read. Impossible options raise ConfigError."""

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

    def __post_init__(self) -> None:
        refuse_bools(limit=self.limit)
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit={self.limit}: must be 1 or more")
        if self.rows_as is not None and self.rows_as not in ROW_KINDS:
            raise ConfigError(f"rows_as={self.rows_as!r}: must be one of {', '.join(ROW_KINDS)}")
