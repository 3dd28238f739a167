"""A web server of media on loopback that misbehaves as its URLs say. For tests of downloads.

    with MediaServer({"cat.jpg": jpeg}) as server:
        server.url("cat.jpg")                  # http://127.0.0.1:PORT/cat.jpg
        server.url("cat.jpg", "429", "once")   # the first request fails, the next one succeeds

Every answer is written byte by byte, so that it can be wrong in any way.
"""

from __future__ import annotations

import asyncio
import gzip
import socket
import struct
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from types import TracebackType
from urllib.parse import parse_qsl, urlsplit

Headers = dict[str, str]


class MediaServer:
    """Serves named bytes. ``?fault=NAME`` makes an answer fail, ``&times=N`` the first N of them.

    Attributes:
        requests: Number of requests by path with query.
        heads: The lines of each request's head, in order.
        num_connections: Connections that were accepted.
        max_open: Most requests at the same time.
        may_answer: Set it to let requests with the fault "hold" go on.
    """

    def __init__(self, media: Mapping[str, bytes], headers: Headers | None = None) -> None:
        self.media = dict(media)
        self.headers = headers or {}
        self.requests: Counter[str] = Counter()
        self.heads: list[list[str]] = []
        self.num_connections = 0
        self.num_open = 0
        self.max_open = 0
        self.may_answer = threading.Event()
        self._was_revived = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> MediaServer:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(500)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(500)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(500)
        self._loop.close()

    @property
    def host(self) -> str:
        """What to allow by ``allow_hosts``."""
        return f"127.0.0.1:{self.port}"

    def url(self, name: str, fault: str = "", times: int = 1 << 30) -> str:
        """Return the URL of a medium, with a fault in the first `times` answers."""
        query = f"?fault={fault}&times={times}" if fault else ""
        return f"http://{self.host}/{name}{query}"

    def revive(self) -> None:
        """Serve again at the same port, after the fault "stop"; it does not stop again."""
        self._was_revived = True
        self._server = asyncio.run_coroutine_threadsafe(self._start(self.port), self._loop).result(
            120
        )

    async def _start(self, port: int = 0) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", port)

    async def _stop(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode("latin-1").split("\r\n")[:-2]
                self.num_open += 1
                self.max_open = max(self.max_open, self.num_open)
                try:
                    if not await self._answer(lines, writer):
                        break
                finally:
                    self.num_open -= 1
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, lines: list[str], writer: asyncio.StreamWriter) -> bool:
        """Answer one request. Return whether the connection stays open."""
        target = lines[0].split(" ")[1]
        self.heads.append(lines)
        self.requests[target] += 1
        pieces = urlsplit(target)
        query = dict(parse_qsl(pieces.query))
        body = self.media.get(pieces.path.lstrip("/"))
        fault = query.get("fault")
        if fault == "stop" and self._was_revived:
            fault = None
        if fault and self.requests[target] <= int(query["times"]):
            return await self._fail(fault, body or b"", writer)
        if body is None:
            await self._send(writer, 404, b"no such medium")
        else:
            await self._send_range(lines, body, writer)
        return True

    async def _send_range(
        self, lines: list[str], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        start = int(headers.get("range", "bytes=0-")[6:-1])
        etag = {"ETag": '"v1"'}
        if start and headers.get("if-range") == '"v1"':
            part = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
            await self._send(writer, 206, body[start:], {**etag, **part})
        else:
            await self._send(writer, 200, body, etag)

    async def _send(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        body: bytes,
        headers: Headers | None = None,
        length: int | None = None,
    ) -> None:
        fields = {
            "Content-Length": str(len(body) if length is None else length),
            **self.headers,
            **(headers or {}),
        }
        lines = [f"HTTP/1.1 {status} Because", *(f"{k}: {v}" for k, v in fields.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()

    async def _fail(self, fault: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        name, _, argument = fault.partition("~")
        action: Callable[[asyncio.StreamWriter, bytes, str], Awaitable[bool]]
        action = getattr(self, f"_fail_{name}")
        return await action(writer, body, argument)

    async def _fail_status(self, writer: asyncio.StreamWriter, body: bytes, argument: str) -> bool:
        status, _, retry_after = argument.partition("~")
        await self._send(
            writer, int(status), b"sorry", {"Retry-After": retry_after} if retry_after else {}
        )
        return True

    async def _fail_silence(self, writer: asyncio.StreamWriter, body: bytes, argument: str) -> bool:
        """Say nothing for ever."""
        await asyncio.Event().wait()
        return False

    async def _fail_hold(self, writer: asyncio.StreamWriter, body: bytes, argument: str) -> bool:
        """Send the body when `may_answer` is set."""
        while not self.may_answer.is_set():
            await asyncio.sleep(0.01)
        await self._send(writer, 200, body)
        return True

    async def _fail_reset(self, writer: asyncio.StreamWriter, body: bytes, argument: str) -> bool:
        """End the connection by RST, in the middle of the body."""
        await self._send(writer, 200, body[: len(body) // 2], length=len(body))
        await asyncio.sleep(0.02)
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        return False

    async def _fail_stop(self, writer: asyncio.StreamWriter, body: bytes, argument: str) -> bool:
        """Stop to serve."""
        self._server.close()
        return False

    async def _fail_close(self, writer: asyncio.StreamWriter, body: bytes, argument: str) -> bool:
        return False

    async def _fail_cut(self, writer: asyncio.StreamWriter, body: bytes, argument: str) -> bool:
        headers = {"ETag": argument} if argument else {}
        await self._send(writer, 200, body[: len(body) // 2], headers, length=len(body))
        return False

    async def _fail_short(self, writer: asyncio.StreamWriter, body: bytes, argument: str) -> bool:
        """Send more bytes than Content-Length says."""
        await self._send(writer, 200, body, length=len(body) // 2)
        return False

    async def _fail_dribble(self, writer: asyncio.StreamWriter, body: bytes, argument: str) -> bool:
        """Send the body in pieces that always come in time."""
        await self._send(writer, 200, b"", length=len(body))
        for byte in body:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)
        return False

    async def _fail_endless(self, writer: asyncio.StreamWriter, body: bytes, argument: str) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
            await writer.drain()

    async def _fail_huge(self, writer: asyncio.StreamWriter, body: bytes, argument: str) -> bool:
        await self._send(writer, 200, body, length=1 << 40)
        return False

    async def _fail_bomb(self, writer: asyncio.StreamWriter, body: bytes, argument: str) -> bool:
        """Send 100 MB of zeros in 100 kB."""
        await self._send(writer, 200, _bomb(), {"Content-Encoding": "gzip"})
        return True

    async def _fail_gzip(self, writer: asyncio.StreamWriter, body: bytes, argument: str) -> bool:
        await self._send(writer, 200, gzip.compress(body), {"Content-Encoding": "gzip"})
        return True

    async def _fail_redirect(
        self, writer: asyncio.StreamWriter, body: bytes, argument: str
    ) -> bool:
        await self._send(writer, 302, b"", {"Location": argument})
        return True

    async def _fail_loop(self, writer: asyncio.StreamWriter, body: bytes, argument: str) -> bool:
        await self._send(writer, 302, b"", {"Location": "?fault=loop&times=99"})
        return True

    async def _fail_header(self, writer: asyncio.StreamWriter, body: bytes, argument: str) -> bool:
        """Send the body with one more header, ``NAME: VALUE``."""
        name, _, value = argument.partition(":")
        await self._send(writer, 200, body, {name: value.strip()})
        return True

    async def _fail_noise(self, writer: asyncio.StreamWriter, body: bytes, argument: str) -> bool:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        await writer.drain()
        return False


@cache
def _bomb() -> bytes:
    return gzip.compress(bytes(100_000_000), 1)
