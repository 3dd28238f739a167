"""Storage: HTTP/1.1 requests without a body, whose responses are read in pieces.

Made for many ranges of objects at once. The bytes of a response go from the socket into the pieces
that the caller gets, and nowhere else. So a gigabyte costs half the CPU time of other clients:
docs/object-storage.md has the figures.

It knows what object stores use: connections that are kept, TLS, proxies, and answers of known
length, in chunks or up to the end of the connection. It follows no redirects, keeps no cookies and
sends nothing twice (but for a kept connection that the server closed meanwhile).
"""

from __future__ import annotations

import asyncio
import base64
import copy
import random
import re
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from urllib.parse import SplitResult, unquote, urlsplit

PIECE_BYTES = 1024 * 1024
"""Length of a piece, which costs a turn of the event loop. Where the caller says where a response
goes, one read brings what has come, so a piece may be longer."""

MAX_HEAD_BYTES = 64 * 1024
"""Longest head of a response. The servers of S3 send less than 2 kB."""

MAX_CHUNK_LINE_BYTES = 8 * 1024
"""Longest line between the chunks of a body: a length, or a header after the last chunk."""

HEAD_READ_BYTES = 4 * 1024
"""What is read at once while a head is awaited. Bytes of the body after it are copied."""

FLUSH_S = 1.0
"""Bytes that have waited for the rest of their piece this long are handed over. So a slow response
shows its speed, and less is lost with its connection."""

MAX_IDLE_S = 15.0
"""Seconds that an idle connection is kept. Amazon S3 closes it after about 20."""


class ProtocolError(ConnectionError):
    """What came is not HTTP/1.1."""


class ProxyError(ConnectionError):
    """A proxy does not connect to the server.

    Attributes:
        status: What it answers, such as 407: it wants a name and a password.
    """

    def __init__(self, host: str | None, status: int) -> None:
        super().__init__(f"the proxy {host} answers {status}")
        self.status = status


class HttpClient:
    """Sends requests, each on a connection that is idle or new. It sets no limit to their number.

    A client lives in one event loop.

    Args:
        tls: For ``https``.
        proxy: URL of a proxy, for all requests, or None.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, proxy: str | None = None) -> None:
        self._tls = tls
        self._proxy = urlsplit(proxy) if proxy else None
        self._idle: dict[tuple[str, str], list[tuple[float, _Connection]]] = {}
        self._connections: set[_Connection] = set()

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], into: memoryview | None = None
    ) -> Response:
        """Send a request, and return its answer as soon as its head is there.

        Cancelling it drops the connection.

        Args:
            method: ``GET`` or ``HEAD``.
            url: With everything quoted that must be.
            headers: Beside ``Host``.
            into: Where the body of a successful response goes, if it is not longer. None: into new
                memory.

        Raises:
            OSError: The server cannot be reached, or the connection broke.
            ProtocolError: What came is not HTTP/1.1.
            ProxyError: The proxy does not connect to the server.
        """
        parsed_url = urlsplit(url)
        target = f"{parsed_url.path or '/'}{'?' if parsed_url.query else ''}{parsed_url.query}"
        if self._proxy is not None and parsed_url.scheme == "http":
            target = f"http://{parsed_url.netloc}{target}"
            headers = {**headers, **_authorization(self._proxy)}
        lines = [f"{method} {target} HTTP/1.1", f"Host: {parsed_url.netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        data = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        while True:
            connection = self._take_idle(parsed_url)
            was_idle = connection is not None
            if connection is None:
                connection = await self._connect(parsed_url)
                self._connections.add(connection)
            try:
                await connection.send(data, has_body=method != "HEAD", into=into)
            except BaseException as error:
                self._drop(connection)
                # A server closes idle connections at any time, also as the request is on its way.
                if was_idle and isinstance(error, OSError) and not connection.has_received:
                    continue
                raise
            return Response(self, connection, (parsed_url.scheme, parsed_url.netloc))

    async def close(self) -> None:
        """Drop all connections."""
        self._idle.clear()
        for connection in list(self._connections):
            self._drop(connection)

    def _take_idle(self, parsed_url: SplitResult) -> _Connection | None:
        """Return the connection that was used last, or None."""
        idle = self._idle.get((parsed_url.scheme, parsed_url.netloc), [])
        while idle:
            since, connection = idle.pop()
            if connection.is_usable and time.monotonic() - since < MAX_IDLE_S:
                return connection
            self._drop(connection)
        return None

    def _give_back(self, connection: _Connection, server: tuple[str, str]) -> None:
        if connection in self._connections and connection.is_usable:
            connection.forget()
            self._idle.setdefault(server, []).append((time.monotonic(), connection))
        else:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        connection.abort()

    async def _connect(self, parsed_url: SplitResult) -> _Connection:
        """Connect to a server, if necessary through the proxy."""
        loop = asyncio.get_running_loop()
        tls = self._tls if parsed_url.scheme == "https" else None
        name, port = _address(parsed_url)
        if self._proxy is None:
            connection = _Connection()
            connected = await _connected_socket(name, port)
            try:
                await loop.create_connection(
                    lambda: connection,
                    sock=connected,
                    ssl=tls,
                    server_hostname=name if tls else None,
                )
            except BaseException:
                connected.close()
                raise
            return connection
        tunnel = _Connection()
        await loop.create_connection(lambda: tunnel, *_address(self._proxy))
        if tls is None:
            return tunnel
        try:
            await self._open_tunnel(tunnel, name, port, self._proxy)
            connection = _Connection()
            encrypted = await loop.start_tls(
                tunnel.transport, connection, tls, server_hostname=name
            )
        except BaseException:
            tunnel.abort()
            raise
        assert encrypted is not None
        connection.connection_made(encrypted)
        return connection

    async def _open_tunnel(
        self, tunnel: _Connection, name: str, port: int, proxy: SplitResult
    ) -> None:
        """Have a proxy connect to a server."""
        lines = [f"CONNECT {name}:{port} HTTP/1.1", f"Host: {name}:{port}"]
        lines += [f"{key}: {value}" for key, value in _authorization(proxy).items()]
        # A refusal may have a body. Behind a 200, the bytes of the server would follow.
        await tunnel.send(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"), has_body=True)
        if tunnel.status != 200:
            raise ProxyError(proxy.hostname, tunnel.status)


class Response:
    """The response to a request: its head, and its body in pieces while it arrives.

    Attributes:
        status: Such as 206.
        headers: By their names in lower case.
    """

    def __init__(
        self, client: HttpClient, connection: _Connection, server: tuple[str, str]
    ) -> None:
        self._client, self._connection, self._server = client, connection, server
        self.status, self.headers = connection.status, connection.headers

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        """Yield the body in pieces of about `PIECE_BYTES`, as they arrive.

        Raises:
            OSError: The connection broke. What came before was yielded.
        """
        while (piece := await self._connection.read()) is not None:
            yield piece

    async def read(self, max_bytes: int) -> bytes:
        """Return the body, or its first bytes; errors as `__aiter__`."""
        data = b""
        async for piece in self:
            data += piece
            if len(data) >= max_bytes:
                break
        return data[:max_bytes]

    async def close(self) -> None:
        """Keep the connection if the body came to its end, and drop it otherwise."""
        server, self._server = self._server, ("", "")
        if server[0]:
            self._client._give_back(self._connection, server)


class _Connection(asyncio.BufferedProtocol):
    """One connection. It carries one request at a time, and reads into the buffers of pieces."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.status = 0
        self.headers: dict[str, str] = {}
        self.has_received = False
        """Bytes of the present response came."""
        self._is_aborted = False
        self._error: Exception | None = None
        self._scratch = bytearray(MAX_HEAD_BYTES)
        """For heads, and for bodies whose framing lies between their bytes."""
        self._num_scratch = 0
        self._has_head = True
        self._has_body = False
        self._body: _Body | None = None
        self._into: memoryview | None = None
        self._waiter: asyncio.Future[None] | None = None

    # -- called by the client --------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent."""
        return (
            self._error is None
            and self._has_head
            and (self._body is None or self._body.is_complete)
            and not self.transport.is_closing()
            and self.headers.get("connection", "").lower() != "close"
        )

    def abort(self) -> None:
        """Close the connection now. The server sees that nobody waits any more."""
        self._is_aborted = True
        if hasattr(self, "transport"):
            self.transport.abort()

    def forget(self) -> None:
        """Let go of the last response, and of the memory that it went to."""
        self._body = self._into = None

    async def send(self, data: bytes, *, has_body: bool, into: memoryview | None = None) -> None:
        """Send a request and wait for the head of its answer."""
        self._has_head = self.has_received = False
        self._has_body, self._body, self._num_scratch = has_body, None, 0
        self._into = into
        self.transport.write(data)
        while not self._has_head:
            await self._wait()

    async def read(self) -> memoryview | None:
        """Return the next bytes of the body. None: it has ended."""
        body = self._body
        if body is None:
            return None
        while not body.pieces:
            if body.is_complete:
                return None
            await self._wait(body)
        return body.pieces.popleft()

    async def _wait(self, body: _Body | None = None) -> None:
        """Wait until something arrived. Bytes of a body that is slow are handed over."""
        if self._error is not None:
            # The frames of an error that is raised hold the memory of the body, and this connection
            # holds its error. Such a circle would only end with the garbage collector.
            raise copy.copy(self._error)
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if body is None else loop.call_later(FLUSH_S, self._flush, body)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _flush(self, body: _Body) -> None:
        body.flush()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- called by the event loop ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, _size_hint: int) -> memoryview:
        """Return where the next bytes go: into a piece of the body, or into the scratch buffer."""
        body = self._body
        if body is not None and body.is_plain and not (body.is_complete or self._is_aborted):
            return body.free
        free = memoryview(self._scratch)[self._num_scratch :]
        return free if self._has_head else free[:HEAD_READ_BYTES]

    def buffer_updated(self, num_bytes: int) -> None:
        """Take note of bytes that came."""
        self.has_received = True
        try:
            self._take(num_bytes)
        except (ProtocolError, ValueError, RecursionError) as error:  # heads of 1xx without end
            self._fail(ProtocolError(str(error)))
        if self._body is not None and (self._body.pieces or self._body.is_complete):
            self._wake()

    def _take(self, num_bytes: int) -> None:
        body = self._body
        if self._is_aborted:  # its memory may be in other hands
            return
        if not self._has_head:
            self._num_scratch += num_bytes
            self._parse_head()
        elif body is None or body.is_complete:
            raise ProtocolError("bytes came that nobody asked for")
        elif body.is_plain:
            body.filled(num_bytes)
        else:
            body.feed(memoryview(self._scratch)[:num_bytes])

    def eof_received(self) -> None:
        """Close the connection: `connection_lost` follows."""

    def connection_lost(self, error: Exception | None) -> None:
        """Hand over what came, and then say that the connection broke."""
        if self._body is not None:
            self._body.end_of_connection()
        self._fail(error or ConnectionResetError("the server closed the connection"))

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._wake()
        self.transport.abort()

    def _parse_head(self) -> None:
        end = self._scratch.find(b"\r\n\r\n", 0, self._num_scratch)
        if end < 0:
            if self._num_scratch == MAX_HEAD_BYTES:
                raise ProtocolError(f"the head of an answer has more than {MAX_HEAD_BYTES} bytes")
            return
        first, *lines = self._scratch[:end].decode("latin-1").split("\r\n")
        version, _, status_and_reason = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status_and_reason[:3].isdecimal():
            raise ProtocolError("what answers is not an HTTP/1.1 server")
        self.status = int(status_and_reason[:3])
        if self.status < 200:  # such as 103: the response follows
            self._scratch[: self._num_scratch - end - 4] = self._scratch[
                end + 4 : self._num_scratch
            ]
            self._num_scratch -= end + 4
            self._parse_head()
            return
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if version == "HTTP/1.0":
            self.headers.setdefault("connection", "close")
        after, self._num_scratch = bytes(self._scratch[end + 4 : self._num_scratch]), 0
        if self._has_body and self.status not in (204, 304):
            self._body = _Body.after(self.headers, self._into if self.status < 300 else None)
            if after:
                self._body.feed(memoryview(after))
        elif after:
            raise ProtocolError("an answer without a body has one")
        self._has_head = True
        self._wake()


class _Body:
    """The body of a response, while it arrives.

    Args:
        length: Bytes that are still to come, or None if the end of the connection ends it.
        is_chunked: It comes in chunks, with their lengths between them.
        into: Where it goes, or None.
    """

    def __init__(self, length: int | None, *, is_chunked: bool, into: memoryview | None) -> None:
        self.pieces: deque[memoryview] = deque()
        self._length = length
        self._line = bytearray() if is_chunked else None
        """What came of a line between chunks."""
        self._chunk_left = 0
        self._is_last_chunk = False
        self.is_complete = length == 0
        fits = length is not None and into is not None and length <= len(into)
        self._piece = into[:length] if into is not None and fits else memoryview(b"")
        self._num_filled = self._num_handed = 0

    @classmethod
    def after(cls, headers: Mapping[str, str], into: memoryview | None) -> _Body:
        """Return the body that follows a head."""
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return cls(None, is_chunked=True, into=into)
        length = headers.get("content-length")
        if length is not None and not length.isdecimal():
            raise ProtocolError("the length of an answer is not a number")
        return cls(None if length is None else int(length), is_chunked=False, into=into)

    @property
    def is_plain(self) -> bool:
        """Whether all bytes that come are of the body."""
        return self._line is None

    @property
    def free(self) -> memoryview:
        """Where the next bytes go."""
        if self._num_filled == len(self._piece):
            num_bytes = PIECE_BYTES if self._length is None else min(PIECE_BYTES, self._length)
            self._piece = memoryview(bytearray(num_bytes))
            self._num_filled = self._num_handed = 0
        return self._piece[self._num_filled :]

    def filled(self, num_bytes: int) -> None:
        """Take note of bytes that were written to `free`."""
        self._num_filled += num_bytes
        if self._length is not None:
            self._length -= num_bytes
            self.is_complete = self._length == 0
        num_waiting = self._num_filled - self._num_handed
        if self.is_complete or num_waiting >= PIECE_BYTES or self._num_filled == len(self._piece):
            self.flush()

    def feed(self, data: memoryview) -> None:
        """Take bytes that came elsewhere than in `free`."""
        if self._line is not None:
            self._feed_chunks(data)
            return
        while data:
            if self.is_complete:
                raise ProtocolError("an answer is longer than it says")
            self._copy(data[: (num_bytes := min(len(data), len(self.free)))])
            data = data[num_bytes:]

    def _copy(self, data: memoryview) -> None:
        self.free[: len(data)] = data
        self.filled(len(data))

    def _feed_chunks(self, data: memoryview) -> None:
        r"""Take bytes of a chunked body.

        Example: ``5\r\n``, 5 bytes, ``\r\n``, ``1a\r\n``, 26 bytes, ``\r\n``, ``0\r\n\r\n``.
        """
        assert self._line is not None
        while data:
            if self._chunk_left:
                num_bytes = min(len(data), self._chunk_left, len(self.free))
                self._copy(data[:num_bytes])
                self._chunk_left -= num_bytes
                data = data[num_bytes:]
            elif self.is_complete:
                raise ProtocolError("an answer is longer than it says")
            else:
                self._line.append(data[0])  # framing is a few bytes in tens of thousands
                data = data[1:]
                if len(self._line) > MAX_CHUNK_LINE_BYTES:
                    raise ProtocolError(
                        f"a line between chunks has more than {MAX_CHUNK_LINE_BYTES} bytes"
                    )
                if self._line.endswith(b"\r\n"):
                    self._end_line(self._line)

    def _end_line(self, line: bytearray) -> None:
        """Take a line between chunks. The empty one after a chunk stays, so a second is bad."""
        if self._is_last_chunk and line == b"\r\n":
            self.is_complete = True
            self.flush()
        elif self._is_last_chunk:  # a trailing header
            line.clear()
        elif line != b"\r\n":
            length = bytes(line).partition(b";")[0].strip()
            line.clear()
            if not re.fullmatch(rb"[0-9a-fA-F]+", length):  # int() takes "-5" and "1_0", too
                raise ProtocolError("the length of a chunk is not a number")
            self._chunk_left = int(length, 16)
            self._is_last_chunk = self._chunk_left == 0

    def flush(self) -> None:
        """Hand over what came."""
        if self._num_filled > self._num_handed:
            self.pieces.append(self._piece[self._num_handed : self._num_filled])
            self._num_handed = self._num_filled

    def end_of_connection(self) -> None:
        """Hand over what came; without a length, that was all."""
        self.flush()
        if self._length is None and self._line is None:
            self.is_complete = True


async def _connected_socket(name: str, port: int) -> socket.socket:
    """Connect to an address of a server, drawn again each time: S3 names eight, to spread load."""
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    random.shuffle(addresses)
    failure: OSError | None = None
    for family, kind, protocol, _, address in addresses:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            await loop.sock_connect(connection, address)
        except OSError as error:
            failure = error
            connection.close()
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise failure or ConnectionError(f"{name}: has no address")


def _address(parsed_url: SplitResult) -> tuple[str, int]:
    return parsed_url.hostname or "", parsed_url.port or (
        443 if parsed_url.scheme == "https" else 80
    )


def _authorization(proxy: SplitResult) -> dict[str, str]:
    """Return the header for the name and password in a proxy's URL."""
    if proxy.username is None:
        return {}
    login = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(login.encode()).decode()}
