"""Spectrograms of sounds: which frequencies are heard when, as a picture with axes.

The sounds may come from strangers. So only their start is decoded, within limits, and what cannot
be decoded says why.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.errors import DecodeError
from mmstream.media.limits import Deadline

MAX_SECONDS = 60
"""Of a sound that are drawn."""

TILE_SECONDS = 20
"""The same in a tile."""

TIMEOUT_S = 5.0
"""Longest time of the processor to decode them."""

MAX_RATE = 192_000
"""Samples of a second, from which on fewer seconds are drawn."""

MAX_CHANNELS = 64

WIDTH, HEIGHT = 720, 180
"""Pixels of a picture, without its axes."""

TILE_WIDTH, TILE_HEIGHT = 176, 72
"""The same in a tile, which has no axes."""

WINDOW_S = 0.03
"""Seconds that one spectrum is of, about."""

RANGE_DB = 80.0
"""What is so much quieter than the loudest place is as dark as silence."""

COLOURS = ((8, 10, 30), (66, 28, 110), (170, 50, 105), (240, 120, 60), (252, 245, 190))
"""From silence to the loudest place."""


class Tick(NamedTuple):
    """A mark of an axis."""

    at: float
    """Pixels from the left, or from the top."""
    text: str


class Spectrogram(NamedTuple):
    """The picture of a sound."""

    name: str
    """Of its file."""
    source: str = ""
    """The picture, as an address that holds it."""
    seconds: float = 0.0
    """That are drawn."""
    num_seconds: float = 0.0
    """Of the sound."""
    times: tuple[Tick, ...] = ()
    """The axis of seconds."""
    frequencies: tuple[Tick, ...] = ()
    """The axis of Hz."""
    problem: str = ""
    """Why there is none."""

    @property
    def label(self) -> str:
        """What it shows, for those who cannot see it."""
        part = "" if self.seconds == self.num_seconds else f" of {self.num_seconds:,.1f}"
        return f"spectrogram of {self.name}, {self.seconds:,.1f}{part} s"


def spectrogram_of(
    name: str, data: bytes, size: tuple[int, int] = (WIDTH, HEIGHT), max_seconds: int = MAX_SECONDS
) -> Spectrogram:
    """Return the picture of the start of a sound, or why there is none.

    Args:
        name: Of its file.
        data: The file.
        size: Width and height of the picture.
        max_seconds: That are drawn.
    """
    try:
        samples, rate, num_seconds = _start_of(data, max_seconds)
    except DecodeError as error:
        return Spectrogram(name, problem=str(error))
    seconds = len(samples) / rate
    width, height = size
    frequencies = [Tick(height - tick.at, tick.text) for tick in _ticks(rate / 2, height, 4)]
    return Spectrogram(
        name,
        _picture(decibels(samples, rate, width), size),
        seconds,
        max(seconds, num_seconds),
        tuple(_ticks(seconds, width, 8)),
        tuple(frequencies),
    )


def _start_of(data: bytes, max_seconds: int) -> tuple[npt.NDArray[np.float32], int, float]:
    """Return the mean of the channels of the start of a sound, its rate, and its whole length.

    Raises:
        DecodeError: It is damaged, empty, or takes too long.
    """
    from mmstream.media.audio import open_audio  # loads libsndfile and FFmpeg

    with open_audio(data, Deadline.start(TIMEOUT_S)) as source:
        rate = source.sample_rate
        if source.num_channels > MAX_CHANNELS:
            raise DecodeError(f"the sound has {source.num_channels:,} channels")
        blocks = source.blocks(0, min(source.num_samples, max_seconds * min(rate, MAX_RATE)))
        means = [block.mean(axis=1) for block in blocks]
        samples = np.nan_to_num(np.concatenate(means)) if means else np.zeros(0, np.float32)
        if not samples.size:
            raise DecodeError("the sound has no samples")
        return samples, rate, source.num_samples / rate


def decibels(samples: npt.NDArray[Any], rate: int, width: int) -> npt.NDArray[np.float32]:
    """Return the loudness of each frequency, float32 [frequencies, at most `width`], 0 to 1.

    Each column has the loudest of its spectra, so that a click of a long sound is seen.

    Args:
        samples: Of one channel.
        rate: Samples of a second.
        width: Columns.
    """
    length = 1 << max(4, round(math.log2(rate * WINDOW_S)))
    padded = np.pad(samples, (0, max(0, length - len(samples))))
    num_spectra = len(padded) - length + 1
    step = max(1, min(length // 2, num_spectra // width))
    windows = np.lib.stride_tricks.sliding_window_view(padded, length)[::step]
    columns = min(width, len(windows))
    starts = np.arange(columns) * len(windows) // columns
    loudest = np.empty((length // 2 + 1, columns), np.float32)
    hann = np.hanning(length).astype(np.float32)
    stops = [*starts[1:].tolist(), len(windows)]
    for column, (start, stop) in enumerate(zip(starts.tolist(), stops, strict=True)):
        spectra = np.abs(np.fft.rfft(windows[start:stop] * hann, axis=1))
        loudest[:, column] = spectra.max(axis=0)
    peak = float(loudest.max()) or 1.0
    of_peak = 20 * np.log10(np.maximum(loudest / peak, 1e-9))
    scaled: npt.NDArray[np.float32] = np.clip(1 + of_peak / RANGE_DB, 0, 1)
    return scaled if loudest.any() else np.zeros_like(loudest)


def _picture(loudness: npt.NDArray[np.float32], size: tuple[int, int]) -> str:
    """Return a PNG as an address that holds it, with the lowest frequency at the bottom."""
    from PIL import Image

    grey = Image.fromarray((loudness[::-1] * 255).astype(np.uint8))
    image = grey.resize(size, Image.Resampling.BILINEAR).convert("P")
    places = np.linspace(0, 255, len(COLOURS))
    table = [np.interp(np.arange(256), places, channel) for channel in zip(*COLOURS, strict=True)]
    image.putpalette(np.stack(table, axis=1).astype(np.uint8).tobytes())
    file = io.BytesIO()
    image.save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _ticks(most: float, pixels: int, count: int) -> Iterator[Tick]:
    """Yield marks at round numbers from 0 to `most`, about `count`."""
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * count >= most)
    for number in range(math.floor(most / step * (1 + 1e-9)) + 1):
        value = number * step
        yield Tick(round(value / most * pixels, 1), f"{value:,.10g}")
