"""Opus, AAC and all other audio in containers, decoded by FFmpeg (PyAV).

Place in the flow: `source.py` opens here what `wav.py` and `libsndfile.py` leave, such as the audio
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

from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.open import is_cover, media_stream, open_media
from mmstream.decoding.ffmpeg.source import EncodedMedia
from mmstream.errors import DecodeError

__all__ = ["ContainerSource", "open_container"]

_NEAR_S = 0.1
"""Seconds by which the sizes of packets and the duration in a header may differ."""
_BLOCK_SAMPLES = 1 << 15
_SCALES = {"s16": 2.0**-15, "s32": 2.0**-31, "u8": 2.0**-7}


class ContainerSource:
    """The audio track of a container; see `source.AudioSource`.

    Args:
        data: The file.
        deadline: When the time of the sample is over.
        container: The file, opened.
    """

    def __init__(self, data: EncodedMedia, deadline: Deadline, container: Any) -> None:
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
        self._stated_samples = _stated_samples(container, stream, packets, first)
        self._unread: Iterator[Any] | None = chain((first,), frames)

    @cached_property
    def num_samples(self) -> int:
        """Number of samples per channel. Where no header tells, all are decoded to count them."""
        if self._stated_samples is not None:
            return self._stated_samples
        return sum(frame.samples for frame in self._frames())

    def blocks(self, start: int, stop: int) -> Iterator[NDArray[np.float32]]:
        """Yield the samples from `start` to before `stop`; see `source.AudioSource`."""
        position = num_waiting = 0
        waiting = []
        for frame in self._frames():
            first, last = max(0, start - position), min(frame.samples, stop - position)
            if first < last:
                waiting.append(_floats(frame)[first:last])
                num_waiting += last - first
            position += frame.samples
            if position >= stop:
                break
            if num_waiting >= _BLOCK_SAMPLES:
                yield np.concatenate(waiting)
                waiting, num_waiting = [], 0
        if waiting:
            yield np.concatenate(waiting)

    def _frames(self) -> Iterator[Any]:
        """Yield all frames. The first time those of the opened file, then those of a new one."""
        frames, self._unread = self._unread, None
        if frames is not None:
            yield from map(self._checked, frames)
            return
        with open_media(self._data, self._deadline) as container:
            stream = media_stream(container, "audio")
            yield from map(self._checked, _decoded(container, stream, self._deadline, []))

    def _checked(self, frame: Any) -> Any:
        rate, num_channels = frame.sample_rate, frame.layout.nb_channels
        if rate == self.sample_rate and num_channels == self.num_channels:
            return frame
        raise DecodeError(
            f"its audio changes from {self.sample_rate} Hz and {self.num_channels} channels to "
            f"{rate} Hz and {num_channels}"
        )


@contextmanager
def open_container(data: EncodedMedia, deadline: Deadline) -> Iterator[ContainerSource]:
    """Read the header and the first frame of an audio track, for the body of a with statement.

    Raises:
        DecodeError: FFmpeg cannot read it, here or in the body, or it has no audio.
        TimeoutError: The time of the sample is over.
    """
    with open_media(data, deadline) as container:
        yield ContainerSource(data, deadline, container)


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
    videos = [stream for stream in container.streams.video if not is_cover(stream)]
    if not videos or videos[0].start_time is None or frame.pts is None:
        return 0.0
    return float(frame.pts * frame.time_base - videos[0].start_time * videos[0].time_base)


def _stated_samples(container: Any, stream: Any, packets: list[Any], frame: Any) -> int | None:
    """Return the number of samples that the header tells, None where it does not tell exactly.

    The first frame lacks what was dropped before it. In an mp4 all packets of AAC have as many
    samples as each other, such as 1,024. If the second of 205 packets gave the first frame, and it
    has 1,024 samples, then 1,024 were dropped: 205 x 1,024 - 1,024 are left. In ogg the last page
    says where the audio ends.
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
        num_read = round(sum(packet.duration or 0 for packet in packets) * stream.time_base * rate)
        return int(round(seconds * rate) - (num_read - frame.samples))
    return None


def _floats(frame: Any) -> NDArray[np.float32]:
    """Return the samples of a frame, float32 [T, num_channels]."""
    samples: NDArray[Any] = frame.to_ndarray()
    num_channels = frame.layout.nb_channels
    samples = samples.T if frame.format.is_planar else samples.reshape(-1, num_channels)
    floats = samples.astype(np.float32, copy=False)
    if samples.dtype.kind == "f":
        return floats
    name = frame.format.name.removesuffix("p")
    if name not in _SCALES:
        raise DecodeError(f"its audio has samples of type {name}: convert it to s16")
    return (floats - 128 if name == "u8" else floats) * np.float32(_SCALES[name])
