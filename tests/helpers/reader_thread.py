"""A reader process without a process: `serve` in a thread, on any store."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import mmstream as mm
from mmstream.pipeline import large_files_of
from mmstream.reading.process import ReaderSetup, StepConnection
from mmstream.reading.range_cache import NodeCacheSettings
from mmstream.reading.server import serve


class ReaderThread:
    """The main process' side of a reader; see `ReaderProcess`."""

    def __init__(self, control: Connection, connections: list[StepConnection]) -> None:
        self.control, self.connections = control, connections
        self.iteration = 0

    def begin(
        self, epoch: int, step: int, rows: tuple[int, int], *, single_samples: bool = False
    ) -> int:
        self.iteration += 1
        self.control.send(("begin", self.iteration, epoch, step, rows, single_samples))
        return self.iteration

    def describe(self) -> str:
        self.control.send(("describe",))
        return self.control.recv()[1]


@contextmanager
def reader_thread(
    pipeline: mm.Pipeline,
    num_connections: int = 1,
    node_cache: NodeCacheSettings | None = None,
) -> Iterator[ReaderThread]:
    """Serve the steps of a pipeline to this process until the block ends."""
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    pairs = [
        socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(num_connections)
    ]
    ends = [pair[1] for pair in pairs]
    files = large_files_of(pipeline)
    least_bytes = None if files is None else files.least_bytes
    ours.send(ReaderSetup(pipeline.dataset, pipeline.order, least_bytes, node_cache))
    thread = threading.Thread(target=lambda: asyncio.run(serve(theirs, ends)), daemon=True)
    thread.start()
    connections = [StepConnection(pair[0]) for pair in pairs]
    try:
        yield ReaderThread(ours, connections)
    finally:
        ours.close()
        for connection in connections:
            connection.close()
        thread.join(500)
        assert not thread.is_alive()
        for end in (theirs, *ends):
            end.close()
