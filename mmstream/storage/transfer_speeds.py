"""Storage: how fast requests were of late, and so which of them are late now."""

from __future__ import annotations

from collections import deque
from statistics import median

from mmstream.storage.transfer_limits import TransferLimits


class TransferSpeeds:
    """First bytes and rates of the last requests of a process, and how many may be sent again.

    The time to the first byte and the rate after it are kept apart: the time of a whole request
    says nothing where ranges are 0.1 MB and 8 MB long.

    Args:
        limits: The numbers to go by.

    Attributes:
        first_byte_s: Median of the last requests.
        piece_s: Seconds that a piece takes after the one before, at the median rate.
        rate: Median bytes/s after the first byte. 0: not known.
        slowest_s: The longest time to a first byte.
    """

    def __init__(self, limits: TransferLimits) -> None:
        self._limits = limits
        self._first_bytes: deque[float] = deque(maxlen=limits.num_speeds)
        self._rates: deque[float] = deque(maxlen=limits.num_speeds)
        # Until something is known, a request is late when it stands still.
        self.first_byte_s = self.piece_s = limits.standstill_s / limits.late_factor
        self.rate = self.slowest_s = 0.0
        self._saved = float(limits.late_burst)

    def add(self, first_byte_s: float, rate: float | None) -> None:
        """Note a request that ended well.

        Args:
            first_byte_s: Seconds to its first byte.
            rate: Its bytes/s, or None for a request too short to tell.
        """
        self._first_bytes.append(first_byte_s)
        if rate is not None:
            self._rates.append(rate)
        self._saved = min(self._limits.late_burst, self._saved + self._limits.late_share)

    def refresh(self) -> None:
        """Work out what is usual from the requests so far."""
        if len(self._first_bytes) >= self._limits.min_speeds:
            self.slowest_s = max(self._first_bytes)
            self.first_byte_s = median(self._first_bytes)
            self.piece_s = self._limits.guessed_piece_s
        if len(self._rates) >= self._limits.min_speeds:
            self.rate = median(self._rates)
            self.piece_s = self._limits.piece_bytes / self.rate

    def may_repeat(self) -> bool:
        """Tell whether one more request may be sent again, and count it: only a share of them."""
        is_allowed = self._saved >= 1
        self._saved -= is_allowed
        return is_allowed
