"""Whether a host is gone, or this machine's network is down.

    download (nobody answered) -> OUTAGE -> a reject, or the end of the conversion

A row whose host is gone is a reject. But when the network is down, every row would become one. So a
download without an answer is a reject only after a sign that the network is up: somebody else
answered meanwhile, or a host that answered before can be reached.

There is one `Outage` for servers and one for DNS: servers that are known already answer for a long
time after the DNS server of a machine has died.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from mmstream.errors import StorageError

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
