"""What the videos of a sample may cost together: memory and time.

The limits on one file are settings of its decoder, and come first: bytes, pixels, seconds, frames.
They are a matter of the file alone, so what exceeds them does so on every machine. The time is a
last resort.
"""

from __future__ import annotations

from typing import NamedTuple

from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.errors import DecodeError


class VideoLimits(NamedTuple):
    """The limits of decoding the videos of one sample, in one thread."""

    max_memory: int
    """Most bytes that decoding may need at its peak, besides the files."""
    deadline: Deadline
    """When the time is over."""
    held_bytes: int = 0
    """Memory that the results of the sample's earlier videos take."""

    @classmethod
    def start(cls, max_memory: int, timeout_s: float | None) -> VideoLimits:
        """Return limits whose time starts now."""
        return cls(max_memory, Deadline.start(timeout_s))

    def check_memory(self, num_bytes: int, what: str) -> None:
        """Refuse what needs more memory than the limit.

        Args:
            num_bytes: What is needed at the peak, besides `held_bytes`.
            what: For the message, such as "8 frames of 640x480".

        Raises:
            DecodeError: Names the need and the limit.
        """
        if num_bytes + self.held_bytes > self.max_memory:
            held = f" and the videos before it {self.held_bytes / 2**20:.0f} MiB"
            raise DecodeError(
                f"{what} needs {num_bytes / 2**20:.0f} MiB to decode"
                f"{held if self.held_bytes else ''}, more than max_memory={self.max_memory}"
            )

    def holding(self, num_bytes: int) -> VideoLimits:
        """Return the limits of the sample's next video, after a result of this many bytes."""
        return self._replace(held_bytes=self.held_bytes + num_bytes)
