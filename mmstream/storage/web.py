"""Storage: HTTP, as web servers and object stores speak it.

The first part says what headers of responses mean, whichever client sent the request. The second
one sends requests to plain web servers, for ``http://`` and ``https://``.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, cast

from mmstream.errors import StorageError, escaped
from mmstream.storage.retry import StoreHealth, health_of
from mmstream.storage.store import ObjectStat, RequestError, require_size

# -- headers of responses --------------------------------------------------------------------------

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.IGNORECASE)

_PAGE_TYPES = ("text/html", "application/xhtml+xml")
_PAGE_BEGIN = re.compile(
    rb"(?i)(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!doctype html|<html\b|<error>\s*<code>)"
)
_PAGE_NAMES = (".html", ".htm", ".xhtml")


def require_object(url: str, headers: Mapping[str, str], begin: bytes = b"") -> None:
    """Raise a RequestError if something else came than the bytes of an object.

    Proxies, login pages of networks and load balancers send web pages, with status 200 too. Some
    compress what nobody asked them to compress.

    Args:
        url: Of the object. Its name may end in ``.html``: then it is a page.
        headers: Of the response, by names in lower case.
        begin: First bytes of the body, as far as they are known.
    """
    kind = headers.get("content-type", "").lower()
    is_page = kind.startswith(_PAGE_TYPES) or (begin and _PAGE_BEGIN.match(begin))
    if is_page and not url.lower().endswith(_PAGE_NAMES):
        raise RequestError(
            "a web page came and not the object: a proxy or a login page answers in place of the "
            "storage"
        )
    coding = headers.get("content-encoding", "")
    if "gzip" in coding and begin.startswith(b"\x1f\x8b") and not url.endswith(("gz", "GZ")):
        raise RequestError(f"the bytes came compressed ({escaped(coding)}), which nobody asked for")


def range_stat(
    url: str, status: int, headers: Mapping[str, str], start: int, stop: int, health: StoreHealth
) -> ObjectStat | None:
    """Return the object that a response to the request of a range is of. None: it does not say.

    Args:
        url: Of the object.
        status: 200 or 206.
        headers: Of the response, by names in lower case.
        start: First byte that was asked for.
        stop: The byte after the last one.
        health: Of the store. A server that has sent ranges is expected to do so again.

    Raises:
        RequestError: It is no such range: a cache may answer with another one. A response may end
            earlier, where the object does.
    """
    require_object(url, headers)
    if status == 206:
        content_range = headers.get("content-range", "")
        match = _CONTENT_RANGE.fullmatch(content_range)
        if match is None or int(match[1]) != start or int(match[2]) >= stop:
            came = escaped(content_range) or "a range without Content-Range"
            raise RequestError(f"bytes {start}-{stop - 1} were asked for, {came} came")
        size = None if match[3] == "*" else int(match[3])
    elif start == 0 and number_of_bytes(headers) == stop:
        size = None  # the whole object, or a server that says 200 always
    else:
        raise RequestError(
            f"the server does not know ranges of objects (it answers {status} where 206 is right); "
            "serve them by another one, or download them first",
            may_be_final=not health.has_ranges,
        )
    num_expected = min(stop, size or stop) - start
    if "content-encoding" in headers and (number_of_bytes(headers) or stop) < num_expected:
        require_object(url, headers, b"\x1f\x8b")
    health.has_ranges |= status == 206
    return None if size is None else ObjectStat(size, version_of(headers))


def version_of(headers: Mapping[str, str]) -> str | None:
    """Return an ETag without its quotes, and without the mark of a weak one. None: it has none."""
    return headers.get("etag", "").removeprefix("W/").strip('"') or None


def number_of_bytes(headers: Mapping[str, str]) -> int | None:
    """Return the length of a body. None: the response does not say it, as with chunks."""
    text = headers.get("content-length", "")
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None


def timestamp(date: str) -> float | None:
    """Return the time that a header says, in seconds since 1970. None: it says none."""
    try:
        moment = parsedate_to_datetime(date)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, TypeError, IndexError):  # zones and years that cannot be
        return None


def seconds_until(text: str, now: float | None = None) -> float | None:
    """Return what ``Retry-After`` says, in seconds: a number of them, or a date. None: nothing."""
    if re.fullmatch("[0-9]+", text):
        return float(text[:9])
    moment = timestamp(text)
    return None if moment is None else max(0.0, moment - (now or time.time()))


# -- requests to a plain web server ----------------------------------------------------------------
#
# fsspec sends them too, but it drops what the responses say: a server that is down would be an
# absent object, and a server that ignores ranges would send whole shards. Here a 206 is a range, a
# 200 is none, and `ObjectStat` has the size and the ETag of the response.
#
# The client is fsspec's, so its connections and its event loop are shared with all other requests.

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
