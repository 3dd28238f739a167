"""The time that the media of one sample may take, all together.

FFmpeg cannot be interrupted within a call. So its calls are kept short: `MediaSource` reads nothing
after the deadline, and the decoders ask between two packets.

Time is that of the processor: a busy machine and a slow server do not make a sample bad. A deadline
belongs to the thread that starts it.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from mmstream.errors import TimeoutError


class Deadline(NamedTuple):
    """When the time of a sample is over."""

    timeout_s: float | None = None
    """Seconds of the thread's processor time that were given. None: no limit."""
    end: float = float("inf")
    """The end, on the clock of ``time.thread_time``."""

    @classmethod
    def start(cls, timeout_s: float | None) -> Deadline:
        """Return a deadline whose time starts now."""
        return cls() if timeout_s is None else cls(timeout_s, time.thread_time() + timeout_s)

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return time.thread_time() > self.end

    def check(self) -> None:
        """Refuse to go on after the deadline.

        Raises:
            TimeoutError: Names the limit.
        """
        if self.is_over:
            raise TimeoutError(f"decoding takes longer than timeout_s={self.timeout_s:g}")
