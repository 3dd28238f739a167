"""Storage: what headers of HTTP answers say, whichever client sent the request."""

from __future__ import annotations

import re
import time
from datetime import UTC
from email.utils import parsedate_to_datetime

from mmstream.errors import escaped
from mmstream.storage.store import RequestError

__all__ = ["seconds_until", "size_of_range", "timestamp"]

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


def size_of_range(content_range: str, start: int, stop: int) -> int | None:
    """Return the size of the object that an answer with status 206 is a range of.

    Args:
        content_range: The header, such as "bytes 0-9/100".
        start: First byte that was asked for.
        stop: The byte behind the last one. An answer may end earlier, where the object does.

    Returns:
        The size, or None where the server does not say it ("bytes 0-9/*").

    Raises:
        RequestError: It is another range, as a cache may answer. Or the header cannot be read.
    """
    match = _CONTENT_RANGE.fullmatch(content_range)
    if match is None or int(match[1]) != start or int(match[2]) >= stop:
        came = escaped(content_range) or "a range without Content-Range"
        raise RequestError(f"bytes {start}-{stop - 1} were asked for, {came} came")
    return None if match[3] == "*" else int(match[3])


def timestamp(date: str) -> float | None:
    """Return the time that a header says, in seconds since 1970. None: it says none."""
    try:
        moment = parsedate_to_datetime(date)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def seconds_until(text: str) -> float:
    """Return what ``Retry-After`` says, in seconds: a number of them, or a date."""
    if text.isdecimal():
        return float(text)
    now = time.time()
    return max(0.0, (timestamp(text) or now) - now)
