"""An audio file of any format, as samples in float32 that can be read from any position.

Place in the flow: the decoder of audio opens a file with `open_audio`, knows its length, and reads
a span. So does the converter, for what is noted about a file:

    wav with plain numbers               -> `WavSource`        reads the bytes of the span
    flac, mp3, ogg (vorbis), other wav   -> `SoundFileSource`  1.3 to 2 times as fast as FFmpeg
    opus, m4a, mp4, mkv, webm, all other -> `ContainerSource`  FFmpeg
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import numpy as np
import soundfile
from numpy.typing import NDArray

from mmstream.errors import DecodeError
from mmstream.media.audio_headers import (
    TOLERANCE_S,
    Mp3Frames,
    check_last_page,
    check_rate,
    is_single_stream,
    mp3_frames,
    num_opus_samples,
    refuse_short,
    states_length,
)
from mmstream.media.ffmpeg import MediaSource, NoStreamError, media_stream, open_media
from mmstream.media.limits import Deadline
from mmstream.media.types import EncodedMedia, container_format

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
            stop: The sample after the last.
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
            if frames.is_stated:  # less what the encoder has put before and after the samples
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
        return states_length(data)
    return name in ("wav", "aiff")


def _is_plain_vorbis(data: EncodedMedia) -> bool:
    """Tell whether libsndfile gives all samples of an Ogg, in the order of channels of a WAV.

    It knows the first of several streams only, and leaves the channels in the order of Vorbis. The
    number of channels stands after the name and a version of 4 bytes.
    """
    head = data[:_HEAD_BYTES]
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
    """A file that libsndfile has opened; see `AudioSource`."""

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
        """Yield the samples from `start` to before `stop`; see `AudioSource`."""
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
    """Numbers in a file; see `AudioSource`."""

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
        """Yield the samples from `start` to before `stop`; see `AudioSource`."""
        frame_bytes = self.num_channels * self.sample_bytes
        step = max(1, _BLOCK_VALUES // self.num_channels)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            position = self.position + first * frame_bytes
            raw = self.data[position : position + (last - first) * frame_bytes]
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
    position = 12
    for _ in range(_MAX_CHUNKS):
        head = data[position : position + 48]
        if len(head) < 8:
            return None
        name, size = head[:4], int.from_bytes(head[4:8], "little")
        if name == b"ds64":  # of a file beyond 4 GiB, which libsndfile reads
            return None
        if name == b"fmt " and size >= 16 and len(head) >= 24:
            codec, num_channels, sample_rate, _, frame_bytes, sample_bits = struct.unpack_from(
                "<HHIIHH", head, 8
            )
            if codec == _EXTENSIBLE and size >= 26 and len(head) >= 34:
                codec = int.from_bytes(head[32:34], "little")
        if name == b"data":
            sample_bytes = sample_bits // 8
            sample_widths = {_PCM: (1, 2, 3, 4), _FLOAT: (4, 8)}.get(codec, ())
            is_plain = sample_bits % 8 == 0 and sample_bytes in sample_widths and sample_rate > 0
            if not is_plain or not num_channels or frame_bytes != num_channels * sample_bytes:
                return None
            tolerated = int(TOLERANCE_S * sample_rate) * frame_bytes
            num_bytes = _data_bytes(size, len(data) - position - 8, tolerated)
            num_samples = num_bytes // frame_bytes
            return WavSource(
                *(data, sample_rate, num_channels, num_samples, codec, sample_bytes, position + 8)
            )
        position += 8 + size + size % 2
    return None


def _data_bytes(size: int, num_present: int, tolerated: int) -> int:
    """Return how many bytes the samples have.

    Raises:
        DecodeError: The file ends before them.
    """
    if size >= _UNKNOWN_SIZE and size > num_present:
        return num_present
    if size > num_present + tolerated:
        raise DecodeError(f"truncated wav: {size - num_present:,} bytes of its samples are missing")
    return min(size, num_present)


# -- Opus, AAC and all other audio in containers, by FFmpeg ----------------------------------------
#
# It is what plain numbers and libsndfile leave, such as the audio track of a video. FFmpeg drops
# the samples that an encoder puts before the first (priming).
#
# Every span is decoded from the start of the file, and its samples are counted. The state of these
# decoders depends on all that they have decoded: after a seek, AAC fills noise bands with other
# noise, and Opus needs half a second to be near. Time stamps of Matroska are rounded to 1 ms.

_NEAR_S = 0.2
"""Seconds by which what a header says and what there is may differ."""
_MIN_BLOCK = 1 << 15
_PACKED_TYPES = {
    "flt": (np.float32, 0, 1.0),
    "dbl": (np.float64, 0, 1.0),
    "u8": (np.uint8, 128, 2.0**-7),
    "s16": (np.int16, 0, 2.0**-15),
    "s32": (np.int32, 0, 2.0**-31),
}
_TYPES = {**_PACKED_TYPES, **{f"{name}p": type_ for name, type_ in _PACKED_TYPES.items()}}
"""FFmpeg's name of a type of sample -> the type, the number of silence, the size of a step."""


class ContainerSource:
    """The audio track of a container; see `AudioSource`.

    Args:
        data: The file.
        deadline: When the time of the sample is over.
        container: The file, opened.
        num_samples: Its samples per channel, where they are known.
    """

    def __init__(
        self,
        data: EncodedMedia,
        deadline: Deadline,
        container: Any,
        num_samples: int | None = None,
    ) -> None:
        self._data, self._deadline = data, deadline
        stream = media_stream(container, "audio")
        packets: list[Any] = []
        frames = _decoded(container, stream, deadline, packets)
        first = next(frames, None)
        if first is None:
            raise DecodeError("has no samples in its audio")
        self.sample_rate = int(first.sample_rate)
        self.num_channels = int(first.layout.nb_channels)
        self.start_s = _start_s(container, first)
        self._tick_s = float(first.time_base)  # fractions take a tenth of the time of AAC
        self._num_priming = _num_priming(stream, packets, first)
        self._stated_samples = num_samples or _stated_samples(
            data, container, stream, packets, first
        )
        self._stated_s = _stated_s(container, stream)
        self._unread: Iterator[Any] | None = chain((first,), frames)

    @cached_property
    def num_samples(self) -> int:
        """Number of samples per channel. Where no header tells, all are decoded to count them."""
        if self._stated_samples is not None:
            return self._stated_samples
        num_samples = int(sum(frame.samples for frame in self._frames())) - self._num_priming
        if self._stated_s is not None:
            refuse_short(self._stated_s, num_samples / self.sample_rate, _NEAR_S)
        return num_samples

    def blocks(
        self, start: int, stop: int, out: NDArray[np.float32] | None = None
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the samples from `start` to before `stop`; see `AudioSource`."""
        position, num_filled = -self._num_priming, 0
        block = np.empty((self.num_channels, _MIN_BLOCK), np.float32) if out is None else out.T
        for frame in self._frames():
            first, last = max(0, start - position), min(frame.samples, stop - position)
            position += frame.samples
            if first < last:
                if num_filled + last - first > block.shape[1]:
                    yield block[:, :num_filled].T
                    block = np.empty((self.num_channels, max(_MIN_BLOCK, last)), np.float32)
                    num_filled = 0
                end = num_filled + last - first
                _write_floats(frame, slice(first, last), block[:, num_filled:end])
                num_filled = end
            if position >= stop:
                break
        if num_filled:
            yield block[:, :num_filled].T

    def _frames(self) -> Iterator[Any]:
        """Yield all frames. The first time those of the opened file, then those of a new one."""
        frames, self._unread = self._unread, None
        if frames is not None:
            yield from self._checked(frames)
            return
        with open_media(self._data, self._deadline) as container:
            stream = media_stream(container, "audio")
            yield from self._checked(_decoded(container, stream, self._deadline, []))

    def _checked(self, frames: Iterator[Any]) -> Iterator[Any]:
        """Yield frames that go on from each other: their times, their rate and their channels."""
        end_s, tick_s = float("inf"), self._tick_s
        for frame in frames:
            rate, num_channels = frame.sample_rate, frame.layout.nb_channels
            if rate != self.sample_rate or num_channels != self.num_channels:
                raise DecodeError(
                    f"its audio changes from {self.sample_rate} Hz and {self.num_channels} "
                    f"channels to {rate} Hz and {num_channels}"
                )
            if frame.pts is not None:
                start_s = frame.pts * tick_s
                if start_s - end_s > _NEAR_S:
                    raise DecodeError(
                        f"its audio has a gap of {start_s - end_s:.2f} s at {end_s:.2f} s"
                    )
                end_s = start_s + frame.samples / rate
            yield frame


@contextmanager
def open_container(
    data: EncodedMedia, deadline: Deadline, num_samples: int | None = None
) -> Iterator[ContainerSource]:
    """Read the header and the first frame of an audio track, for the body of a with statement.

    Args:
        data: The file.
        deadline: When the time of the sample is over.
        num_samples: Its samples per channel, where they are known.

    Raises:
        DecodeError: FFmpeg cannot read it, here or in the body, or it has no audio.
        TimeoutError: The time of the sample is over.
    """
    with open_media(data, deadline) as container:
        yield ContainerSource(data, deadline, container, num_samples)


def _decoded(
    container: Any, stream: Any, deadline: Deadline, first_packets: list[Any]
) -> Iterator[Any]:
    """Yield the decoded frames of a stream. Damage is an error, and is not concealed.

    Args:
        container: The file.
        stream: Its audio.
        deadline: When the time of the sample is over.
        first_packets: Gets the packets that the first frame needs.
    """
    stream.codec_context.options = {"err_detect": "explode"}
    num_frames = 0
    for packet in container.demux(stream):
        deadline.check()
        if not num_frames:
            first_packets.append(packet)
        for frame in packet.decode():
            num_frames += 1
            yield frame


def _start_s(container: Any, frame: Any) -> float:
    """Return when the first sample is heard, in seconds after the video's first frame."""
    try:
        video = media_stream(container, "video")
    except NoStreamError:
        return 0.0
    if video.start_time is None or frame.pts is None:
        return 0.0
    return float(frame.pts * frame.time_base - video.start_time * video.time_base)


def _num_priming(stream: Any, packets: list[Any], frame: Any) -> int:
    """Return how many samples FFmpeg leaves that an Opus encoder has put before the recording.

    FFmpeg goes by the delay that a Matroska states. For speech at 16 kHz, FFmpeg 5 wrote a third of
    it there. The head of the Opus has the right number.
    """
    head = bytes(stream.codec_context.extradata or b"")
    if not head.startswith(b"OpusHead"):
        return 0
    num_stated = int.from_bytes(head[10:12], "little")
    num_read = round(sum(packet.duration or 0 for packet in packets) * stream.time_base * 48_000)
    num_left = num_stated - (num_read - frame.samples)
    # The durations of packets are rounded to a millisecond.
    return num_left if 48 < num_left < frame.samples else 0


def _stated_s(container: Any, stream: Any) -> float | None:
    """Return how long the header says the audio is. None where it speaks of the video as well.

    Of plain MP3 and AAC, FFmpeg takes all frames for as large as the first ones.
    """
    name = container.format.name.split(",")[0]
    if name in ("mp3", "aac"):
        return None
    if stream.duration:
        return float(stream.duration * stream.time_base)
    if container.duration and len(container.streams) == 1:
        # Matroska states the end. Its first sample may come late.
        start = container.start_time or 0 if name == "matroska" else 0
        return float((container.duration - max(0, start)) / 1_000_000)
    return None


def _stated_samples(
    data: EncodedMedia, container: Any, stream: Any, packets: list[Any], frame: Any
) -> int | None:
    """Return the number of samples that the header tells, None where it does not tell exactly.

    The first frame lacks what was dropped before it. In an mp4 all packets of AAC have as many
    samples as each other, such as 1,024. If the second of 205 packets gave the first frame, and it
    has 1,024 samples, then 1,024 were dropped: 205 x 1,024 - 1,024 are left.
    """
    rate = frame.sample_rate
    seconds = float(stream.duration * stream.time_base) if stream.duration else None
    name = container.format.name.split(",")[0]
    frame_size = stream.codec_context.frame_size
    if name == "mov" and frame_size and seconds:
        num_dropped = len(packets) * frame_size - frame.samples
        num_samples = len(stream.index_entries) * frame_size - num_dropped
        if abs(num_samples / rate - seconds) < _NEAR_S:  # else the packets are in fragments
            return int(num_samples)
    if name == "ogg" and stream.codec_context.name in ("opus", "libopus") and seconds:
        if stream.start_time:
            return None  # cut from another file, with more samples than its last page says
        num_opus = num_opus_samples(data)
        if num_opus is not None and abs(num_opus / rate - seconds) < _NEAR_S:
            return num_opus
    return None


def _write_floats(frame: Any, span: slice, out: NDArray[np.float32]) -> None:
    """Write samples of a frame into float32 [num_channels, T]."""
    name = frame.format.name
    if name not in _TYPES:
        raise DecodeError(f"its audio has samples of type {name}: convert it to s16")
    dtype, offset, scale = _TYPES[name]
    num_channels, planes = len(out), frame.planes
    if frame.format.is_planar:
        # PyAV 18 lists a ninth plane of eight channels, which is not memory of the frame.
        for channel, plane in zip(out, planes[:num_channels], strict=True):
            channel[:] = np.frombuffer(plane, dtype, frame.samples)[span]
    else:
        values = np.frombuffer(planes[0], dtype, frame.samples * num_channels)
        out[:] = values.reshape(-1, num_channels)[span].T
    if scale != 1:
        out -= offset
        out *= np.float32(scale)
