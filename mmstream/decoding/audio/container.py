"""Opus, AAC and all other audio in containers, decoded by FFmpeg (PyAV).

Place in the flow: `source.py` opens here what plain numbers and libsndfile leave, such as the audio
track of a video. FFmpeg drops the samples that an encoder puts before the first (priming).

Every span is decoded from the start of the file, and its samples are counted. The state of these
decoders depends on all that they have decoded: after a seek, AAC fills noise bands with other
noise, and Opus needs half a second to be near. Time stamps of Matroska are rounded to 1 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.audio.headers import num_opus_samples
from mmstream.decoding.audio.limits import refuse_short
from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.open import NoStreamError, media_stream, open_media
from mmstream.errors import DecodeError
from mmstream.media_types import EncodedMedia

_NEAR_S = 0.2
"""Seconds by which what a header says and what there is may differ."""
_BLOCK_SAMPLES = 1 << 15
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
    """The audio track of a container; see `source.AudioSource`.

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
        """Yield the samples from `start` to before `stop`; see `source.AudioSource`."""
        position, num_filled = -self._num_priming, 0
        block = np.empty((self.num_channels, _BLOCK_SAMPLES), np.float32) if out is None else out.T
        for frame in self._frames():
            first, last = max(0, start - position), min(frame.samples, stop - position)
            position += frame.samples
            if first < last:
                if num_filled + last - first > block.shape[1]:
                    yield block[:, :num_filled].T
                    block = np.empty((self.num_channels, max(_BLOCK_SAMPLES, last)), np.float32)
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
        # PyAV 18 lists a ninth plane of eight channels, which is no memory of the frame.
        for channel, plane in zip(out, planes[:num_channels], strict=True):
            channel[:] = np.frombuffer(plane, dtype, frame.samples)[span]
    else:
        values = np.frombuffer(planes[0], dtype, frame.samples * num_channels)
        out[:] = values.reshape(-1, num_channels)[span].T
    if scale != 1:
        out -= offset
        out *= np.float32(scale)
