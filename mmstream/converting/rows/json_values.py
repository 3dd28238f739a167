"""JSON values that are no lines: an array of rows, or objects after each other over several lines.

    a JSON array, a pretty-printed stream -> JSON VALUES -> one line each

A block of the file is read at a time, and msgspec splits the items of an array that end in it, all
at once. Items that it does not take (NaN, very deep ones, those cut by the block) and the objects
of a stream end where their brackets do. So a file of any size takes the memory of a block and a
row. The file is not mapped: where another program shortens it, that would end the process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec

from mmstream.converting.rows.records import BOM, MAX_ROW_BYTES
from mmstream.decoding.fields import decode_json

_BLOCK = 1 << 20
_BLANK = b" \t\r\n"
_NOT_BLANK = re.compile(rb"[^ \t\r\n]")
_STRING_OR_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|[\[{\]},]', re.DOTALL)


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
        yield from _Splitter(file).values()


class _Splitter:
    """Splits a file at the ends of its values."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._data = b""
        """What was read and not yielded yet, from `_start` on."""
        self._start = 0
        self._line = 1
        """Of the file, where `_data` begins."""
        self._joint = b""
        """The last byte of an item, and how the file goes on."""
        self._is_fresh = False
        """True: `_take_many` was not tried since the last read."""

    def values(self) -> Iterator[bytes]:
        """Yield the bytes of each value, checked but for those that are nested too deeply."""
        mark = self._next_byte()
        is_array = mark == b"["
        self._start += is_array
        while self._next_byte():
            if is_array:
                yield from map(bytes, self._take_many())
            stop = self._end_of_value(is_array)
            if is_array and stop == len(self._data):
                break
            value = self._data[self._start : stop].rstrip(_BLANK)
            if value or mark != b"[":  # ``[]`` has no item
                self._require_json(value)
                yield value
            mark = self._data[stop : stop + 1]
            self._joint = value[-1:] + self._data[stop : stop + 8]
            self._start = stop + is_array
            if is_array and mark == b"]":
                if self._next_byte():
                    raise NotJSONError(f"{self._data[self._start :][:20]!r} follows the array")
                return
        if is_array:
            line = self._line + self._data.count(b"\n")
            raise NotJSONError(f"it is cut off, line {line}")

    def _next_byte(self) -> bytes:
        """Go to the next byte that is no white space and return it; empty at the file's end."""
        while (found := _NOT_BLANK.search(self._data, self._start)) is None:
            self._start = len(self._data)
            if not self._read_on():
                return b""
        self._start = found.start()
        return found[0]

    def _read_on(self) -> bool:
        """Read at least another block behind the value at hand. Tell whether there was any."""
        self._line += self._data.count(b"\n", 0, self._start)
        rest = self._data[self._start :]
        if len(rest) > MAX_ROW_BYTES:
            raise NotJSONError(f"a value of more than {MAX_ROW_BYTES} bytes, or a lost quote")
        block = self._file.read(max(_BLOCK, len(rest)))
        self._data, self._start, self._is_fresh = rest + block, 0, True
        return bool(block)

    def _take_many(self) -> list[msgspec.Raw]:
        """Return items up to the last place of the block that looks like the end of one.

        Such a place may lie inside an item or a string. Then this is no array of JSON, and no item
        is returned.
        """
        stop = self._data.rfind(self._joint, self._start) + 1
        if not self._joint or not self._is_fresh or stop <= self._start:
            return []
        self._is_fresh = False
        array = b"[%b]" % self._data[self._start : stop]
        try:
            items = msgspec.json.decode(array, type=list[msgspec.Raw])
        except (msgspec.DecodeError, RecursionError):
            return []
        self._start = stop + 1  # behind the comma
        self._next_byte()
        return items

    def _end_of_value(self, is_array: bool) -> int:
        """Return where the value at hand ends in `_data`: at its end, where the file is cut off.

        It is sought by brackets outside of strings. In an array, a comma or bracket stands there.
        """
        while True:
            depth = 0
            for found in _STRING_OR_MARK.finditer(self._data, self._start):
                mark = found[0]
                depth += (mark in b"[{") - (mark in b"]}")
                if is_array and (depth < 0 or (depth == 0 and mark == b",")):
                    return found.start()
                if not is_array and depth == 0 and mark in b"]}":
                    return found.end()
            if not self._read_on():
                return len(self._data)

    def _require_json(self, value: bytes) -> None:
        """Raise a NotJSONError that names the line, if the value at `_start` is no JSON."""
        try:
            decode_json(value, msgspec.Raw)
        except msgspec.DecodeError as error:
            position = str(error).rpartition("(byte ")[2].removesuffix(")")
            behind = self._start + (int(position) if position.isdigit() else len(value))
            line = self._line + self._data.count(b"\n", 0, behind)
            raise NotJSONError(f"{error}, line {line}") from None
        except RecursionError:
            pass  # the row will be rejected, and no other
