"""Columns that the caller maps: some row must have them. A check before the first shard.

    rows -> COLUMNS -> plan

A misspelled name would otherwise lose a column of all rows in silence.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmstream.converting.rows.source import RowSource
from mmstream.errors import ConfigError, escaped

__all__ = ["require_columns"]

MAX_ROWS = 10_000
"""Rows that are looked through. Usually the first one has all columns."""
_MAX_NAMED = 20


def require_columns(source: RowSource, columns: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError if a mapped column is in none of the first 10,000 rows.

    A single row may lack it: an empty cell of a table is an absent key.

    Args:
        source: The rows.
        columns: Pairs (name that the formats know, name in the rows).
    """
    absent = {theirs: ours for ours, theirs in columns}
    first: tuple[int, list[str]] | None = None
    if not absent or not source.num_rows:
        return
    for row in source.select(range(min(source.num_rows, MAX_ROWS))).read():
        if isinstance(row.value, dict):
            first = first or (row.number, list(row.value))
            absent = {theirs: ours for theirs, ours in absent.items() if theirs not in row.value}
        if not absent:
            return
    if first is None:
        return  # each row is a reject that says why, or a sample already
    number, names = first
    shown = ", ".join(escaped(name, 60) for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED:,} others" if len(names) > _MAX_NAMED else ""
    of_first = f" of the first {MAX_ROWS:,}" if source.num_rows > MAX_ROWS else ""
    missing = ", ".join(f"{theirs} (as {ours})" for theirs, ours in absent.items())
    raise ConfigError(
        f"columns: no row{of_first} has the column {escaped(missing, 200)}; row {number:,} has "
        f"{shown}{more}"
    )
