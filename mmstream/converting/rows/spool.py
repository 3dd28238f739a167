"""The spool: rows that have no lines of their own, in one temporary file.

    csv, COCO, a folder, an iterable, grouped rows -> SPOOL -> records.py

A record is MessagePack: the row's number in its file, its value, and the reason why it has none.
MessagePack is JSON with bytes. So a row may hold the bytes of a picture.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from mmstream.converting.draft import RowError
from mmstream.errors import escaped

__all__ = ["NumberedRow", "read_spooled", "write_spool"]

NumberedRow = tuple[int, Any]
"""(number of the row in its file from 1, its value or a `RowError`)."""


class _Spooled(msgspec.Struct, array_like=True):
    number: int
    value: Any
    reason: str | None


def write_spool(
    rows: Iterable[NumberedRow], path: Path, offsets: BinaryIO, limit: int | None = None
) -> tuple[int, str]:
    """Write rows to a new file, and their offsets. Return their number and their checksum.

    Args:
        rows: JSON values that may also hold bytes. One of them is in memory at a time.
        path: The new file.
        offsets: Where int64 [num_rows + 1] byte offsets are written.
        limit: Most rows. No more are taken from `rows`.
    """
    digest = hashlib.sha256()
    position = num_rows = 0
    encoder = msgspec.msgpack.Encoder()
    with path.open("wb") as file:
        np.array([0], np.int64).tofile(offsets)
        for number, value in islice(rows, limit):
            try:
                record = encoder.encode(_spooled(number, value))
            except UnicodeEncodeError as error:
                reason = f"{escaped(error.object, 80)}: text that is no Unicode: {error.reason}"
                record = encoder.encode(_Spooled(number, None, reason))
            digest.update(record)
            file.write(record)
            position += len(record)
            num_rows += 1
            offsets.write(position.to_bytes(8, sys.byteorder))
    return num_rows, digest.hexdigest()


def _spooled(number: int, value: Any) -> _Spooled:
    if isinstance(value, RowError):
        return _Spooled(number, None, str(value))
    return _Spooled(number, value, None)


def read_spooled(record: bytes) -> NumberedRow:
    """Return the row of one record."""
    spooled = msgspec.msgpack.decode(record, type=_Spooled)
    if spooled.reason is not None:
        return spooled.number, RowError(spooled.reason)
    return spooled.number, spooled.value
