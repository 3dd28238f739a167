"""A proxy before an S3 server that is slow, breaks answers, lies about them, or goes away.

It runs in a process of its own, so it takes no time from the process that a test measures. A test
says what it does, changes that while it runs, and asks what it did::

    with fault_proxy(server.endpoint, Faults(latency_s=0.05, reset=0.05)) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        ...
        proxy.set(Faults(latency_s=0.05))
        proxy.go_away()
        proxy.come_back()
        print(proxy.counts())

Each kind of fault has a rate: its share of the requests. Which request gets one depends on the
seed, the path, the range and how often this range was asked for before. So a run can be repeated,
however its requests are ordered, and a fault can end when the request is sent again.

This file is also the program of that process. It reads one command a line, and it ends when its
standard input ends.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

RATES = ("mute", "stall", "dribble", "reset", "truncate", "busy", "wrong_etag", "flip", "tail")
"""The kinds of faults. A request gets at most one of them."""

PIPE_BYTES = 1 << 20
PACED_S = 0.02
"""An answer with a limited rate comes in pieces of so many seconds."""

SIGNATURE = {b"authorization", b"x-amz-date", b"x-amz-content-sha256", b"x-amz-security-token"}


@dataclass(frozen=True)
class Faults:
    """What a proxy does to the requests that pass.

    Attributes:
        latency_s: From the arrival of a request to the first byte of its answer, at least.
        bytes_per_s: Of the body of an answer on its connection. 0: as fast as it goes.
        mute: Rate of requests that never get an answer; the connection stays open.
        stall: Rate of answers that stop for ever somewhere in the body.
        dribble: Rate of answers that go on with `dribble_bytes_per_s` from somewhere in the body.
        reset: Rate of connections that are reset somewhere in the body.
        truncate: Rate of connections that are closed somewhere in the body.
        busy: Rate of requests that are answered by 503 SlowDown, with `retry_after_s`.
        wrong_etag: Rate of answers with an ETag that is not the object's.
        flip: Rate of answers with one flipped bit.
        tail: Rate of requests whose latency and rate are `tail_factor` times worse.
        after_bytes: Where in the body stall, dribble, reset and truncate begin. None: anywhere.
        dribble_bytes_per_s: Of a dribbling answer.
        retry_after_s: The header of a 503. None: no header.
        tail_factor: Of the tail.
        replaced: Ends of paths. These objects have another ETag in all answers.
        replaced_growth: Bytes by which replaced objects claim to be longer.
        methods: The requests that can have one of the rated faults. Where a request itself has a
            body, such as a PUT, the reset comes somewhere in that.
        only: A regular expression; rated faults are for paths in which it is found.
        seed: Of the draws.
    """

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    mute: float = 0.0
    stall: float = 0.0
    dribble: float = 0.0
    reset: float = 0.0
    truncate: float = 0.0
    busy: float = 0.0
    wrong_etag: float = 0.0
    flip: float = 0.0
    tail: float = 0.0
    after_bytes: int | None = None
    dribble_bytes_per_s: float = 10.0
    retry_after_s: int | None = None
    tail_factor: float = 20.0
    replaced: tuple[str, ...] = ()
    replaced_growth: int = 0
    methods: tuple[str, ...] = ("GET",)
    only: str = ""
    seed: int = 1


@dataclass(frozen=True)
class Counts:
    """What a proxy did so far.

    Attributes:
        num_requests: All requests, of every method.
        num_gets: The GET requests among them.
        num_bytes: Bytes of bodies that were sent to clients.
        num_connections: Connections that were accepted.
        num_in_flight: Requests that are under way now.
        max_in_flight: The most requests that were under way at the same moment.
        faults: Requests by kind of fault, each kind in `RATES`.
        gets_by_suffix: GETs by the end of the path after its last dot, such as "tar".
        bytes_by_suffix: Bytes of bodies by the same.
    """

    num_requests: int
    num_gets: int
    num_bytes: int
    num_connections: int
    num_in_flight: int
    max_in_flight: int
    faults: dict[str, int]
    gets_by_suffix: dict[str, int]
    bytes_by_suffix: dict[str, int]


class FaultProxy:
    """A running proxy. `fault_proxy` starts one."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self._lock = threading.Lock()
        self.port = port

    @property
    def endpoint(self) -> str:
        """The URL for clients."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process, for measurements of CPU time."""
        return self._process.pid

    def set(self, faults: Faults) -> None:
        """Change what happens to the requests that come from now on."""
        self._ask("set", asdict(faults))

    def counts(self) -> Counts:
        """Return what was done since the start or the last `reset_counts`."""
        return Counts(**self._ask("counts"))

    def reset_counts(self) -> None:
        """Count from zero, and draw faults as at the start."""
        self._ask("reset_counts")

    def go_away(self) -> None:
        """Refuse new connections and reset those that there are."""
        self._ask("go_away")

    def come_back(self) -> None:
        """Accept connections, at the same port as before."""
        self._ask("come_back")

    def away_for(self, seconds: float) -> threading.Timer:
        """Go away now, and come back after some seconds; return the timer of that."""
        self.go_away()
        timer = threading.Timer(seconds, self.come_back)
        timer.daemon = True
        timer.start()
        return timer

    def alias(self, objects: Mapping[str, str]) -> None:
        """Give objects other names: path that clients use -> path on the server.

        Both begin with the bucket. The server must allow to read without a signature: one that was
        for another path is left out. A listing of a prefix that has such names shows them alone,
        if objects are held.
        """
        self._ask("alias", dict(objects))

    def hold(self) -> None:
        """Read each object once from the server, and send it from memory from then on.

        So the server takes no time of a measurement. It is read without a signature.
        """
        self._ask("hold")

    def _ask(self, command: str, argument: Any = None) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps([command, argument]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fault proxy ended with {self._process.wait()}")
        return json.loads(line)


@contextmanager
def fault_proxy(endpoint: str, faults: Faults = Faults()) -> Iterator[FaultProxy]:
    """Run a proxy before the server of a URL such as ``http://127.0.0.1:8333``."""
    process = subprocess.Popen(
        [sys.executable, "-I", __file__, endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            assert process.stdout is not None
            proxy = FaultProxy(process, int(process.stdout.readline()))
            proxy.set(faults)
            yield proxy
        finally:
            process.kill()


# What follows runs in the process of the proxy.


class _BrokenOffError(Exception):
    """The connection to the client ends here."""


class _Stream:
    """A connection whose heads are parsed and whose bodies are moved by the kernel."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._ahead = b""  # received with a head, and not yet taken
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def head(self) -> bytes:
        """Return a head with the empty line at its end, or nothing if the other side closed."""
        while (end := self._ahead.find(b"\r\n\r\n")) < 0:
            data = self.socket.recv(1 << 14)
            if not data:
                return b""
            self._ahead += data
        head, self._ahead = self._ahead[: end + 4], self._ahead[end + 4 :]
        return head

    def take(self, num_bytes: int) -> bytes:
        """Return at least one byte and at most so many."""
        if self._ahead:
            data, self._ahead = self._ahead[:num_bytes], self._ahead[num_bytes:]
            return data
        data = self.socket.recv(num_bytes)
        if not data:
            raise _BrokenOffError
        return data

    def take_all(self, num_bytes: int) -> bytes:
        """Return exactly so many bytes."""
        pieces = []
        while num_bytes:
            pieces.append(self.take(min(num_bytes, 1 << 20)))
            num_bytes -= len(pieces[-1])
        return b"".join(pieces)

    def line(self) -> bytes:
        """Return a line with its end."""
        while b"\n" not in self._ahead:
            data = self.socket.recv(1 << 14)
            if not data:
                raise _BrokenOffError
            self._ahead += data
        end = self._ahead.index(b"\n") + 1
        return self.take(end)

    def move(self, target: socket.socket, pipe: tuple[int, int], num_bytes: int) -> None:
        """Send the next bytes to another connection."""
        if self._ahead:
            data = self.take(num_bytes)
            target.sendall(data)
            num_bytes -= len(data)
        while num_bytes:
            num_in_pipe = os.splice(self.socket.fileno(), pipe[1], min(num_bytes, PIPE_BYTES))
            if not num_in_pipe:
                raise _BrokenOffError
            num_bytes -= num_in_pipe
            while num_in_pipe:
                num_in_pipe -= os.splice(pipe[0], target.fileno(), num_in_pipe)


class _Body(Protocol):
    """The bytes of an answer that are not sent yet."""

    def send(self, client: socket.socket, num_bytes: int) -> None:
        """Send the next bytes."""

    def read(self, num_bytes: int) -> bytes:
        """Return the next bytes."""


class _ServerBody:
    """On its way from the server."""

    def __init__(self, server: _Stream, pipe: tuple[int, int]) -> None:
        self._server, self._pipe = server, pipe

    def send(self, client: socket.socket, num_bytes: int) -> None:
        self._server.move(client, self._pipe, num_bytes)

    def read(self, num_bytes: int) -> bytes:
        return self._server.take_all(num_bytes)


class _BytesBody:
    """In memory."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def send(self, client: socket.socket, num_bytes: int) -> None:
        client.sendall(self.read(num_bytes))

    def read(self, num_bytes: int) -> bytes:
        data, self._data = self._data[:num_bytes], self._data[num_bytes:]
        return bytes(data)


class _FileBody:
    """In a file in memory."""

    def __init__(self, file: int, start: int) -> None:
        self._file, self._start = file, start

    def send(self, client: socket.socket, num_bytes: int) -> None:
        while num_bytes:
            num_sent = os.sendfile(client.fileno(), self._file, self._start, num_bytes)
            self._start += num_sent
            num_bytes -= num_sent

    def read(self, num_bytes: int) -> bytes:
        data = os.pread(self._file, num_bytes, self._start)
        self._start += len(data)
        return data


class _Answer(NamedTuple):
    status: int
    lines: list[bytes]
    """The head without the empty line at its end."""
    body: _Body
    length: int


class _Request(NamedTuple):
    method: str
    path: str
    """Without the query, decoded."""
    query: str
    head: bytes
    headers: dict[bytes, bytes]

    @property
    def suffix(self) -> str:
        return self.path.rpartition("/")[2].rpartition(".")[2]


class _HeldObject(NamedTuple):
    """An object that was read from the server once."""

    lines: list[bytes]
    """The head of its answer, without its length."""
    file: int
    size: int

    def entry(self, key: str) -> bytes:
        """Return its lines in a listing, under another name."""
        etag = _headers(self.lines).get(b"etag", b"")
        return _ENTRY % (escape(key).encode(), etag, self.size)

    def answer(self, request: _Request) -> _Answer:
        """Return what the server would answer to a GET or HEAD."""
        start, stop, status = 0, self.size, b"200 OK"
        more = []
        if match := re.fullmatch(rb"bytes=(\d*)-(\d*)", request.headers.get(b"range", b"")):
            first, last = match.groups()
            start = int(first) if first else max(0, self.size - int(last))
            stop = min(int(last) + 1, self.size) if first and last else self.size
            if start >= self.size:
                lines = [b"HTTP/1.1 416 Range Not Satisfiable", b"Content-Length: 0"]
                return _Answer(416, lines, _BytesBody(b""), 0)
            status = b"206 Partial Content"
            more = [b"Content-Range: bytes %d-%d/%d" % (start, stop - 1, self.size)]
        lines = [b"HTTP/1.1 " + status, *self.lines, *more, b"Content-Length: %d" % (stop - start)]
        return _Answer(int(status[:3]), lines, _FileBody(self.file, start), stop - start)


class _Proxy:
    def __init__(self, host: str, port: int) -> None:
        self.server = (host, port)
        self.faults = Faults()
        self.aliases: dict[str, str] = {}
        self.held: dict[str, _HeldObject] | None = None
        self.hold_lock = threading.Lock()
        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()
        self.listener: socket.socket | None = None
        self.port = 0
        self.num_in_flight = 0
        self.come_back()
        self.reset_counts()

    # Commands

    def set(self, faults: dict[str, Any]) -> None:
        lists = {name: tuple(faults[name]) for name in ("replaced", "methods")}
        self.faults = Faults(**{**faults, **lists})

    def alias(self, objects: dict[str, str]) -> None:
        self.aliases = objects

    def hold(self) -> None:
        self.held = {}

    def counts(self) -> dict[str, Any]:
        with self.lock:
            return asdict(
                Counts(
                    **self.numbers,
                    num_in_flight=self.num_in_flight,
                    faults={kind: self.num_faults[kind] for kind in RATES},
                    gets_by_suffix=dict(self.gets),
                    bytes_by_suffix=dict(self.bytes),
                )
            )

    def reset_counts(self) -> None:
        with self.lock:
            self.numbers = Counter(
                num_requests=0, num_gets=0, num_bytes=0, num_connections=0, max_in_flight=0
            )
            self.num_faults: Counter[str] = Counter()
            self.gets: Counter[str] = Counter()
            self.bytes: Counter[str] = Counter()
            self.num_asked: Counter[tuple[str, str, bytes]] = Counter()

    def go_away(self) -> None:
        with self.lock:
            listener, self.listener = self.listener, None
            connections = list(self.connections)
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        for connection in connections:
            _reset(connection)

    def come_back(self) -> None:
        if self.listener is None:
            self.listener = socket.create_server(("127.0.0.1", self.port), backlog=1024)
            self.port = self.listener.getsockname()[1]
            threading.Thread(target=self.accept, args=(self.listener,), daemon=True).start()

    # Connections

    def accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with self.lock:
                    self.connections.add(client)
                    self.numbers["num_connections"] += 1
                    is_away = self.listener is not listener
                if is_away:
                    _reset(client)
                threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client: socket.socket) -> None:
        """Pass the requests of one connection on, and the answers back."""
        pipe = os.pipe()
        fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        exchange = _Exchange(self, _Stream(client), pipe)
        try:
            with suppress(OSError, _BrokenOffError):
                while exchange.handle_next():
                    pass
        finally:
            exchange.close_server()
            with self.lock:
                self.connections.discard(client)
            client.close()
            os.close(pipe[0])
            os.close(pipe[1])

    # What the exchanges ask and tell

    def held_object(self, request: _Request) -> _HeldObject | None:
        """Return the object of a GET or HEAD, if objects are held and there is one."""
        if self.held is None or request.query or request.method not in ("GET", "HEAD"):
            return None
        path = self.aliases.get(request.path.lstrip("/"), request.path.lstrip("/"))
        with self.hold_lock:
            if path not in self.held:
                held = _read_object(self.server, path)
                if held is None:
                    return None
                self.held[path] = held
            return self.held[path]

    def listing(self, request: _Request) -> bytes | None:
        """Return the answer to a ListObjectsV2 whose prefix has other names of held objects."""
        query = dict(parse_qsl(request.query, keep_blank_values=True))
        if self.held is None or request.method != "GET" or query.get("list-type") != "2":
            return None
        bucket, prefix = request.path.strip("/"), query.get("prefix", "")
        names = sorted(name for name in self.aliases if name.startswith(f"{bucket}/{prefix}"))
        lines = []
        for name in names:
            held = self.held_object(request._replace(path=name, query=""))
            if held is not None:
                lines.append(held.entry(name.removeprefix(f"{bucket}/")))
        if not lines:
            return None
        return _LISTING % (bucket.encode(), escape(prefix).encode(), len(lines), b"".join(lines))

    def draw(self, request: _Request) -> tuple[str, random.Random]:
        """Return the kind of fault of a request, or nothing, and what draws its details."""
        faults, byte_range = self.faults, request.headers.get(b"range", b"")
        asked = (request.method, request.path, byte_range)
        with self.lock:
            number = self.num_asked[asked]
            self.num_asked[asked] += 1
        draw = random.Random(f"{faults.seed} {asked} {number}")
        if request.method not in faults.methods or not re.search(faults.only, request.path):
            return "", draw
        value = draw.random()
        for kind in RATES:
            value -= getattr(faults, kind)
            if value < 0:
                with self.lock:
                    self.num_faults[kind] += 1
                return kind, draw
        return "", draw

    def begin(self, request: _Request) -> None:
        with self.lock:
            self.num_in_flight += 1
            numbers = self.numbers
            numbers["num_requests"] += 1
            numbers["max_in_flight"] = max(numbers["max_in_flight"], self.num_in_flight)
            if request.method == "GET":
                numbers["num_gets"] += 1
                self.gets[request.suffix] += 1

    def end(self) -> None:
        with self.lock:
            self.num_in_flight -= 1

    def sent(self, request: _Request, num_bytes: int) -> None:
        with self.lock:
            self.numbers["num_bytes"] += num_bytes
            self.bytes[request.suffix] += num_bytes


class _Exchange:
    """The requests of one connection, one after the other, and its connection to the server."""

    def __init__(self, proxy: _Proxy, client: _Stream, pipe: tuple[int, int]) -> None:
        self.proxy, self.client, self.pipe = proxy, client, pipe
        self.server: _Stream | None = None

    def handle_next(self) -> bool:
        """Handle one request; return whether the connection goes on."""
        head = self.client.head()
        if not head:
            return False
        arrived = time.monotonic()
        request = _parse(head)
        self.proxy.begin(request)
        try:
            self.handle(request, arrived)
        finally:
            self.proxy.end()
        return request.headers.get(b"connection", b"").lower() != b"close"

    def handle(self, request: _Request, arrived: float) -> None:
        faults = self.proxy.faults
        kind, draw = self.proxy.draw(request)
        slower = faults.tail_factor if kind == "tail" else 1.0
        due = arrived + faults.latency_s * slower
        length = int(request.headers.get(b"content-length", b"0"))
        if kind == "mute":
            self.wait_for_the_client()
        if kind == "busy":
            self.client.take_all(length)
            _sleep_until(due)
            self.client.socket.sendall(_slow_down(faults.retry_after_s))
            return
        held = self.proxy.held_object(request)
        listing = self.proxy.listing(request)
        if listing is not None:
            head = [b"HTTP/1.1 200 OK", b"Content-Type: application/xml"]
            head.append(b"Content-Length: %d" % len(listing))
            answer = _Answer(200, head, _BytesBody(listing), len(listing))
        elif held is not None:
            answer = held.answer(request)
        else:
            answer = self.ask(request, length, kind == "reset", faults, draw)
        status, lines, body, length = answer
        is_replaced = request.path.endswith(faults.replaced) if faults.replaced else False
        if is_replaced or kind == "wrong_etag":
            lines = _with_other_etag(lines, faults.replaced_growth if is_replaced else 0)
        _sleep_until(due)
        self.client.socket.sendall(b"\r\n".join([*lines, b"", b""]))
        if request.method == "HEAD":
            return
        if kind == "flip" and status < 300 and length:
            changed = bytearray(body.read(length))
            changed[draw.randrange(length)] ^= 1 << draw.randrange(8)
            body = _BytesBody(bytes(changed))
        bytes_per_s = faults.bytes_per_s / slower
        if kind in ("stall", "dribble", "reset", "truncate"):
            num_good = draw.randrange(max(length, 1))
            if faults.after_bytes is not None:
                num_good = min(faults.after_bytes, max(length - 1, 0))
            self.send(request, body, num_good, bytes_per_s)
            self.break_off(kind, request, body, length - num_good, faults.dribble_bytes_per_s)
        else:
            self.send(request, body, length, bytes_per_s)
        if b"connection: close" in (line.lower() for line in lines):
            raise _BrokenOffError

    def ask(
        self, request: _Request, length: int, is_reset: bool, faults: Faults, draw: random.Random
    ) -> _Answer:
        """Send a request to the server; return its answer."""
        server = self.connected()
        server.socket.sendall(self.head_for_server(request))
        if b"100-continue" in request.headers.get(b"expect", b"").lower():
            head = server.head()
            if not head.startswith(b"HTTP/1.1 100"):
                return self.answer(request, head)
            self.client.socket.sendall(head)
        if length and is_reset:
            num_good = draw.randrange(length) if faults.after_bytes is None else faults.after_bytes
            self.client.move(server.socket, self.pipe, min(num_good, length))
            self.reset_client()
        self.client.move(server.socket, self.pipe, length)
        return self.answer(request, server.head())

    def connected(self) -> _Stream:
        """Return a connection to the server that it has not closed meanwhile."""
        if self.server is not None:
            with suppress(BlockingIOError):
                self.server.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                self.close_server()  # nothing can come before a request: it was closed
        if self.server is None:
            self.server = _Stream(socket.create_connection(self.proxy.server))
        return self.server

    def close_server(self) -> None:
        if self.server is not None:
            self.server.socket.close()
            self.server = None

    def head_for_server(self, request: _Request) -> bytes:
        target = self.proxy.aliases.get(request.path.lstrip("/"))
        if target is None:
            return request.head
        first, *lines = request.head[:-4].split(b"\r\n")
        lines = [line for line in lines if line.partition(b":")[0].lower() not in SIGNATURE]
        method, _, version = first.split(b" ")
        return b"\r\n".join(
            [b" ".join([method, b"/" + target.encode(), version]), *lines, b"", b""]
        )

    def answer(self, request: _Request, head: bytes) -> _Answer:
        """Return an answer of the server, of which the head has come."""
        assert self.server is not None
        if not head:
            raise _BrokenOffError
        lines = head[:-4].split(b"\r\n")
        status = int(lines[0].split(b" ", 2)[1])
        if request.method == "HEAD" or status in (204, 304):
            return _Answer(status, lines, _BytesBody(b""), 0)
        headers = _headers(lines[1:])
        if headers.get(b"transfer-encoding", b"").lower() != b"chunked":
            length = int(headers.get(b"content-length", b"0"))
            return _Answer(status, lines, _ServerBody(self.server, self.pipe), length)
        pieces = []
        while size := int(self.server.line(), 16):
            pieces.append(self.server.take_all(size))
            self.server.line()
        self.server.line()
        data = b"".join(pieces)
        lines = [line for line in lines if not line.lower().startswith(b"transfer-encoding:")]
        lines.append(b"Content-Length: %d" % len(data))
        return _Answer(status, lines, _BytesBody(data), len(data))

    def send(self, request: _Request, body: _Body, num_bytes: int, bytes_per_s: float) -> None:
        """Send the next bytes of a body."""
        started, num_sent = time.monotonic(), 0
        piece_bytes = max(1, int(bytes_per_s * PACED_S)) if bytes_per_s else num_bytes
        while num_sent < num_bytes:
            size = min(piece_bytes, num_bytes - num_sent)
            if bytes_per_s:
                _sleep_until(started + (num_sent + size) / bytes_per_s)
            body.send(self.client.socket, size)
            num_sent += size
            self.proxy.sent(request, size)

    def break_off(
        self, kind: str, request: _Request, body: _Body, num_left: int, slow: float
    ) -> None:
        """Do to the rest of an answer what its fault says."""
        if kind == "stall":
            self.wait_for_the_client()
        if kind == "reset":
            self.reset_client()
        if kind == "dribble":
            self.send(request, body, num_left, slow)
            return
        raise _BrokenOffError

    def reset_client(self) -> None:
        _reset(self.client.socket)
        raise _BrokenOffError

    def wait_for_the_client(self) -> None:
        """Say nothing until the client gives up."""
        while self.client.socket.recv(1 << 16):
            pass
        raise _BrokenOffError


def _parse(head: bytes) -> _Request:
    first, *lines = head[:-4].split(b"\r\n")
    method, target, _ = first.split(b" ", 2)
    path, _, query = target.decode().partition("?")
    return _Request(method.decode(), unquote(path), query, head, _headers(lines))


def _read_object(server: tuple[str, int], path: str) -> _HeldObject | None:
    """Read an object whole into memory, or return None if the server does not give it."""
    connection = http.client.HTTPConnection(*server)
    with closing(connection):
        connection.request("GET", "/" + quote(path))
        answer = connection.getresponse()
        if answer.status != 200:
            return None
        file = os.memfd_create("held")
        size = 0
        while data := answer.read(1 << 20):
            size += os.write(file, data)
    lines = [
        f"{name}: {value}".encode()
        for name, value in answer.getheaders()
        if name.lower() not in ("content-length", "transfer-encoding", "connection")
    ]
    return _HeldObject(lines, file, size)


def _headers(lines: list[bytes]) -> dict[bytes, bytes]:
    pairs = (line.partition(b":") for line in lines)
    return {name.lower(): value.strip() for name, _, value in pairs}


def _with_other_etag(lines: list[bytes], growth: int) -> list[bytes]:
    """Return the head of an answer as of another object, longer by some bytes."""
    changed = []
    for line in lines:
        name, _, value = line.partition(b":")
        if name.lower() == b"etag":
            line = name + b': "' + value.strip(b' "')[::-1] + b'"'
        if name.lower() == b"content-range":
            bounds, _, total = value.partition(b"/")
            line = name + b":" + bounds + b"/%d" % (int(total) + growth)
        changed.append(line)
    return changed


_LISTING = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>%s</Name>'
    b"<Prefix>%s</Prefix><KeyCount>%d</KeyCount><IsTruncated>false</IsTruncated>%s"
    b"</ListBucketResult>"
)
_ENTRY = (
    b"<Contents><Key>%s</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    b"<ETag>%s</ETag><Size>%d</Size><StorageClass>STANDARD</StorageClass></Contents>"
)


def _slow_down(retry_after_s: int | None) -> bytes:
    body = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Slow down</Message></Error>"
    retry = b"" if retry_after_s is None else b"Retry-After: %d\r\n" % retry_after_s
    return (
        b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\n"
        b"Content-Length: %d\r\n%s\r\n%s" % (len(body), retry, body)
    )


def _reset(connection: socket.socket) -> None:
    """End a connection so that the other side sees "connection reset", also while it is in use."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)  # wakes a thread that reads
        connection.close()


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(endpoint: str) -> None:
    """Run a proxy and its commands until standard input ends."""
    parts = urlsplit(endpoint)
    proxy = _Proxy(parts.hostname or "127.0.0.1", parts.port or 80)
    _say(proxy.port)
    for line in sys.stdin:
        command, argument = json.loads(line)
        call = getattr(proxy, command)
        _say(call() if argument is None else call(argument))


if __name__ == "__main__":
    main(sys.argv[1])
