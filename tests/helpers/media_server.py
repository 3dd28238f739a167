"""A web server of media on loopback that misbehaves as its URLs say. For tests of downloads.

    with MediaServer({"cat.jpg": jpeg}) as server:
        server.url("cat.jpg")                  # http://127.0.0.1:PORT/cat.jpg
        server.url("cat.jpg", "429", "once")   # the first request fails, the next one succeeds

Every answer is written byte by byte, so that it can be wrong in any way.
"""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain, repeat
from urllib.parse import parse_qsl, urlsplit

from tests.helpers.stub_server import RESET, StubRequest, StubServer, reply

Steps = Iterable[bytes | float | str]


class MediaServer(StubServer):
    """Serves named bytes. ``?fault=NAME`` makes an answer fail, ``&times=N`` the first N of them.

    Attributes:
        num_open: Requests that are being answered.
        max_open: Most requests at the same time.
        may_answer: Set it to let requests with the fault "hold" go on.
    """

    def __init__(
        self, media: Mapping[str, bytes], headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(self._counted)
        self.media = dict(media)
        self.headers = dict(headers or {})
        self.num_open = self.max_open = self.port = 0
        self.may_answer = threading.Event()
        self._num_of_target: Counter[str] = Counter()
        self._was_revived = False
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> MediaServer:
        self._thread.start()
        assert self._is_ready.wait(500)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(500)

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
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(500)

    async def _run(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        await self._start()
        self._is_ready.set()
        await self._end.wait()
        await self.end(self._server)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self.serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def _counted(self, request: StubRequest) -> Iterator[bytes | float | str]:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            yield from self._steps(request)
        finally:
            self.num_open -= 1

    def _steps(self, request: StubRequest) -> Steps:
        self._num_of_target[request.target] += 1
        target = urlsplit(request.target)
        query = dict(parse_qsl(target.query))
        body = self.media.get(target.path.lstrip("/"))
        fault, _, argument = query.get("fault", "").partition("~")
        if fault == "stop" and not self._was_revived:
            self._server.close()
            return [b""]
        if fault not in ("", "stop") and self._num_of_target[request.target] <= int(query["times"]):
            return self._wrong_steps(fault, argument, body or b"")
        if body is None:
            return [self._reply(b"no such medium", "404 Not Found")]
        start, etag = int(request.headers.get("range", "bytes=0-")[6:-1]), '"v1"'
        if start and request.headers.get("if-range") == etag:
            rest = f"bytes {start}-{len(body) - 1}/{len(body)}"
            headers = {"ETag": etag, "Content-Range": rest}
            return [self._reply(body[start:], "206 Partial Content", headers)]
        return [self._reply(body, headers={"ETag": etag})]

    def _wrong_steps(self, fault: str, argument: str, body: bytes) -> Steps:
        """Return what is sent in place of a good answer."""
        status, _, retry_after = argument.partition("~")
        name, _, value = argument.partition(": ")
        length = {"Content-Length": str(len(body))}
        etag = {"ETag": argument} if argument else {}
        half = self._reply(body[: len(body) // 2], headers=length | etag)
        in_chunks = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        by_byte = chain.from_iterable((bytes([byte]), 0.02) for byte in body)
        patience = {"Retry-After": retry_after} if retry_after else {}
        steps: dict[str, Steps] = {
            "status": [self._reply(b"sorry", f"{status} Because", patience)],
            "silence": repeat(60.0),
            "hold": chain(self._pauses_until_it_may_answer(), [self._reply(body)]),
            "reset": [half, 0.02, RESET],
            "close": [b""],
            "cut": [half, b""],
            "short": [self._reply(body, headers={"Content-Length": str(len(body) // 2)}), b""],
            "dribble": chain([self._reply(headers=length)], by_byte, [b""]),
            "endless": chain([in_chunks], repeat(b"10000\r\n" + bytes(1 << 16) + b"\r\n")),
            "huge": [self._reply(body, headers={"Content-Length": str(1 << 40)}), b""],
            "bomb": [self._reply(_bomb(), headers={"Content-Encoding": "gzip"})],
            "gzip": [self._reply(gzip.compress(body), headers={"Content-Encoding": "gzip"})],
            "redirect": [self._reply(status="302 Found", headers={"Location": argument})],
            "loop": [self._reply(status="302 Found", headers={"Location": "?fault=loop&times=99"})],
            "header": [self._reply(body, headers={name: value})],
            "noise": [b"SSH-2.0-OpenSSH_9.6\r\n", b""],
        }
        return steps[fault]

    def _pauses_until_it_may_answer(self) -> Iterator[float]:
        while not self.may_answer.is_set():
            yield 0.01

    def _reply(
        self, body: bytes = b"", status: str = "200 OK", headers: Mapping[str, str] | None = None
    ) -> bytes:
        return reply(status, body, {**self.headers, **(headers or {})})


@cache
def _bomb() -> bytes:
    """Return 100 MB of zeros in 100 kB."""
    return gzip.compress(bytes(100_000_000), 1)
