"""Storage: the ranges that a reader process has requested, sent in the order of their deadlines.

The reader process of a rank says which ranges it needs and when. This module decides which of them
is requested next, how many at a time, and again after which failure. `range_client` sends each
request once.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, MutableMapping, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

from mmstream.errors import StorageError
from mmstream.storage.range_client import RangeClient
from mmstream.storage.store import ObjectStat, require_known
from mmstream.storage.transfer_counts import TransferCounts
from mmstream.storage.transfer_limits import TransferLimits

__all__ = ["RangeRequest", "Transfers"]


class RangeRequest(NamedTuple):
    """Bytes [start, stop) of an object, and when they are needed."""

    client: int
    """Index of the client, and so of the store."""
    name: str
    start: int
    stop: int
    deadline: int
    """Clock at which the bytes are needed first: a step number, counted over epochs."""


class Transfers:
    """Requests ranges side by side, those with the earliest deadlines first.

    Lives in one event loop of one process, and is used from there.

    Args:
        clients: One for each store. They are closed with this object.
        known: For each client, the objects as they are expected, by name. An object that is not in
            it is entered as its first answer says.
        limits: How many requests at a time, and when one counts as late.
    """

    def __init__(
        self,
        clients: Sequence[RangeClient],
        known: Sequence[MutableMapping[str, ObjectStat]],
        limits: TransferLimits | None = None,
    ) -> None:
        self._clients, self._known = clients, known
        self._limits = limits or TransferLimits()
        self._heap: list[tuple[int, int, RangeRequest, asyncio.Future[bytearray]]] = []
        self._serial = count()
        self._tasks: dict[asyncio.Future[bytearray], asyncio.Task[None]] = {}
        self._num_requests = self._num_bytes = 0
        self._busy_s, self._busy_since = 0.0, 0.0

    def submit(self, request: RangeRequest) -> asyncio.Future[bytearray]:
        """Queue a range.

        Returns:
            What resolves to exactly ``stop - start`` bytes. Or it raises a FileNotFoundError, a
            ReplacedError, a ConfigError or a StorageError: all of them are final.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytearray] = loop.create_future()
        if request.stop <= request.start:
            future.set_result(bytearray())
            return future
        heapq.heappush(self._heap, (request.deadline, next(self._serial), request, future))
        loop.call_soon(self._start)
        return future

    def advance(self, clock: int) -> None:
        """Say which deadline the consumer needs now."""

    def cancel(self, futures: Iterable[asyncio.Future[bytearray]]) -> None:
        """Give up ranges that nobody needs any more."""
        for future in futures:
            future.cancel()
            if task := self._tasks.get(future):
                task.cancel()

    def pop_counts(self) -> TransferCounts:
        """Return what happened since the previous call."""
        busy_s, now = self._busy_s, asyncio.get_running_loop().time()
        if self._tasks:
            busy_s, self._busy_since = busy_s + now - self._busy_since, now
        counts = TransferCounts(
            num_requests=self._num_requests, num_bytes=self._num_bytes, busy_s=busy_s
        )
        self._num_requests = self._num_bytes = 0
        self._busy_s = 0.0
        return counts

    async def close(self) -> None:
        """Give up all ranges, and close the clients."""
        self.cancel([future for _, _, _, future in self._heap])
        self._heap.clear()
        tasks = list(self._tasks.values())
        self.cancel(list(self._tasks))
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._heap and len(self._tasks) < self._limits.start_in_flight:
            _, _, request, future = heapq.heappop(self._heap)
            if future.done():
                continue
            if not self._tasks:
                self._busy_since = loop.time()
            task = loop.create_task(self._transfer(request, future))
            self._tasks[future] = task
            task.add_done_callback(partial(self._end, future))

    def _end(self, future: asyncio.Future[bytearray], _: object) -> None:
        del self._tasks[future]
        if not self._tasks:
            self._busy_s += asyncio.get_running_loop().time() - self._busy_since
        self._start()

    async def _transfer(self, request: RangeRequest, future: asyncio.Future[bytearray]) -> None:
        try:
            data = await self._read(request)
        except Exception as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(data)

    async def _read(self, request: RangeRequest) -> bytearray:
        number, name, start, stop, _ = request
        client = self._clients[number]
        data = bytearray(stop - start)
        self._num_requests += 1
        stream = await client.open(name, start, stop)
        try:
            if stream.stat is not None:
                require_known(client.url_of(name), name, stream.stat, self._known[number])
            position = 0
            async for piece in stream:
                data[position : position + len(piece)] = piece
                position += len(piece)
                self._num_bytes += len(piece)
        finally:
            await stream.close()
        if position != len(data):
            raise StorageError(f"{client.url_of(name)}: {position} bytes came of {len(data)}")
        return data
