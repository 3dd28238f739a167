"""The reader process of a rank: it serves steps to the other processes.

`reading/process.py` starts it as ``python -m mmstream.reading.server CONTROL STEPS...``, with the
numbers of inherited sockets. It imports neither torch nor the user's script. It ends when its
control connection ends, so with its main process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import mmap
import os
import pickle
import resource
import select
import socket
import sys
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from ctypes import addressof, c_char
from dataclasses import replace
from itertools import cycle
from multiprocessing.connection import Connection

import numpy as np

from mmstream.dataset.dataset import Dataset, datasets_of
from mmstream.errors import MMStreamError
from mmstream.processes.machine import memory_bytes
from mmstream.processes.workers import follow_main_process
from mmstream.reading.process import (
    MAX_AHEAD,
    MAX_MESSAGE_BYTES,
    ReaderSetup,
    StepHeader,
    StepRequest,
    StepResponse,
)
from mmstream.reading.range_cache import RangeCache, needs_of
from mmstream.reading.rank_reader import RankReader, StepSamples
from mmstream.storage.node_cache import NodeCache
from mmstream.storage.range_client import range_client
from mmstream.storage.transfers import Transfers
from mmstream.tar.header import BLOCK

ROOM_BYTES = 16 << 10
"""For a message to a client: a step of 256 samples. Longer ones take memory of their own."""

NUM_ROOMS = MAX_AHEAD + 2
"""A client reads each message before this many others are written."""


# -- the memory in which samples arrive ------------------------------------------------------------
#
# The processes that the reader process serves see it, too. Whoever takes a sample reads it where it
# arrived, so nothing is copied from process to process. The memory is one file without a name, of
# which each process maps the whole. Its pages exist from their first use on. Those of pieces that
# came back serve again: new pages cost more than all copies.
#
# A piece is a range, and it stays until the last of its samples was taken and its step is over.
# What a user holds does not count: samples that a loop gets are bytes of their own.

SPARE_BYTES = 256 << 20
"""Where more than this is unused at the end of the memory, it goes back to the system."""


class SampleMemory:
    """Memory that is taken piece by piece. A piece comes back when its last view is gone.

    One thread takes pieces. Any thread may drop them.

    Args:
        num_bytes: most bytes that it may have. They take no room before they are used.

    Attributes:
        file: descriptor for other processes, which belongs to this object.
        num_bytes: its length.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self.file = os.memfd_create("mmstream-samples", os.MFD_CLOEXEC)
        os.ftruncate(self.file, self.num_bytes)
        self._map = mmap.mmap(self.file, self.num_bytes)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._address = addressof(c_char.from_buffer(self._map))
        # Holes, by their size, first and last byte. No two of them touch.
        self._sizes: list[tuple[int, int]] = []
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._dropped = deque[tuple[int, int]]()
        self._num_used = 0
        self._add_hole(0, self.num_bytes)

    def take(self, num_bytes: int) -> memoryview:
        """Return memory with any content, for bytes that are to come.

        Raises:
            MemoryError: no hole is as long.
        """
        while self._dropped:
            self._put_back(*self._dropped.popleft())
        needed = max(1, -(-num_bytes // BLOCK)) * BLOCK  # as headers of tars are found
        number = bisect_left(self._sizes, (needed, 0))  # the smallest hole that is long enough
        if number == len(self._sizes):
            raise MemoryError(
                f"the reader process has no room for {num_bytes:,} bytes of samples: it may have "
                f"{self.num_bytes:,} bytes, by the memory of the machine, ulimit -v and ulimit -f; "
                "raise these limits, run it on more ranks, or begin a new run with a smaller "
                "window_bytes="
            )
        start, stop = self._take_hole(self._sizes[number][1])
        if start + needed < stop:
            self._add_hole(start + needed, stop)
        self._num_used = max(self._num_used, start + needed)
        piece = self._bytes[start : start + num_bytes]
        # Views keep this array alive. It may end in any thread, and in the middle of this function.
        end = weakref.finalize(piece, self._dropped.append, (start, start + needed))
        end.atexit = False
        return memoryview(piece)  # type: ignore[arg-type]

    def position(self, view: memoryview) -> int:
        """Return where in this memory a view of a piece begins."""
        return addressof(c_char.from_buffer(view)) - self._address

    def close(self) -> None:
        """Give the descriptor back. The memory goes with its last view."""
        os.close(self.file)

    def _put_back(self, start: int, stop: int) -> None:
        """Make a hole of a piece, joined with the holes beside it."""
        if stop in self._stop_of:
            _, stop = self._take_hole(stop)
        if start in self._start_of:
            start, _ = self._take_hole(self._start_of[start])
        self._add_hole(start, stop)
        if stop == self.num_bytes and self._num_used - start > SPARE_BYTES:
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_REMOVE, first, self._num_used - first)
            self._num_used = start

    def _add_hole(self, start: int, stop: int) -> None:
        insort(self._sizes, (stop - start, start))
        self._stop_of[start], self._start_of[stop] = stop, start

    def _take_hole(self, start: int) -> tuple[int, int]:
        stop = self._stop_of.pop(start)
        del self._start_of[stop]
        del self._sizes[bisect_left(self._sizes, (stop - start, start))]
        return start, stop


def most_bytes() -> int:
    """Return how many bytes a `SampleMemory` may have: the memory of the machine.

    Limits of addresses and of files (``ulimit -v``, ``ulimit -f``) may leave less.
    """
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    files, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = [memory_bytes()]
    if addresses != resource.RLIM_INFINITY:
        limits.append(addresses // 2)  # whoever takes samples needs addresses for itself, too
    if files != resource.RLIM_INFINITY:
        limits.append(files)
    return min(limits)


# -- serving ---------------------------------------------------------------------------------------


class LogToMain(logging.Handler):
    """Sends what is logged here to the main process, which has the user's settings of logging."""

    def __init__(self, control: Connection) -> None:
        super().__init__()
        self._control = control

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record. It is left out where the main process has not read many earlier ones."""
        fields = record.__dict__ | {"msg": record.getMessage(), "args": None, "exc_info": None}
        with suppress(Exception):  # whoever logs has other things to do
            poll = select.poll()  # select.select takes no descriptor above 1,023
            poll.register(self._control, select.POLLOUT)
            if poll.poll(0):
                self._control.send(("log", fields))


class Server:
    """Serves the steps of one rank.

    Args:
        control: where the main process says what to read.
        connections: where steps are asked for.
        reader: reads them.
        memory: where their samples lie.
    """

    def __init__(
        self,
        control: Connection,
        connections: Sequence[socket.socket],
        reader: RankReader,
        memory: SampleMemory,
    ) -> None:
        self._control, self._reader, self._memory = control, reader, memory
        self._clients = {
            connection: _Client([memory.take(ROOM_BYTES) for _ in range(NUM_ROOMS)])
            for connection in connections
        }
        self._iteration = 0
        self._early: list[tuple[socket.socket, StepRequest]] = []
        self._responding: dict[socket.socket, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until the control connection ends."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control.fileno(), self._obey)
        for connection in self._clients:
            connection.setblocking(False)
            loop.add_reader(connection.fileno(), self._accept, connection)
        await self._ended.wait()
        loop.remove_reader(self._control.fileno())
        for connection in self._clients:
            loop.remove_reader(connection.fileno())
            connection.close()
        await self._reader.close()

    def _obey(self) -> None:
        """Do what the main process says."""
        try:
            command, *values = self._control.recv()
            if command == "begin":
                self._begin(*values)
            else:
                self._control.send(("described", self._reader.describe()))
        except (EOFError, OSError):
            self._ended.set()

    def _begin(
        self,
        iteration: int,
        epoch: int,
        step: int,
        rows: tuple[int, int],
        single_samples: bool,
    ) -> None:
        """Begin an iteration. Steps of earlier ones are dropped."""
        self._iteration = iteration
        for connection, task in list(self._responding.items()):
            task.cancel()
            requests = self._clients[connection].requests
            for _ in requests:
                self._send(connection, StepResponse())
            requests.clear()
        self._responding.clear()
        for client in self._clients.values():
            client.num_told = 0  # responses that are dropped have told of shards, too
        self._reader.begin(epoch, step, rows, single_samples=single_samples)
        early, self._early = self._early, []
        for connection, request in early:
            self._take(connection, request)

    def _accept(self, connection: socket.socket) -> None:
        """Take a request."""
        try:
            message = connection.recv(MAX_MESSAGE_BYTES)
        except OSError:
            message = b""
        if not message:  # that worker has ended
            self._clients[connection] = _Client(self._clients[connection].rooms)
            asyncio.get_running_loop().remove_reader(connection.fileno())
            return
        self._take(connection, pickle.loads(message))

    def _take(self, connection: socket.socket, request: StepRequest) -> None:
        if request.iteration > self._iteration:  # it has come before the word of the main process
            self._early.append((connection, request))
        elif request.iteration < self._iteration:
            self._send(connection, StepResponse())
        else:
            client = self._clients[connection]
            client.requests.append(request)
            if connection not in self._responding:
                task = asyncio.get_running_loop().create_task(self._respond_all(connection, client))
                self._responding[connection] = task

    async def _respond_all(self, connection: socket.socket, client: _Client) -> None:
        """Respond to the requests of a connection, one after the other."""
        while client.requests:
            response = await self._respond(client, client.requests[0])
            client.requests.popleft()
            self._send(connection, response)
        del self._responding[connection]

    async def _respond(self, client: _Client, request: StepRequest) -> StepResponse:
        try:
            step_data = client.begin_step(request)
            samples = await self._reader.step(request.epoch, request.step)
            step_data += samples.data
            return self._put(client, self._header(client, samples))
        except Exception as error:
            try:
                return self._put(client, error)
            except Exception:  # some errors cannot be pickled: they cross as their words
                return self._put(client, MMStreamError(f"{type(error).__name__}: {error}"))

    def _header(self, client: _Client, samples: StepSamples) -> StepHeader:
        """Say where the samples of a step are."""
        starts = [self._memory.position(view) if view else 0 for view in samples.data]
        counts, num_wrong = self._reader.pop_counts()
        read_shards = self._reader.read_shards[client.num_told :]
        client.num_told += len(read_shards)
        return StepHeader(
            replace(samples, data=[]),
            np.array(starts, np.int64),
            counts,
            num_wrong,
            read_shards,
        )

    def _put(self, client: _Client, value: StepHeader | Exception) -> StepResponse:
        """Put a value where whoever asked finds it."""
        message = pickle.dumps(value)
        memory = next(client.room)
        if len(message) > len(memory):
            memory = self._memory.take(len(message))
            client.steps[-1].append(memory)
        memory[: len(message)] = message
        num_attached = 0 if client.has_memory else self._memory.num_bytes
        return StepResponse(self._memory.position(memory), len(message), num_attached)

    def _send(self, connection: socket.socket, response: StepResponse) -> None:
        """Send a response. Whoever asked waits for it, so there is room for it."""
        files = [self._memory.file] if response.memory_bytes else []
        try:
            socket.send_fds(connection, [pickle.dumps(response)], files)
        except OSError:
            asyncio.get_running_loop().remove_reader(connection.fileno())
        else:
            self._clients[connection].has_memory |= bool(files)


class _Client:
    """What a connection has asked for, and what it has got.

    Args:
        rooms: for messages, so that there is room for the error that there is none.
    """

    def __init__(self, rooms: Sequence[memoryview]) -> None:
        self.rooms = rooms
        self.room = cycle(rooms)
        self.has_memory = False
        self.num_told = 0  # of `RankReader.read_shards`
        self.requests: deque[StepRequest] = deque()  # not answered yet
        self.steps: deque[list[memoryview]] = deque()  # samples that may be in use

    def begin_step(self, request: StepRequest) -> list[memoryview]:
        """Return where the samples of a new step are held. Drop those that are in use no more."""
        while len(self.steps) > request.num_in_use:
            self.steps.popleft()
        self.steps.append([])
        return self.steps[-1]


async def serve(control: Connection, connections: Sequence[socket.socket]) -> None:
    """Serve until the control connection ends.

    Args:
        control: to the main process. The first message is a `ReaderSetup`.
        connections: where steps are asked for.
    """
    setup: ReaderSetup = control.recv()
    datasets: list[Dataset] = datasets_of(setup.source)
    memory = SampleMemory(most_bytes())
    transfers = Transfers(
        [range_client(dataset.store) for dataset in datasets],
        [dataset.shards.known for dataset in datasets],
        new_memory=memory.take,
    )
    cache = None
    if setup.node_cache is not None:
        root, max_bytes, node_share = setup.node_cache
        needs = needs_of(setup.source, setup.order, node_share)
        cache = RangeCache(setup.source, NodeCache(root, needs, max_bytes))
    reader = RankReader(
        setup.source,
        setup.order,
        transfers,
        datasets,
        least_large_bytes=setup.least_large_bytes,
        cache=cache,
        new_memory=memory.take,
    )
    gc.collect()
    gc.freeze()  # manifests are many objects, which live until the end
    warm_up = asyncio.get_running_loop().create_task(reader.warm_up())
    try:
        await Server(control, connections, reader, memory).run()
    finally:
        warm_up.cancel()
        control.close()
        await transfers.close()
        memory.close()


def main(arguments: Sequence[str]) -> None:
    """Run a reader process.

    Args:
        arguments: numbers of sockets: the control connection, then the step connections.
    """
    control, *connections = map(int, arguments)
    follow_main_process()  # also where its forked children hold our connections open
    main_process = Connection(control)
    # Stores may be of modules that only the main process sees.
    sys.path[:], level = main_process.recv()
    logger = logging.getLogger("mmstream")
    logger.setLevel(level)
    logger.addHandler(LogToMain(main_process))
    logger.propagate = False
    asyncio.run(serve(main_process, [socket.socket(fileno=number) for number in connections]))


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # threads that wait for storage are not waited for
