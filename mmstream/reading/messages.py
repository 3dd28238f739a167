"""What a reader process and the other processes of its rank say to each other.

There are two kinds of connections. Through the *control* connection, the main process says what to
read. It is a pickled value a message. Through a *step* connection, a worker (or the main process,
where there are no workers) asks for a step and gets it. Its messages are short. They say where in
the memory of the reader process (`SampleMemory`) a pickled header lies, and that says where the
samples do. The first response brings this memory with it. A worker is done with a step before it
asks for another one, so the samples stay until then. The main process asks *ahead*: for the next
steps as soon as it has one. So the reader process takes their samples meanwhile.
"""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.dataset.source import ShardSource
from mmstream.errors import MMStreamError, SampleError, ShardError
from mmstream.order import AnyOrder
from mmstream.reading.large_samples import LargeSample
from mmstream.reading.range_cache import NodeCacheSettings
from mmstream.reading.step import PackedRows
from mmstream.storage import ObjectStat
from mmstream.storage.transfers import TransferCounts
from mmstream.types import IntArray

MEMORY_FD = 1
"""Descriptors that come with the first response."""

MAX_AHEAD = 4
"""Steps that a connection may ask for ahead, at most."""

MAX_MESSAGE_BYTES = 4096
"""Of a pickled `StepRequest` or `StepResponse`, which are some numbers."""


class ReaderEnded(MMStreamError):  # noqa: N818 - seen by the loader only, which knows why
    """The reader process is gone. The loader says how it ended."""


class ReaderSetup(NamedTuple):
    """What a reader process is told first."""

    source: ShardSource
    order: AnyOrder
    least_large_bytes: int | None = None
    """Of samples of this size, the first bytes are read. None: all are read whole."""
    node_cache: NodeCacheSettings | None = None
    """Where samples of earlier epochs are. None: all come from storage."""


class StepRequest(NamedTuple):
    """Asks for the samples of a step."""

    iteration: int
    """Counts the iterations of a loader."""
    epoch: int
    step: int
    num_in_use: int = 0
    """How many of the steps before may be in use until this one is."""


class StepResponse(NamedTuple):
    """Says where a `StepHeader` or an exception lies, pickled."""

    start: int = 0
    """Its first byte in the memory of the reader process."""
    num_bytes: int = 0
    """0: the step belongs to an iteration that is over."""
    memory_bytes: int = 0
    """Size of this memory, if it comes with this message; else 0."""


@dataclass(frozen=True)
class StepHeader:
    """What goes with the bytes of a step. Arrays have one entry per sample, row by row."""

    shard: IntArray
    index: IntArray
    valid: npt.NDArray[np.bool_]
    """Of each row."""
    starts: IntArray
    """Sample i is bytes [starts[i], stops[i]) of the memory of the reader process."""
    stops: IntArray
    """The same as `starts` where there is an error."""
    errors: dict[int, ShardError | SampleError]
    """By seat."""
    large: dict[int, LargeSample]
    """By seat: the samples of which the first bytes are there only."""
    counts: TransferCounts
    num_wrong_reads: int
    packed: PackedRows | None = None
    """How samples make rows, where rows are packs. None: seats are rows."""
    read_shards: Sequence[tuple[int, ObjectStat]] = ()
    """Shards that were read since the step before, as they were then. Whoever asked may read more
    of them, and must not get another version."""


class StepConnection:
    """The side of a connection that asks for steps. One process uses it, from its first step on.

    It can be sent to that process before.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._memory: memoryview | None = None
        self._ahead: deque[StepRequest] = deque()  # not answered yet

    def __reduce__(self) -> tuple[Any, ...]:
        return StepConnection, (self._socket,)

    def ask(self, request: StepRequest) -> tuple[StepHeader, memoryview]:
        """Return the header of a step, and the memory with its samples.

        They stay until the next request for a step. Where later steps were asked for ahead, they
        stay until the request after those.

        Raises:
            ReaderEnded: there is no reader process any more.
            MMStreamError: the step belongs to an iteration that is over. Or this process has no
                file descriptor left for the memory.
            StorageError: storage failed for good.
        """
        value = self._receive_step(request)
        if isinstance(value, Exception):
            raise value
        assert self._memory is not None, "it came with the first response"
        return value, self._memory

    def ask_ahead(self, request: StepRequest) -> None:
        """Ask for the step after those that were asked for. `ask` returns it when its turn comes.

        All that come after the step that `ask` returned last stay in memory beside it.
        """
        request = request._replace(num_in_use=self.num_ahead + 1)
        with suppress(ReaderEnded):  # the next call of `ask` says so
            self._send(request)
            self._ahead.append(request)

    @property
    def num_ahead(self) -> int:
        """Steps that were asked for ahead."""
        return len(self._ahead)

    def _receive_step(self, request: StepRequest) -> StepHeader | Exception:
        """Receive a step, and ask for it if that was not done ahead."""
        while self._ahead:
            asked, value = self._ahead.popleft(), self._receive()
            if asked[:3] == request[:3]:
                return value  # others are of an iteration that is over
        self._send(request)
        return self._receive()

    def _send(self, request: StepRequest) -> None:
        with _noticing_its_end():
            self._socket.sendall(pickle.dumps(request))

    def _receive(self) -> StepHeader | Exception:
        with _noticing_its_end():
            message, files, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, MEMORY_FD)
            if not message:
                raise ConnectionResetError
        response: StepResponse = pickle.loads(message)
        if files:
            self._attach(files[0], response.memory_bytes)
        if not response.num_bytes:
            return MMStreamError("this step belongs to an iteration that is over")
        if self._memory is None:  # its descriptor came with the first response, and was dropped
            return MMStreamError(
                "this process has no file descriptor left for the memory of the reader process; "
                "raise the limit of the shell (ulimit -n), or open fewer files"
            )
        value: StepHeader | Exception = pickle.loads(
            self._memory[response.start :][: response.num_bytes]
        )
        return value

    def _attach(self, file: int, num_bytes: int) -> None:
        try:
            self._memory = memoryview(mmap.mmap(file, num_bytes))
        finally:
            os.close(file)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
        self._memory = None


@contextmanager
def _noticing_its_end() -> Iterator[None]:
    """Raise ReaderEnded where the reader process has ended, or the connection was closed.

    Other errors do not come from the connection. A signal handler of the user may raise one here,
    such as TimeoutError.
    """
    try:
        yield
    except OSError as error:
        if not isinstance(error, ConnectionError) and error.errno != errno.EBADF:
            raise
        raise ReaderEnded("the reader process has ended") from None
