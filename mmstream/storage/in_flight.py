"""Storage: how many requests of a rank are in flight, found by measurement.

It starts with a number that suits most links, and doubles it each round trip while ranges are
queued and requests stay as quick as the first ones. This is the slow start of TCP. From then on a
step up is tried, and it stays if it brought more bytes/s. Fewer are in flight where the consumer
needs fewer, where the store asks for it, and where requests share a link that is too slow for them.
"""

from __future__ import annotations

import math
from statistics import median

from mmstream.storage.allowance import Allowance
from mmstream.storage.transfer_limits import TransferLimits

__all__ = ["InFlight"]


class InFlight:
    """The number of requests that may be in flight.

    Times are those of the event loop.

    Args:
        limits: The numbers to go by.
        num_local_ranks: Ranks of this node. They share its link.
        now: The time.

    Attributes:
        limit: The number now.
    """

    def __init__(self, limits: TransferLimits, num_local_ranks: int, now: float) -> None:
        self._limits = limits
        self.limit = max(limits.min_start_in_flight, limits.start_in_flight // num_local_ranks)
        self._max = max(limits.min_start_in_flight, limits.max_in_flight // num_local_ranks)
        self._start = self.limit
        self._is_starting = True
        # Seconds of short requests (True), and seconds a byte of others. Only of those that were
        # sent since the last change. Then the medians of the first round of each kind.
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._first_times: dict[bool, float] = {}
        self._forgiven = self._new_allowance()
        self._cut_at = -math.inf  # requests that were sent before do not halve it once more
        self._rates: list[float] = []  # of requests that were sent since the last change
        self._usual_rate = math.inf
        self._queued_at = now
        self._no_trial_before = now
        self._before_step: tuple[int, float, float] | None = None  # limit, bytes/s, mean bytes
        self._changed_at = now
        self._is_settled = False
        self._times = {True: [], False: []}
        self._measured_from, self._num_bytes, self._num_ended = now, 0, 0

    def received(self, num_bytes: int) -> None:
        """Note bytes that arrived."""
        self._num_bytes += num_bytes

    def ended(self, started: float, rate: float | None, now: float) -> None:
        """Note a request that ended well.

        Args:
            started: When it was sent.
            rate: Its bytes/s, or None for a request too short to tell.
            now: The time.
        """
        self._forgiven.earn(1)
        self._num_ended += 1
        if started < self._changed_at:
            return
        if self._is_starting:
            self._times[rate is None].append(now - started if rate is None else 1 / rate)
        if rate is None:
            return
        self._rates.append(rate)
        if len(self._rates) >= max(16, self.limit):
            self._usual_rate = median(self._rates)
            if self._usual_rate < self._limits.min_connection_rate:
                self._halve(now)
            self._rates.clear()

    def failed(self, started: float, now: float) -> None:
        """Note a request that was refused because of too many, or that was not answered.

        A few among many are no sign of too many.
        """
        if not self._forgiven.spend(1) and started >= self._cut_at:
            self._halve(now)

    def tick(self, now: float, *, is_queued: bool) -> None:
        """Change the number, if it is time to. Called every now and then.

        Args:
            now: The time.
            is_queued: Whether ranges wait for a permit.
        """
        if not is_queued:
            if now - self._queued_at >= self._limits.full_s:
                self._queued_at = now
                self._change(self.limit - max(1, self.limit // 8), now)
            elif self._before_step is not None:  # so many are not needed
                self._change(self._before_step[0], now)
            self._restart(now)
            return
        self._queued_at = now
        if self._is_starting:
            self._start_up(now)
            return
        if not self._is_settled:
            if self._num_ended >= self._round:  # those that were sent before
                self._is_settled = True
                self._measured_from, self._num_bytes, self._num_ended = now, 0, 0
            return
        # Requests that began together end together. So a trial lasts for a whole round of them.
        seconds = now - self._measured_from
        if seconds >= self._limits.min_trial_s and self._num_ended >= self._round:
            self._judge(self._num_bytes / seconds, self._num_bytes / self._num_ended, now)

    @property
    def _round(self) -> float:
        """So many requests are in flight at a time, if none of them is urgent."""
        return self.limit * (1 - self._limits.reserved_share)

    def _start_up(self, now: float) -> None:
        """Double the number each round trip, while requests are as quick as the first ones.

        A limit of each connection shows at once, because each further one brings as many bytes/s.
        Where requests share a link, or the cores, twice as many take twice as long.
        """
        num_short, num_long = len(self._times[True]), len(self._times[False])
        if num_short * self._limits.short_permits + num_long < self.limit / 2:
            return  # so many were sent at once, when the number was doubled
        is_short = num_short > num_long
        usual = median(self._times[is_short])
        first = self._first_times.setdefault(is_short, usual)
        is_slow = not is_short and usual * self._limits.min_connection_rate > 1 / 2
        if usual > self._limits.start_slowdown * first:
            self._is_starting = False
            self._change(max(self._start, self.limit // 2), now)
        elif is_slow or self.limit == self._max:
            self._is_starting = False
        else:
            self._change(2 * self.limit, now)

    def _judge(self, rate: float, mean_bytes: float, now: float) -> None:
        """Keep or take back a step up, and try the next one."""
        before, self._before_step = self._before_step, None
        if before is not None and mean_bytes > self._limits.comparable * before[2]:
            self._change(before[0], now)  # longer ranges brought more bytes/s, not more of them
        elif before is not None and rate < self._limits.min_gain * before[1]:
            self._no_trial_before = now + self._limits.retrial_s
            self._change(before[0], now)
        elif (
            now >= self._no_trial_before
            and self.limit < self._max
            and self._usual_rate >= self._limits.min_connection_rate * self._limits.step_up
        ):
            step = self.limit, rate, mean_bytes
            self._change(math.ceil(self.limit * self._limits.step_up), now)
            self._before_step = step
        else:
            self._restart(now)

    def _halve(self, now: float) -> None:
        self._cut_at = now
        self._is_starting = False
        self._no_trial_before = now + self._limits.recovery_s
        self._change(self.limit // 2, now)

    def _change(self, limit: int, now: float) -> None:
        self.limit = min(self._max, max(self._limits.min_in_flight, limit))
        self._forgiven = self._new_allowance()
        self._before_step, self._changed_at = None, now
        self._rates.clear()
        self._restart(now)

    def _new_allowance(self) -> Allowance:
        """Return how many requests may fail. Refusals come sooner than answers, all at once."""
        limits = self._limits
        return Allowance(limits.forgiven_share, max(limits.forgiven_burst, self.limit // 8))

    def _restart(self, now: float) -> None:
        """Measure anew, as soon as the requests in flight are those of the present number."""
        self._is_settled = False
        self._times = {True: [], False: []}
        self._measured_from, self._num_bytes, self._num_ended = now, 0, 0
