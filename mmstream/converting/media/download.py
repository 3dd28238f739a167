"""Downloads of media: one event loop in one thread of a worker process.

    load -> DOWNLOAD (URL -> bytes)
              hosts.py       may the URL be requested? its host's addresses; when does it get a
                             request? is the network down?
              `WebClient`    one request: connect to a checked address, send, read within limits

Redirects are followed here and not by the HTTP client, so that each hop is checked like a new URL.

A server may refuse by its headers that its media are used for training. The directives are those
that img2dataset honours, plus the reservation of TDMRep. A body that a server compressed, although
it was asked not to, is unpacked.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import os
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import cache, lru_cache
from ipaddress import ip_address
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from mmstream.converting.draft import RowError
from mmstream.converting.media.hosts import (
    DeadHostError,
    DnsCache,
    Host,
    HostRules,
    Outage,
    TryFailedError,
    WebAddress,
    host_rule,
    is_allowed,
    is_public,
    look_up,
    parse_url,
    private_address,
    shown_url,
)
from mmstream.converting.options import DownloadOptions
from mmstream.errors import StorageError, escaped
from mmstream.storage.responses import seconds_until
from mmstream.storage.retry import THROTTLED_STATUS, backoff_s, may_pass

NUM_LOOKUPS = 64
"""Names that are looked up at the same time, by all processes. Resolvers give way under more."""

MAX_HOSTS = 1 << 14
"""Hosts of which a process knows how they answer: those that were requested last."""


class Downloader:
    """Downloads media, many at a time. A context manager; its thread ends with it.

    Keep it for all shards of a process: it remembers connections, names in DNS and bad hosts.

    Args:
        options: Limits.
        num_processes: Processes of this machine that download at the same time. They share the
            connections of `options` evenly.
        look_up: Returns the addresses of a host's name. For tests.
    """

    def __init__(
        self,
        options: DownloadOptions,
        num_processes: int = 1,
        *,
        look_up: Callable[[str], list[str]] = look_up,
    ) -> None:
        self._options = options
        self._slots = asyncio.Semaphore(max(1, options.num_connections // num_processes))
        per_host = max(1, options.num_connections_per_host // num_processes)
        self._host = lru_cache(MAX_HOSTS)(lambda _: Host(per_host))
        self._dns = DnsCache(
            look_up,
            lambda host: self._dns_outage.answered(host),
            max(8, NUM_LOOKUPS // num_processes),
        )
        self._dns_outage = Outage("DNS server", self._dns.answers, options.max_unanswered)
        self._server_outage = Outage("server", self._can_connect, options.max_unanswered)
        self._allowed = frozenset(map(host_rule, options.allow_hosts))
        self._resolver = CheckedResolver(self._dns, self._allowed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="mmstream-downloads", daemon=True
        )

    def __enter__(self) -> Downloader:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(
        self, url: str, max_bytes: int | None = None, keep: Callable[[bytes], Any] = bytes
    ) -> Future[Any]:
        """Start to download a URL. Return at once.

        Downloads start in the order of the calls, as far as their hosts allow it. The number of
        calls is not bounded: the caller bounds what it holds.

        Args:
            url: An http or https URL.
            max_bytes: A lower limit than that of the options.
            keep: What becomes of the bytes.

        Returns:
            A future. Its result is what `keep` returns. It raises a RowError that names the URL
            (without secrets) and the reason, or a StorageError when the network is down: that is
            not the row's fault, so the conversion must stop. Reasons hold no number of tries and no
            time but that of the options, so the same answers give the same rejects.
        """
        limit = min(self._options.max_bytes, max_bytes or self._options.max_bytes)
        return asyncio.run_coroutine_threadsafe(self._download(url, limit, keep), self._loop)

    async def _open(self) -> None:
        self._client = WebClient(self._options, self._resolver)

    async def _close(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()
        self._dns.close()

    async def _download(self, url: str, max_bytes: int, keep: Callable[[bytes], Any]) -> Any:
        """Return what is kept of a URL; the errors are those of `start`."""
        try:
            return keep(await self._try_often(url, max_bytes))
        except RowError as error:
            raise RowError(f"{shown_url(url)}: {error}") from None

    async def _try_often(self, url: str, max_bytes: int) -> bytes:
        for num_tries in range(1, self._options.num_tries + 1):
            try:
                return await self._follow(url, max_bytes, is_retry=num_tries > 1)
            except TryFailedError as error:
                failure = error
            if num_tries < self._options.num_tries:
                await asyncio.sleep(backoff_s(num_tries))
        if not failure.is_answered:
            outage = self._dns_outage if failure.is_dns else self._server_outage
            await outage.require_network(failure.origin, failure.reason, failure.started)
        raise RowError(failure.reason)

    async def _follow(self, url: str, max_bytes: int, *, is_retry: bool) -> bytes:
        """Request a URL once, and follow its redirects."""
        base: str | None = None
        for _ in range(self._options.max_redirects + 1):
            try:
                address = parse_url(url, self._allowed, base)
                answer = await self._request(address, max_bytes, is_retry)
            except RowError as error:
                if base is None:
                    raise
                raise RowError(f"redirects to {shown_url(url)}: {error}") from None
            if isinstance(answer, bytes):
                return answer
            url, base = answer, str(address)
        raise RowError(f"more than {self._options.max_redirects} redirects")

    async def _request(self, address: WebAddress, max_bytes: int, is_retry: bool) -> bytes | str:
        """Send one request when its host may get one, and note what the host does."""
        host = self._host(address.host)
        try:
            if address.ip is None:  # before the host's turn: a slow DNS server holds up nobody else
                await self._resolver.addresses(address.host, address.port)
            async with host.slot(is_retry=is_retry), self._slots:
                answer = await self._get(address, host, max_bytes)
        except TryFailedError as failure:
            failure.origin = address.origin
            host.failed(failure, is_retry=is_retry)
            raise
        except DeadHostError:
            reason = "its host does not answer"
            await self._server_outage.require_network(address.origin, reason)
            raise RowError(f"{reason}, and is left out for some minutes") from None
        return answer

    async def _get(self, address: WebAddress, host: Host, max_bytes: int) -> bytes | str:
        is_answered, started = True, time.monotonic()
        try:
            return await self._client.get(address, max_bytes, keep_connection=host.num_requests > 1)
        except TryFailedError as failure:
            is_answered, failure.started = failure.is_answered, started
            raise
        except (StorageError, asyncio.CancelledError):
            is_answered = False
            raise
        finally:
            if is_answered:
                host.answered()
                self._server_outage.answered(address.origin)

    async def _can_connect(self, origin: str) -> bool:
        """Tell whether a host that answered before can be connected to now."""
        host, _, port = origin.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                ip = host
                if WebAddress("http", host, int(port), "/").ip is None:
                    [ip, *_] = await self._resolver.addresses(host, int(port))
                _, writer = await asyncio.open_connection(ip, int(port))
        except (OSError, RowError, TryFailedError):  # a time-out is an OSError
            return False
        writer.close()
        return True


@cache
def shared_downloader(options: DownloadOptions, num_processes: int) -> Downloader:
    """Return the downloader of this process, which lives as long as the process.

    A worker process writes many shards. With one downloader for all of them, names in DNS and dead
    hosts are not forgotten with each shard. Its thread does not keep the process alive.
    """
    downloader = Downloader(options, num_processes).__enter__()
    atexit.register(_close_in, os.getpid(), downloader)
    return downloader


def _close_in(process_id: int, downloader: Downloader) -> None:
    """Close a downloader at the end of its process. A fork of it does not have the thread."""
    if os.getpid() == process_id:
        downloader.__exit__(None, None, None)


CONNECT_TIMEOUT_S = 5.0
"""Hosts that are gone are common, and most of them do not even refuse. A live one takes 0.3 s."""

BYTES_PER_SECOND = 128 << 10
"""A try gets a further second for so many bytes."""

KEEP_ALIVE_S = 4.0
"""Longer, and the idle connections to many hosts are too many."""

TOKEN = "mmstream"
"""What ``X-Robots-Tag: mmstream: noai`` is addressed to."""

HEADERS = {
    "User-Agent": f"{TOKEN} (dataset converter)",
    "Accept": "*/*",
    "Accept-Encoding": "identity",  # media are compressed already
}

_REDIRECTS = (301, 302, 303, 307, 308)

_OUT_OF_SOCKETS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_REASONS = {
    errno.ECONNREFUSED: "connection refused",
    errno.ECONNRESET: "connection reset",
    errno.EPIPE: "connection reset",
    errno.ETIMEDOUT: "timed out while connecting",
    errno.ENETUNREACH: "no route to its address",
    errno.EHOSTUNREACH: "no route to its address",
    errno.EADDRNOTAVAIL: "no route to its address",
}


class CheckedResolver(AbstractResolver):
    """Gives aiohttp only addresses that may be connected to.

    aiohttp connects to exactly what a resolver returns. So a DNS server cannot give one address for
    the check and another one for the connection.
    """

    def __init__(self, dns: DnsCache, allowed: HostRules) -> None:
        self._dns = dns
        self._allowed = allowed
        self._private: set[tuple[str, int]] = set()

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return the addresses of a name that may be connected to.

        Raises:
            RowError: There are none.
            TryFailedError: No DNS server answered.
        """
        if is_allowed(host, port, self._allowed):
            addresses = await self._dns.addresses(host)
            self._private.update((address, port) for address in addresses)
            return list(addresses)
        # The dot keeps the resolver from trying the domains of this network too.
        addresses = await self._dns.addresses(host.rstrip(".") + ".")
        public = [address for address in addresses if is_public(ip_address(address))]
        if not public:
            raise RowError(private_address(min(addresses), host))
        return public

    async def resolve(
        self,
        host: str,
        port: int = 0,
        family: socket.AddressFamily = socket.AF_UNSPEC,  # noqa: ARG002 - aiohttp passes AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses in aiohttp's form."""
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in await self.addresses(host, port)
        ]

    async def close(self) -> None:
        """Nothing to close."""

    def may_connect(self, address: str, port: int) -> bool:
        """Tell whether a connection may go to an address, wherever it came from."""
        return (
            is_public(ip_address(address))
            or is_allowed(address, port, self._allowed)
            or (address, port) in self._private
        )


class WebClient:
    """Sends requests, and keeps connections for the next ones. Lives in one event loop.

    Args:
        options: Limits of one request.
        resolver: The addresses of names.
    """

    def __init__(self, options: DownloadOptions, resolver: CheckedResolver) -> None:
        self._options = options
        self._resolver = resolver
        connector = aiohttp.TCPConnector(
            resolver=resolver,
            use_dns_cache=False,
            limit=0,  # the caller limits them, so that no time-out counts the time in a queue
            keepalive_timeout=KEEP_ALIVE_S,
            socket_factory=self._socket,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,  # a proxy looks names up itself, past the checks; no ~/.netrc either
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=min(CONNECT_TIMEOUT_S, options.idle_timeout_s),
                sock_read=options.idle_timeout_s,
            ),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def get(
        self, address: WebAddress, max_bytes: int, *, keep_connection: bool
    ) -> bytes | str:
        """Send one request. Return its body, or the URL that it leads to, which may be relative.

        Args:
            address: Where to.
            max_bytes: Limit on the body, as it comes and decompressed.
            keep_connection: Whether another request to the same host is likely.

        Raises:
            RowError: It cannot succeed. The message is only the reason.
            TryFailedError: It may succeed another time.
            StorageError: This machine has no more sockets.
        """
        is_answered = False
        # A corpus of the web has more hosts than a process has sockets.
        headers = {} if keep_connection else {"Connection": "close"}
        try:
            async with (
                asyncio.timeout(self._options.timeout_s) as deadline,
                self._session.get(
                    URL(str(address), encoded=True), allow_redirects=False, headers=headers
                ) as response,
            ):
                is_answered = True
                if response.status in _REDIRECTS and response.headers.get("Location"):
                    return str(response.headers["Location"])
                self._require_allowed(response)
                data = await self._body(response, max_bytes, deadline)
        except TimeoutError as error:
            if deadline.expired():
                reason = f"timed out after {self._options.timeout_s:g} s"
            elif isinstance(error, aiohttp.ConnectionTimeoutError):
                reason = "timed out while connecting"
            else:
                reason = f"no byte for {self._options.idle_timeout_s:g} s"
            raise TryFailedError(reason, is_answered=is_answered) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _failure(error, is_answered) from None
        return decompressed(data, response.headers.get("Content-Encoding"), max_bytes)

    def _require_allowed(self, response: aiohttp.ClientResponse) -> None:
        """Raise the error of an answer whose body may not be used, by its headers."""
        status, headers = response.status, response.headers
        if may_pass(status):
            raise TryFailedError(
                f"http {status}",
                is_answered=True,
                is_throttled=status in THROTTLED_STATUS,
                wait_s=seconds_until(headers.get("Retry-After", "").strip()),
            )
        if status != 200:
            raise RowError(f"http {status}")
        if self._options.honor_robots:
            directive = disallowed_by(
                headers.getall("X-Robots-Tag", []), headers.get("TDM-Reservation")
            )
            if directive is not None:
                raise RowError(f"says {directive}; take it all the same with --ignore-robots")

    async def _body(
        self, response: aiohttp.ClientResponse, max_bytes: int, deadline: asyncio.Timeout
    ) -> bytes:
        """Return the whole body."""
        total, size = response.content_length, 0
        if total is not None and total > max_bytes:
            raise RowError(f"larger than {max_bytes:,} bytes")
        end = asyncio.get_running_loop().time() + self._options.timeout_s
        chunks: list[bytes] = []
        try:
            async for chunk in response.content.iter_any():
                chunks.append(chunk)
                size += len(chunk)
                if size > max_bytes:
                    raise RowError(f"larger than {max_bytes:,} bytes")
                if size >= BYTES_PER_SECOND:
                    deadline.reschedule(end + size // BYTES_PER_SECOND)
        except aiohttp.ClientPayloadError:
            amount = f"after {size:,} bytes" if total is None else f"{size:,} of {total:,} bytes"
            raise TryFailedError(f"cut off: {amount}", is_answered=True) from None
        if not size:
            raise RowError("has no content")
        return b"".join(chunks)

    def _socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        """Return a socket to connect to an address. Checks every connection, as the last one."""
        family, kind, protocol, _, end = address
        ip, port = str(end[0]), int(end[1])
        if not self._resolver.may_connect(ip, port):
            raise RowError(private_address(ip, ip))
        return socket.socket(family, kind, protocol)


def _failure(error: Exception, is_answered: bool) -> Exception:
    """Return the failure of a try as an error of this package. Secrets of its URL are left out."""
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return RowError("its TLS certificate or connection is not valid")
    number = error.errno if isinstance(error, OSError) else None
    if number in _OUT_OF_SOCKETS:
        return StorageError(
            "downloads: this machine has no more sockets or open files; raise `ulimit -n`, or "
            "lower --num-connections"
        )
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return TryFailedError("closed the connection without an answer", is_answered=is_answered)
    if isinstance(error, aiohttp.ClientResponseError):
        return RowError("its answer is not HTTP")
    if isinstance(error, aiohttp.ClientConnectionError | OSError):
        reason = _REASONS.get(number or 0, "connection failed")
        return TryFailedError(reason, is_answered=is_answered)
    return RowError("cannot be requested")  # a URL or header that aiohttp refuses


DIRECTIVES = ("noai", "noimageai", "noindex", "noimageindex")


def disallowed_by(robots_tags: Iterable[str], tdm_reservation: str | None = None) -> str | None:
    """Return the directive that forbids the use of a medium. None: there is none.

    Args:
        robots_tags: Every ``X-Robots-Tag`` of an answer. A directive may stand after the name of
            the program that it is for: ``otherbot: noai, noindex``.
        tdm_reservation: ``TDM-Reservation`` of the answer (W3C TDMRep). ``1`` reserves the rights
            of text and data mining.

    Examples:
        >>> disallowed_by(["noarchive, NoAI"]), disallowed_by(["otherbot: noai"])
        ('noai', None)
    """
    for tag in robots_tags:
        program = TOKEN
        for text in tag.lower().split(","):
            name, colon, directive = text.rpartition(":")
            # "unavailable_after: 25 Jun 2030 15:00:00 PST" is a directive with a value.
            if colon and "unavailable_after" not in name:
                program = name.strip()
            if program == TOKEN and directive.strip() in DIRECTIVES:
                return directive.strip()
    if tdm_reservation is not None and tdm_reservation.strip() == "1":
        return "tdm-reservation"
    return None


_ANY_HEADER = 32 + zlib.MAX_WBITS
"""zlib reads both gzip's header and its own."""


def decompressed(body: bytes, encoding: str | None, max_bytes: int) -> bytes:
    """Return a body without its compression. No more than `max_bytes` are ever unpacked.

    Args:
        body: As it came.
        encoding: ``Content-Encoding`` of the answer.
        max_bytes: Limit on the result.

    Raises:
        RowError: The result is larger, the body is damaged, or the compression is unknown. The
            message is only the reason.
    """
    name = (encoding or "identity").strip().lower()
    if name in ("identity", ""):
        return body
    if name not in ("gzip", "x-gzip", "deflate"):
        raise RowError(f"content-encoding {escaped(name)!r} is not supported")
    inflater = zlib.decompressobj(_ANY_HEADER)
    try:
        data = inflater.decompress(body, max_bytes + 1)
    except zlib.error:
        raise RowError(f"its {name} body is damaged") from None
    if len(data) > max_bytes:
        raise RowError(f"larger than {max_bytes:,} bytes when decompressed")
    if not inflater.eof or inflater.unused_data:  # cut off, or more after its end
        raise RowError(f"its {name} body is damaged")
    return data
