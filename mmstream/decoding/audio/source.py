"""An audio file of any format, as samples in float32 that can be read from any position.

Place in the flow: `decoder.py` opens a file with `open_audio`, knows its length, and reads a span:

    wav with plain numbers               -> `wav.py`           reads the bytes of the span
    flac, mp3, ogg (vorbis), other wav   -> `libsndfile.py`    1.3 to 2 times as fast as FFmpeg
    opus, m4a, mp4, mkv, webm, all other -> `container.py`     FFmpeg
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.audio.container import open_container
from mmstream.decoding.audio.headers import (
    Mp3Frames,
    check_last_page,
    flac_tells_length,
    is_single_stream,
    mp3_frames,
)
from mmstream.decoding.audio.libsndfile import open_sound_file
from mmstream.decoding.audio.limits import check_rate
from mmstream.decoding.audio.wav import open_wav
from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.errors import DecodeError
from mmstream.media_types import EncodedMedia, container_format, read_range

_VORBIS = b"\x01vorbis"
_HEAD_BYTES = 512
_UNKNOWN_LENGTH = (1 << 63) - 1
"""What libsndfile returns where a header states less than nothing."""


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
def open_audio(
    data: EncodedMedia, deadline: Deadline, frames: Mp3Frames | None = None
) -> Iterator[AudioSource]:
    """Open an audio file, or the audio track of a video, for the body of a with statement.

    Args:
        data: The file.
        deadline: When the time of the sample is over.
        frames: Of an MP3, if they were looked for already.

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
    with _opened(data, name, deadline, frames) as source:
        check_rate(source.sample_rate)
        yield source


def _opened(
    data: EncodedMedia, name: str | None, deadline: Deadline, frames: Mp3Frames | None
) -> AbstractContextManager[AudioSource]:
    """Open a file of this format by the library that reads it fastest."""
    wav = open_wav(data) if name == "wav" else None
    if wav is not None:
        return nullcontext(wav)
    if name == "mp3":
        return _open_mp3(data, deadline, frames or mp3_frames(data, deadline))
    if name is not None and _is_for_libsndfile(data, name):
        return open_sound_file(data, name, deadline)
    return open_container(data, deadline)


@contextmanager
def _open_mp3(
    data: EncodedMedia, deadline: Deadline, frames: Mp3Frames | None
) -> Iterator[AudioSource]:
    """Open an MP3 by libsndfile, unless it would take the file for shorter than it is."""
    exact = None
    if frames is not None:
        data, num_samples = frames.data, frames.num_samples
        exact = None if frames.is_tagged else num_samples
        with open_sound_file(data, "mp3", deadline) as file:
            if frames.is_stated:  # less what the encoder has put before and behind the samples
                num_samples = min(num_samples, file.num_samples)
            if num_samples <= file.num_samples < _UNKNOWN_LENGTH:
                yield replace(file, num_samples=num_samples)
                return
    with open_container(data, deadline, exact) as source:
        yield source


def _is_for_libsndfile(data: EncodedMedia, name: str) -> bool:
    if name == "ogg":
        return _is_plain_vorbis(data)
    if name == "flac":
        return flac_tells_length(data)
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
