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

import http.client
import json
import mmap
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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.helpers.http_servers import Answer, QuietHandler, QuietServer, ask

ROOT = Path(__file__).parents[2]
RATES = ("mute", "stall", "dribble", "reset", "truncate", "busy", "wrong_etag", "flip", "tail")
"""The kinds of faults. A request gets at most one of them."""

PACED_S = 0.02
"""An answer with a limited rate comes in pieces of so many seconds."""

DRIBBLE_BYTES_PER_S = 10.0
TAIL_FACTOR = 20.0


@dataclass(frozen=True)
class Faults:
    """What a proxy does to the requests that pass.

    Attributes:
        latency_s: From the arrival of a request to the first byte of its answer, at least.
        bytes_per_s: Of the body of an answer on its connection. 0: as fast as it goes.
        mute: Rate of requests that never get an answer; the connection stays open.
        stall: Rate of answers that stop for ever somewhere in the body.
        dribble: Rate of answers that go on with `DRIBBLE_BYTES_PER_S` from somewhere in the body.
        reset: Rate of connections that are reset somewhere in the body.
        truncate: Rate of connections that are closed somewhere in the body.
        busy: Rate of requests that are answered by 503 SlowDown, with `retry_after_s`.
        wrong_etag: Rate of answers with an ETag that is not the object's.
        flip: Rate of answers with one flipped bit.
        tail: Rate of requests whose latency and rate are `TAIL_FACTOR` times worse.
        retry_after_s: The header of a 503. None: no header.
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
    retry_after_s: int | None = None
    methods: tuple[str, ...] = ("GET",)
    only: str = ""
    seed: int = 1


@dataclass(frozen=True)
class Counts:
    """What a proxy did so far.

    Attributes:
        num_gets: GET requests.
        num_bytes: Bytes of bodies that were sent to clients.
        faults: Requests by kind of fault, each kind in `RATES`.
        gets_by_suffix: GETs by the end of the path after its last dot, such as "tar".
    """

    num_gets: int
    num_bytes: int
    faults: dict[str, int]
    gets_by_suffix: dict[str, int]


class FaultProxy:
    """A running proxy. `fault_proxy` starts one."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self._lock = threading.Lock()
        self.endpoint = f"http://127.0.0.1:{port}"

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

    def serve_files(self, files: Mapping[str, Path]) -> None:
        """Answer from local files, so that the server takes no time of a measurement.

        The names are paths that clients use, beginning with the bucket. No listing has them.
        """
        self._ask("serve_files", {name: str(path) for name, path in files.items()})

    def _ask(self, *command: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fault proxy ended with {self._process.wait()}")
        return json.loads(line)


@contextmanager
def fault_proxy(endpoint: str, faults: Faults = Faults()) -> Iterator[FaultProxy]:
    """Run a proxy before the server of a URL such as ``http://127.0.0.1:8333``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.http_fault_proxy", endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
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


class _Listener(QuietServer):
    """Accepts connections as long as the proxy is there."""

    def __init__(self, proxy: _Proxy) -> None:
        super().__init__(("127.0.0.1", proxy.port), _Handler)
        self.proxy = proxy
        self.connections: set[socket.socket] = set()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self.connections.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)


class _Proxy:
    """What is done to requests, and what was done."""

    def __init__(self, endpoint: str) -> None:
        self.server = urlsplit(endpoint).netloc
        self.faults = Faults()
        self.files: dict[str, memoryview] = {}
        self.lock = threading.Lock()
        self.listener: _Listener | None = None
        self.port = 0
        self.come_back()
        self.reset_counts()

    # Commands

    def set(self, faults: dict[str, Any]) -> None:
        self.faults = Faults(**faults)

    def serve_files(self, files: dict[str, str]) -> None:
        maps = {}
        for path in set(files.values()):
            with Path(path).open("rb") as file:
                maps[path] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self.files = {name: maps[path] for name, path in files.items()}

    def counts(self) -> dict[str, Any]:
        with self.lock:
            faults = {kind: self.num_faults[kind] for kind in RATES}
            return asdict(Counts(self.gets.total(), self.num_bytes, faults, dict(self.gets)))

    def reset_counts(self) -> None:
        with self.lock:
            self.num_bytes = 0
            self.num_faults: Counter[str] = Counter()
            self.gets: Counter[str] = Counter()
            self.num_asked: Counter[tuple[str, str, bytes]] = Counter()

    def go_away(self) -> None:
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.shutdown()
            listener.server_close()
            for connection in list(listener.connections):
                _reset(connection)

    def come_back(self) -> None:
        if self.listener is None:
            self.listener = _Listener(self)
            self.port = self.listener.server_address[1]
            threading.Thread(target=self.listener.serve_forever, args=(0.05,), daemon=True).start()

    # What the handlers ask and tell

    def draw(self, method: str, path: str, byte_range: str) -> tuple[str, random.Random]:
        """Count a request. Return the kind of its fault, or nothing, and what draws its details."""
        faults, asked = self.faults, (method, path, byte_range.encode())
        with self.lock:
            number = self.num_asked[asked]
            self.num_asked[asked] += 1
            if method == "GET":
                self.gets[path.rpartition("/")[2].rpartition(".")[2]] += 1
        draw = random.Random(f"{faults.seed} {asked} {number}")
        if method not in faults.methods or not re.search(faults.only, path):
            return "", draw
        value = draw.random()
        for kind in RATES:
            value -= getattr(faults, kind)
            if value < 0:
                with self.lock:
                    self.num_faults[kind] += 1
                return kind, draw
        return "", draw

    def sent(self, num_bytes: int) -> None:
        with self.lock:
            self.num_bytes += num_bytes

    def answer_from_file(self, path: str, byte_range: str) -> Answer | None:
        """Return the answer to a GET or HEAD of a file."""
        file = self.files.get(path.lstrip("/"))
        if file is None:
            return None
        headers = {"Etag": f'"{len(file)}"'}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", byte_range)
        if match is None:
            return Answer(200, headers, file)
        start, stop = int(match[1]), min(int(match[2] or len(file)) + 1, len(file))
        if start >= stop:
            return Answer(416, {}, b"")
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(file)}"
        return Answer(206, headers, file[start:stop])


class _Handler(QuietHandler):
    """Passes the requests of one connection on, and the answers back."""

    server: _Listener

    def handle_any(self) -> None:
        try:
            self.handle_one(time.monotonic())
        except (OSError, http.client.HTTPException):
            self.close_connection = True

    def handle_one(self, arrived: float) -> None:
        proxy, faults = self.server.proxy, self.server.proxy.faults
        path, byte_range = unquote(self.path.partition("?")[0]), self.headers.get("Range", "")
        kind, draw = proxy.draw(self.command, path, byte_range)
        if kind == "mute":
            self.wait_for_the_client()
        num_bytes = int(self.headers.get("Content-Length") or 0)
        if kind == "reset" and num_bytes:
            self.rfile.read(draw.randrange(num_bytes))
            self.reset()
        body = self.rfile.read(num_bytes)
        answer = None
        if kind == "busy":
            answer = _slow_down(faults.retry_after_s)
        elif self.command in ("GET", "HEAD"):
            answer = proxy.answer_from_file(path, byte_range)
        if answer is None:
            headers = {name: text for name, text in self.headers.items() if name != "Expect"}
            answer = ask(proxy.server, self.command, self.path, headers, body)
        answer = _damaged(answer, kind, draw)
        slower = TAIL_FACTOR if kind == "tail" else 1.0
        _sleep_until(arrived + faults.latency_s * slower)
        self.send_head(answer)
        if self.command != "HEAD":
            self.send_body(answer.body, kind, draw, faults.bytes_per_s / slower)

    def send_body(
        self, body: bytes | memoryview, kind: str, draw: random.Random, bytes_per_s: float
    ) -> None:
        body = memoryview(body)
        if kind not in ("stall", "dribble", "reset", "truncate"):
            self.send_paced(body, bytes_per_s)
            return
        num_good = draw.randrange(max(len(body), 1))
        self.send_paced(body[:num_good], bytes_per_s)
        if kind == "stall":
            self.wait_for_the_client()
        if kind == "reset":
            self.reset()
        if kind == "dribble":
            self.send_paced(body[num_good:], DRIBBLE_BYTES_PER_S)
        self.close_connection = True

    def send_paced(self, body: memoryview, bytes_per_s: float) -> None:
        started = time.monotonic()
        piece_bytes = int(bytes_per_s * PACED_S) or (1 if bytes_per_s else len(body) or 1)
        for start in range(0, len(body), piece_bytes):
            piece = body[start : start + piece_bytes]
            if bytes_per_s:
                _sleep_until(started + (start + len(piece)) / bytes_per_s)
            self.wfile.write(piece)
            self.server.proxy.sent(len(piece))

    def reset(self) -> None:
        _reset(self.connection)
        raise ConnectionAbortedError

    def wait_for_the_client(self) -> None:
        """Say nothing until the client gives up."""
        while self.connection.recv(1 << 16):
            pass
        raise ConnectionAbortedError


def _damaged(answer: Answer, kind: str, draw: random.Random) -> Answer:
    """Return an answer with another ETag or with a flipped bit, if this is its fault."""
    if kind == "wrong_etag" and "Etag" in answer.headers:
        etag = answer.headers["Etag"].strip('"')[::-1]
        return answer._replace(headers=answer.headers | {"Etag": f'"{etag}"'})
    if kind == "flip" and answer.status < 300 and answer.body:
        changed = bytearray(answer.body)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        return answer._replace(body=bytes(changed))
    return answer


def _slow_down(retry_after_s: int | None) -> Answer:
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return Answer(503, headers, b"<Error><Code>SlowDown</Code><Message>Slow down</Message></Error>")


def _reset(connection: socket.socket) -> None:
    """End a connection so that the other side sees "connection reset", also while it is in use."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)  # wakes a thread that reads
        os.close(connection.detach())


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(endpoint: str) -> None:
    """Run a proxy and its commands until standard input ends."""
    proxy = _Proxy(endpoint)
    _say(proxy.port)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        _say(getattr(proxy, command)(*arguments))


if __name__ == "__main__":
    main(sys.argv[1])
