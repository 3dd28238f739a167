"""Bytes of media that arrive before their row's turn: in memory, and beyond a limit on disk.

    downloads and objects -> LOOK AHEAD -> load

Rows keep their order. One slow server must not hold up the downloads of the rows behind it. So many
rows are in flight, and what has arrived waits for its turn.
"""

from __future__ import annotations

import os
import tempfile
import threading
from concurrent.futures import Future
from typing import BinaryIO, NamedTuple

from mmstream.errors import StorageError, escaped

__all__ = ["ArrivedBytes", "Ticket"]


class _Spilled(NamedTuple):
    start: int
    num_bytes: int


class Ticket:
    """A medium that was asked for. `ArrivedBytes.take` redeems it, once."""

    __slots__ = ("done", "is_dropped", "value")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.is_dropped = False
        self.value: bytes | _Spilled | BaseException = b""


class ArrivedBytes:
    """What has arrived and was not taken yet. A context manager, which removes its file.

    Args:
        max_bytes: Beyond this much in memory, what arrives is written to a temporary file.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._file_size = 0

    def __enter__(self) -> ArrivedBytes:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()

    def wait_for(self, future: Future[bytes]) -> Ticket:
        """Return the ticket of a medium that will arrive."""
        ticket = Ticket()
        future.add_done_callback(lambda done: self._arrive(ticket, done))
        return ticket

    def take(self, ticket: Ticket) -> bytes:
        """Wait for a medium and return its bytes. Raises what its future raised."""
        ticket.done.wait()
        value, ticket.value = ticket.value, b""
        if isinstance(value, BaseException):
            raise value
        if isinstance(value, _Spilled):
            return self._read(value)
        with self._lock:
            self._num_bytes -= len(value)
        return value

    def drop(self, ticket: Ticket) -> None:
        """Forget a medium whose row failed, once it has arrived."""
        with self._lock:
            ticket.is_dropped = True
            if ticket.done.is_set() and isinstance(ticket.value, bytes):
                self._num_bytes -= len(ticket.value)
                ticket.value = b""

    def _arrive(self, ticket: Ticket, future: Future[bytes]) -> None:
        with self._lock:
            try:
                data = future.result()
                ticket.value = b"" if ticket.is_dropped else self._keep(data)
            except BaseException as error:  # CancelledError too: whoever waits must get it
                ticket.value = error
            ticket.done.set()

    def _keep(self, data: bytes) -> bytes | _Spilled:
        if self._num_bytes + len(data) > self._max_bytes:
            return self._spill(data)
        self._num_bytes += len(data)
        return data

    def _spill(self, data: bytes) -> _Spilled:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
            self._file.write(data)
            self._file.flush()
        except (OSError, ValueError) as error:  # ValueError: closed, nobody waits any more
            raise StorageError(
                f"{escaped(tempfile.gettempdir())}: {error}; media wait there for the rows before "
                "them. Set TMPDIR to a folder with more space, then run the same command again"
            ) from error
        self._file_size += len(data)
        return _Spilled(self._file_size - len(data), len(data))

    def _read(self, spilled: _Spilled) -> bytes:
        with self._lock:
            assert self._file is not None
            data = os.pread(self._file.fileno(), spilled.num_bytes, spilled.start)
        if len(data) != spilled.num_bytes:
            raise StorageError("a temporary file of media was cut short; run the command again")
        return data
