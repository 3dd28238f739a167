"""The hosts of the downloads: their addresses, how many requests each gets and when, and outages.

    download -> DNS -> HOSTS (wait for a slot) -> request -> HOSTS (it answered, or not) -> OUTAGE

Names: a corpus of the web names a million hosts, many of which are gone. Resolvers give way under
that: 70 % of a run of img2dataset failed for it. So names are looked up a few at a time, never
twice at the same time, and a name that does not exist is remembered too.

Slots: a host that asks for patience gets fewer requests for a while. One that does not answer gets
one at a time, and after half a minute without an answer none, until a later try succeeds. URLs that
hang at a healthy host are tried again when its others are done, at the end of a shard. So only
first tries tell that a host is dead. Otherwise the good URLs of the next shard would be lost.

Outages: a row whose host is gone is a reject. But when the network is down, every row would become
one. So a download without an answer is a reject only after a sign that the network is up: somebody
else answered meanwhile, or a host that answered before can be reached. There is one `Outage` for
servers and one for DNS: servers that are known already answer for a long time after the DNS server
of a machine has died.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import NamedTuple

from mmstream.converting.draft import RowError
from mmstream.errors import StorageError

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


POSITIVE_TTL_S = 600.0
"""`getaddrinfo` does not tell how long an answer holds. Most names have minutes to hours."""

NEGATIVE_TTL_S = 300.0
MAX_NAMES = 1 << 16

_NO_SUCH_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class _Entry(NamedTuple):
    expires: float
    addresses: tuple[str, ...]
    """Empty: the name does not exist."""


class DnsCache:
    """Looks names up in threads, and remembers the answers. Lives in one event loop.

    Args:
        look_up: Returns the addresses of a name, or raises socket.gaierror. May block.
        on_answer: Called with a name whose look-up was answered, also if there is no such name.
        num_threads: Look-ups at the same time.
        clock: Seconds.
    """

    def __init__(
        self,
        look_up: Callable[[str], list[str]],
        on_answer: Callable[[str], None],
        num_threads: int = 32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look_up = look_up
        self._on_answer = on_answer
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._running: dict[str, asyncio.Future[_Entry]] = {}
        self._threads = ThreadPoolExecutor(num_threads, "mmstream-dns")

    async def addresses(self, host: str) -> tuple[str, ...]:
        """Return the addresses of a name, in the resolver's order of preference.

        Raises:
            RowError: The name does not exist. The message is only the reason.
            TryFailedError: No DNS server answered. That is not remembered.
        """
        entry = self._entries.get(host)
        if entry is None or entry.expires <= self._clock():
            entry = await self._shared_lookup(host)
        if not entry.addresses:
            raise RowError("not found in DNS")
        return entry.addresses

    async def answers(self, host: str) -> bool:
        """Tell whether a DNS server answers now, asked for a name that it knew before."""
        try:
            await self._shared_lookup(host)
        except TryFailedError:
            return False
        return True

    def close(self) -> None:
        """Give up the look-ups that run. Does not wait for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _shared_lookup(self, host: str) -> _Entry:
        running = self._running.get(host)
        if running is None:
            running = asyncio.ensure_future(self._lookup(host))
            self._running[host] = running
            running.add_done_callback(lambda done: self._finished(host, done))
        # Shielded: who gives up must not end the look-up of the others. There is no time-out: the C
        # library has one, and the time until a thread is free must not count.
        return await asyncio.shield(running)

    def _finished(self, host: str, lookup: asyncio.Future[_Entry]) -> None:
        del self._running[host]
        if not lookup.cancelled():
            lookup.exception()  # perhaps nobody waits for it any more

    async def _lookup(self, host: str) -> _Entry:
        loop = asyncio.get_running_loop()
        addresses = await loop.run_in_executor(self._threads, self._answer, host)
        self._on_answer(host)
        ttl = POSITIVE_TTL_S if addresses else NEGATIVE_TTL_S
        entry = _Entry(self._clock() + ttl, addresses)
        self._entries.pop(host, None)
        self._entries[host] = entry
        if len(self._entries) > MAX_NAMES:
            del self._entries[next(iter(self._entries))]
        return entry

    def _answer(self, host: str) -> tuple[str, ...]:
        """Return the addresses of a name; none if it does not exist. Runs in a thread."""
        started = self._clock()
        try:
            return tuple(self._look_up(host))
        except UnicodeError:
            return ()
        except socket.gaierror as error:
            if error.errno in _NO_SUCH_NAME:
                return ()
            failure = TryFailedError("DNS did not answer", is_dns=True)
            failure.started = started
            raise failure from None


def look_up(host: str) -> list[str]:
    """Return the addresses of a name, by the C library: /etc/hosts, then DNS."""
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


FRESH_S = 1.0
"""An older answer shows nothing about the network as it is now."""

NUM_WITNESSES = 3
"""Hosts that answered last. They are asked when nobody else answers."""


class Outage:
    """Judges downloads that got no answer. Lives in one event loop.

    Args:
        what: Who did not answer, for the message: "server" or "DNS server".
        probe: Returns whether a host that answered before answers now.
        max_unanswered: So many unanswered downloads in a row are an outage. Once a host has
            answered, a host counts once. 0: nothing is an outage.
        clock: Seconds.
    """

    def __init__(
        self,
        what: str,
        probe: Callable[[str], Awaitable[bool]],
        max_unanswered: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._probe = probe
        self._max_unanswered = max_unanswered
        self._clock = clock
        self._witnesses: dict[str, None] = {}
        self._answered_at = float("-inf")
        self._num_unanswered = 0
        self._unanswered_hosts: set[str] = set()
        self._probing = asyncio.Lock()

    def answered(self, host: str) -> None:
        """Note that a host answered, in whatever way."""
        self._answered_at = self._clock()
        self._num_unanswered = 0
        self._unanswered_hosts.clear()
        self._witnesses.pop(host, None)
        self._witnesses[host] = None
        if len(self._witnesses) > NUM_WITNESSES:
            del self._witnesses[next(iter(self._witnesses))]

    async def require_network(self, host: str, reason: str, since: float = 0.0) -> None:
        """Return if it is the host's fault that a download got no answer.

        Args:
            host: Whose download failed.
            reason: Why its last try failed.
            since: When its last request was sent, by the clock. Earlier answers show nothing.

        Raises:
            StorageError: The network is down, as far as this process can know.
        """
        if not self._max_unanswered:
            return
        self._num_unanswered += 1
        self._unanswered_hosts.add(host)
        num = len(self._unanswered_hosts) if self._witnesses else self._num_unanswered
        if num >= self._max_unanswered:
            raise self._error(f"the last {num} {'hosts' if self._witnesses else 'downloads'}", host)
        if not self._witnesses:
            return
        async with self._probing:  # one probe serves all downloads that failed meanwhile
            if self._answered_at >= max(since, self._clock() - FRESH_S):
                return
            for witness in list(self._witnesses)[::-1]:
                if await self._probe(witness):
                    self._answered_at = self._clock()
                    return
        raise self._error(f"{host} and the hosts that answered before", host, reason)

    def _error(self, hosts: str, host: str, reason: str = "") -> StorageError:
        example = f" ({reason})" if reason else f" (the last one: {host})"
        return StorageError(
            f"downloads: no {self._what} answers for {hosts}{example}; is the network of this "
            "machine down? Finished shards are kept; run the same command again to continue"
        )
