"""Templates, and what a page gets of a request."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse

from mmstream.display.html import environment
from mmstream.errors import ConfigError, escaped

MAX_NUMBER = 1 << 53
"""Largest number of an address."""


def link(*path: object, **query: object) -> Markup:
    """Return an address of this server, escaped for HTML. What is None or "" is left out.

    Examples:
        >>> link("sample", 3, 17, where='a < "b"')
        Markup('/sample/3/17?where=a+%3C+%22b%22')
    """
    given = {name: value for name, value in query.items() if value not in (None, "")}
    address = "/" + "/".join(quote(str(part), safe="", errors="surrogateescape") for part in path)
    return escape(address + ("?" + urlencode(given, errors="replace") if given else ""))


TEMPLATES = environment(Path(__file__).with_name("templates"))
TEMPLATES.globals |= {"link": link}

NAVIGATION = (
    ("samples", "Samples", "/"),
    ("order", "Order", "/order"),
    ("problems", "Problems", "/problems"),
    ("statistics", "Statistics", "/statistics"),
    ("run", "Run", "/run"),
)


def show(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page.

    Args:
        request: What it answers.
        template: In ``templates/``.
        status: Of HTTP.
        values: For the template.
    """
    text = TEMPLATES.get_template(template).render(
        values,
        url=request.app.state.content.url,
        navigation=NAVIGATION,
        query=request.query_params,
    )
    return HTMLResponse(text, status)


def number_of(values: Mapping[str, str], name: str, default: int = 0, least: int = 0) -> int:
    """Return a whole number of an address or a form.

    Raises:
        ConfigError: It is none, or too small or large.
    """
    text = values.get(name, "").strip().replace(",", "") or str(default)
    if not (text.isascii() and text.isdecimal() and least <= int(text[:20]) <= MAX_NUMBER):
        raise ConfigError(f"{name} {escaped(repr(text))}: give a whole number from {least} up")
    return int(text)


class Pager(NamedTuple):
    """Which part of a list a page shows."""

    start: int
    stop: int
    total: int
    previous: Markup | None
    """Address of the part before."""
    next: Markup | None

    @classmethod
    def of(cls, request: Request, size: int, total: int) -> Pager:
        """Return the part that begins at ``start`` of an address, or the last one."""
        start = min(number_of(request.query_params, "start"), max(0, total - 1) // size * size)
        stop = min(start + size, total)

        address = request.url.remove_query_params("token")

        def at(position: int) -> Markup:
            return escape(str(address.include_query_params(start=position)))

        before = at(max(0, start - size)) if start else None
        return cls(start, stop, total, before, at(stop) if stop < total else None)
