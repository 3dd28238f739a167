"""An audio file of any format, as samples in float32 that can be read from any position.

Place in the flow: `decoder.py` opens a file with `open_audio`, knows its length, and reads a span:

    wav with plain numbers               -> `wav.py`           reads the bytes of the span
    flac, mp3, ogg (vorbis), other wav   -> `libsndfile.py`    1.3 to 2 times as fast as FFmpeg
    opus, m4a, mp4, mkv, webm, all other -> `container.py`     FFmpeg
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.audio.container import open_container
from mmstream.decoding.audio.headers import (
    check_last_page,
    flac_tells_length,
    is_single_stream,
    mp3_tells_length,
)
from mmstream.decoding.audio.libsndfile import open_sound_file
from mmstream.decoding.audio.wav import open_wav
from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.sniff import container_format
from mmstream.decoding.ffmpeg.source import EncodedMedia, read_range
from mmstream.errors import DecodeError

__all__ = ["AudioSource", "open_audio"]

_VORBIS = b"\x01vorbis"
_HEAD_BYTES = 512
_RATES = range(1_000, 1_000_001)
"""Samples per second that files have. The filter of an absurd rate takes seconds to compute."""


class AudioSource(Protocol):
    """The samples of one file, at its own rate and with all of its channels."""

    @property
    def sample_rate(self) -> int:
        """Samples per second and channel."""

    @property
    def num_channels(self) -> int:
        """Number of channels."""

    @property
    def num_samples(self) -> int:
        """Number of samples per channel. What an encoder puts before the first does not count."""

    @property
    def start_s(self) -> float:
        """When the first sample is heard: 0, or in a file with a video, seconds after its start."""

    def blocks(
        self, start: int, stop: int, out: NDArray[np.float32] | None = None
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the samples from `start` to before `stop`, float32 [T, num_channels], in pieces.

        It is called once. Together the pieces have less than ``stop - start`` samples where the
        file ends too early.

        Args:
            start: First sample.
            stop: The sample behind the last.
            out: Float32 [stop - start, num_channels], contiguous. The pieces are written there, and
                are views of it. None: they are in memory of their own.

        Raises:
            DecodeError: The file is damaged.
            TimeoutError: The time of the sample is over.
        """


@contextmanager
def open_audio(data: EncodedMedia, deadline: Deadline) -> Iterator[AudioSource]:
    """Open an audio file, or the audio track of a video, for the body of a with statement.

    Args:
        data: The file.
        deadline: When the time of the sample is over.

    Yields:
        The samples of its first audio track.

    Raises:
        DecodeError: The file is damaged, or has no audio in it.
        TimeoutError: The time of the sample is over.
    """
    if not len(data):
        raise DecodeError("the file is empty")
    name = container_format(data)
    if name == "ogg":
        check_last_page(data)
    with _opened(data, name, deadline) as source:
        if source.sample_rate not in _RATES:
            raise DecodeError(f"its audio has a sample rate of {source.sample_rate} Hz")
        yield source


def _opened(
    data: EncodedMedia, name: str | None, deadline: Deadline
) -> AbstractContextManager[AudioSource]:
    """Open a file of this format by the library that reads it fastest."""
    wav = open_wav(data) if name == "wav" else None
    if wav is not None:
        return nullcontext(wav)
    if name is not None and _is_for_libsndfile(data, name):
        return open_sound_file(data, name, deadline)
    return open_container(data, deadline)


def _is_for_libsndfile(data: EncodedMedia, name: str) -> bool:
    if name == "ogg":
        return _is_plain_vorbis(data)
    if name == "flac":
        return flac_tells_length(data)
    if name == "mp3":
        return mp3_tells_length(data)
    return name in ("wav", "aiff")


def _is_plain_vorbis(data: EncodedMedia) -> bool:
    """Tell whether libsndfile gives all samples of an Ogg, in the order of channels of a WAV.

    It knows the first of several streams only, and leaves the channels in the order of Vorbis. The
    number of channels stands behind the name and a version of 4 bytes.
    """
    head = read_range(data, 0, _HEAD_BYTES)
    start = head.find(_VORBIS)
    num_channels = head[start + len(_VORBIS) + 4 :][:1]
    return start >= 0 and num_channels in (b"\1", b"\2") and is_single_stream(data)
