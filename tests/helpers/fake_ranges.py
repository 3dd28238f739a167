"""A store that answers ranges in virtual time, with any fault that a test plans."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from mmstream.storage.store import ObjectStat, RequestError

PIECE = 1 << 20


@dataclass(frozen=True)
class Answer:
    """How a request is answered."""

    latency_s: float = 0.05
    """To the first byte. Infinite: the request is mute."""
    rate: float = 40e6
    """Bytes/s of this connection."""
    error: Exception | None = None
    """Raised in place of an answer, after the latency."""
    breaks_after: float = math.inf
    """Bytes after which the stream raises."""
    ends_after: float = math.inf
    """Bytes after which the stream ends in silence."""
    stops_after: float = math.inf
    """Bytes after which nothing comes any more."""
    piece: int | None = None
    """Bytes of a piece. None: as many as the client's."""
    version: str = "v1"
    content: bytes | None = None
    """Of the whole object, where it is another one."""


@dataclass
class Sent:
    """A request as the store got it."""

    name: str
    start: int
    stop: int
    time: float
    into: memoryview | None
    """Where the bytes go, if the client was told and copies them."""
    num_bytes: int = 0
    """That were sent as its answer."""
    is_closed: bool = False


@dataclass
class FakeClient:
    """A `RangeClient` over objects in memory. `answer` decides what happens to each request."""

    objects: dict[str, bytes]
    answer: Callable[[Sent], Answer] = field(default=lambda sent: Answer())
    url: str = "fake://bucket"
    link_rate: float = math.inf
    """Bytes/s of all connections together."""
    piece: int = PIECE
    is_blank: bool = False
    """No byte is copied: nobody looks at them."""
    streams: bool = True
    sent: list[Sent] = field(default_factory=list)
    num_open: int = 0
    """Requests under way."""
    max_open: int = 0
    num_streaming: int = 0
    """Requests whose bytes are on the link."""
    is_closed: bool = False

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    async def open(
        self, name: str, start: int, stop: int, into: memoryview | None = None
    ) -> _Stream:
        now = asyncio.get_running_loop().time()
        sent = Sent(name, start, stop, now, None if self.is_blank else into)
        self.sent.append(sent)
        answer = self.answer(sent)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            if answer.latency_s == math.inf:
                await asyncio.get_running_loop().create_future()
            await asyncio.sleep(answer.latency_s)
            if not self.streams:
                await asyncio.sleep((stop - start) / answer.rate)
                answer = replace(answer, rate=math.inf)
            if answer.error is not None:
                raise answer.error
            if name not in self.objects:
                raise FileNotFoundError(f"{self.url_of(name)}: no such object")
        except BaseException:
            self._end(sent)
            raise
        return _Stream(self, sent, answer, into)

    def _end(self, sent: Sent) -> None:
        if not sent.is_closed:
            sent.is_closed = True
            self.num_open -= 1

    async def close(self) -> None:
        self.is_closed = True


@dataclass
class _Stream:
    client: FakeClient
    sent: Sent
    how: Answer
    into: memoryview | None

    def __post_init__(self) -> None:
        content = self.how.content
        self.content = self.client.objects[self.sent.name] if content is None else content
        self.stat = ObjectStat(len(self.content), self.how.version)

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        how, sent, client = self.how, self.sent, self.client
        loop: Any = asyncio.get_running_loop()
        body = memoryview(self.content)[sent.start : sent.stop]
        last = min(len(body), how.ends_after, how.breaks_after, how.stops_after)
        while sent.num_bytes < last:
            end = min(last, sent.num_bytes + (how.piece or client.piece))
            piece = body[sent.num_bytes : int(end)]
            client.num_streaming += 1
            rate = min(how.rate, client.link_rate / client.num_streaming)
            try:
                await asyncio.sleep(len(piece) / rate)
            finally:
                client.num_streaming -= 1
            begin, sent.num_bytes = sent.num_bytes, sent.num_bytes + len(piece)
            if self.into is None:
                yield piece
            else:
                if not client.is_blank:
                    self.into[begin : sent.num_bytes] = piece
                yield self.into[begin : sent.num_bytes]
        if how.stops_after <= sent.num_bytes:
            await loop.create_future()
        if how.breaks_after <= sent.num_bytes:
            raise RequestError("connection reset by peer")

    async def close(self) -> None:
        self.client._end(self.sent)
