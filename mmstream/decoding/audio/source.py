"""An audio file of any format, as samples in float32 that can be read from any position.

Place in the flow: `decoder.py` opens a file with `open_audio`, knows its length, and reads a span:

    wav with plain numbers               -> `WavSource`        reads the bytes of the span
    flac, mp3, ogg (vorbis), other wav   -> `SoundFileSource`  1.3 to 2 times as fast as FFmpeg
    opus, m4a, mp4, mkv, webm, all other -> `container.py`     FFmpeg
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import soundfile
from numpy.typing import NDArray

from mmstream.decoding.audio.container import open_container
from mmstream.decoding.audio.headers import (
    Mp3Frames,
    check_last_page,
    flac_tells_length,
    is_single_stream,
    mp3_frames,
)
from mmstream.decoding.audio.limits import TOLERANCE_S, check_rate
from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.open import MediaSource
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


# -- flac, mp3 and Ogg Vorbis, by libsndfile -------------------------------------------------------
#
# A span of an MP3 or an Ogg is reached by decoding up to it (0.2 to 0.4 ms a second). In MP3 a
# frame takes bits from frames before it, so a seek would change the first samples. In a damaged Ogg
# a seek of libsndfile 1.2.2 crashes the process.
#
# mpg123 reads a few bytes at a time, so a file in memory is a `BytesIO`, which is fast. The
# deadline is asked between blocks. A file that is read by ranges goes through `MediaSource`.

_BLOCK_SAMPLES = 1 << 16
_SHOWN_REASON = 160


class _Stream(soundfile.SoundFile):  # type: ignore[misc]
    """A file whose reads do not seek. Those of its base class seek to where they ended."""

    def seekable(self) -> bool:
        return False


@dataclass(frozen=True)
class SoundFileSource:
    """A file that libsndfile has opened; see `source.AudioSource`."""

    file: Any
    check: Callable[[], None]
    """Raises what ended the reading, such as the deadline."""
    is_sought: bool
    """Whether a span is reached by a seek."""
    sample_rate: int
    num_channels: int
    num_samples: int
    start_s: float = 0.0

    def blocks(
        self, start: int, stop: int, out: NDArray[np.float32] | None = None
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the samples from `start` to before `stop`; see `source.AudioSource`."""
        position = self.file.seek(start) if self.is_sought and start else 0
        while position < stop:
            end = stop if position >= start else start
            last = min(end, position + _BLOCK_SAMPLES)
            memory = None
            if out is not None and position >= start:
                memory = out[position - start : last - start]
            block = self.file.read(last - position, "float32", always_2d=True, out=memory)
            self.check()
            if not len(block):
                return
            position += len(block)
            if position > start:
                yield block


@contextmanager
def open_sound_file(data: EncodedMedia, name: str, deadline: Deadline) -> Iterator[SoundFileSource]:
    """Open a file with libsndfile for the body of a with statement.

    Args:
        data: The file.
        name: Its format, by FFmpeg's name.
        deadline: When the time of the sample is over.

    Raises:
        DecodeError: libsndfile cannot read it, here or in the body.
        TimeoutError: The time of the sample is over.
    """
    source = io.BytesIO(data) if isinstance(data, bytes) else MediaSource(data, deadline)
    check = source.check if isinstance(source, MediaSource) else deadline.check
    try:
        with _Stream(source) as file:
            yield SoundFileSource(
                file=file,
                check=check,
                is_sought=name not in ("mp3", "ogg"),
                sample_rate=file.samplerate,
                num_channels=file.channels,
                num_samples=file.frames,
            )
    except soundfile.LibsndfileError as error:
        check()
        raise DecodeError(f"damaged {name}: {_reason(error)}") from None
    except BaseException:
        check()
        raise


def _reason(error: soundfile.LibsndfileError) -> str:
    text = str(error.error_string).removeprefix("Error : ")
    if "does not exist" in text:  # what libsndfile says where mpg123 cannot read the first frame
        return "no frame in it can be decoded"
    return text[:_SHOWN_REASON]


# -- plain numbers of a wav, where they stand ------------------------------------------------------

_PCM = 1
_FLOAT = 3
_EXTENSIBLE = 0xFFFE
_MAX_CHUNKS = 1000
"""Most chunks of a file that are looked at."""
_UNKNOWN_SIZE = 0x7FFF_0000
"""A pipe does not know its size when it writes the header: programs write such a number or more."""
_BLOCK_VALUES = 1 << 18


@dataclass(frozen=True)
class WavSource:
    """Numbers in a file; see `source.AudioSource`."""

    data: EncodedMedia
    sample_rate: int
    num_channels: int
    num_samples: int
    codec: int
    """1: integers. 3: floating point."""
    sample_bytes: int
    """Bytes of one number."""
    position: int
    """Where in the file the first number stands."""
    start_s: float = 0.0

    def blocks(
        self, start: int, stop: int, out: NDArray[np.float32] | None = None
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the samples from `start` to before `stop`; see `source.AudioSource`."""
        frame_bytes = self.num_channels * self.sample_bytes
        step = max(1, _BLOCK_VALUES // self.num_channels)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            raw = read_range(
                self.data, self.position + first * frame_bytes, self.position + last * frame_bytes
            )
            num_read = len(raw) // frame_bytes
            if out is None:
                block = np.empty((num_read, self.num_channels), np.float32)
            else:
                block = out[first - start : first - start + num_read]
            self._write_floats(raw[: num_read * frame_bytes], block.reshape(-1))
            yield block

    def _write_floats(self, raw: bytes, out: NDArray[np.float32]) -> None:
        """Write the numbers as float32; integers are scaled to -1 to 1."""
        scale = 2.0 ** (1 - 8 * self.sample_bytes)
        if self.codec == _FLOAT:
            out[:] = np.frombuffer(raw, f"<f{self.sample_bytes}")
        elif self.sample_bytes == 1:  # the only integers without a sign
            np.subtract(np.frombuffer(raw, np.uint8), 128.0, out=out, dtype=np.float32)
            out *= np.float32(scale)
        elif self.sample_bytes == 3:
            wide = np.zeros((len(raw) // 3, 4), np.uint8)
            wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
            np.multiply(wide.view("<i4")[:, 0], scale / 256, out=out, dtype=np.float32)
        else:
            integers = np.frombuffer(raw, f"<i{self.sample_bytes}")
            np.multiply(integers, scale, out=out, dtype=np.float32)


def open_wav(data: EncodedMedia) -> WavSource | None:
    """Read the header of a WAV.

    Returns:
        The file. None where its samples are compressed, or the header is odd.

    Raises:
        DecodeError: More than 0.1 s of samples that the header promises are missing.
    """
    codec = sample_rate = num_channels = frame_bytes = sample_bits = 0
    long_size: int | None = None  # of a file beyond 4 GiB, whose header is RF64
    position = 12
    for _ in range(_MAX_CHUNKS):
        head = read_range(data, position, position + 48)
        if len(head) < 8:
            return None
        name, size = head[:4], int.from_bytes(head[4:8], "little")
        if name == b"ds64" and len(head) >= 24:
            long_size = int.from_bytes(head[16:24], "little")
        if name == b"fmt " and size >= 16 and len(head) >= 24:
            codec, num_channels, sample_rate, _, frame_bytes, sample_bits = struct.unpack_from(
                "<HHIIHH", head, 8
            )
            if codec == _EXTENSIBLE and size >= 26 and len(head) >= 34:
                codec = int.from_bytes(head[32:34], "little")
        if name == b"data":
            sample_bytes = sample_bits // 8
            known = {_PCM: (1, 2, 3, 4), _FLOAT: (4, 8)}.get(codec, ())
            is_plain = sample_bits % 8 == 0 and sample_bytes in known and sample_rate > 0
            if not is_plain or not num_channels or frame_bytes != num_channels * sample_bytes:
                return None
            tolerated = int(TOLERANCE_S * sample_rate) * frame_bytes
            num_bytes = _data_bytes(size, long_size, len(data) - position - 8, tolerated)
            num_samples = num_bytes // frame_bytes
            return WavSource(
                *(data, sample_rate, num_channels, num_samples, codec, sample_bytes, position + 8)
            )
        position += 8 + size + size % 2
    return None


def _data_bytes(size: int, long_size: int | None, num_present: int, tolerated: int) -> int:
    """Return how many bytes the samples have.

    Raises:
        DecodeError: The file ends before them.
    """
    if size == 0xFFFF_FFFF and long_size is not None:
        size = long_size
    elif size >= _UNKNOWN_SIZE and size > num_present:
        return num_present
    if size > num_present + tolerated:
        raise DecodeError(f"truncated wav: {size - num_present:,} bytes of its samples are missing")
    return min(size, num_present)
