"""Sounds for people: a waveform, a player for what the model hears, a picture of features.

samples.py -> sounds.py -> markup.py
"""

from __future__ import annotations

import io
import math
import wave
from typing import Any

import numpy as np
import numpy.typing as npt

from mmstream.display.markup import html_text, media_player, png, size_text, small_line, stretched
from mmstream.display.recordings import Features, Sound, array_of, features_text, sound_text

WIDTH = 480
HEIGHT = 56
"""Pixels of a waveform."""

BLUE = (70, 130, 220)
"""Seen on light and on dark ground."""

PEAK = 32767
"""Of 16-bit samples."""


def waveform(samples: Any, width: int = WIDTH, height: int = HEIGHT, label: str = "") -> str:
    """Return the picture of a sound: the range of its samples in each column of pixels.

    Args:
        samples: Floating in -1..1 or int16, [T] or [C, T]. Channels are mixed.
        width: In pixels; shorter sounds are stretched to it.
        height: In pixels.
        label: What it is, for those who do not see it.
    """
    mono = _mono(samples)
    pixels = np.zeros((height, width, 4), dtype=np.uint8)
    pixels[..., :3] = BLUE
    if mono.size:
        bounds = np.linspace(0, mono.size, width + 1).astype(np.int64)
        starts = np.minimum(bounds[:-1], mono.size - 1)
        low = np.minimum.reduceat(mono, starts)
        high = np.maximum.reduceat(mono, starts)
        middle = (height - 1) / 2
        top = np.floor(middle - np.clip(high, -1, 1) * middle)
        bottom = np.ceil(middle - np.clip(low, -1, 1) * middle)
        line = np.arange(height)[:, None]
        pixels[..., 3] = np.where((line >= top) & (line <= bottom), 255, 0)
    return png(pixels, label)


def wav_of(samples: Any, sample_rate: int) -> bytes:
    """Return a WAV of 16 bits. Samples beyond -1..1 are cut off.

    Args:
        samples: Floating in -1..1 or int16, [T] or [C, T].
        sample_rate: Samples per second.
    """
    values = _floats(samples)
    channels = values[None] if values.ndim == 1 else values
    numbers = np.rint(np.clip(channels, -1, 1) * PEAK).astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((len(channels), 2, sample_rate, 0, "NONE", ""))
        file.writeframes(np.ascontiguousarray(numbers.T).tobytes())
    return buffer.getvalue()


def spectrogram(values: Any, label: str = "", width: int = WIDTH) -> str:
    """Return features as a picture: time from left to right, low bins below, high values bright."""
    grey = stretched(array_of(values).astype(np.float32))
    step = max(1, -(-grey.shape[1] // width))
    return png(np.ascontiguousarray(grey[::-1, ::step]), label)


def sound_html(name: str, sound: Sound, sample_rate: int, max_bytes: int) -> str:
    """Return a decoded sound: its waveform, what it is, and a player.

    Args:
        name: Of its field.
        sound: The samples.
        sample_rate: Samples per second, which the samples themselves do not say.
        max_bytes: Larger sounds get no player.
    """
    text = f"{name}: {sound_text(sound, sample_rate)}"
    if getattr(sound.samples, "ndim", 0) not in (1, 2):
        return html_text(text, 200)
    num_bytes = 2 * math.prod(sound.samples.shape)
    data = wav_of(sound.samples, sample_rate) if num_bytes <= max_bytes else b""
    more = "" if data else f", no player: more than {size_text(max_bytes)}"
    return (
        f"<div>{waveform(sound.samples, label=text)}</div>"
        f"{media_player('audio/wav', data) if data else ''}"
        f"{small_line(html_text(text + more, 200))}"
    )


def features_html(name: str, features: Features) -> str:
    """Return the picture of features, and what they are."""
    text = f"{name}: {features_text(features)}"
    shown = spectrogram(features.values, text) if getattr(features.values, "ndim", 0) == 2 else ""
    return f"<div>{shown}</div>{small_line(html_text(text, 200))}"


def _floats(samples: Any) -> npt.NDArray[np.float32]:
    array = array_of(samples)
    scale = PEAK if array.dtype.kind == "i" else 1
    return array.astype(np.float32) / np.float32(scale)


def _mono(samples: Any) -> npt.NDArray[np.float32]:
    values = _floats(samples)
    return values if values.ndim == 1 else values.mean(axis=0)
