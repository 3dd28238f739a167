"""What the HTTP servers and proxies of tests have in common."""

from __future__ import annotations

import http.client
import ssl
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

FRAMING = {"transfer-encoding", "connection", "content-length"}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes | memoryview


class QuietServer(ThreadingHTTPServer):
    """Prints a traceback of a mistake in a handler, and none of a broken connection."""

    daemon_threads = True
    request_queue_size = 512
    """Linux drops connections behind a full queue, and they come back after seconds."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class QuietHandler(BaseHTTPRequestHandler):
    """Calls `handle_any` for each request, and logs nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    url: str

    def handle_any(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.handle_any()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def read_body(self) -> bytes:
        """Return the body of the request."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send_head(self, answer: Answer) -> None:
        """Send a status and headers. The length is that of the body, or what a header says."""
        usual = {"Date": self.date_time_string(), "Content-Length": str(len(answer.body))}
        self.send_response_only(answer.status)
        for name, text in (usual | answer.headers).items():
            self.send_header(name, text)
        self.end_headers()

    def send(self, answer: Answer) -> None:
        """Send a whole answer."""
        self.send_head(answer)
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


def ask(server: str, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
    """Send a request to a server, and return its answer without the headers of its framing."""
    with closing(http.client.HTTPConnection(server)) as connection:
        connection.request(method, target, body or None, headers)
        answer = connection.getresponse()
        data = answer.read()
    pairs = answer.getheaders()
    kept = {name.title(): text for name, text in pairs if name.lower() not in FRAMING}
    if method == "HEAD":
        kept["Content-Length"] = answer.getheader("Content-Length") or "0"
    return Answer(answer.status, kept, data)


@contextmanager
def serving(
    kind: type[QuietHandler], /, tls: ssl.SSLContext | None = None, **attributes: Any
) -> Iterator[Any]:
    """Run a server in this process.

    Args:
        kind: The class of its handlers.
        tls: For ``https``.
        attributes: Of the handlers of this server.

    Yields:
        The class of the handlers of this server, with its `url`. Changes of it hold at once.
    """
    handler: Any = type(kind.__name__, (kind,), attributes)
    with QuietServer(("127.0.0.1", 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        handler.url = f"{scheme}://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield handler
        finally:
            server.shutdown()
            thread.join()
