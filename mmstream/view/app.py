"""The routes of the server, and who may ask.

Only a browser of this machine that was given the address may ask: another page of the browser
cannot, nor a host name that leads here. Every answer forbids scripts, and all that is from
elsewhere.
"""

from __future__ import annotations

import hmac

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmstream.errors import ConfigError, MMStreamError
from mmstream.view import charts, order, problems, samples, writing
from mmstream.view.choice import Choices
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
    app.state.content, app.state.choices, app.state.token = content, Choices(content), token
    return app


def _style(_request: Request) -> Response:
    text = (
        TEMPLATES.get_template("style.css").render() + TEMPLATES.get_template("view.css").render()
    )
    return Response(text, media_type="text/css")


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
