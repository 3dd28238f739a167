"""The hosts of the downloads: how many requests each one gets, and when.

    download -> HOSTS (wait for a slot) -> request -> HOSTS (it answered, or not)

A host that asks for patience gets fewer requests for a while. One that does not answer gets one at
a time, and after half a minute without an answer none, until a later try succeeds.

URLs that hang at a healthy host are tried again when its others are done, at the end of a shard. So
only first tries tell that a host is dead. Otherwise the good URLs of the next shard would be lost.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

MAX_WAIT_S = 60.0
"""Longest wait that a server can ask for. A longer one would hold up the whole shard."""

MIN_FAILURES = 8
"""A host is dead after the first tries of so many URLs in a row without an answer."""

MIN_SILENCE_S = 30.0
"""And so many seconds since the first of them: a short break costs no rows."""

FIRST_REST_S = 60.0
"""How long a dead host is left alone, at first. The time doubles with each failure after it."""

MAX_REST_S = 600.0


class TryFailedError(Exception):
    """One try of a download failed, in a way that may pass.

    Attributes:
        reason: For the message, if no try succeeds.
        is_answered: Whether the server answered at all.
        is_dns: Whether it was the DNS server that did not answer.
        is_throttled: The server said that it gets too many requests.
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
        is_throttled: bool = False,
        wait_s: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_answered = is_answered
        self.is_dns = is_dns
        self.is_throttled = is_throttled
        self.wait_s = wait_s


class DeadHostError(Exception):
    """The host has not answered for some time. It gets no request now."""


class Host:
    """One host. Lives in one event loop.

    Args:
        max_requests: Requests at the same time.
        clock: Seconds.
    """

    def __init__(self, max_requests: int, clock: Callable[[], float]) -> None:
        self._max_requests = max_requests
        self._clock = clock
        self._limit = float(max_requests)
        self._num_running = 0
        self._num_requests = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._resume_at = 0.0
        self._num_failures = 0
        self._silent_since = 0.0
        self._rest_s = FIRST_REST_S
        self._dead_until = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is known of the host that the next request must know."""
        return not (self._num_running or self._waiting or self._num_failures) and (
            self._resume_at <= self._clock() and self._limit == self._max_requests
        )

    @property
    def limit(self) -> int:
        """Requests that may run now."""
        return 1 if self._num_failures >= MIN_FAILURES else int(self._limit)

    @property
    def is_busy(self) -> bool:
        """Whether another request is likely, so that a connection is worth keeping."""
        return bool(self._waiting) or self._num_requests > 1

    @asynccontextmanager
    async def slot(self, *, is_retry: bool = False) -> AsyncIterator[None]:
        """Wait until the host may get a request. Requests come in the order of the calls.

        Args:
            is_retry: Whether the URL was requested before. A host that has been silent for half a
                minute gets no such request, also where it is not dead.

        Raises:
            DeadHostError: The host gets no request for some time.
        """
        self._require_alive(is_retry)
        if self._num_running >= self.limit or self._waiting:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # the slot was given in the same moment
                    self._give_back()
                raise
        else:
            self._num_running += 1
        try:
            while (wait_s := self._resume_at - self._clock()) > 0:
                await asyncio.sleep(wait_s)
            self._require_alive(is_retry)
            self._num_requests += 1
            yield
        finally:
            self._give_back()

    def answered(self) -> None:
        """Note that the host answered, with any status."""
        self._num_failures = 0
        self._rest_s = FIRST_REST_S
        self._dead_until = 0.0
        self._limit = min(self._max_requests, self._limit + 1 / self._limit)

    def failed(self, failure: TryFailedError, *, is_retry: bool = False) -> None:
        """Note that a try failed."""
        now = self._clock()
        if failure.is_throttled and self._resume_at <= now:  # once for all requests that ran
            self._limit = max(1.0, self._limit / 2)
        if failure.wait_s is not None:
            self._resume_at = max(self._resume_at, now + min(failure.wait_s, MAX_WAIT_S))
        if failure.is_answered or is_retry:
            return
        if not self._num_failures:
            self._silent_since = now
        self._num_failures += 1
        if self._is_silent() and self._dead_until <= now:
            self._dead_until = now + self._rest_s
            self._rest_s = min(2 * self._rest_s, MAX_REST_S)

    def _require_alive(self, is_retry: bool) -> None:
        if self._is_dead() or (is_retry and self._is_silent()):
            raise DeadHostError

    def _give_back(self) -> None:
        self._num_running -= 1
        while self._waiting and (self._num_running < self.limit or self._is_dead()):
            turn = self._waiting.popleft()
            if not turn.done():
                self._num_running += 1
                turn.set_result(None)

    def _is_silent(self) -> bool:
        """Whether first tries have had no answer for some time."""
        silence_s = self._clock() - self._silent_since
        return self._num_failures >= MIN_FAILURES and silence_s >= MIN_SILENCE_S

    def _is_dead(self) -> bool:
        return self._clock() < self._dead_until


class Hosts:
    """All hosts of the downloads of one process.

    Args:
        max_requests: Requests to one host at the same time.
        clock: Seconds.
    """

    def __init__(self, max_requests: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_requests = max_requests
        self._clock = clock
        self._hosts: dict[str, Host] = {}
        self._next_sweep = 1 << 12

    def host(self, name: str) -> Host:
        """Return a host by its name. The same one while anything is known of it."""
        host = self._hosts.get(name)
        if host is None:
            if len(self._hosts) >= self._next_sweep:
                self._hosts = {k: host for k, host in self._hosts.items() if not host.is_idle}
                self._next_sweep = max(1 << 12, 2 * len(self._hosts))
            host = self._hosts[name] = Host(self._max_requests, self._clock)
        return host
