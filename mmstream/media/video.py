"""What is known of a video before it is decoded: times, size and turn of its frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from av.stream import Discard

from mmstream.errors import DecodeError
from mmstream.media.deadline import Deadline
from mmstream.media.ffmpeg import media_stream, open_media
from mmstream.media.mp4 import UPRIGHT, Mp4Table, Turn, turn_of, video_tables
from mmstream.media.timeline import Timeline, demuxed_timeline
from mmstream.media.types import EncodedMedia

MAX_PACKETS = 1 << 22
"""Most packets of a video: 19 hours at 60 frames per second."""

_SOUGHT_BY_POSITION = "mpegts"
"""It has no index: FFmpeg would look for a time by reading here and there."""


class VideoFile(NamedTuple):
    """What is known of a video before it is decoded."""

    timeline: Timeline
    """The times of all frames, and their packets."""
    stored: tuple[int, int]
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
    def picture(self) -> tuple[int, int]:
        """(height, width) of the frames as they are shown."""
        return self.stored if self.turn.rotation % 180 == 0 else self.stored[::-1]


def read_video_file(data: EncodedMedia, deadline: Deadline, max_pixels: int) -> VideoFile:
    """Read what is known of a video before it is decoded.

    Raises:
        DecodeError: It is no video, or its frames are larger than the limit.
        TimeoutError: It takes too long.
    """
    tables = video_tables(data)
    with open_media(data, deadline, max_pixels, header_only=bool(tables)) as container:
        return read_video(container, tables, deadline, max_pixels)


def read_video(
    container: Any, tables: Mapping[int, Mp4Table], deadline: Deadline, max_pixels: int
) -> VideoFile:
    """Read what is known of the video of an opened file; see `read_video_file`.

    Args:
        container: PyAV's container, just opened.
        tables: What `video_tables` says of the file.
        deadline: When to stop.
        max_pixels: Limit on height x width of a frame.
    """
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
