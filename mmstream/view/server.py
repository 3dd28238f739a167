"""The server of the pages: on loopback, until a signal ends it."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable
from types import FrameType

import uvicorn

from mmstream.errors import ConfigError
from mmstream.view.app import application
from mmstream.view.content import Content

MAX_END_S = 2.0
"""So long after a signal the process ends, also where a thread still computes a page."""


class _Server(uvicorn.Server):
    """Calls a function once it answers."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End because of a signal, as soon as the requests under way are answered."""
        timer = threading.Timer(MAX_END_S, os._exit, [128 + sig])
        timer.daemon = True
        timer.start()
        super().handle_exit(sig, frame)


def serve(content: Content, port: int, *, opens: bool, say: Callable[[str], object]) -> None:
    """Answer until SIGTERM or Ctrl-C.

    Args:
        content: What the pages show.
        port: On loopback; 0: a free one.
        opens: Open the address in a browser.
        say: Called with the address once the server answers.

    Raises:
        ConfigError: The port is taken.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"port {port}: {error.strerror}; --port 0 takes a free one") from None
    port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
    address = f"http://127.0.0.1:{port}/?token={token}"

    def started() -> None:
        say(address)
        if opens:
            threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()

    config = uvicorn.Config(
        application(content, token, port),
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    _Server(config, started).run(sockets=[listener])
