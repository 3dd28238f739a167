"""The reader process of a rank: it serves steps to the other processes.

`reading/process.py` starts it as ``python -m mmstream.reading.server CONTROL STEPS...``, with the
numbers of inherited sockets. It imports neither torch nor the user's script. It ends when its
control connection ends, so with its main process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.source import datasets_of
from mmstream.reading.arrived import CachedSample, StepSamples
from mmstream.reading.messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    ReaderSetup,
    StepBlock,
    StepHeader,
    StepRequest,
    Verdict,
)
from mmstream.reading.range_cache import RangeCache, needs_of
from mmstream.reading.rank_reader import RankReader
from mmstream.storage.node_cache import NodeCache
from mmstream.storage.range_client import range_client
from mmstream.storage.transfers import Transfers

__all__ = ["Server", "main"]

LOOK_S = 1.0
"""Seconds between two looks at whether the parent still runs."""


class LogToMain(logging.Handler):
    """Sends what is logged here to the main process, which has the user's settings of logging."""

    def __init__(self, control: Connection) -> None:
        super().__init__()
        self._control = control

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record. It is left out where the main process has not read many earlier ones."""
        fields = record.__dict__ | {"msg": record.getMessage(), "args": None, "exc_info": None}
        with suppress(OSError):
            if select.select([], [self._control], [], 0)[1]:
                self._control.send(("log", fields))


class Server:
    """Serves the steps of one rank.

    Args:
        control: where the main process says what to read.
        connections: where steps are asked for.
        reader: reads them.
    """

    def __init__(
        self, control: Connection, connections: Sequence[socket.socket], reader: RankReader
    ) -> None:
        self._control, self._reader = control, reader
        self._blocks = {connection: StepBlock() for connection in connections}
        self._cached: dict[socket.socket, dict[int, CachedSample]] = {}  # of the latest step
        self._iteration = 0
        self._early: list[tuple[socket.socket, StepRequest]] = []
        self._answers: dict[socket.socket, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until the control connection ends."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control.fileno(), self._obey)
        for connection in self._blocks:
            connection.setblocking(False)
            loop.add_reader(connection.fileno(), self._accept, connection)
        await self._ended.wait()
        loop.remove_reader(self._control.fileno())
        for connection, block in self._blocks.items():
            loop.remove_reader(connection.fileno())
            connection.close()
            block.close()
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
        for connection, answer in list(self._answers.items()):
            answer.cancel()
            self._send(connection, Answer(Verdict.DROPPED, 0, 0, 0))
        self._answers.clear()
        self._cached.clear()
        self._reader.begin(epoch, step, rows, single_samples=single_samples)
        early, self._early = self._early, []
        for connection, request in early:
            self._begin_answer(connection, request)

    def _accept(self, connection: socket.socket) -> None:
        """Take a request."""
        try:
            message = connection.recv(MAX_MESSAGE_BYTES)
        except OSError:
            message = b""
        if not message:  # that worker has ended
            asyncio.get_running_loop().remove_reader(connection.fileno())
            return
        self._begin_answer(connection, StepRequest.unpacked(message))

    def _begin_answer(self, connection: socket.socket, request: StepRequest) -> None:
        if request.iteration > self._iteration:  # it has come before the word of the main process
            self._early.append((connection, request))
        elif request.iteration < self._iteration:
            self._send(connection, Answer(Verdict.DROPPED, 0, 0, 0))
        else:
            task = asyncio.get_running_loop().create_task(self._answer(connection, request))
            self._answers[connection] = task

    async def _answer(self, connection: socket.socket, request: StepRequest) -> None:
        try:
            if request.seats:
                cached = self._cached[connection]
                samples = await self._reader.again([cached[seat] for seat in request.seats])
            else:
                samples = await self._reader.step(request.epoch, request.step)
                self._cached[connection] = samples.cached
            answer, file = self._put_step(self._blocks[connection], samples)
        except Exception as error:
            answer, file = _put_error(self._blocks[connection], error)
        del self._answers[connection]
        self._send(connection, answer, file)

    def _put_step(self, block: StepBlock, samples: StepSamples) -> tuple[Answer, int | None]:
        """Copy the samples of a step into a block, with room for those in the node cache."""
        ends = np.cumsum(samples.sizes, dtype=np.int64)
        cached = {seat: sample.location for seat, sample in samples.cached.items()}
        counts, num_wrong = self._reader.pop_counts()
        header = pickle.dumps(
            StepHeader(
                samples.shard,
                samples.index,
                samples.valid,
                ends,
                samples.errors,
                samples.large,
                counts,
                num_wrong,
                samples.packed,
                cached,
            )
        )
        num_bytes = samples.num_bytes
        view, file = block.reserve(num_bytes + len(header))
        start = 0
        for one_sample, end in zip(samples.data, ends.tolist(), strict=True):
            if one_sample:
                view[start:end] = one_sample
            start = end
        return _with_header(view, Verdict.STEP, num_bytes, header, block, file)

    def _send(self, connection: socket.socket, answer: Answer, file: int | None = None) -> None:
        """Send an answer. Whoever asked waits for it, so there is room for it."""
        try:
            socket.send_fds(connection, [answer.packed()], [] if file is None else [file])
        except OSError:
            asyncio.get_running_loop().remove_reader(connection.fileno())


def _put_error(block: StepBlock, error: Exception) -> tuple[Answer, int | None]:
    header = pickle.dumps(error)
    view, file = block.reserve(len(header))
    return _with_header(view, Verdict.ERROR, 0, header, block, file)


def _with_header(
    view: memoryview,
    verdict: Verdict,
    num_bytes: int,
    header: bytes,
    block: StepBlock,
    file: int | None,
) -> tuple[Answer, int | None]:
    view[num_bytes : num_bytes + len(header)] = header
    view.release()
    block_bytes = 0 if file is None else block.num_bytes
    return Answer(verdict, num_bytes, len(header), block_bytes), file


async def serve(control: Connection, connections: Sequence[socket.socket]) -> None:
    """Serve until the control connection ends.

    Args:
        control: to the main process. The first message is a `ReaderSetup`.
        connections: where steps are asked for.
    """
    setup: ReaderSetup = control.recv()
    datasets: list[Dataset] = datasets_of(setup.source)
    transfers = Transfers(
        [range_client(dataset.store) for dataset in datasets],
        [dataset.known for dataset in datasets],
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
    )
    gc.collect()
    gc.freeze()  # manifests are many objects, which live until the end
    warm_up = asyncio.get_running_loop().create_task(reader.warm_up())
    try:
        await Server(control, connections, reader).run()
    finally:
        warm_up.cancel()
        control.close()
        await transfers.close()


def main(arguments: Sequence[str]) -> None:
    """Run a reader process.

    Args:
        arguments: numbers of sockets: the control connection, then the step connections.
    """
    control, *connections = map(int, arguments)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    main_process = Connection(control)
    # Stores may be of modules that only the main process sees.
    sys.path[:], level = main_process.recv()
    logger = logging.getLogger("mmstream")
    logger.setLevel(level)
    logger.addHandler(LogToMain(main_process))
    logger.propagate = False
    asyncio.run(serve(main_process, [socket.socket(fileno=number) for number in connections]))


def _end_with(parent: int) -> None:
    """End with the parent, also where its forked children hold our connections open."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # threads that wait for storage are not waited for
