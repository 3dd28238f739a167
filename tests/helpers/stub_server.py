"""An HTTP server that answers as a test says, byte by byte."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeAlias

RESET = "reset"
"""A step that ends the connection by RST."""


class StubRequest(NamedTuple):
    method: str
    target: str
    headers: dict[str, str]
    """By names in lower case."""
    connection: int
    """Number of the connection that it came on, from 0."""

    @property
    def access_key(self) -> str:
        """The name of the key that signed it, or nothing."""
        _, _, credential = self.headers.get("authorization", "").partition("Credential=")
        return credential.partition("/")[0]

    @property
    def region(self) -> str:
        """The region that it was signed for, or nothing."""
        _, _, credential = self.headers.get("authorization", "").partition("Credential=")
        return credential.split("/")[2] if credential else ""


StubAnswer: TypeAlias = bytes | Iterable[bytes | float | str] | None
"""Bytes to send; or steps: bytes, pauses in seconds, `RESET`; or None: no answer ever. Steps that
end with ``b""`` close the connection."""


class StubServer:
    """Calls a function for each request, and sends what it returns.

    Attributes:
        requests: all that came.
        num_connections: that were opened so far.
        num_closed: connections that the client closed.
    """

    def __init__(self, answer: Callable[[StubRequest], StubAnswer]) -> None:
        self.answer = answer
        self.requests: list[StubRequest] = []
        self.num_connections = 0
        self.num_closed = 0
        self.endpoint = ""
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begin to serve a connection: a callback of `asyncio.start_server`."""
        self._writers.append(writer)
        self._tasks.append(asyncio.get_running_loop().create_task(self._serve(reader, writer)))

    async def end(self, server: asyncio.Server) -> None:
        """Close the server and its connections, also those that have just come."""
        loop = asyncio.get_running_loop()
        for listener in server.sockets:
            loop.remove_reader(listener.fileno())
        # asyncio accepts a connection in three turns of its loop. After `close` it would leave it
        # open, and the garbage collector would warn in any later test.
        for _ in range(3):
            await asyncio.sleep(0)
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.num_connections = self.num_connections, self.num_connections + 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.strip().split("\r\n")
                method, target, _ = first.split(" ")
                pairs = (line.split(": ", 1) for line in lines)
                headers = {name.lower(): value for name, value in pairs}
                request = StubRequest(method, target, headers, number)
                self.requests.append(request)
                answer = self.answer(request)
                steps = [answer] if isinstance(answer, bytes) else answer
                if method == "HEAD" and isinstance(answer, bytes):
                    steps = [answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"]
                if steps is None:
                    await reader.read()  # until the client gives up
                    break
                for step in steps:
                    if isinstance(step, float):
                        await asyncio.sleep(step)
                    elif step == RESET:
                        connection = writer.get_extra_info("socket")
                        no_time = struct.pack("ii", 1, 0)
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_time)
                        writer.transport.abort()
                        return
                    elif step:
                        writer.write(step)
                        await writer.drain()
                    else:
                        return
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            self.num_closed += 1
            writer.close()


@asynccontextmanager
async def stub_server(answer: Callable[[StubRequest], StubAnswer]) -> AsyncIterator[StubServer]:
    """Serve in this event loop until the block ends."""
    stub = StubServer(answer)
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
    stub.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield stub
    finally:
        await stub.end(server)


def reply(
    status: str = "200 OK", body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    """An answer of known length, or of another one if the headers say so."""
    fields = {"Content-Length": str(len(body)), **(headers or {})}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def ranged(request: StubRequest, data: bytes, etag: str = '"e1"') -> bytes:
    """The answer of S3 to the request of a range of `data`."""
    start, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
    body = data[int(start) : int(last) + 1]
    if not body:
        return reply("416 Range", headers={"Content-Range": f"bytes */{len(data)}"})
    content_range = f"bytes {start}-{int(start) + len(body) - 1}/{len(data)}"
    return reply("206 Partial", body, {"Content-Range": content_range, "ETag": etag})


def refused(status: str, code: str, message: str = "", **headers: str) -> bytes:
    """An answer of S3 that says an error."""
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    return reply(status, body, {name.replace("_", "-"): value for name, value in headers.items()})
