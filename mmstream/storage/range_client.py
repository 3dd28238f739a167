"""Storage: the clients that the hot read path opens ranges of objects with.

`mmstream.storage.transfers` decides which range is requested when, and again after a failure. A
client sends each request once. There is one client a store, in the reader process of a rank.

    s3_client.py     ``s3://``, through connections of its own
    `StoreClient`    every other store, through threads
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from mmstream.storage.remote import RemoteStore
from mmstream.storage.retry import sent_once
from mmstream.storage.s3_client import S3Client
from mmstream.storage.store import ObjectStat, Store


class RangeStream(Protocol):
    """The response to one request, while it arrives: the bytes of a range in pieces."""

    @property
    def stat(self) -> ObjectStat | None:
        """Size and version of the whole object. None: the storage did not say."""

    def __aiter__(self) -> AsyncIterator[bytes | memoryview]:
        """Yield the bytes in order, in pieces of about 1 MiB.

        They may end early: where a connection broke in silence, and where the range goes past the
        end of the object. So the caller counts bytes, and compares `stat` with what it expects.

        Raises:
            RequestError: The response broke off.
        """

    async def close(self) -> None:
        """Drop what has not arrived yet. It is no error to close twice."""


class RangeClient(Protocol):
    """Opens ranges of the objects of one store.

    A client lives in one event loop, and in the process that made it. It never crosses a fork.

    Attributes:
        streams: `open` returns with the first byte. False: it returns with the last one.
    """

    @property
    def streams(self) -> bool:
        """See above."""

    def url_of(self, name: str) -> str:
        """Return the URL of an object, for messages."""

    async def open(
        self, name: str, start: int, stop: int, into: memoryview | None = None
    ) -> RangeStream:
        """Request bytes [start, stop) of an object, once. Cancelling it drops the connection.

        It returns as the response begins, so that its time is that to the first byte.

        Args:
            name: Of the object.
            start: First byte.
            stop: First byte after the range.
            into: Where the bytes go: ``stop - start`` bytes. The pieces are slices of it then, in
                order and without gaps. Nothing writes there after the stream is closed. None: into
                new memory, which costs twice the CPU time.

        Raises:
            RequestError: The request failed for a passing reason.
            FileNotFoundError: No such object or bucket.
            ConfigError: The storage cannot take such a name or setting.
            StorageError: No second request would help, for example after wrong credentials.
        """

    async def close(self) -> None:
        """Give back what the client holds. No range may be opened any more."""


def range_client(store: Store) -> RangeClient:
    """Return a new client for a store. It connects when its first range is opened."""
    if isinstance(store, RemoteStore) and store.url.startswith("s3://"):
        return S3Client(store.url)
    return StoreClient(store)


# -- every other store, through threads ------------------------------------------------------------
#
# It serves what has no asynchronous client of its own. A range arrives as one piece. Each request
# is sent once: `mmstream.storage.transfers` sends those again that fail or take too long.
#
# A thread cannot be ended. A read that was given up goes on in its thread until the storage
# answers, and another thread takes its place.

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
            response = await loop.run_in_executor(self._threads, self._read, name, start, stop)
        if into is None:
            return response
        length = len(response.data)
        into[:length] = response.data
        return ReadRange(into[:length], response.stat)

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
