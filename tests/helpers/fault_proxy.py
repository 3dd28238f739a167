"""A proxy before a server that can be taken away and brought back, as in an outage."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class FaultProxy:
    """Hands connections on to a server, as bytes. While it is away, connections are refused."""

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self.port = 0
        self.come_back()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def go_away(self) -> None:
        """Refuse new connections and reset those that there are."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        for connection in list(self._open):
            self._close(connection)

    def come_back(self) -> None:
        """Accept connections, at the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(self._server)
                self._open |= {client, server}
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for connection in (source, target):
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        self._open.discard(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


@contextmanager
def fault_proxy(endpoint: str) -> Iterator[FaultProxy]:
    """Run a proxy before the server of a URL such as ``http://127.0.0.1:8333``."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    proxy = FaultProxy(host, int(port))
    try:
        yield proxy
    finally:
        proxy.go_away()
