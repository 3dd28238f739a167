"""Samples at one rate -> samples at another, by libsoxr's high-quality filter, as librosa does.

Place in the flow: `decoder.py` plans with `num_resampled` and `source_piece`, and then feeds a
`Resampler`.

A span of the result is a span of the whole file's result. So the samples around it are read too
(`MARGIN_S`), and the piece begins where both rates have a sample at the same time:

    44,100 -> 16,000 Hz: every 441 samples of the source are 160 of the result.
    Result 100,000 to 110,000 is source 275,625 to 303,188. With a margin of 8,820 samples the piece
    begins at 266,805 = 605 x 441, which is sample 605 x 160 = 96,800 of the result.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import numpy as np
import soxr
from numpy.typing import NDArray

MARGIN_S = 0.2
"""Seconds beside a span that take part in its resampling."""


class Piece(NamedTuple):
    """The samples of the source that a span of the result needs."""

    start: int
    """First sample of the source."""
    stop: int
    """The sample of the source behind the last."""
    offset: int
    """How many samples of the piece's result come before the span."""


def num_resampled(num_samples: int, source_rate: int, rate: int) -> int:
    """Return how many samples at `rate` are nearest to so many at `source_rate`.

    Examples:
        >>> num_resampled(44_101, 44_100, 16_000)
        16000
    """
    return (2 * num_samples * rate + source_rate) // (2 * source_rate)


def source_piece(start: int, stop: int, num_samples: int, source_rate: int, rate: int) -> Piece:
    """Return what the samples `start` to `stop` of the result need of a source.

    Args:
        start: First sample of the result.
        stop: The sample of the result behind the last.
        num_samples: Samples of the whole source.
        source_rate: Of the source.
        rate: Of the result.

    Examples:
        >>> source_piece(100_000, 110_000, 2_000_000, 44_100, 16_000)
        Piece(start=266805, stop=312008, offset=3200)
        >>> source_piece(100, 200, 300, 16_000, 16_000)
        Piece(start=100, stop=200, offset=0)
    """
    if source_rate == rate:
        return Piece(start, min(stop, num_samples), 0)
    margin = int(MARGIN_S * source_rate)
    divisor = gcd(source_rate, rate)
    source_step, step = source_rate // divisor, rate // divisor
    num_steps = max(0, start * source_rate // rate - margin) // source_step
    last = -(-stop * source_rate // rate) + margin
    return Piece(num_steps * source_step, min(last, num_samples), start - num_steps * step)


class Resampler:
    """Resamples a recording piece by piece. The result is that of all samples at once.

    Args:
        source_rate: Samples per second of the source.
        rate: Samples per second of the result.
        num_channels: Number of channels.
    """

    def __init__(self, source_rate: int, rate: int, num_channels: int) -> None:
        self._stream = None
        if source_rate != rate:
            self._stream = soxr.ResampleStream(source_rate, rate, num_channels, dtype="float32")

    def resample(self, samples: NDArray[np.float32], last: bool) -> NDArray[np.float32]:
        """Return the next samples [T, num_channels] of the result, as far as they are known.

        Args:
            samples: The next samples of the source, [T, num_channels].
            last: Whether no others follow.
        """
        if self._stream is None:
            return samples
        samples = np.ascontiguousarray(samples)
        resampled: NDArray[np.float32] = self._stream.resample_chunk(samples, last=last)
        return resampled
