"""What the audio of a sample may cost: seconds of audio, seconds of time.

Place in the flow: `decoding.media` starts an `AudioLimits` for each sample, so that many files
have no more time and memory than one. The memory of a result follows from its length.
"""

from __future__ import annotations

from typing import NamedTuple

from mmstream.errors import DecodeError
from mmstream.media.deadline import Deadline

MAX_BYTES = 4 << 30
"""Default of `AudioDecoder.max_bytes`."""
MAX_DURATION_S = 3600.0
"""Default of `AudioDecoder.max_duration_s`."""
TIMEOUT_S = 60.0
"""Default of `AudioDecoder.timeout_s`."""

MAX_RESULT_BYTES = 2 << 30
"""Most bytes of a result as float32: an hour of 48 kHz with three channels."""


class AudioLimits(NamedTuple):
    """The limits of decoding the audio of one sample."""

    max_duration_s: float
    """Longest results, all together."""
    deadline: Deadline
    """When the time is over."""
    held_s: float = 0.0
    """Length of the results of the sample's earlier files."""

    @classmethod
    def start(
        cls, max_duration_s: float = MAX_DURATION_S, timeout_s: float | None = TIMEOUT_S
    ) -> AudioLimits:
        """Return limits whose time starts now."""
        return cls(max_duration_s, Deadline.start(timeout_s))

    def check_duration(self, duration_s: float) -> None:
        """Refuse a result that is too long.

        Raises:
            DecodeError: Names the length and the limit.
        """
        if duration_s + self.held_s > self.max_duration_s:
            held = f" after {self.held_s:.1f} s of the sample's other audio" if self.held_s else ""
            raise DecodeError(
                f"audio of {duration_s:.1f} s{held} exceeds max_duration_s={self.max_duration_s:g}"
            )

    def holding(self, duration_s: float) -> AudioLimits:
        """Return the limits of the sample's next file, after a result of this length."""
        return self._replace(held_s=self.held_s + duration_s)


def check_result(num_samples: int, num_channels: int) -> None:
    """Refuse a result of one file that needs too much memory, such as one with 200 channels.

    Raises:
        DecodeError: Names the need and the limit.
    """
    num_bytes = num_samples * num_channels * 4
    if num_bytes > MAX_RESULT_BYTES:
        raise DecodeError(
            f"audio of {num_samples:,} samples and {num_channels} channels needs "
            f"{num_bytes >> 20:,} MiB, more than {MAX_RESULT_BYTES >> 20:,}"
        )
