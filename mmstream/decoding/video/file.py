"""A video file: what is known of it before decoding, and the pictures of chosen packets."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from av.stream import Discard
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.mp4_tables import UPRIGHT, Turn, turn_of
from mmstream.decoding.ffmpeg.open import media_stream, open_media
from mmstream.decoding.image.geometry import Shape
from mmstream.decoding.video.frames import (
    DamagedError,
    DemuxedPackets,
    PacketReader,
    UnseekableError,
    decoded_frames,
)
from mmstream.decoding.video.mp4 import Mp4Table, TablePackets, mp4_tables
from mmstream.decoding.video.timeline import Timeline, demuxed_timeline
from mmstream.errors import DecodeError
from mmstream.media_types import EncodedMedia, container_format

MAX_PACKETS = 1 << 22
"""Most packets of a video: 19 hours at 60 frames per second."""

_SEEKABLE = ("matroska", "mov", "avi", "flv", "mpegts")
"""Formats in which packets have the same times after a seek. In others FFmpeg counts some anew."""
_SOUGHT_BY_POSITION = "mpegts"
"""It has no index: FFmpeg would look for a time by reading here and there."""

Pixels = NDArray[np.uint8]


class VideoFile(NamedTuple):
    """What is known of a video before it is decoded."""

    timeline: Timeline
    """The times of all frames, and their packets."""
    stored: Shape
    """(height, width) of the frames as they are stored."""
    turn: Turn
    """How frames are turned to be shown."""
    fps: float
    """Frames per second, on average."""
    table: Mp4Table | None = None
    """Where the packets lie in an MP4. None: FFmpeg reads them."""
    codec: str = ""
    """FFmpeg's name of its decoder, such as "h264" or "libdav1d"."""

    @property
    def picture(self) -> Shape:
        """(height, width) of the frames as they are shown."""
        return self.stored if self.turn.rotation % 180 == 0 else self.stored[::-1]

    @contextmanager
    def opened(
        self, data: EncodedMedia, deadline: Deadline, may_seek: bool
    ) -> Iterator[tuple[PacketReader, Any]]:
        """Open the file to read packets, for the body of a with statement.

        Args:
            data: The file.
            deadline: When to stop.
            may_seek: Whether FFmpeg may jump. If not, it reads from the start.

        Yields:
            What reads packets, and PyAV's stream.

        Raises:
            DecodeError: FFmpeg cannot read it, here or in the body.
            TimeoutError: It takes too long.
        """
        max_pixels = self.stored[0] * self.stored[1]
        table = self.table
        with open_media(data, deadline, max_pixels, header_only=table is not None) as container:
            stream = media_stream(container, "video")
            if table is not None:
                yield TablePackets(data, table), stream
                return
            discard_others(container, stream)
            may_seek = may_seek and container.format.name.split(",")[0] in _SEEKABLE
            yield DemuxedPackets(container, stream, self.timeline, may_seek), stream

    def pictures(
        self, data: EncodedMedia, packets: Sequence[int], deadline: Deadline, max_decoded: int
    ) -> Iterator[tuple[int, Pixels]]:
        """Decode the frames of chosen packets.

        Where a frame does not come out, all frames before it are decoded too, from the start.

        Args:
            data: The file.
            packets: Their numbers, each once.
            deadline: When to stop.
            max_decoded: From the start no more packets than these are decoded.

        Yields:
            (packet, uint8 [H, W, 3]), upright, in RGB. The memory is used again for the next one.

        Raises:
            DecodeError: A frame is damaged, lost, or of another size.
            TimeoutError: It takes too long.
        """
        left = set(packets)
        may_seek = may_jump = True
        while left:
            try:
                for packet, frame in self._frames(data, left, deadline, may_seek, may_jump):
                    yield packet, frame
                    left.discard(packet)
            except UnseekableError:
                if not may_seek:
                    raise DecodeError("its packets are others when they are read again") from None
                may_seek = False
            except DamagedError:
                if not may_jump or max(left) >= max_decoded:
                    raise
                may_seek = may_jump = False  # what is called a key may need what is before it

    def _frames(
        self,
        data: EncodedMedia,
        packets: Collection[int],
        deadline: Deadline,
        may_seek: bool,
        may_jump: bool,
    ) -> Iterator[tuple[int, Pixels]]:
        to_rgb = VideoReformatter()
        with self.opened(data, deadline, may_seek) as (reader, stream):
            for packet, frame in decoded_frames(
                reader, stream.codec_context, self.timeline, sorted(packets), deadline, may_jump
            ):
                if (frame.height, frame.width) != self.stored:
                    height, width = self.stored
                    raise DecodeError(
                        f"a frame of {frame.width}x{frame.height} in a video of {width}x{height}"
                    )
                yield packet, self._upright(to_rgb.reformat(frame, format="rgb24", threads=1))

    def _upright(self, frame: Any) -> Pixels:
        """Return the pixels of an RGB frame, turned as the file says."""
        height, width = self.stored
        plane = frame.planes[0]
        lines = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
        pixels = lines[:height, : 3 * width].reshape(height, width, 3)
        if self.turn == UPRIGHT:
            return pixels
        if self.turn.is_flipped:
            pixels = pixels[::-1]
        return np.ascontiguousarray(np.rot90(pixels, -self.turn.rotation // 90))  # torch needs it


def read_video_file(data: EncodedMedia, deadline: Deadline, max_pixels: int) -> VideoFile:
    """Read what is known of a video before it is decoded.

    Raises:
        DecodeError: It is no video, or its frames are larger than the limit.
        TimeoutError: It takes too long.
    """
    tables = mp4_tables(data) if container_format(data) == "mov" else {}
    with open_media(data, deadline, max_pixels, header_only=bool(tables)) as container:
        stream = media_stream(container, "video")
        stored = (stream.codec_context.height, stream.codec_context.width)
        if min(stored) < 1 or stored[0] * stored[1] > max_pixels:
            raise DecodeError(f"frames of {stored[1]}x{stored[0]} exceed max_pixels={max_pixels}")
        table = tables.get(stream.id)
        codec: str = stream.codec_context.name
        if table is not None:
            fps = _fps(stream, table.timeline)
            return VideoFile(table.timeline, stored, table.turn, fps, table, codec)
        discard_others(container, stream)
        packets = _Packets(container, stream)
        name = container.format.name
        has_pts, has_position = name != "avi", name == _SOUGHT_BY_POSITION
        timeline = demuxed_timeline(packets, stream, deadline, MAX_PACKETS, has_pts, has_position)
        fps = _fps(stream, timeline)
        return VideoFile(timeline, stored, packets.turn(), fps, None, codec)


def discard_others(container: Any, stream: Any) -> None:
    """Leave the packets of other streams out."""
    for other in container.streams:
        if other.index != stream.index:
            other.discard = Discard.all


def _fps(stream: Any, timeline: Timeline) -> float:
    """Return the average rate that the file states, unless its frames contradict."""
    counted = timeline.num_frames / timeline.duration_s if timeline.duration_s > 0 else 1.0
    stated = float(stream.average_rate) if stream.average_rate else 0.0
    return stated if 0.98 < stated / counted < 1.02 else counted


class _Packets:
    """All packets of a stream. The first key frame tells the turn, which no header does."""

    def __init__(self, container: Any, stream: Any) -> None:
        self._container, self._stream = container, stream
        self._first: Any = None

    def __iter__(self) -> Iterator[Any]:
        for packet in self._container.demux(self._stream):
            if self._first is None and packet.is_keyframe:
                self._first = packet
            yield packet

    def turn(self) -> Turn:
        """Return how the first key frame is turned to be shown."""
        context = self._stream.codec_context
        frames = [*context.decode(self._first), *context.decode(None)] if self._first else []
        matrix = frames[0].side_data.get("DISPLAYMATRIX") if frames else None
        return UPRIGHT if matrix is None else turn_of(np.frombuffer(matrix, np.int32).tolist())
