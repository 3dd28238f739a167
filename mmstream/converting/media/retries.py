"""When a failed download is tried again. No input or output.

download (a try failed) -> RETRIES (wait so long)
"""

from __future__ import annotations

import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

__all__ = ["MAX_WAIT_S", "TryFailedError", "backoff_s", "may_pass", "retry_after_s"]

FIRST_WAIT_S = 0.5
MAX_WAIT_S = 60.0
"""Longest wait that a server can ask for. A longer one would hold up the whole shard."""


class TryFailedError(Exception):
    """One try of a download failed, in a way that may pass.

    Attributes:
        reason: For the message, if no try succeeds.
        is_answered: Whether the server answered at all.
        is_dns: Whether it was the DNS server that did not answer.
        asks_patience: The server said that it gets too many requests.
        wait_s: What the server asked for by ``Retry-After``, or None.
        origin: Host and port of the request.
        started: When the request was sent, by `time.monotonic`.
    """

    origin = ""
    started = 0.0

    def __init__(
        self,
        reason: str,
        *,
        is_answered: bool = False,
        is_dns: bool = False,
        asks_patience: bool = False,
        wait_s: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_answered = is_answered
        self.is_dns = is_dns
        self.asks_patience = asks_patience
        self.wait_s = wait_s


def may_pass(status: int) -> bool:
    """Tell whether the same request may succeed later, by the status of its answer."""
    return status in (408, 425, 429) or (500 <= status < 600 and status not in (501, 505))


def backoff_s(num_failures: int, rng: random.Random) -> float:
    """Return the seconds to wait after so many failed tries: 0.5, 1, 2, ... with jitter.

    The jitter is half of it, so that tries which failed together do not come back together.
    """
    longest = min(MAX_WAIT_S, FIRST_WAIT_S * 2.0 ** min(num_failures - 1, 30))
    return longest * (0.5 + rng.random() / 2)


def retry_after_s(header: str | None, now: datetime | None = None) -> float | None:
    """Return the seconds that ``Retry-After`` asks for, at most `MAX_WAIT_S`.

    Args:
        header: Seconds, or a date of HTTP. None, or anything else, asks for nothing.
        now: For tests.

    Examples:
        >>> retry_after_s("7"), retry_after_s("86400"), retry_after_s("soon")
        (7.0, 60.0, None)
    """
    if header is None:
        return None
    text = header.strip()
    if text.isascii() and text.isdigit():
        seconds = float(text[:9])
    else:
        try:
            date = parsedate_to_datetime(text)
        except ValueError:
            return None
        date = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
        seconds = (date - (now or datetime.now(UTC))).total_seconds()
    return min(max(seconds, 0.0), MAX_WAIT_S)
