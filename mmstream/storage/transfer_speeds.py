"""Storage: how fast requests were of late, and so which of them are slow now.

The time to the first byte and the rate after it are kept apart: the time of a whole request says
nothing where ranges are 0.1 MB and 8 MB long.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from mmstream.storage.running_quantiles import RunningQuantiles
from mmstream.storage.transfer_limits import TransferLimits

__all__ = ["TransferSpeeds"]

MAX_NEIGHBOURS = 256
"""Requests that ended of late and are kept one by one."""


class TransferSpeeds:
    """First bytes and rates of the requests of a process.

    Times are those of the event loop. `refresh` works out the limits; in between they stay.

    Args:
        limits: The numbers to go by.

    Attributes:
        first_byte_timeout_s: A first byte that takes longer does not come.
        late_first_byte_s: A first byte that takes longer is late.
        slow_rate: Bytes/s of the slowest twentieth.
        is_hedging: Whether requests were measured, and are not all slow at present.
    """

    def __init__(self, limits: TransferLimits) -> None:
        self._limits = limits
        self._first_bytes = RunningQuantiles(60.0)
        self._first_bytes_of_open = RunningQuantiles(60.0)
        self._first_bytes_of_hour = RunningQuantiles(3600.0)
        self._rates = RunningQuantiles(60.0)
        self._short_times = RunningQuantiles(60.0)
        self._neighbours: deque[tuple[float, float]] = deque(maxlen=MAX_NEIGHBOURS)
        self.first_byte_timeout_s = limits.min_first_byte_s
        self.late_first_byte_s = math.inf
        self.slow_rate = 0.0
        self.is_hedging = False
        self._usual_first_byte_s = 0.0
        self._usual_rate = math.inf
        self._long_first_byte_s, self._least_rate = math.nan, math.nan
        self._long_short_s = math.nan

    def add_first_byte(self, seconds: float, now: float, *, is_connecting: bool = False) -> None:
        """Note how long a first byte took.

        Many connections that are opened at once take long, on a busy machine ten times as long as
        requests on open ones. They count while little else was measured.
        """
        self._first_bytes.add(seconds, now)
        if not is_connecting:
            self._first_bytes_of_open.add(seconds, now)
        self._first_bytes_of_hour.add(seconds, now)

    def add_rate(self, rate: float, now: float) -> None:
        """Note the bytes/s of a request that ended."""
        self._rates.add(rate, now)
        self._neighbours.append((now, rate))

    def add_short_time(self, seconds: float, now: float) -> None:
        """Note how long a request took that ended and was too short to have a rate."""
        self._short_times.add(seconds, now)

    def refresh(self, now: float) -> None:
        """Work out the limits from what was measured by now."""
        limits, first_bytes = self._limits, self._first_bytes_of_open
        if first_bytes.num_values(now) < limits.min_samples:
            first_bytes = self._first_bytes
        num_values = first_bytes.num_values(now)
        if num_values:
            timeout_s = limits.first_byte_factor * first_bytes.quantile(0.99, now)
            self.first_byte_timeout_s = min(
                max(timeout_s, limits.min_first_byte_s), limits.max_first_byte_s
            )
        self.is_hedging = num_values >= limits.min_samples and first_bytes.quantile(
            0.5, now
        ) <= limits.slowdown * self._first_bytes_of_hour.quantile(0.5, now)
        self.late_first_byte_s = math.inf
        if num_values >= limits.min_samples:
            self._usual_first_byte_s = first_bytes.quantile(0.95, now)
            self.late_first_byte_s = limits.late_first_byte_factor * self._usual_first_byte_s
        self.slow_rate, self._usual_rate = 0.0, math.inf
        if self._rates.num_values(now) >= limits.min_samples:
            self.slow_rate = self._rates.quantile(0.05, now)
            self._usual_rate = self._rates.quantile(0.5, now)
        self._long_first_byte_s = self._quantile(first_bytes, 0.9, now)
        self._least_rate = self._quantile(self._rates, 0.1, now)
        self._long_short_s = self._quantile(self._short_times, 0.9, now)

    def _quantile(self, values: RunningQuantiles, share: float, now: float) -> float:
        """Return a quantile. NaN: too few requests have ended."""
        is_known = values.num_values(now) >= self._limits.min_overdue_samples
        return values.quantile(share, now) if is_known else math.nan

    def usual_s(self, num_bytes: int) -> float:
        """Return the seconds that a new request for so many bytes takes, first byte at p95."""
        return self._usual_first_byte_s + num_bytes / self._usual_rate

    def overdue_s(self, num_bytes: int) -> float:
        """Return after how many seconds a request for so many bytes is overdue, as a whole.

        Infinite: too few like it have ended.
        """
        usual_s = (
            self._long_short_s
            if num_bytes < self._limits.min_rated_bytes
            else self._long_first_byte_s + num_bytes / self._least_rate
        )
        if math.isnan(usual_s):
            return math.inf
        return max(self._limits.min_overdue_s, self._limits.overdue_factor * usual_s)

    def least_rate(self, rates_now: list[float], now: float) -> float:
        """Return the bytes/s below which a stream is given up.

        Requests that ended of late prove what is possible. Where few did, the streams that are read
        at present count too: all of them may be slow.

        Args:
            rates_now: Of the streams that are read at present.
            now: The time.
        """
        # Half of the span: a stream that was as quick as they until then is above the least rate.
        since = now - self._limits.least_speed_s / 2
        neighbours = [rate for ended, rate in self._neighbours if ended >= since]
        if len(neighbours) < self._limits.min_overdue_samples:
            since = now - self._limits.least_speed_s
            neighbours = rates_now + [rate for ended, rate in self._neighbours if ended >= since]
        share = self._limits.least_speed_share * median(neighbours) if neighbours else 0.0
        return max(share, self._limits.dribble_rate)
