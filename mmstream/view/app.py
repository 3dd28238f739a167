"""The server of the pages: on loopback, until a signal ends it; its routes, and who may ask.

Only a browser of this machine that was given the address may ask: another page of the browser
cannot, nor a host name that leads here. Every answer forbids scripts, and all that is from
elsewhere.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmstream.errors import ConfigError, MMStreamError
from mmstream.view import charts, order, problems, samples, writing
from mmstream.view.content import Content
from mmstream.view.pages import TEMPLATES, show

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' data:; "
    "media-src 'self' data:; style-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # without a referrer, a form would send no origin
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def application(content: Content, token: str, port: int) -> Starlette:
    """Return the application.

    Args:
        content: What the pages show.
        token: Whoever asks must know it.
        port: Where it listens on loopback.
    """
    app = Starlette(
        routes=[
            Route("/", samples.grid),
            Route("/find", samples.find),
            Route("/sample/{shard:int}/{index:int}", samples.one),
            Route("/file/{shard:int}/{index:int}/{name:path}", samples.file),
            Route("/against/{other:int}/sample/{shard:int}/{index:int}", samples.one),
            Route("/against/{other:int}/file/{shard:int}/{index:int}/{name:path}", samples.file),
            Route("/select", writing.select_question),
            Route("/select", writing.select, methods=["POST"]),
            Route("/bad", writing.bad_question),
            Route("/bad", writing.bad, methods=["POST"]),
            Route("/order", order.step_page),
            Route("/problems", problems.problems),
            Route("/statistics", charts.statistics_page),
            Route("/run", charts.run_page),
            Route("/style.css", _style),
        ],
        middleware=[Middleware(Guard, token=token, port=port)],
        exception_handlers={MMStreamError: _problem, OSError: _problem, KeyError: _problem},
    )
    app.state.content, app.state.token = content, token
    return app


def _style(_request: Request) -> Response:
    sheets = (TEMPLATES.get_template(name).render() for name in ("style.css", "view.css"))
    return Response("".join(sheets), media_type="text/css")


def _problem(request: Request, error: Exception) -> Response:
    """Return a page that says what went wrong; the other pages work as before."""
    reason = str(error.args[0] if isinstance(error, KeyError) else error)
    status = 400 if isinstance(error, ConfigError) else 503
    return show(request, "problem.html", status=status, reason=reason)


class Guard:
    """Refuses requests of strangers, and adds `HEADERS` to all answers."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._cookie = f"mmstream-{port}"  # the cookies of all ports are in one jar

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        given = request.query_params.get("token", "")

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if self._is_known(given):
                    cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
                    headers.append("Set-Cookie", cookie)
            await send(message)

        refusal = self._refusal(request, given)
        answer = PlainTextResponse(f"{refusal}\n", 403) if refusal else self._app
        await answer(scope, receive, send_guarded)

    def _refusal(self, request: Request, given: str) -> str:
        """Return why a request is refused; "" where it is not."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if host not in self._hosts:
            return "another host name than 127.0.0.1 and its port"
        if origin is not None and origin != f"http://{host}":
            return "a request of another site"
        if not self._is_known(given or request.cookies.get(self._cookie, "")):
            return "open the whole address that `mmstream view` has printed, with its token"
        return ""

    def _is_known(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode())


# -- the server ------------------------------------------------------------------------------------

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
