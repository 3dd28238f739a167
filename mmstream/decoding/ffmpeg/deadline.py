"""The time that the media of one sample may take, all together.

FFmpeg cannot be interrupted within a call. So its calls are kept short: `source.py` reads nothing
after the deadline, and the decoders ask between two packets.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from mmstream.errors import TimeoutError

__all__ = ["Deadline"]


class Deadline(NamedTuple):
    """When the time of a sample is over."""

    timeout_s: float | None = None
    """Seconds that were given, for messages. None: no limit."""
    end: float = float("inf")
    """The end, on the clock of ``time.monotonic``."""

    @classmethod
    def start(cls, timeout_s: float | None) -> Deadline:
        """Return a deadline whose time starts now."""
        return cls() if timeout_s is None else cls(timeout_s, time.monotonic() + timeout_s)

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self.end

    def check(self) -> None:
        """Refuse to go on after the deadline.

        Raises:
            TimeoutError: Names the limit.
        """
        if self.is_over:
            raise TimeoutError(f"decoding takes longer than timeout_s={self.timeout_s:g}")
