"""Storage: the clients that the hot read path opens ranges of objects with.

`mmstream.storage.transfers` decides which range is requested when, and again after a failure. A
client sends each request once. There is one client a store, in the reader process of a rank.

    `S3Client`       ``s3://``, through connections of its own
    `UnionClient`    a union of stores: the clients of these
    `StoreClient`    every other store, through threads
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote
from xml.sax.saxutils import unescape

from mmstream.errors import ConfigError, StorageError, escaped
from mmstream.storage.http_client import HttpClient, Response
from mmstream.storage.remote import RemoteStore
from mmstream.storage.responses import (
    Refusal,
    connection_failure,
    failure,
    number_of_bytes,
    range_stat,
    version_of,
)
from mmstream.storage.retry import CREDENTIALS_HINT, health_of, sent_once
from mmstream.storage.s3_endpoint import S3Endpoint, Signer, s3_endpoint
from mmstream.storage.store import ObjectStat, RequestError, Store, join_url, key_of
from mmstream.storage.union import UnionStore

logger = logging.getLogger(__name__)


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
        """Drop what has not arrived yet. It is not an error to close twice."""


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
            into: Where the bytes go, ``stop - start`` of them, if the client can receive them
                there: the pieces are slices of it then, in order and without gaps. Nothing writes
                there after the stream is closed. Into new memory costs twice the CPU time.

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
    if isinstance(store, UnionStore):
        return UnionClient(store)
    if isinstance(store, RemoteStore) and store.url.startswith("s3://"):
        return S3Client(store.url)
    return StoreClient(store)


class UnionClient:
    """A `RangeClient` for a union of stores."""

    def __init__(self, store: UnionStore) -> None:
        self._store = store
        self._clients = {own: range_client(own) for _, own in store.stores}

    @property
    def streams(self) -> bool:
        """Whether the clients of all stores do."""
        return all(client.streams for client in self._clients.values())

    def url_of(self, name: str) -> str:
        """Return the URL of an object, for messages."""
        return self._store.url_of(name)

    async def open(
        self, name: str, start: int, stop: int, into: memoryview | None = None
    ) -> RangeStream:
        """Request bytes [start, stop) of an object; as the client of its store."""
        store, own_name = self._store.find(name)
        return await self._clients[store].open(own_name, start, stop, into)

    async def close(self) -> None:
        """Close the clients of all stores."""
        for client in self._clients.values():
            await client.close()


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
    """A `RangeClient` for any store."""

    streams = False

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reads = asyncio.Semaphore(store.access.max_reads)
        self._threads = ThreadPoolExecutor(MAX_THREADS, "mmstream-store-client")

    def url_of(self, name: str) -> str:
        """Return the URL of an object, for messages."""
        return self._store.url_of(name)

    async def open(
        self,
        name: str,
        start: int,
        stop: int,
        into: memoryview | None = None,  # noqa: ARG002 - a thread reads into memory of its own
    ) -> ReadRange:
        """Read a range, whole. A cancelled read goes on in its thread, and nobody gets it.

        Raises:
            RequestError: The request failed for a passing reason.
            FileNotFoundError: No such object.
            StorageError: No second request would help.
        """
        loop = asyncio.get_running_loop()
        async with self._reads:
            return await loop.run_in_executor(self._threads, self._read, name, start, stop)

    def _read(self, name: str, start: int, stop: int) -> ReadRange:
        stats: dict[str, ObjectStat] = {}
        with sent_once():
            (outcome,) = self._store.read_ranges([(name, start, stop)], stats)
        stat = stats.get(name)
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

    data: bytes
    stat: ObjectStat | None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.data

    async def close(self) -> None:
        """Do nothing: no connection is held."""


# -- s3:// -----------------------------------------------------------------------------------------
#
# A request is sent once, and its failure is told as one of two kinds: passing (a `RequestError`) or
# final. What one more request can mend is mended at once: credentials are read again, and a bucket
# in another region is followed there.

MAX_ERROR_BYTES = 16 * 1024
"""Bytes that are read of a response that says an error. S3's have less than 1 kB."""

SIGNER_S = 30.0
"""Seconds after which the credentials are asked again whether they are to be renewed. botocore
renews them 15 minutes before they expire."""


class S3Client:
    """A `RangeClient` for a prefix of a bucket.

    Args:
        url: Such as ``s3://bucket/prefix``.
    """

    streams = True

    def __init__(self, url: str) -> None:
        self.url = url
        self._bucket = url.removeprefix("s3://").partition("/")[0]
        self._link: _Link | None = None
        self._lock = asyncio.Lock()
        self._renewal: asyncio.Task[None] | None = None

    def __reduce__(self) -> Any:
        raise TypeError(f"{self.url}: a client is not pickled; make one in each process")

    def url_of(self, name: str) -> str:
        """Return the URL of an object, whether it exists or not."""
        return join_url(self.url, name)

    async def open(
        self, name: str, start: int, stop: int, into: memoryview | None = None
    ) -> S3Stream:
        """Request bytes [start, stop) of an object. Cancelling it drops the connection.

        Raises:
            RequestError: The request failed for a passing reason.
            FileNotFoundError: No such object or bucket.
            ConfigError: A setting cannot be.
            StorageError: Wrong credentials, or no second request would help.
        """
        url = self.url_of(name)
        tried: set[str] = set()
        while True:
            link = await self._current_link(url)
            byte_range = f"bytes={start}-{stop - 1}"
            response = await self._request(link, "GET", url, name, byte_range, into)
            if response.status in (200, 206):
                return await self._stream(url, response, start, stop)
            try:
                refusal = await _refusal(response)
            except OSError as error:
                raise _passing(error) from error
            finally:
                await response.close()
            if response.status == 416:
                return await self._past_the_end(link, url, name, response)
            if response.status == 404 and health_of(self.url).has_ranges and not refusal.code:
                # Elsewhere an object may be absent, and many stores say that with a page.
                raise RequestError(f"{refusal}, but not as S3 says it: a proxy?")
            remedy = refusal.remedy
            if remedy is None or remedy in tried:
                raise failure(url, refusal, health_of(self.url), waits_for_access=True)
            tried.add(remedy)
            await self._apply(remedy, link, url, refusal)

    async def close(self) -> None:
        """Drop all connections. No range may be opened any more."""
        if self._renewal is not None:
            self._renewal.cancel()
        if self._link is not None:
            await self._link.http.close()

    async def _stream(self, url: str, response: Response, start: int, stop: int) -> S3Stream:
        """Return the stream of a response, if it is of the range."""
        health = health_of(self.url)
        try:
            stat = range_stat(url, response.status, response.headers, start, stop, health)
        except RequestError:
            await response.close()
            raise
        health.answered()
        return S3Stream(response, stat, stop - start)

    async def _past_the_end(self, link: _Link, url: str, name: str, response: Response) -> S3Stream:
        """Return the response to a range past the end: the object as it is, no bytes."""
        size = response.headers.get("content-range", "").rpartition("/")[2]  # "bytes */100"
        head = await self._request(link, "HEAD", url, name)
        await head.close()
        if head.status == 404:
            raise FileNotFoundError(f"{url}: no such object")
        headers = head.headers if head.status == 200 else {"content-length": size}
        num_bytes = number_of_bytes(headers)
        if num_bytes is None:
            raise RequestError(f"{url}: {head.status} to the question for its size")
        health_of(self.url).answered()
        return S3Stream(head, ObjectStat(num_bytes, version_of(headers)), 0)

    async def _request(
        self,
        link: _Link,
        method: str,
        url: str,
        name: str | None,
        byte_range: str | None = None,
        into: memoryview | None = None,
    ) -> Response:
        """Send one request for an object, or (None) for the bucket."""
        target = link.endpoint.url
        if name is not None:
            try:
                target += quote(key_of(self.url_of(name)), safe="/-_.~")
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"{url}: no object in S3 has such a name: {error.reason}"
                ) from None
        headers = dict(link.endpoint.headers)
        if byte_range is not None:
            headers["range"] = byte_range
        if link.signer is not None:
            headers = _signed(link.signer, method, target, headers)
        headers["accept-encoding"] = "identity"
        headers["user-agent"] = "mmstream"
        try:
            return await link.http.request(method, target, headers, into)
        except OSError as error:
            final = None if health_of(self.url).has_answered else connection_failure(url, error)
            raise final or _passing(error) from error

    # -- where the bucket is, and with which credentials -------------------------------------------

    async def _current_link(self, url: str) -> _Link:
        """Return what requests are sent with.

        Asking for credentials may take seconds, as long as a request may wait for its first byte.
        So it is done once for all requests, and goes on if one of them is given up. A link that is
        there already is used meanwhile: botocore renews credentials long before they expire.
        """
        link = self._link
        if link is None or time.monotonic() >= link.checked_until:
            if self._renewal is None or self._renewal.done():
                self._renewal = asyncio.get_running_loop().create_task(self._renew(url, link))
                self._renewal.add_done_callback(retrieve_error)
            if link is None:
                await asyncio.shield(self._renewal)
                link = self._link
        assert link is not None
        return link

    async def _renew(self, url: str, link: _Link | None) -> None:
        """Make the first link, or the one after another."""
        try:
            async with self._lock:
                if self._link is link:
                    self._link = await self._made_link(url, link)
        except Exception as error:
            if link is None:
                raise
            logger.warning("%s: the credentials could not be read again: %s", url, escaped(error))
            if self._link is link:  # if they expire, a refusal says so, and they are read then
                self._link = link._replace(checked_until=time.monotonic() + SIGNER_S)

    async def _made_link(
        self, url: str, old: _Link | None, region: str | None = None, *, reread: bool = False
    ) -> _Link:
        """Return a link for the present credentials.

        Args:
            url: Named in errors.
            old: Its connections are kept where the bucket is still in the same place.
            region: Of the bucket, if a server named it.
            reread: Read all settings and credentials again.
        """

        def make() -> tuple[S3Endpoint, Signer | None]:
            cached = None if old is None or reread else old.endpoint
            endpoint = cached or s3_endpoint(self._bucket, region)
            return endpoint, endpoint.signer()

        try:
            endpoint, signer = await asyncio.to_thread(make)
        except Exception as error:  # of botocore, of a process or a service, of a missing file
            if health_of(self.url).has_answered:
                raise _passing(error) from None
            if isinstance(error, ConfigError):
                raise
            raise StorageError(f"{url}: {escaped(error)}; {CREDENTIALS_HINT}") from None
        if old is not None and old.endpoint.url == endpoint.url:
            http = old.http
        else:
            if old is not None:
                await old.http.close()
            http = HttpClient(endpoint.tls, endpoint.proxy)
        return _Link(endpoint, signer, http, time.monotonic() + SIGNER_S)

    async def _apply(self, remedy: str, used: _Link, url: str, refusal: Refusal) -> None:
        """Renew what a refusal is about, unless another request did so meanwhile."""
        async with self._lock:
            if self._link is not None and self._link.endpoint is not used.endpoint:
                return
            region: str | None = used.endpoint.region
            if remedy == "region":
                region = refusal.region or await self._region_of_bucket(used, url)
                if region is None or region == used.endpoint.region:
                    message = (
                        f"{url}: {refusal}; the bucket is in another region, and the server does "
                        "not say in which: set AWS_REGION, or check AWS_ENDPOINT_URL"
                    )
                    # A load balancer may do so for a while.
                    has_answered = health_of(self.url).has_answered
                    raise RequestError(message) if has_answered else StorageError(message)
            self._link = await self._made_link(url, used, region, reread=True)

    async def _region_of_bucket(self, link: _Link, url: str) -> str | None:
        response = await self._request(link, "HEAD", url, None)
        await response.close()
        return response.headers.get("x-amz-bucket-region")


class S3Stream:
    """A `RangeStream` of an object in S3."""

    def __init__(self, response: Response, stat: ObjectStat | None, length: int) -> None:
        self.stat, self._response, self._length = stat, response, length

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        left = self._length
        try:
            async for piece in self._response:
                data = piece[:left]  # a server may send more than it was asked for
                left -= len(data)
                if data:
                    yield data
        except OSError as error:
            raise _passing(error) from error

    async def close(self) -> None:
        """Drop what has not arrived yet, with its connection."""
        await self._response.close()


class _Link(NamedTuple):
    """What requests are sent with."""

    endpoint: S3Endpoint
    signer: Signer | None
    http: HttpClient
    checked_until: float


def _signed(signer: Signer, method: str, url: str, headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a request with its signature."""
    from botocore.awsrequest import AWSRequest

    request = AWSRequest(method, url, headers)
    signer(request)
    return dict(request.headers)


def retrieve_error(task: asyncio.Task[None]) -> None:
    """Look at the error of a task, or asyncio complains where nobody waited for it to the end."""
    if not task.cancelled():
        task.exception()


async def _refusal(response: Response) -> Refusal:
    """Read what a response says about an error."""
    text = (await response.read(MAX_ERROR_BYTES)).decode("utf-8", "replace")
    code, message, region = (_element(text, name) for name in ("Code", "Message", "Region"))
    return Refusal.of(
        response.status, response.headers, code=code, message=message, region=region or None
    )


def _element(text: str, name: str) -> str:
    """Return the content of the first element of a name in S3's XML, or nothing."""
    match = re.search(rf"<(?:\w+:)?{name}(?:\s[^>]*)?>([^<]*)</", text)
    return unescape(match[1]).strip() if match else ""


def _passing(error: Exception) -> RequestError:
    return RequestError(f"{type(error).__name__}: {escaped(error)}")
