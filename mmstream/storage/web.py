"""Storage: requests to a plain web server, for ``http://`` and ``https://``.

fsspec sends them too, but it drops what the responses say: a server that is down would be an absent
object, and a server that ignores ranges would send whole shards. Here a 206 is a range, a 200 is
none, and `ObjectStat` has the size and the ETag of the response.

The client is fsspec's, so its connections and its event loop are shared with all other requests.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, cast

from mmstream.errors import StorageError
from mmstream.storage.http_headers import (
    number_of_bytes,
    range_stat,
    require_object,
    version_of,
)
from mmstream.storage.retry import health_of
from mmstream.storage.store import ObjectStat, require_size

MAX_REQUESTS_IN_FLIGHT = 64
"""Ranges of one call that are requested of a web server at a time."""

_AS_IT_IS = {"Accept-Encoding": "identity"}


def client_options() -> dict[str, Any]:
    """Return the settings of fsspec's file system for web servers.

    Passwords come from ``~/.netrc``, and proxies from the environment.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}}


def head(client: Any, url: str) -> ObjectStat:
    """Return the size and the ETag of an object.

    Raises:
        StorageError: The server does not say the size.
        Exception: The request failed, see `mmstream.storage.remote`.
    """
    from fsspec.asyn import sync

    async def request() -> ObjectStat:
        session = await client.set_session()
        settings = {"headers": _AS_IT_IS, "allow_redirects": True}
        async with session.head(client.encode_url(url), **settings) as response:
            response.raise_for_status()
            require_object(url, response.headers)
            size = number_of_bytes(response.headers)
            if size is None:
                raise StorageError(f"{url}: the server does not say its size; download it first")
            return ObjectStat(size, version_of(response.headers))

    return cast(ObjectStat, sync(client.loop, request))


def read(client: Any, url: str, max_bytes: int | None) -> bytes:
    """Return a whole object; errors as `head`. One with more bytes is a TooLargeError."""
    from fsspec.asyn import sync

    async def request() -> bytes:
        session = await client.set_session()
        async with session.get(client.encode_url(url), headers=_AS_IT_IS) as response:
            response.raise_for_status()
            require_size(url, number_of_bytes(response.headers) or 0, max_bytes)
            data = await read_at_most(
                response.content, None if max_bytes is None else max_bytes + 1
            )
            require_object(url, response.headers, data)
            return data

    data = cast(bytes, sync(client.loop, request))
    require_size(url, len(data), max_bytes)
    return data


async def read_at_most(body: Any, max_bytes: int | None) -> bytes:
    """Return the first bytes of a body. None: all of them."""
    pieces, left = [], sys.maxsize if max_bytes is None else max_bytes
    while left and (piece := await body.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


class RangeResponse(NamedTuple):
    """The response to the request of a range."""

    data: bytes
    stat: ObjectStat | None
    """The object that it is a range of. None: the storage did not say."""


def read_ranges(
    client: Any, urls: Sequence[str], bounds: Sequence[tuple[int, int]]
) -> list[RangeResponse | Exception]:
    """Request ranges once, side by side. Return the response to each of them, or its error."""
    health = health_of(urls[0])

    async def read_range(url: str, start: int, stop: int) -> RangeResponse:
        headers = {**_AS_IT_IS, "Range": f"bytes={start}-{stop - 1}"}
        session = await client.set_session()
        async with session.get(client.encode_url(url), headers=headers) as response:
            response.raise_for_status()
            stat = range_stat(url, response.status, response.headers, start, stop, health)
            return RangeResponse(await response.read(), stat)

    return side_by_side(client, read_range, urls, bounds)


def side_by_side(
    client: Any,
    read_range: Callable[[str, int, int], Awaitable[RangeResponse]],
    urls: Sequence[str],
    bounds: Sequence[tuple[int, int]],
    max_in_flight: int = MAX_REQUESTS_IN_FLIGHT,
) -> list[RangeResponse | Exception]:
    """Request ranges in the event loop of a client. Errors are values."""
    from fsspec.asyn import sync

    async def read_one(limit: asyncio.Semaphore, url: str, start: int, stop: int) -> RangeResponse:
        async with limit:
            return await read_range(url, start, stop)

    async def read_all() -> list[RangeResponse | BaseException]:
        limit = asyncio.Semaphore(max_in_flight)
        requests = (read_one(limit, url, *bound) for url, bound in zip(urls, bounds, strict=True))
        return await asyncio.gather(*requests, return_exceptions=True)

    return cast("list[RangeResponse | Exception]", sync(client.loop, read_all))
