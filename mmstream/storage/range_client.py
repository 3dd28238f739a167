"""Storage: the clients that the hot read path opens ranges of objects with.

`mmstream.storage.transfers` decides which range is requested when, and again after a failure. A
client sends each request once. There is one client a store, in the reader process of a rank.

    s3_client.py     ``s3://``, through connections of its own
    store_client.py  every other store, through threads
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from mmstream.storage.remote import RemoteStore
from mmstream.storage.s3_client import S3Client
from mmstream.storage.store import ObjectStat, Store
from mmstream.storage.store_client import StoreClient


class RangeStream(Protocol):
    """The answer to one request, while it arrives: the bytes of a range in pieces."""

    @property
    def stat(self) -> ObjectStat | None:
        """Size and version of the whole object. None: the storage did not say."""

    def __aiter__(self) -> AsyncIterator[bytes | memoryview]:
        """Yield the bytes in order, in pieces of about 1 MiB.

        They may end early: where a connection broke in silence, and where the range goes past the
        end of the object. So the caller counts bytes, and compares `stat` with what it expects.

        Raises:
            RequestError: The answer broke off.
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

        It returns as the answer begins, so that its time is that to the first byte.

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
