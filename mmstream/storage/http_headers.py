"""Storage: what headers of HTTP answers say, whichever client sent the request."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from mmstream.errors import escaped
from mmstream.storage.store import ObjectStat, RequestError

if TYPE_CHECKING:
    from mmstream.storage.retry import StoreHealth

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.IGNORECASE)

_PAGE_TYPES = ("text/html", "application/xhtml+xml")
_PAGE_BEGIN = re.compile(
    rb"(?i)(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!doctype html|<html\b|<error>\s*<code>)"
)
_PAGE_NAMES = (".html", ".htm", ".xhtml")


def require_object(url: str, headers: Mapping[str, str], begin: bytes = b"") -> None:
    """Raise a RequestError if something else came than the bytes of an object.

    Proxies, login pages of networks and load balancers send web pages, with status 200 too. Some
    compress what nobody asked them to compress.

    Args:
        url: Of the object. Its name may end in ``.html``: then it is a page.
        headers: Of the response, by names in lower case.
        begin: First bytes of the body, as far as they are known.
    """
    kind = headers.get("content-type", "").lower()
    is_page = kind.startswith(_PAGE_TYPES) or (begin and _PAGE_BEGIN.match(begin))
    if is_page and not url.lower().endswith(_PAGE_NAMES):
        raise RequestError(
            "a web page came and not the object: a proxy or a login page answers in place of the "
            "storage"
        )
    coding = headers.get("content-encoding", "")
    if "gzip" in coding and begin.startswith(b"\x1f\x8b") and not url.endswith(("gz", "GZ")):
        raise RequestError(f"the bytes came compressed ({escaped(coding)}), which nobody asked for")


def range_stat(
    url: str, status: int, headers: Mapping[str, str], start: int, stop: int, health: StoreHealth
) -> ObjectStat | None:
    """Return the object that a response to the request of a range is of. None: it does not say.

    Args:
        url: Of the object.
        status: 200 or 206.
        headers: Of the response, by names in lower case.
        start: First byte that was asked for.
        stop: The byte behind the last one.
        health: Of the store. A server that has sent ranges is expected to do so again.

    Raises:
        RequestError: It is no such range: a cache may answer with another one. A response may end
            earlier, where the object does.
    """
    require_object(url, headers)
    if status == 206:
        content_range = headers.get("content-range", "")
        match = _CONTENT_RANGE.fullmatch(content_range)
        if match is None or int(match[1]) != start or int(match[2]) >= stop:
            came = escaped(content_range) or "a range without Content-Range"
            raise RequestError(f"bytes {start}-{stop - 1} were asked for, {came} came")
        size = None if match[3] == "*" else int(match[3])
    elif start == 0 and number_of_bytes(headers) == stop:
        size = None  # the whole object, or a server that says 200 always
    else:
        raise RequestError(
            f"the server does not know ranges of objects (it answers {status} where 206 is right); "
            "serve them by another one, or download them first",
            may_be_final=not health.has_ranges,
        )
    num_expected = min(stop, size or stop) - start
    if "content-encoding" in headers and (number_of_bytes(headers) or stop) < num_expected:
        require_object(url, headers, b"\x1f\x8b")
    health.has_ranges |= status == 206
    return None if size is None else ObjectStat(size, version_of(headers))


def version_of(headers: Mapping[str, str]) -> str | None:
    """Return an ETag without its quotes, and without the mark of a weak one. None: it has none."""
    return headers.get("etag", "").removeprefix("W/").strip('"') or None


def number_of_bytes(headers: Mapping[str, str]) -> int | None:
    """Return the length of a body. None: the response does not say it, as with chunks."""
    text = headers.get("content-length", "")
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None


def timestamp(date: str) -> float | None:
    """Return the time that a header says, in seconds since 1970. None: it says none."""
    try:
        moment = parsedate_to_datetime(date)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, TypeError, IndexError):  # zones and years that cannot be
        return None


def seconds_until(text: str, now: float | None = None) -> float | None:
    """Return what ``Retry-After`` says, in seconds: a number of them, or a date. None: nothing."""
    if re.fullmatch("[0-9]+", text):
        return float(text[:9])
    moment = timestamp(text)
    return None if moment is None else max(0.0, moment - (now or time.time()))
