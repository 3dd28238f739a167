"""Storage: how long failing requests are sent again.

The rules of all that is sent again: pauses, and which statuses may pass. (Bytes that came but make
no sense are another case: `dataset.manifest` and `dataset.shard_indexes` read such a file again,
and `decoding.rows` such a sample.)

A store that has answered is expected to come back: its requests are sent again until nothing came
from it for `STORAGE_PATIENCE_S`. All calls of a process count from the same moment, so that calls
side by side, or one after the other, do not add up. A store that never answered may be a wrong
address: its requests are sent `MAX_FIRST_ATTEMPTS` times.

Example: a server is away from second 10 on. A request that fails at second 12 counts from there. So
does a second one that starts at second 200, and both give up at second 312.

`retry` waits in its thread. `mmstream.storage.transfers` waits in an event loop. Both go by
`Failures`, and share the `StoreHealth` of a store. In `sent_once`, `retry` leaves it to its caller.
Downloads have as many tries as their options say, with the same pauses.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TypeVar

from mmstream.errors import ConfigError, StorageError, escaped
from mmstream.storage.store import RequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_is_sent_once: ContextVar[bool] = ContextVar("is_sent_once", default=False)

STORAGE_PATIENCE_S = 300.0
"""Seconds without a response after which a store counts as failed. ``MMSTREAM_STORAGE_PATIENCE_S``
sets another number."""

PATIENCE_VARIABLE = "MMSTREAM_STORAGE_PATIENCE_S"

MAX_PATIENCE_S = 10 * 365 * 86_400.0
"""Ten years. A larger number means the same: for ever."""

MAX_FIRST_ATTEMPTS = 5
"""How often a request is sent to a store that never answered, the first time included."""

FIRST_PAUSE_S = 0.5
"""The longest pause before the second attempt. Each further one may be twice as long. A pause is
drawn between half of that and all, so that many workers do not ask again at the same moment."""

THROTTLED_STATUS = (429, 503)
"""Statuses of HTTP that ask for fewer requests."""

MAX_PAUSE_S = 10.0

FIRST_WARNING_S = 5.0
"""Seconds without a response after which a WARNING says so."""

WARNING_INTERVAL_S = 30.0

_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}
"""Errors of botocore. They are known by name, so that botocore is imported only for S3."""

CREDENTIALS_HINT = (
    "check the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws; "
    "AWS_ENDPOINT_URL)"
)

_OTHER_HINTS = {
    **dict.fromkeys(
        ("gs", "gcs"),
        "check the credentials (GOOGLE_APPLICATION_CREDENTIALS)",
    ),
    **dict.fromkeys(
        ("az", "abfs", "abfss"),
        "check the credentials (AZURE_STORAGE_CONNECTION_STRING or AZURE_STORAGE_ACCOUNT_NAME)",
    ),
    **dict.fromkeys(
        ("http", "https"),
        "if the host needs a password, put it into ~/.netrc; else the address may have expired",
    ),
    "hf": "check the credentials (HF_TOKEN)",
}
"""What is said in place of that for other schemes than ``s3://``."""


@dataclass
class StoreHealth:
    """What this process knows of a store: whether it ever answered, and since when it is silent.

    Times are those of `time.monotonic`.
    """

    has_answered: bool = False
    has_ranges: bool = False
    """It has sent ranges of objects."""
    last_answer: float = -math.inf
    silent_since: float | None = None
    """Start of the first request that failed after the last response, or that response if it came
    later."""
    last_failure: float = -math.inf
    last_warning: float = -math.inf

    def answered(self, now: float | None = None) -> None:
        """Note that a response came, now or at a time of `time.monotonic`."""
        self.has_answered = True
        self.silent_since = None
        self.last_answer = time.monotonic() if now is None else now

    def failed(self, started: float, now: float, limit_s: float) -> float:
        """Note that a request failed; return since when the store is silent."""
        if self.silent_since is None or now - self.last_failure > limit_s:  # idle since
            self.silent_since = max(started, self.last_answer)
        self.last_failure = now
        return self.silent_since


@dataclass
class Failures:
    """The failed attempts of one call, or of one range.

    Attributes:
        url: Named in errors and warnings.
        health: Of the store.
        num_attempts: Attempts that failed so far.
        since: Start of the first of them, or of the store's silence if that is earlier.
    """

    url: str
    health: StoreHealth
    num_attempts: int = 0
    since: float = math.inf

    def add(self, error: Exception, started: float, now: float) -> float:
        """Count a failed attempt. A warning says so, once in a while.

        Args:
            error: Why it failed.
            started: When it started, as `time.monotonic` says.
            now: When it failed.

        Returns:
            Seconds to wait before the next attempt. They are drawn at random, from a span that
            doubles with each attempt. A server's Retry-After is honoured, up to a third of the
            patience.

        Raises:
            StorageError: There is no next attempt.
        """
        self.num_attempts += 1
        health, limit_s = self.health, patience_limit_s()
        # A call has the same limit alone: other requests may be answered all the time.
        self.since = min(self.since, started, health.failed(started, now, limit_s))
        left_s = self.since + limit_s - now
        if self.num_attempts == 1 and self.since == started and limit_s > 0:
            left_s = max(left_s, FIRST_PAUSE_S)  # a long upload may break after more than that
        is_doubtful = not health.has_answered or getattr(error, "may_be_final", False)
        is_new = is_doubtful and self.num_attempts >= MAX_FIRST_ATTEMPTS
        if left_s <= 0 or is_new:
            setting = f" ({PATIENCE_VARIABLE}={limit_s:g})" if left_s <= 0 else ""
            hint = "" if health.has_answered else _address_hint(self.url, error)
            times = "once" if self.num_attempts == 1 else f"{self.num_attempts} times"
            raise StorageError(
                f"{self.url}: failed {times} in {now - self.since:.1f} s"
                f"{setting}, last {type(error).__name__}: {error}{hint}"
            ) from error
        if now - self.since > FIRST_WARNING_S:
            _warn(health, self.url, error, self.since, now, limit_s)
        asked_s = min(getattr(error, "retry_after_s", 0.0), limit_s / 3)
        return min(max(backoff_s(self.num_attempts), asked_s), left_s)


def backoff_s(num_failures: int) -> float:
    """Return the seconds to wait after so many failed attempts: up to 0.5, 1, 2, ... 10."""
    longest_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 10))
    return random.uniform(longest_s / 2, longest_s)


def may_pass(status: int) -> bool:
    """Tell whether the same request may succeed later, by the status of its response."""
    return status in (408, 425, 429) or (500 <= status < 600 and status not in (501, 505))


def _address_hint(url: str, error: BaseException | None) -> str:
    """Return what to look at where nothing is reached at the address of S3."""
    while error is not None and url.startswith("s3://"):
        is_of_botocore = type(error).__name__ == "EndpointConnectionError"
        if is_of_botocore or isinstance(error, ConnectionRefusedError | socket.gaierror):
            return "; check AWS_ENDPOINT_URL"
        error = error.__cause__ or error.__context__
    return ""


def health_of(url: str) -> StoreHealth:
    """Return what this process knows of the store of a URL. One bucket is one store."""
    scheme, _, location = url.partition("://")
    endpoints = os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL")
    return _health(scheme, location.partition("/")[0], *endpoints)


@lru_cache(maxsize=64)
def _health(_scheme: str, _bucket: str, *_endpoints: str | None) -> StoreHealth:
    return StoreHealth()


@contextmanager
def sent_once() -> Iterator[None]:
    """Have `retry` send each request once in this block: whoever calls decides what follows.

    A request that fails for a passing reason raises a RequestError.
    """
    token = _is_sent_once.set(True)
    try:
        yield
    finally:
        _is_sent_once.reset(token)


def retry(url: str, call: Callable[[], T], health: StoreHealth | None = None) -> T:
    """Call a function that sends requests, and call it again when it fails for a passing reason.

    Not retried: an absent object, missing rights, and errors of the caller or of this package.

    Args:
        url: Named in errors.
        call: Sends one request or several.
        health: Of the store. None: that of the URL's bucket.

    Raises:
        FileNotFoundError: No such object or bucket.
        ConfigError: The storage cannot take such a name or setting.
        StorageError: Wrong credentials, or all attempts failed.
        RequestError: It failed for a passing reason, in `sent_once`.
    """
    failures = Failures(url, health or health_of(url))
    while True:
        started = time.monotonic()
        try:
            result = call()
        except (StorageError, ConfigError, TypeError, ImportError, AttributeError, MemoryError):
            raise  # a bug, or the final error of a `retry` inside `call`
        except Exception as error:
            if isinstance(error, FileNotFoundError):
                failures.health.answered()
            final = _final_error(url, error, failures.health)
            if final is error:
                raise
            if final is not None:
                raise final from error
            if _is_sent_once.get():
                if isinstance(error, RequestError):
                    raise
                text = f"{type(error).__name__}: {error}"
                raise RequestError(text) from error
            pause(url, failures.add(error, started, time.monotonic()))
        else:
            failures.health.answered()
            return result


def _final_error(url: str, error: Exception, health: StoreHealth) -> Exception | None:
    """Return what the caller gets of an error that no second request mends."""
    if isinstance(error, FileNotFoundError):
        # An error of this package says already what is absent.
        is_plain = str(error).startswith(f"{url}: no such")
        return error if is_plain else FileNotFoundError(f"{url}: no such object")
    kind = type(error).__name__
    if _is_sent_once.get() and health.has_answered and not isinstance(error, ValueError):
        return None  # the reader waits: a proxy may refuse for a while
    if isinstance(error, ValueError) or kind == "ParamValidationError":
        return ConfigError(f"{url}: {error}")
    if isinstance(error, PermissionError) or kind in _NO_CREDENTIALS:
        hint = _OTHER_HINTS.get(url.partition("://")[0], CREDENTIALS_HINT)
        return StorageError(f"{url}: {error}; {hint}")
    if getattr(error, "errno", None) == errno.EOPNOTSUPP:
        return StorageError(f"{url}: {error}; the server does not know this kind of request")
    return None


def patience_limit_s() -> float:
    """Return the patience of this process in seconds."""
    text = os.environ.get(PATIENCE_VARIABLE)
    if text is None:
        return STORAGE_PATIENCE_S
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = math.nan
    if not 0 <= limit_s < math.inf:
        raise ConfigError(f"{PATIENCE_VARIABLE}={text}: a number of seconds, 0 or more")
    return min(limit_s, MAX_PATIENCE_S)


def _warn(
    health: StoreHealth, url: str, error: Exception, since: float, now: float, limit_s: float
) -> None:
    """Say which request fails, why, since when and until when; once in a while for a store."""
    if now - health.last_warning < WARNING_INTERVAL_S:
        return
    health.last_warning = now
    clock = datetime.now()
    left = timedelta(seconds=since + limit_s - now)
    end = f"{clock + left:{'%H:%M:%S' if left.days == 0 else '%Y-%m-%d %H:%M:%S'}}"
    logger.warning(
        "%s: fails since %s (%.0f s): %s: %s; it is tried %s",
        escaped(url),
        f"{clock - timedelta(seconds=now - since):%H:%M:%S}",
        now - since,
        type(error).__name__,
        escaped(error),
        f"again until {end}" if health.has_answered else f"{MAX_FIRST_ATTEMPTS} times in all",
    )


def pause(url: str, seconds: float) -> None:
    """Wait. A program that ends does not wait: it would have to be killed."""
    end = time.monotonic() + seconds
    while (left_s := end - time.monotonic()) > 0:
        if getattr(threading, "_SHUTTING_DOWN", False):
            raise StorageError(f"{url}: the interpreter is shutting down")
        time.sleep(min(left_s, 0.5))
