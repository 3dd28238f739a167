"""Names of hosts -> addresses, remembered for some minutes.

    addresses (a name) -> DNS -> addresses (which of them are public?)

A corpus of the web names a million hosts, many of which are gone. Resolvers give way under that:
70 % of a run of img2dataset failed for it. So names are looked up a few at a time, never twice at
the same time, and a name that does not exist is remembered too.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from mmstream.converting.draft import RowError
from mmstream.converting.media.hosts import TryFailedError

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
