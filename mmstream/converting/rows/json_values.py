"""JSON values that are no lines: an array of rows, or objects after each other over several lines.

    a JSON array, a pretty-printed stream -> JSON VALUES -> one line each

The file is read a block at a time, and so is each step of it: quotes, brackets outside of strings,
how deep they are. So a file of any size takes the memory of one block and one row.

Worked example: ``[{"a": ","}, 2]`` has brackets and commas outside of strings at 0, 1, 10, 11, 14.
Behind them the depth is 1, 2, 1, 1, 0. The comma at 11 and the bracket at 14 are those at the depth
of the array, so the items are bytes [1, 11) and [12, 14).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from mmstream.converting.rows.json_text import decode_json
from mmstream.converting.rows.records import BOM, MAX_ROW_BYTES
from mmstream.types import IntArray

__all__ = ["NotJSONError", "iter_values", "write_lines"]

_BLOCK = 256 << 10
"""The arrays of positions in a block take ten times its memory."""
_BLANK = b" \t\r\n"

_STEP = np.zeros(256, np.int8)
"""How a byte changes the depth."""
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1
_IS_MARK = _STEP != 0
_IS_MARK[ord(",")] = True


class NotJSONError(ValueError):
    """The file is no JSON array, or no stream of JSON objects. The message names the line."""


def write_lines(path: Path, target: Path, limit: int | None) -> Path:
    """Write each value of a JSON array or stream as one line. Return `target`.

    Raises:
        NotJSONError: The file is damaged, up to the last value that is asked for.
    """
    with target.open("wb") as file:
        for value in islice(iter_values(path), limit):
            # A line end is white space in JSON: inside a string it would not have parsed.
            file.write(value.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n")
    return target


def iter_values(path: Path) -> Iterator[bytes]:
    """Yield the bytes of each item of a JSON array, or of each object of a stream.

    Raises:
        NotJSONError: As it is reached.
    """
    with path.open("rb") as file:
        if file.read(len(BOM)) != BOM:
            file.seek(0)
        for line, value in _Splitter(file).values():
            try:
                decode_json(value, msgspec.Raw)
            except msgspec.DecodeError as error:
                raise NotJSONError(f"{error}, line {line + _line_in(error, value)}") from None
            except RecursionError:
                pass  # the row will be rejected, and no other
            yield value


def _line_in(error: Exception, value: bytes) -> int:
    """Return how many lines behind the beginning of a value its error lies."""
    words = str(error).rpartition("(byte ")[2].removesuffix(")")
    return value.count(b"\n", 0, int(words)) if words.isdigit() else value.count(b"\n")


class _Splitter:
    """Splits a file at the ends of its values."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._depth = 0
        self._in_string = False
        self._num_backslashes = 0
        """At the end of the last block."""
        self._line = 1
        """Of the file, where the next value begins."""

    def values(self) -> Iterator[tuple[int, bytes]]:
        """Yield (line of the file, bytes) of each value, as it was read and not checked."""
        pieces: list[bytes] = []
        num_bytes = num_values = 0
        base: int | None = None
        """Depth of the values: 1 in an array, 0 in a stream. None: not known yet."""
        while block := self._file.read(_BLOCK):
            start = 0
            positions, depths = self._marks(block)
            if base is None and len(positions):
                base = 1 if block[positions[0]] == ord("[") else 0
                if base:  # the bracket of the array is not part of its first item
                    self._line += block.count(b"\n", 0, int(positions[0]))
                    pieces, start = [], int(positions[0]) + 1
                    positions, depths = positions[1:], depths[1:]
            for stop, is_last in _ends(block, positions, depths, base):
                pieces.append(block[start:stop])
                line, value = self._trimmed(b"".join(pieces))
                pieces, num_bytes = [], 0
                start = stop + base if base is not None else stop
                if value or not is_last or num_values:  # ``[]`` has no item
                    num_values += 1
                    yield line, value
                if is_last:
                    self._require_end(block[start:])
                    return
            pieces.append(block[start:])
            num_bytes += len(block) - start
            if num_bytes > MAX_ROW_BYTES:
                raise NotJSONError(f"a value of more than {MAX_ROW_BYTES} bytes, or a lost quote")
        rest = b"".join(pieces)
        line, value = self._trimmed(rest)
        if base == 1:
            raise NotJSONError(f"it is cut off, line {self._line}")
        if value:  # cut off, or no object: it does not parse, and the error names it
            yield line, value

    def _require_end(self, rest: bytes) -> None:
        while rest:
            if rest.strip(_BLANK):
                raise NotJSONError(f"{rest.strip(_BLANK)[:20]!r} follows the array")
            rest = self._file.read(_BLOCK)

    def _trimmed(self, value: bytes) -> tuple[int, bytes]:
        """Return a value without white space around it, and the line where it begins."""
        trimmed = value.lstrip(_BLANK)
        line = self._line + value.count(b"\n", 0, len(value) - len(trimmed))
        self._line += value.count(b"\n")
        return line, trimmed.rstrip(_BLANK)

    def _marks(self, block: bytes) -> tuple[IntArray, IntArray]:
        """Return where brackets and commas outside of strings lie, and the depths behind them."""
        data = np.frombuffer(block, np.uint8)
        quotes = self._quotes(data)
        positions = np.flatnonzero(_IS_MARK[data])
        num_before = np.searchsorted(quotes, positions) + self._in_string
        positions = positions[num_before % 2 == 0]
        depths = np.cumsum(_STEP[data[positions]], dtype=np.int64) + self._depth
        self._in_string = bool((len(quotes) + self._in_string) % 2)
        self._depth = int(depths[-1]) if len(depths) else self._depth
        return positions, depths

    def _quotes(self, data: npt.NDArray[np.uint8]) -> IntArray:
        """Return where quotes lie that begin or end a string. An odd run of backslashes escapes."""
        quotes = np.flatnonzero(data == ord('"'))
        others = np.flatnonzero(data != ord("\\"))
        before = self._num_backslashes
        last = int(others[-1]) if len(others) else -1 - before
        self._num_backslashes = len(data) - 1 - last
        if len(others) == len(data) and not before:
            return quotes
        # The last byte before each quote that is no backslash; in front of the block, -1 - before.
        rank = np.searchsorted(others, quotes) - 1
        previous = np.where(rank >= 0, others[np.maximum(rank, 0)], -1 - before)
        is_free: npt.NDArray[np.bool_] = (quotes - 1 - previous) % 2 == 0
        return quotes[is_free]


def _ends(
    block: bytes, positions: IntArray, depths: IntArray, base: int | None
) -> Iterator[tuple[int, bool]]:
    """Yield (where a value ends, whether its array ends there) for each value of a block."""
    if base is None:
        return
    ending = positions[depths == base], depths[depths == base]
    if base == 1:
        is_end = depths <= 1
        ending = positions[is_end], depths[is_end]
    for position, depth in zip(*(column.tolist() for column in ending), strict=True):
        mark = block[position]
        if base == 0 and mark != ord(","):
            yield position + 1, False
        elif base == 1 and mark == ord(",") and depth == 1:
            yield position, False
        elif base == 1 and depth <= 0:
            yield position, True
            return
