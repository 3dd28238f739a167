"""Storage: ranges of any store, read by threads.

It serves what has no asynchronous client of its own. A range arrives as one piece. Each request is
sent once: `mmstream.storage.transfers` sends those again that fail or take too long.

A thread cannot be ended. A read that was given up goes on in its thread until the storage answers,
and another thread takes its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mmstream.storage.patience import sent_once
from mmstream.storage.store import ObjectStat, Store

MAX_THREADS = 512
"""Threads, those included whose reads were given up. If so many hang, the storage is away."""


class StoreClient:
    """A `mmstream.storage.range_client.RangeClient` for any store."""

    streams = False

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reads = asyncio.Semaphore(store.access.max_reads)
        self._threads = ThreadPoolExecutor(MAX_THREADS, "mmstream-store-client")

    def url_of(self, name: str) -> str:
        """Return the URL of an object, for messages."""
        return self._store.url_of(name)

    async def open(
        self, name: str, start: int, stop: int, into: memoryview | None = None
    ) -> ReadRange:
        """Read a range, whole. A cancelled read goes on in its thread, and nobody gets it.

        Raises:
            RequestError: The request failed for a passing reason.
            FileNotFoundError: No such object.
            StorageError: No second request would help.
        """
        loop = asyncio.get_running_loop()
        async with self._reads:
            answer = await loop.run_in_executor(self._threads, self._read, name, start, stop)
        if into is None:
            return answer
        length = len(answer.data)
        into[:length] = answer.data
        return ReadRange(into[:length], answer.stat)

    def _read(self, name: str, start: int, stop: int) -> ReadRange:
        known: dict[str, ObjectStat] = {}
        with sent_once():
            (outcome,) = self._store.read_ranges([(name, start, stop)], known)
        stat = known.get(name)
        if stat is not None and stat.size < stop:
            return ReadRange(b"", stat)
        if isinstance(outcome, OSError):
            raise outcome
        return ReadRange(outcome, stat)

    async def close(self) -> None:
        """Take no further ranges. Reads that no thread has begun are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class ReadRange:
    """A range that has arrived whole."""

    data: bytes | memoryview
    stat: ObjectStat | None

    async def __aiter__(self) -> AsyncIterator[bytes | memoryview]:
        yield self.data

    async def close(self) -> None:
        """Do nothing: no connection is held."""
