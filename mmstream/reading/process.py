"""A reader process as the other processes of its rank see it: its start and end, and steps from it.

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
import logging
import mmap
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

from mmstream.dataset.dataset import ShardSource, datasets_of, is_behind_network
from mmstream.errors import MMStreamError
from mmstream.order import AnyOrder
from mmstream.processes.machine import num_local_ranks, words_of_exit
from mmstream.processes.workers import (
    job_signals_blocked,
    main_process_mark,
    safe_environment,
)
from mmstream.reading.plan import needs_single_samples
from mmstream.reading.range_cache import NodeCacheSettings, is_cached, log_what_is_cached
from mmstream.reading.rank_reader import StepSamples
from mmstream.storage import ObjectStat
from mmstream.storage.node_cache import open_cache_dir
from mmstream.storage.transfers import TransferCounts
from mmstream.types import IntArray

logger = logging.getLogger(__name__)

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
    """What goes with the bytes of a step."""

    samples: StepSamples
    """All of them but their bytes."""
    starts: IntArray
    """First byte of each sample in the memory of the reader process, which has `sizes` of it."""
    counts: TransferCounts
    num_wrong_reads: int
    read_shards: Sequence[tuple[int, ObjectStat]]
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
            try:
                self._memory = memoryview(mmap.mmap(files[0], response.memory_bytes))
            finally:
                os.close(files[0])
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


# -- its start and end, in the main process --------------------------------------------------------

END_S = 2.0
"""Seconds in which a reader process ends by itself, before it is killed."""

ANSWER_S = 2.0
"""Seconds in which it says what it waits for."""


def needs_reader_process(source: ShardSource) -> bool:
    """Tell whether a process of its own reads a source: where reads mostly wait for a network."""
    return any(map(is_behind_network, datasets_of(source)))


def node_cache_settings(
    source: ShardSource, cache_dir: str | None, max_bytes: int | None, world_size: int
) -> NodeCacheSettings | None:
    """Make the folder of a node cache, and say what is not cached.

    Args:
        source: what is read.
        cache_dir: a local folder; None: there is no cache.
        max_bytes: most bytes that the cache may take. None: 80 % of what is free.
        world_size: number of ranks.

    Returns:
        What the reader process is told; None if nothing would be cached.

    Raises:
        ConfigError: `cache_dir` cannot be used.
    """
    if cache_dir is None:
        return None
    root = open_cache_dir(cache_dir, max_bytes)
    log_what_is_cached(source)
    if not any(map(is_cached, datasets_of(source))):
        return None
    return NodeCacheSettings(root, max_bytes, min(1.0, num_local_ranks() / world_size))


class ReaderProcess:
    """A reader process, from its start to its end. It belongs to the process that made it.

    Args:
        source: what it reads.
        order: which samples, and when.
        num_connections: processes that will ask it for steps.
        least_large_bytes: of samples of this size, it reads the first bytes. None: it reads all
            samples whole.
        node_cache: where samples of earlier epochs are. None: all come from storage.

    Attributes:
        connections: one for each of them.
    """

    def __init__(
        self,
        source: ShardSource,
        order: AnyOrder,
        num_connections: int,
        least_large_bytes: int | None = None,
        node_cache: NodeCacheSettings | None = None,
    ) -> None:
        self._source, self._order = source, order
        self._least_large_bytes = least_large_bytes
        ours, theirs = socket.socketpair()
        pairs = [
            socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(num_connections)
        ]
        self.connections = [StepConnection(pair[0]) for pair in pairs]
        files = [theirs.fileno(), *(pair[1].fileno() for pair in pairs)]
        try:
            with job_signals_blocked():  # they stay blocked there
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "mmstream.reading.server", *map(str, files)],
                    pass_fds=files,
                    stdin=subprocess.DEVNULL,
                    env=os.environ | safe_environment() | main_process_mark(),
                )
        finally:
            theirs.close()
            for _, connection in pairs:
                connection.close()
        self._control = Connection(ours.detach())
        self._lock = threading.Lock()
        self._iteration = 0
        self._environment = dict(os.environ)
        self._end = weakref.finalize(
            self, _end, self._process, self._control, self.connections, os.getpid()
        )
        with suppress(ConnectionError):  # whoever waits for a step learns that it has ended
            sys_path = [os.fspath(path) for path in sys.path]
            self._control.send((sys_path, logging.getLogger("mmstream").getEffectiveLevel()))
            self._control.send(ReaderSetup(source, order, least_large_bytes, node_cache))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def lacks_variables(self) -> bool:
        """Whether it has not begun, and the environment is another one since it was started.

        Credentials may be among the variables.
        """
        return self._iteration == 0 and self._environment != dict(os.environ)

    def begin(self, epoch: int, step: int, rows: tuple[int, int]) -> int:
        """Begin an iteration at a step; return its number, which requests for steps must have.

        Raises:
            ConfigError: the windows of these rows do not fit into memory.
        """
        single_samples = needs_single_samples(
            self._source,
            self._order,
            rows[1] - rows[0],
            least_large_bytes=self._least_large_bytes,
        )
        self._iteration += 1
        with suppress(ConnectionError), self._lock:
            self._control.send(("begin", self._iteration, epoch, step, rows, single_samples))
        return self._iteration

    def describe(self) -> str:
        """Say what it waits for."""
        with suppress(OSError, EOFError), self._lock:
            self._control.send(("describe",))
            while self._control.poll(ANSWER_S):
                if (answer := self._receive()) is not None:
                    return f"the reader process (pid {self.pid}): {answer}"
        return f"the reader process (pid {self.pid}) does not answer"

    def pass_on_log(self) -> None:
        """Log here what it has logged since the previous call."""
        with suppress(OSError, EOFError), self._lock:
            while self._control.poll():
                self._receive()

    def _receive(self) -> str | None:
        """Log a message if it is a log record; return what it says of itself otherwise."""
        kind, value = self._control.recv()
        if kind == "described":
            return cast(str, value)
        record = logging.makeLogRecord(value)
        its_logger = logging.getLogger(record.name)
        if its_logger.isEnabledFor(record.levelno):
            its_logger.handle(record)
        return None

    def words_of_end(self) -> str:
        """Say how it ended; call it when its connections have ended."""
        description = "has closed its connections"
        with suppress(subprocess.TimeoutExpired):
            description = words_of_exit(self._process.wait(END_S))
        return f"the reader process (pid {self.pid}) {description}; a new loop starts another one"

    def close(self) -> None:
        """End it."""
        self.pass_on_log()
        self._end()


def _end(
    process: subprocess.Popen[bytes],
    control: Connection,
    connections: Sequence[StepConnection],
    pid: int,
) -> None:
    if os.getpid() != pid:  # a forked child
        return
    control.close()
    for connection in connections:
        connection.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            # Its thread is in the kernel, in a read of a file system whose server is mute.
            logger.warning(
                "the reader process (pid %d) was killed and has not ended: the system waits for a "
                "read of a mounted folder; it ends when that is answered",
                process.pid,
            )
