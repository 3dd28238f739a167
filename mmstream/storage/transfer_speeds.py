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
        self._first_bytes_of_hour = RunningQuantiles(3600.0)
        self._rates = RunningQuantiles(60.0)
        self._neighbours: deque[tuple[float, float]] = deque(maxlen=MAX_NEIGHBOURS)
        self.first_byte_timeout_s = limits.min_first_byte_s
        self.late_first_byte_s = math.inf
        self.slow_rate = 0.0
        self.is_hedging = False
        self._usual_first_byte_s = 0.0
        self._usual_rate = math.inf

    def add_first_byte(self, seconds: float, now: float) -> None:
        """Note how long a first byte took."""
        self._first_bytes.add(seconds, now)
        self._first_bytes_of_hour.add(seconds, now)

    def add_rate(self, rate: float, now: float) -> None:
        """Note the bytes/s of a request that ended."""
        self._rates.add(rate, now)
        self._neighbours.append((now, rate))

    def refresh(self, now: float) -> None:
        """Work out the limits from what was measured by now."""
        limits, first_bytes = self._limits, self._first_bytes
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
            self.late_first_byte_s = limits.late_factor * self._usual_first_byte_s
        self.slow_rate, self._usual_rate = 0.0, math.inf
        if self._rates.num_values(now) >= limits.min_samples:
            self.slow_rate = self._rates.quantile(0.05, now)
            self._usual_rate = self._rates.quantile(0.5, now)

    def usual_s(self, num_bytes: int) -> float:
        """Return the seconds that a new request for so many bytes takes, first byte at p95."""
        return self._usual_first_byte_s + num_bytes / self._usual_rate

    def least_rate(self, rates_now: list[float], now: float) -> float:
        """Return the bytes/s below which a stream is given up.

        Args:
            rates_now: Of the streams that are read at present.
            now: The time.
        """
        since = now - self._limits.least_speed_s
        neighbours = rates_now + [rate for ended, rate in self._neighbours if ended >= since]
        share = self._limits.least_speed_share * median(neighbours) if neighbours else 0.0
        return max(share, self._limits.dribble_rate)
