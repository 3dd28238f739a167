"""A server of tests that says nothing of clients that go away in the middle of an answer."""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class QuietServer(ThreadingHTTPServer):
    """Prints a traceback of a mistake in a handler, and none of a broken connection."""

    request_queue_size = 512
    """Linux drops connections behind a full queue, and they come back after seconds."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
