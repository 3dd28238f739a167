"""The main process' side of a reader process: starts it, tells it where to begin, and ends it."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, cast

from mmstream.dataset.source import ShardSource, datasets_of, is_behind_network
from mmstream.order import AnyOrder
from mmstream.processes.machine import num_local_ranks, words_of_exit
from mmstream.processes.workers import job_signals_blocked, safe_environment
from mmstream.reading.messages import ReaderSetup, StepConnection
from mmstream.reading.plan import needs_single_samples
from mmstream.reading.range_cache import NodeCacheSettings, is_cached, log_what_is_cached
from mmstream.storage.node_cache import open_cache_dir

logger = logging.getLogger(__name__)

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
                    env=os.environ | safe_environment(),
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
        _log(value)
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


def _log(fields: dict[str, Any]) -> None:
    record = logging.makeLogRecord(fields)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


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
