"""One request of a download: connect to a checked address, send, read the answer within limits.

    download (URL of a hop) -> WEB CLIENT -> bytes, or where it redirects to

A server may refuse by its headers that its media are used for training. The directives are those
that img2dataset honours, plus the reservation of TDMRep. A body that a server compressed, although
it was asked not to, is unpacked.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from mmstream.converting.draft import RowError
from mmstream.converting.media.addresses import AllowedHosts, WebAddress, is_public, private_address
from mmstream.converting.media.hosts import DnsCache, TryFailedError
from mmstream.converting.options import DownloadOptions
from mmstream.errors import StorageError, escaped
from mmstream.storage.http_headers import seconds_until
from mmstream.storage.patience import THROTTLED_STATUS, may_pass

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


@dataclass(frozen=True)
class Redirect:
    """An answer that names another URL. It may be relative."""

    url: str


@dataclass
class Partial:
    """What earlier tries of a download have got. A later one asks for the rest only."""

    url: str = ""
    etag: str = ""
    """A strong one. Empty: the next try starts from the beginning."""
    chunks: list[bytes] = field(default_factory=list)
    size: int = 0

    def restart(self, url: str = "", etag: str = "") -> None:
        """Forget the bytes."""
        self.url, self.etag, self.chunks, self.size = url, etag, [], 0

    def headers(self, url: str) -> dict[str, str]:
        """Return the headers that ask for the rest. Empty: all of it is needed."""
        if not self.size or self.url != url:
            return {}
        return {"Range": f"bytes={self.size}-", "If-Range": self.etag}


class CheckedResolver(AbstractResolver):
    """Gives aiohttp only addresses that may be connected to.

    aiohttp connects to exactly what a resolver returns. So a DNS server cannot give one address for
    the check and another one for the connection.
    """

    def __init__(self, dns: DnsCache, allowed: AllowedHosts) -> None:
        self._dns = dns
        self._allowed = allowed
        self._private: set[tuple[str, int]] = set()

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return the addresses of a name that may be connected to.

        Raises:
            RowError: There are none.
            TryFailedError: No DNS server answered.
        """
        if self._allowed.has(host, port):
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
            or self._allowed.has(address, port)
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
        self, address: WebAddress, max_bytes: int, partial: Partial, *, keep_connection: bool
    ) -> bytes | Redirect:
        """Send one request and read its answer.

        Args:
            address: Where to.
            max_bytes: Limit on the body, as it comes and decompressed.
            partial: What earlier tries have got; what this one gets is added.
            keep_connection: Whether another request to the same host is likely.

        Raises:
            RowError: It cannot succeed. The message is only the reason.
            TryFailedError: It may succeed another time.
            StorageError: This machine has no more sockets.
        """
        url, is_answered = str(address), False
        headers = partial.headers(url)
        if not keep_connection:  # a corpus of the web has more hosts than a process has sockets
            headers["Connection"] = "close"
        try:
            async with (
                asyncio.timeout(self._options.timeout_s) as deadline,
                self._session.get(
                    URL(url, encoded=True), allow_redirects=False, headers=headers
                ) as response,
            ):
                is_answered = True
                target = self._checked_head(response, url, partial)
                if target is not None:
                    return target
                data = await self._body(response, max_bytes, partial, deadline)
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

    def _checked_head(
        self, response: aiohttp.ClientResponse, url: str, partial: Partial
    ) -> Redirect | None:
        """Return where an answer redirects to. None: its body is the medium, or the rest of it."""
        status, headers = response.status, response.headers
        if status in _REDIRECTS and headers.get("Location"):
            return Redirect(headers["Location"])
        if status == 206 and _begins_at(headers.get("Content-Range"), partial.size):
            return None
        if status in (206, 416):  # the range is not what was asked for
            partial.restart()
            raise TryFailedError(f"http {status}", is_answered=True)
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
        etag = headers.get("ETag", "")
        is_plain = etag.startswith('"') and "Content-Encoding" not in headers
        partial.restart(url, etag if is_plain else "")
        return None

    async def _body(
        self,
        response: aiohttp.ClientResponse,
        max_bytes: int,
        partial: Partial,
        deadline: asyncio.Timeout,
    ) -> bytes:
        """Return the whole body, with the bytes of earlier tries."""
        length = response.content_length
        total = None if length is None else partial.size + length
        if total is not None and total > max_bytes:
            raise RowError(f"larger than {max_bytes:,} bytes")
        started = asyncio.get_running_loop().time() + self._options.timeout_s
        num_seconds = 1
        num_new = 0
        try:
            async for chunk in response.content.iter_any():
                partial.chunks.append(chunk)
                partial.size += len(chunk)
                num_new += len(chunk)
                if partial.size > max_bytes:
                    raise RowError(f"larger than {max_bytes:,} bytes")
                if num_new >= num_seconds * BYTES_PER_SECOND:
                    deadline.reschedule(started + num_seconds)
                    num_seconds = num_new // BYTES_PER_SECOND + 1
        except aiohttp.ClientPayloadError:
            size = partial.size
            amount = f"after {size:,} bytes" if total is None else f"{size:,} of {total:,} bytes"
            raise TryFailedError(f"cut off: {amount}", is_answered=True) from None
        finally:
            data = b"".join(partial.chunks)
            partial.chunks = [data]
            if not partial.etag:
                partial.restart()
        if not data:
            raise RowError("has no content")
        return data

    def _socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        """Return a socket to connect to an address. Checks every connection, as the last one."""
        family, kind, protocol, _, end = address
        ip, port = str(end[0]), int(end[1])
        if not self._resolver.may_connect(ip, port):
            raise RowError(private_address(ip, ip))
        return socket.socket(family, kind, protocol)


def _begins_at(content_range: str | None, start: int) -> bool:
    """Tell whether ``Content-Range: bytes 512-2047/2048`` is the rest behind the bytes in hand."""
    return start > 0 and (content_range or "").replace(" ", "").startswith(f"bytes{start}-")


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
        robots_tags: Every ``X-Robots-Tag`` of an answer. A directive may stand behind the name of
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
    try:
        return _inflated(body, _ANY_HEADER, max_bytes)
    except zlib.error:
        pass
    try:  # some servers send "deflate" without a header
        return _inflated(body, -zlib.MAX_WBITS, max_bytes)
    except zlib.error:
        raise RowError(f"its {name} body is damaged") from None


def _inflated(body: bytes, wbits: int, max_bytes: int) -> bytes:
    inflater = zlib.decompressobj(wbits)
    data = inflater.decompress(body, max_bytes + 1)
    if len(data) > max_bytes:
        raise RowError(f"larger than {max_bytes:,} bytes when decompressed")
    if not inflater.eof:
        raise zlib.error("truncated")
    if inflater.unused_data:  # to stop at the end of the first part would cut a medium
        raise zlib.error("more behind its end")
    return data
