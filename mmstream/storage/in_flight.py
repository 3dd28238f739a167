"""Storage: how many requests of a rank are in flight, found by measurement.

It starts with a number that suits most links, and doubles it each round trip while ranges are
queued and requests stay as quick as the quickest ones. This is the slow start of TCP. It halves the
number where the store asks for it, and where requests share a link that is too slow for them.
"""

from __future__ import annotations

import math
from statistics import median

from mmstream.storage.transfer_limits import TransferLimits


class InFlight:
    """The number of requests that may be in flight.

    Times are those of the event loop.

    Args:
        limits: The numbers to go by.
        num_local_ranks: Ranks of this node. They share its link.

    Attributes:
        limit: The number now.
    """

    def __init__(self, limits: TransferLimits, num_local_ranks: int) -> None:
        self._limits = limits
        least = limits.min_start_in_flight
        self.limit = max(least, limits.start_in_flight // num_local_ranks)
        self._max = max(least, limits.max_in_flight // num_local_ranks)
        # Seconds of short requests (True), and seconds a byte of others, that were sent since the
        # last change. Then the least medians of each kind.
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._least: dict[bool, float] = {True: math.inf, False: math.inf}
        self._num_failed = 0.0
        self._changed_at = self._no_growth_before = -math.inf

    def ended(self, started: float, rate: float | None, now: float, *, is_queued: bool) -> None:
        """Note a request that ended well.

        Args:
            started: When it was sent.
            rate: Its bytes/s, or None for a request too short to tell.
            now: The time.
            is_queued: Whether ranges wait for a permit.
        """
        self._num_failed = max(0.0, self._num_failed - self._limits.forgiven_share)
        if started < self._changed_at:
            return
        is_short = rate is None
        times = self._times[is_short]
        times.append(now - started if rate is None else 1 / rate)
        if len(times) < self.limit / 2:
            return  # fewer say too little
        usual = median(times)
        times.clear()
        self._least[is_short] = least = min(self._least[is_short], usual)
        if not is_short and usual * self._limits.min_connection_rate > 1:
            self._change(self.limit // 2, now)
        elif (
            is_queued
            and now >= self._no_growth_before
            and usual <= self._limits.slowdown * least
            and (is_short or usual * self._limits.min_connection_rate < 1 / 2)
        ):
            self._change(2 * self.limit, now)

    def failed(self, started: float, now: float) -> None:
        """Note a request that was refused because of too many, or that was not answered.

        A few among many are no sign of too many.
        """
        self._num_failed += 1
        most = max(self._limits.forgiven_burst, self.limit // 8)
        if self._num_failed > most and started >= self._changed_at:
            self._no_growth_before = now + self._limits.recovery_s
            self._change(self.limit // 2, now)

    def _change(self, limit: int, now: float) -> None:
        self.limit = min(self._max, max(self._limits.min_in_flight, limit))
        self._num_failed = 0.0
        self._changed_at = now
        self._times = {True: [], False: []}
