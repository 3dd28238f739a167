"""The value of a field that is read by ranges, where a decoder needs a small part of a large file.

Readers make such values, decoders read them. The bytes are in a shard, in a folder or
in an object store. `reading.fetcher` says how they come from there.

How much is read:

- A read that nobody has announced fetches at least 64 KiB. Reads that follow one another fetch more
  and more ahead, up to a quarter of what they have read so far. So what is fetched and not used is
  at most a quarter of what is used, and 64 KiB for each place that is read from.
- Ranges that `LazyBytes.expect` announces are fetched exactly, in long pieces that travel side by
  side. A decoder that knows where its frames lie announces them.
- The first 8 MiB stay in memory until `LazyBytes.clear`: a container is opened more than once, and
  reads its header and its index first. What comes later is held until `LazyBytes.forget`, and at
  most 64 MiB of it.
"""

from __future__ import annotations

import io
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from crc32c import crc32c

ReadRanges: TypeAlias = Callable[[Sequence[tuple[int, int]]], list[bytes]]
"""Returns exactly the bytes of each range [start, stop), which are requested side by side."""

MIN_FETCH_BYTES = 64 << 10
"""Bytes that an unannounced read fetches at least."""

MAX_FETCH_BYTES = 8 << 20
"""Longest piece that is fetched at once."""

MAX_AHEAD_BYTES = 32 << 20
"""Bytes that are fetched together."""

KEPT_BYTES = 8 << 20
"""Bytes that stay in memory as long as the value. Those that are read first: header and index."""

MAX_HELD_BYTES = 64 << 20
"""Most bytes that an open file holds beside them."""

AHEAD_SHARE = 4
"""Reads in a row fetch a quarter of what they have read so far ahead."""


class _Piece(NamedTuple):
    start: int
    data: bytes

    @property
    def stop(self) -> int:
        return self.start + len(self.data)


class _Cache:
    """Ranges of one file that were fetched. Values of the same file share it.

    Attributes:
        wait_s: seconds that were spent on fetching so far.
        checksums: CRC-32C of each range that was fetched, in order.
    """

    def __init__(self, size: int, read_ranges: ReadRanges, head: bytes) -> None:
        self.size = size
        self.wait_s = 0.0
        self.checksums: list[tuple[int, int, int]] = []
        self._read_ranges = read_ranges
        self._pieces: list[_Piece] = []  # by start
        self._kept_bytes = 0
        self._passing: list[_Piece] = []  # those that are not kept, the oldest first
        self._expected: list[tuple[int, int]] = []  # by start, disjoint
        self._run_start = self._run_stop = -1  # bytes that were fetched in a row
        if head:
            self._hold(0, head)

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop), all of them inside the file."""
        data = self.read_some(start, stop)
        if len(data) == stop - start:
            return data
        file = io.BytesIO()  # `getvalue` does not copy, unlike a join of pieces
        while data:
            file.write(data)
            start += len(data)
            self._drop([piece for piece in self._passing if piece.stop <= start])
            data = self.read_some(start, stop) if start < stop else b""
        return file.getvalue()

    def read_some(self, start: int, stop: int) -> bytes:
        """Return bytes from `start` on: at least one, at most up to `stop`."""
        piece = self._piece_at(start)
        if piece is None:
            self._fetch(start, stop)
            piece = self._piece_at(start)
            assert piece is not None
        first = start - piece.start
        return piece.data[first : first + stop - start]

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Announce ranges that will be read. They take the place of those announced before."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            start, stop = max(0, start), min(self.size, stop)
            if stop <= start:
                continue
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            else:
                merged.append((start, stop))
        self._expected = merged

    def forget(self) -> None:
        """Give the memory back, but for the first bytes that were read."""
        self._drop(list(self._passing))
        self._expected = []
        self._run_start = self._run_stop = -1

    def clear(self) -> None:
        """Give all memory back."""
        self.forget()
        self._pieces.clear()
        self._kept_bytes = 0

    def is_same(self, other: _Cache) -> bool:
        """Tell whether all that was read here is the same there; it is read there again."""
        if self.size != other.size:
            return False
        for start, stop, checksum in self.checksums:
            (data,) = other._timed([(start, stop)])
            if crc32c(data, 0, 0) != checksum:
                return False
        return True

    def _piece_at(self, position: int) -> _Piece | None:
        """Return a piece that has a byte, or None."""
        number = bisect_right(self._pieces, position, key=itemgetter(0)) - 1
        if number >= 0 and position < self._pieces[number].stop:
            return self._pieces[number]
        return None

    def _fetch(self, start: int, stop: int) -> None:
        """Fetch bytes from `start` on, in one piece or several side by side."""
        ranges = self._expected_from(start)
        if not ranges:
            is_next = start == self._run_stop
            if not is_next:
                self._run_start = start
            ahead = min(MAX_AHEAD_BYTES, (start - self._run_start) // AHEAD_SHARE)
            end = max(min(stop, start + MAX_AHEAD_BYTES), start + max(MIN_FETCH_BYTES, ahead))
            ranges = _cut([(start, self._next_held(start, min(self.size, end)))])
            self._run_stop = ranges[-1][1]
        for (first, _), data in zip(ranges, self._timed(ranges), strict=True):
            self._hold(first, data)

    def _expected_from(self, start: int) -> list[tuple[int, int]]:
        """Return what to fetch where an announced range is read, from this byte on."""
        number = bisect_right(self._expected, start, key=itemgetter(0)) - 1
        if number < 0 or start >= self._expected[number][1]:
            return []
        ranges: list[tuple[int, int]] = []
        room = MAX_AHEAD_BYTES
        for first, stop in self._expected[number:]:
            while (first := max(first, start)) < stop and room:
                piece = self._piece_at(first)
                if piece is not None:
                    start = piece.stop
                    continue
                end = self._next_held(first, min(stop, first + room))
                ranges.append((first, end))
                room -= end - first
                start = end
        return _cut(ranges)

    def _next_held(self, start: int, stop: int) -> int:
        """Return where the first piece after `start` begins, at most `stop`."""
        number = bisect_right(self._pieces, start, key=itemgetter(0))
        return min(stop, self._pieces[number].start) if number < len(self._pieces) else stop

    def _timed(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        begin = time.monotonic()
        try:
            return self._read_ranges(ranges)
        finally:
            self.wait_s += time.monotonic() - begin

    def _hold(self, start: int, data: bytes) -> None:
        piece = _Piece(start, data)
        self._pieces.insert(bisect_right(self._pieces, start, key=itemgetter(0)), piece)
        self.checksums.append((start, piece.stop, int(crc32c(data, 0, 0))))
        if self._kept_bytes + len(data) <= KEPT_BYTES:
            self._kept_bytes += len(data)
            return
        self._passing.append(piece)
        held = sum(len(passing.data) for passing in self._passing)
        while held > MAX_HELD_BYTES:
            held -= len(self._passing[0].data)
            self._drop(self._passing[:1])

    def _drop(self, pieces: Sequence[_Piece]) -> None:
        """Give the memory of passing pieces back."""
        for piece in pieces:
            self._passing.remove(piece)
            self._pieces.remove(piece)


def _cut(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Cut ranges into pieces of at most `MAX_FETCH_BYTES`."""
    return [
        (first, min(stop, first + MAX_FETCH_BYTES))
        for start, stop in ranges
        for first in range(start, stop, MAX_FETCH_BYTES)
    ]


class LazyBytes:
    """The bytes of a large file in a sample, read by ranges when they are asked for.

    A field of a raw sample is one, where the file is large and its decoder needs a part of it. It
    stands for the bytes of the file: ``len(value)``, ``value[start:stop]`` and ``bytes(value)``
    are what they are for bytes. ``bytes(value)`` reads all of it. It pickles as bytes.

    One thread at a time uses it. Reading raises a StorageError or a ShardError.

    Args:
        size: Bytes of the file.
        read_ranges: Returns the bytes of ranges of the file.
        head: The first bytes of the file, if they are known.

    Examples:
        >>> from mmstream.tar.lazy_bytes import LazyBytes
        >>> content = b"0123456789"
        >>> value = LazyBytes(10, lambda ranges: [content[start:stop] for start, stop in ranges])
        >>> len(value), value.read(2, 5), value[-3:], bytes(value)
        (10, b'234', b'789', b'0123456789')
    """

    __slots__ = ("_cache", "_start", "_stop")

    def __init__(self, size: int, read_ranges: ReadRanges, head: bytes = b"") -> None:
        self._cache = _Cache(size, read_ranges, head)
        self._start, self._stop = 0, size

    def within(self, start: int, stop: int) -> LazyBytes:
        """Return bytes [start, stop) as another value, which shares the ranges that were read."""
        value = LazyBytes.__new__(LazyBytes)
        value._cache = self._cache
        value._start, value._stop = self._start + start, self._start + min(stop, len(self))
        return value

    def __len__(self) -> int:
        return self._stop - self._start

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop), fewer where the file ends before.

        Raises:
            StorageError: The storage failed after retries.
            ShardError: The shard is absent, cut, or was replaced.
        """
        start, stop = max(0, start), min(stop, len(self))
        return self._cache.read(self._start + start, self._start + stop) if start < stop else b""

    def read_some(self, start: int, stop: int) -> bytes:
        """Return bytes from `start` on: as many as are in memory, or else as one fetch brings.

        It returns nothing only where the file ends, or where `stop` is not above `start`.
        """
        start, stop = max(0, start), min(stop, len(self))
        return (
            self._cache.read_some(self._start + start, self._start + stop) if start < stop else b""
        )

    def __getitem__(self, item: slice) -> bytes:
        if not isinstance(item, slice):
            raise TypeError("bytes that are read by ranges: take a slice, or bytes(value)")
        start, stop, step = item.indices(len(self))
        return self.read(start, stop) if step == 1 else bytes(self)[item]

    def __bytes__(self) -> bytes:
        data = self.read(0, len(self))
        self._cache.forget()
        return data

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (bytes(self),)

    def __repr__(self) -> str:
        return f"<{len(self):,} bytes, read by ranges>"

    def open(self, check: Callable[[], object] | None = None) -> LazyFile:
        """Return a file to read from.

        Args:
            check: Called before each read. What it raises ends the read, such as the error of a
                deadline.
        """
        return LazyFile(self, check)

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Announce the ranges [start, stop) that will be read, in place of those before.

        They are fetched when the first of them is read: up to 32 MiB at a time, side by side.
        """
        self._cache.expect([(self._start + start, self._start + stop) for start, stop in ranges])

    @property
    def wait_s(self) -> float:
        """Seconds that were spent on fetching so far. A limit of decoding time leaves them out."""
        return self._cache.wait_s

    def is_same(self, other: object) -> bool:
        """Tell whether another value has the same bytes, where this one was read.

        Ranges that were read here are read there. Others are not compared.
        """
        return (
            isinstance(other, LazyBytes)
            and (self._start, self._stop) == (other._start, other._stop)
            and self._cache.is_same(other._cache)
        )

    def forget(self) -> None:
        """Give the memory back, but for the first 8 MiB that were read of the sample."""
        self._cache.forget()

    def clear(self) -> None:
        """Give all memory back. What is read after that is fetched again."""
        self._cache.clear()


class RangeFile(io.RawIOBase):
    """A file of a known size at a position. Subclasses read ranges of bytes from there."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._position = base + offset
        return self._position


class LazyFile(RangeFile):
    """`LazyBytes` as a file that libraries read. Closing it gives most of its memory back."""

    def __init__(self, data: LazyBytes, check: Callable[[], object] | None = None) -> None:
        super().__init__(len(data))
        self._data, self._check = data, check

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes, at most `size`. Negative or None: all of the rest.

        Fewer may come than `size`, as from a socket: a read past the end of what was announced
        would fetch more than is needed. None come only at the end.
        """
        if self._check is not None:
            self._check()
        if size is None or size < 0:
            data = self._data.read(self._position, len(self._data))
        else:
            data = self._data.read_some(self._position, self._position + size)
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, and return how many bytes came."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the file, and give back what was read beyond the first bytes."""
        if not self.closed:
            self._data.forget()
        super().close()
