"""What the images or videos of a sample may cost: pixels, memory, time. Strangers write headers.

Place in the flow: a field of a sample starts `Limits`, so that many files have no more time and
memory than one. Every module that decodes asks them before it does something that
costs much:

    header -> pixels, memory of the decoding -> decode -> memory of what follows -> resize

A limit is a matter of the file and the settings alone: what exceeds it does so on every machine.
Only the time is not, so it is a last resort. It is that of the processor: a busy machine and a slow
server do not make a sample bad. Work inside a C library cannot be interrupted. So what makes such
work long is limited by the formats' own modules: scans of a JPEG, chunks of a PNG. Calls of FFmpeg
are kept short: `MediaSource` reads nothing after the deadline, and it is asked between two packets.

docs/decoder-safety.md lists all limits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from mmstream.errors import DecodeError, TimeoutError

MAX_PIXELS = 128 * 2**20
"""Default of `Limits.max_pixels`."""
MAX_MEMORY = 640 * 2**20
"""Default of `Limits.max_memory`."""
TIMEOUT_S = 30.0
"""Default of `Limits.timeout_s`."""

MAX_SIDE = 65_535
"""Largest height and width of a picture: the most that a JPEG can have, for all formats.

Pillow allocates something for each row, and converts rows whole, so long sides cost more than their
pixels.
"""


@contextmanager
def out_of_memory_refused(medium: str) -> Iterator[None]:
    """Refuse a medium for which the machine has not enough memory, in place of a MemoryError."""
    try:
        yield
    except MemoryError as error:
        raise DecodeError(f"out of memory: {str(error) or f'the {medium} needs more'}") from None


class Deadline(NamedTuple):
    """When the time of a sample is over. It belongs to the thread that starts it."""

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


class Limits(NamedTuple):
    """The limits of decoding the images, or the videos, of one sample, in one thread."""

    max_pixels: int
    """Largest height x width."""
    max_memory: int
    """Most bytes that decoding may need at its peak, besides the file."""
    deadline: Deadline
    """When the time is over."""
    held_bytes: int = 0
    """Memory that the results of the sample's earlier files take."""

    @classmethod
    def start(
        cls,
        max_pixels: int = MAX_PIXELS,
        max_memory: int = MAX_MEMORY,
        timeout_s: float | None = TIMEOUT_S,
    ) -> Limits:
        """Return limits whose time starts now."""
        return cls(max_pixels, max_memory, Deadline.start(timeout_s))

    def check_picture(self, height: int, width: int) -> None:
        """Refuse a picture whose header states no pixels, too many, or too long a side.

        Raises:
            DecodeError: Names the size and the limit.
        """
        self.check_pixels(height, width)
        if max(height, width) > MAX_SIDE:
            raise DecodeError(f"picture of {width}x{height} exceeds {MAX_SIDE} pixels on a side")

    def check_pixels(self, height: int, width: int) -> None:
        """Refuse a size without pixels, or with more than the limit.

        Raises:
            DecodeError: Names the size and the limit.
        """
        if height < 1 or width < 1:
            raise DecodeError(f"picture of {width}x{height} has no pixels")
        if height * width > self.max_pixels:
            raise DecodeError(f"picture of {width}x{height} exceeds max_pixels={self.max_pixels}")

    def check_memory(self, num_bytes: float, height: int, width: int, frames: str = "") -> None:
        """Refuse a picture or video that needs more memory than the limit.

        Args:
            num_bytes: What is needed at the peak, besides `held_bytes`.
            height: Of the picture, for the message.
            width: Of the picture, for the message.
            frames: Of a video, what it has of this size, for the message.

        Raises:
            DecodeError: Names the size, the need and the limit.
        """
        if num_bytes + self.held_bytes > self.max_memory:
            held = f" and the {'videos' if frames else 'images'} before it"
            held += f" {self.held_bytes / 2**20:.0f} MiB"
            raise DecodeError(
                f"{frames or 'picture'} of {width}x{height} needs {num_bytes / 2**20:.0f} MiB to "
                f"decode{held if self.held_bytes else ''}, more than max_memory={self.max_memory}"
            )

    def check_results(self, num_images: int, height: int, width: int) -> None:
        """Refuse a sample whose results of this size together need more memory than the limit.

        Raises:
            DecodeError: Names the number of images, the need and the limit.
        """
        num_bytes = num_images * height * width * 3
        if num_bytes > self.max_memory:
            raise DecodeError(
                f"{num_images} images of {width}x{height} need {num_bytes / 2**20:.0f} MiB, more "
                f"than max_memory={self.max_memory}"
            )

    def holding(self, num_bytes: int) -> Limits:
        """Return the limits of the sample's next file, after a result of this many bytes."""
        return self._replace(held_bytes=self.held_bytes + num_bytes)
