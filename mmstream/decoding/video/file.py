"""A video file: what is known of it before decoding, and the pictures of chosen packets."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from av.stream import Discard
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.open import media_stream, open_media
from mmstream.decoding.ffmpeg.source import EncodedMedia
from mmstream.decoding.image.geometry import Shape
from mmstream.decoding.video.frames import (
    DamagedError,
    DemuxedPackets,
    PacketReader,
    UnseekableError,
    decoded_frames,
    runs,
)
from mmstream.decoding.video.mp4_timeline import PacketBytes, StoredPackets, mp4_timeline
from mmstream.decoding.video.timeline import Timeline, demuxed_timeline
from mmstream.errors import DecodeError
from mmstream.lazy_bytes import LazyBytes

__all__ = ["VideoFile", "read_video_file"]

MAX_PACKETS = 1 << 22
"""Most packets of a video: 19 hours at 60 frames per second."""

Pixels = NDArray[np.uint8]


class VideoFile(NamedTuple):
    """What is known of a video before it is decoded."""

    timeline: Timeline
    """The times of all frames, and their packets."""
    stored: Shape
    """(height, width) of the frames as they are stored."""
    rotation: int
    """Degrees clockwise by which frames are turned to be shown: 0, 90, 180 or 270."""
    fps: float
    """Frames per second, on average."""
    packet_bytes: PacketBytes | None = None
    """Where the packets lie in the file. None: nobody knows."""

    @property
    def picture(self) -> Shape:
        """(height, width) of the frames as they are shown."""
        return self.stored if self.rotation % 180 == 0 else self.stored[::-1]

    def pictures(
        self, data: EncodedMedia, packets: Sequence[int], deadline: Deadline
    ) -> Iterator[tuple[int, Pixels]]:
        """Decode the frames of chosen packets.

        Args:
            data: The file.
            packets: Their numbers, each once.
            deadline: When to stop.

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
                if not may_jump:
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
        max_pixels = self.stored[0] * self.stored[1]
        with open_media(data, deadline, max_pixels) as container:
            stream = media_stream(container, "video")
            if may_jump:
                self._announce(data, packets)
            reader: PacketReader
            if self.packet_bytes is None:
                reader = DemuxedPackets(container, stream, self.timeline, may_seek)
            else:
                reader = StoredPackets(data, self.packet_bytes, self.timeline)
            for packet, frame in decoded_frames(
                reader, stream.codec_context, self.timeline, sorted(packets), deadline, may_jump
            ):
                if (frame.height, frame.width) != self.stored:
                    height, width = self.stored
                    raise DecodeError(
                        f"a frame of {frame.width}x{frame.height} in a video of {width}x{height}"
                    )
                yield packet, self._upright(to_rgb.reformat(frame, format="rgb24", threads=1))

    def _announce(self, data: EncodedMedia, packets: Collection[int]) -> None:
        """Say which bytes will be read, so that they come side by side, and no others."""
        if isinstance(data, LazyBytes) and self.packet_bytes is not None:
            bounds = runs(self.timeline, sorted(packets))
            data.expect([self.packet_bytes.of_run(first, end) for first, end, _ in bounds])

    def _upright(self, frame: Any) -> Pixels:
        """Return the pixels of an RGB frame, turned as the file says."""
        height, width = self.stored
        plane = frame.planes[0]
        lines = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
        pixels = lines[:height, : 3 * width].reshape(height, width, 3)
        if not self.rotation:
            return pixels
        return np.ascontiguousarray(np.rot90(pixels, -self.rotation // 90))  # torch needs it


def read_video_file(data: EncodedMedia, deadline: Deadline, max_pixels: int) -> VideoFile:
    """Read what is known of a video before it is decoded.

    Raises:
        DecodeError: It is no video, or its frames are larger than the limit.
        TimeoutError: It takes too long.
    """
    with open_media(data, deadline, max_pixels) as container:
        stream = media_stream(container, "video")
        context = stream.codec_context
        stored = (context.height, context.width)
        if min(stored) < 1 or stored[0] * stored[1] > max_pixels:
            raise DecodeError(
                f"frames of {context.width}x{context.height} exceed max_pixels={max_pixels}"
            )
        discard_others(container, stream)
        timeline, packet_bytes = _timeline(data, container, stream, deadline)
        rotation = _rotation(data, deadline)
        return VideoFile(timeline, stored, rotation, _fps(stream, timeline), packet_bytes)


def _timeline(
    data: EncodedMedia, container: Any, stream: Any, deadline: Deadline
) -> tuple[Timeline, PacketBytes | None]:
    """Read the timeline of a stream from tables, or else from all packets."""
    known = mp4_timeline(data, container, stream)
    if known is None:
        return demuxed_timeline(container, stream, deadline, MAX_PACKETS), None
    first = next(container.demux(stream), None)
    pts, dts = known[0].pts[0], known[0].dts[0]
    if first is not None and (first.pts, first.dts) == (pts, dts):
        return known
    with open_media(data, deadline) as again:  # FFmpeg counts its times in another way
        stream = media_stream(again, "video")
        discard_others(again, stream)
        return demuxed_timeline(again, stream, deadline, MAX_PACKETS), None


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


def _rotation(data: EncodedMedia, deadline: Deadline) -> int:
    """Return the rotation that the first frame has, in degrees clockwise."""
    with open_media(data, deadline) as container:
        stream = media_stream(container, "video")
        frame = next(container.decode(stream), None)
        return 0 if frame is None else -round(frame.rotation / 90) * 90 % 360
