"""A proxy in front of an S3 server on this machine that flips bits in its answers.

An answer keeps its length and its headers, so nothing but a checksum can notice. Used by
`tools.prove.wrong_reads`.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

__all__ = ["FlippingProxy", "flipping_proxy"]


@dataclass
class FlippingProxy:
    """What a running proxy does.

    Attributes:
        url: Where clients find it.
        rate: Share of the answers with content in which one bit is flipped.
        num_answers: Answers with content so far.
        num_flips: How many of them have a flipped bit.
    """

    url: str
    upstream: tuple[str, int]
    rate: float
    draw: random.Random = field(repr=False)
    num_answers: int = 0
    num_flips: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass the requests of one client on, and the answers back."""
        up_reader, up_writer = await asyncio.open_connection(*self.upstream)
        try:
            with suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
                while True:
                    request = await reader.readuntil(b"\r\n\r\n")
                    up_writer.write(request + await reader.readexactly(_length(request)))
                    is_object = request.startswith(b"GET ")
                    head = await up_reader.readuntil(b"\r\n\r\n")
                    has_body = not request.startswith(b"HEAD ") and b" 204 " not in head[:16]
                    body = await _body(up_reader, head) if has_body else b""
                    writer.write(head + (self._flip(body) if is_object else body))
                    await writer.drain()
        finally:
            up_writer.close()
            writer.close()

    def _flip(self, body: bytes) -> bytes:
        if not body:
            return body
        self.num_answers += 1
        if self.draw.random() >= self.rate:
            return body
        self.num_flips += 1
        changed = bytearray(body)
        changed[self.draw.randrange(len(body))] ^= 1 << self.draw.randrange(8)
        return bytes(changed)


@contextmanager
def flipping_proxy(upstream_url: str, rate: float, seed: int = 1) -> Iterator[FlippingProxy]:
    """Run a proxy in a thread of this process.

    Args:
        upstream_url: Of the server, such as ``http://127.0.0.1:8333``.
        rate: Share of the answers in which one bit is flipped.
        seed: Of the flips.
    """
    parts = urlsplit(upstream_url)
    upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
    proxy = FlippingProxy("", upstream, rate, random.Random(seed))
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(proxy.serve, "127.0.0.1", 0))
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever, name="flipping-proxy", daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        connections = asyncio.all_tasks(loop)
        for connection in connections:
            connection.cancel()
        loop.run_until_complete(asyncio.gather(*connections, return_exceptions=True))
        loop.close()


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """Return the body of an answer as it travels: of a known length, or in chunks."""
    if b"transfer-encoding: chunked" not in head.lower():
        return await reader.readexactly(_length(head))
    pieces = []
    while True:
        size = await reader.readuntil(b"\r\n")
        pieces += [size, await reader.readexactly(int(size, 16) + 2)]
        if int(size, 16) == 0:
            return b"".join(pieces)
