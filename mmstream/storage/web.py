"""Storage: requests to a plain web server, for ``http://`` and ``https://``.

fsspec sends them too, but it drops what the answers say: a server that is down would be an absent
object, and a server that ignores ranges would send whole shards. Here a 206 is a range, a 200 is
none, and `ObjectStat` has the size and the ETag of the answer.

The client is fsspec's, so its connections and its event loop are shared with all other requests.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from typing import Any, cast

from mmstream.errors import StorageError
from mmstream.storage.http_headers import seconds_until, size_of_range
from mmstream.storage.store import ObjectStat, RequestError

__all__ = ["client_options", "head", "read_ranges"]

MAX_REQUESTS_IN_FLIGHT = 64


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
        FileNotFoundError: No such object.
        PermissionError: The server wants a password, or forbids it.
        StorageError: The server does not say the size.
        OSError: The request failed for a passing reason.
    """
    from fsspec.asyn import sync

    async def request() -> ObjectStat:
        session = await client.set_session()
        settings = {"headers": {"Accept-Encoding": "identity"}, "allow_redirects": True}
        async with session.head(client.encode_url(url), **settings) as answer:
            _require_ok(url, answer)
            size = answer.headers.get("Content-Length", "")
            if not size.isdigit():
                raise StorageError(f"{url}: the server does not say its size; download it first")
            return ObjectStat(int(size), _version(answer.headers))

    return cast(ObjectStat, sync(client.loop, request))


def read_ranges(
    client: Any, urls: Sequence[str], bounds: Sequence[tuple[int, int]]
) -> list[tuple[bytes, ObjectStat | None] | Exception]:
    """Request ranges once, side by side. Return (bytes, object) or the error, for each of them."""
    from fsspec.asyn import sync

    async def read_range(
        limit: asyncio.Semaphore, url: str, start: int, stop: int
    ) -> tuple[bytes, ObjectStat | None]:
        settings = {
            "headers": {"Accept-Encoding": "identity", "Range": f"bytes={start}-{stop - 1}"}
        }
        async with limit:
            session = await client.set_session()
            async with session.get(client.encode_url(url), **settings) as answer:
                if answer.status == 416:
                    raise OSError(errno.EINVAL, "the range goes past the end")
                _require_ok(url, answer)
                is_whole = start == 0 and answer.headers.get("Content-Length") == str(stop)
                if answer.status != 206 and not is_whole:
                    answer.close()  # not all of the object
                    raise StorageError(
                        f"{url}: this server knows no ranges (it answers {answer.status} where "
                        "206 is right); serve the file by another one, or download it first"
                    )
                size: int | None = stop
                if answer.status == 206:
                    content_range = answer.headers.get("Content-Range", "")
                    size = size_of_range(content_range, start, stop)
                data = await answer.read()
                version = _version(answer.headers)
                return data, None if size is None else ObjectStat(size, version)

    async def read_all() -> list[tuple[bytes, ObjectStat | None] | BaseException]:
        limit = asyncio.Semaphore(MAX_REQUESTS_IN_FLIGHT)
        requests = (read_range(limit, url, *bound) for url, bound in zip(urls, bounds, strict=True))
        return await asyncio.gather(*requests, return_exceptions=True)

    return cast("list[tuple[bytes, ObjectStat | None] | Exception]", sync(client.loop, read_all))


def _version(headers: Any) -> str | None:
    """Return the ETag without its quotes, and without the mark of a weak one."""
    return headers.get("ETag", "").removeprefix("W/").strip('"') or None


def _require_ok(url: str, answer: Any) -> None:
    status: int = answer.status
    if status in (404, 410):
        raise FileNotFoundError(f"{url}: no such object")
    if status in (401, 403):
        raise StorageError(
            f"{url}: the server answers {status}; if the host needs a password, put it into "
            "~/.netrc; else the address may have expired"
        )
    if status in (429, 503):
        raise RequestError(
            f"the server answers {status}",
            is_throttled=True,
            retry_after_s=seconds_until(answer.headers.get("Retry-After", "")),
        )
    if status in (405, 501):
        raise OSError(errno.EOPNOTSUPP, f"the server answers {status}")
    if status >= 400:
        raise OSError(f"the server answers {status}")
