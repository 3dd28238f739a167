"""Storage: what headers of HTTP answers say, whichever client sent the request."""

from __future__ import annotations

import re

from mmstream.storage.store import RequestError

__all__ = ["size_of_range"]

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
        came = content_range or "a range without Content-Range"
        raise RequestError(f"bytes {start}-{stop - 1} were asked for, {came} came")
    return None if match[3] == "*" else int(match[3])
