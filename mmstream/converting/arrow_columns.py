"""Lists of Python values -> columns of Arrow, for sidecars.

``pyarrow.array`` does the same. But it imports pandas first, wherever that is installed, to ask
whether a list is one of its series. That takes longer than a small conversion needs in all.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["arrow_column"]

_NUMBERS = {pa.int32(): "i", pa.int64(): "q", pa.float64(): "d"}
"""{type of Arrow: its letter in Python's ``array``, which refuses what does not fit}."""


def arrow_column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return values as a column of Arrow.

    Args:
        values: None is null. A struct is a dict; a key that is missing is null.
        kind: int32, int64, float64, string, binary of a fixed length, or lists and structs of them.

    Raises:
        TypeError, ValueError, OverflowError, AttributeError: A value does not fit.

    Examples:
        >>> arrow_column(["a", None, "bc"], pa.string()).to_pylist()
        ['a', None, 'bc']
    """
    num_nulls = values.count(None)
    if num_nulls == len(values):
        return pa.nulls(num_nulls, kind)
    validity = _validity(values) if num_nulls else None
    buffers, children = _content(values, kind, num_nulls > 0)
    return pa.Array.from_buffers(kind, len(values), [validity, *buffers], num_nulls, 0, children)


def _content(
    values: Sequence[Any], kind: pa.DataType, has_nulls: bool
) -> tuple[list[pa.Buffer], list[pa.Array] | None]:
    """Return the buffers of a column, and the columns below it."""

    def filled(blank: Any) -> Sequence[Any]:
        return [blank if value is None else value for value in values] if has_nulls else values

    if pa.types.is_struct(kind):
        dicts = filled({})
        return [], [arrow_column([item.get(f.name) for item in dicts], f.type) for f in kind]
    if pa.types.is_list(kind):
        lists = filled(())
        items = list(chain.from_iterable(lists))
        return [_offsets(lists)], [arrow_column(items, kind.value_type)]
    if pa.types.is_string(kind):
        texts = filled("")
        joined = "".join(texts)
        sized = texts if joined.isascii() else [text.encode() for text in texts]
        return [_offsets(sized), pa.py_buffer(joined.encode())], None
    if pa.types.is_fixed_size_binary(kind):
        pieces = filled(bytes(kind.byte_width))
        if set(map(len, pieces)) != {kind.byte_width}:
            raise ValueError(f"not all values have {kind.byte_width} bytes")
        return [pa.py_buffer(b"".join(pieces))], None
    return [pa.py_buffer(array(_NUMBERS[kind], filled(0)))], None


def _offsets(items: Sequence[Sequence[Any]]) -> pa.Buffer:
    """Return where each item begins, and where the last one ends: int32 [n + 1]."""
    offsets = np.zeros(len(items) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, items), np.int64, len(items)), out=offsets[1:])
    if offsets[-1] >= 1 << 31:
        raise OverflowError(f"{offsets[-1]} bytes or items in {len(items)} values of a column")
    return pa.py_buffer(offsets.astype(np.int32))


def _validity(values: Sequence[Any]) -> pa.Buffer:
    """Return a bit for each value, from the lowest: whether it is there."""
    return pa.py_buffer(np.packbits([value is not None for value in values], bitorder="little"))
