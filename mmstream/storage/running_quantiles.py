"""Storage: quantiles of what was measured during the last minute, or the last hour."""

from __future__ import annotations

import math
from collections import Counter, deque

__all__ = ["RunningQuantiles"]

NUM_SLOTS = 12
"""The span is forgotten in so many pieces: 5 s of a minute."""

LOG_RATIO = math.log(1.05)
"""Numbers that differ by less than 5 % may count as equal."""


class RunningQuantiles:
    """Quantiles of positive numbers over a span of time, to within 5 %.

    Adding a number costs the same however many there are: they are counted in buckets whose bounds
    grow by 5 %.

    Args:
        span_s: Numbers that are older are forgotten, up to a twelfth of the span later.

    Examples:
        >>> from mmstream.storage.running_quantiles import RunningQuantiles
        >>> waits = RunningQuantiles(60.0)
        >>> for i in range(1, 100):
        ...     waits.add(i / 1000, now=float(i))
        >>> waits.num_values(now=99.0)
        60
        >>> 0.06 < waits.quantile(0.5, now=99.0) < 0.08
        True
    """

    def __init__(self, span_s: float) -> None:
        self._slot_s = span_s / NUM_SLOTS
        self._counts: Counter[int] = Counter()
        self._slots: deque[tuple[int, Counter[int]]] = deque()
        self._num_values = 0

    def add(self, value: float, now: float) -> None:
        """Add a number that was measured now."""
        slot = math.floor(now / self._slot_s)
        if not self._slots or self._slots[-1][0] != slot:
            self._forget(slot)
            self._slots.append((slot, Counter()))
        bucket = math.floor(math.log(max(value, 1e-9)) / LOG_RATIO)
        self._slots[-1][1][bucket] += 1
        self._counts[bucket] += 1
        self._num_values += 1

    def num_values(self, now: float) -> int:
        """Return how many numbers the span holds."""
        self._forget(math.floor(now / self._slot_s))
        return self._num_values

    def quantile(self, share: float, now: float) -> float:
        """Return the number below which a share of the numbers lies. NaN: there are none."""
        rank = share * self.num_values(now)
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                return math.exp((bucket + 0.5) * LOG_RATIO)
        return math.nan

    def _forget(self, slot: int) -> None:
        while self._slots and self._slots[0][0] <= slot - NUM_SLOTS:
            _, counts = self._slots.popleft()
            self._counts -= counts  # drops buckets that are empty
            self._num_values -= counts.total()
