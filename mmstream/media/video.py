"""A video file: what is known of it before it is decoded, and chosen frames of it.

Place in the flow: `read_video_file` tells times, size and orientation of the frames, by which
`VideoDecoder` chooses packets. `pictures` starts FFmpeg's decoder at the key before each of these,
feeds it up to the packet, and takes the frame out. Between two chosen frames that share no group
of pictures it jumps.

Frames that no other frame is predicted from are skipped, unless they are chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import av
import numpy as np
from av.stream import Discard
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from mmstream.errors import DecodeError
from mmstream.media.ffmpeg import media_stream, open_media
from mmstream.media.frames import FrameList
from mmstream.media.limits import MAX_MEMORY, Deadline, Limits
from mmstream.media.mp4 import UPRIGHT, Mp4Table, Orientation, parse_matrix, video_tables
from mmstream.media.timeline import Timeline, demuxed_timeline
from mmstream.media.types import EncodedMedia

MAX_PACKETS = 1 << 22
"""Most packets of a video: 19 hours at 60 frames per second."""


class VideoFile(NamedTuple):
    """What is known of a video before it is decoded."""

    timeline: Timeline
    """The times of all frames, and their packets."""
    stored: tuple[int, int]
    """(height, width) of the frames as they are stored."""
    orientation: Orientation
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
        return self.stored if self.orientation.rotation % 180 == 0 else self.stored[::-1]


def read_video_file(
    data: EncodedMedia | FrameList, deadline: Deadline, max_pixels: int
) -> VideoFile:
    """Read what is known of a video before it is decoded.

    Raises:
        DecodeError: It is not a video, or its frames are larger than the limit.
        TimeoutError: It takes too long.
    """
    if isinstance(data, FrameList):
        shape = data.shape(0, Limits(max_pixels, MAX_MEMORY, deadline))
        return VideoFile(data.timeline, shape, UPRIGHT, data.fps)
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
        return VideoFile(table.timeline, stored, table.orientation, fps, table, codec)
    discard_others(container, stream)
    packets = _Packets(container, stream)
    has_pts = container.format.name != "avi"
    timeline = demuxed_timeline(packets, stream, deadline, MAX_PACKETS, has_pts)
    fps = _fps(stream, timeline)
    return VideoFile(timeline, stored, packets.orientation(), fps, None, codec)


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
    """All packets of a stream. The first key frame tells the orientation, which no header does."""

    def __init__(self, container: Any, stream: Any) -> None:
        self._container, self._stream = container, stream
        self._first: Any = None

    def __iter__(self) -> Iterator[Any]:
        for packet in self._container.demux(self._stream):
            if self._first is None and packet.is_keyframe:
                self._first = packet
            yield packet

    def orientation(self) -> Orientation:
        """Return how the first key frame is turned to be shown."""
        context = self._stream.codec_context
        frames = [*context.decode(self._first), *context.decode(None)] if self._first else []
        matrix = frames[0].side_data.get("DISPLAYMATRIX") if frames else None
        return UPRIGHT if matrix is None else parse_matrix(np.frombuffer(matrix, np.int32).tolist())


# -- frames ----------------------------------------------------------------------------------------

Pixels = NDArray[np.uint8]

_SEEKABLE = ("matroska", "mov", "avi", "flv")
"""Formats in which packets have the same times after a seek, and which have an index. In others
FFmpeg recomputes some times, or looks for a time by reading here and there."""
MAX_GAP_BYTES = 16 << 10
"""Bytes between two packets that are read rather than skipped: several seconds of sound."""
_MARK_UNUSED = ("h264", "mpeg4", "mpeg1video", "mpeg2video")
"""Codecs that mark each frame that no other frame is predicted from.

HEVC marks frames that none of the same temporal layer is predicted from, which is not enough.
"""
_HIGH_444 = (44, 144, 244)
"""Profiles of H.264 with colours at full resolution (H.264, Annex A)."""


class UnseekableError(Exception):
    """FFmpeg does not find a packet of this file: read the file from its start instead."""


class DamagedError(DecodeError):
    """A frame is damaged or does not come out."""


PacketReader: TypeAlias = "TablePackets | DemuxedPackets"
"""Where packets come from."""


def pictures(
    file: VideoFile,
    data: EncodedMedia | FrameList,
    packets: Sequence[int],
    deadline: Deadline,
    max_decoded: int,
) -> Iterator[tuple[int, Pixels]]:
    """Decode the frames of chosen packets.

    Where a frame does not come out, all frames before it are decoded too, from the start.

    Args:
        file: What is known of the file.
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
    if isinstance(data, FrameList):
        yield from data.pictures(file.stored, packets, deadline)
        return
    left = set(packets)
    may_seek = may_jump = True
    while left:
        try:
            for packet, frame in _frames(file, data, left, deadline, may_seek, may_jump):
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
    file: VideoFile,
    data: EncodedMedia,
    packets: Collection[int],
    deadline: Deadline,
    may_seek: bool,
    may_jump: bool,
) -> Iterator[tuple[int, Pixels]]:
    to_rgb = VideoReformatter()
    with _opened(file, data, deadline, may_seek) as (reader, stream):
        for packet, frame in decoded_frames(
            reader, stream.codec_context, file.timeline, sorted(packets), deadline, may_jump
        ):
            if (frame.height, frame.width) != file.stored:
                height, width = file.stored
                raise DecodeError(
                    f"a frame of {frame.width}x{frame.height} in a video of {width}x{height}"
                )
            yield packet, _upright(file, to_rgb.reformat(frame, format="rgb24", threads=1))


@contextmanager
def _opened(
    file: VideoFile, data: EncodedMedia, deadline: Deadline, may_seek: bool
) -> Iterator[tuple[PacketReader, Any]]:
    """Open a file to read packets, for the body of a with statement.

    Args:
        file: What is known of the file.
        data: The file.
        deadline: When to stop.
        may_seek: Whether FFmpeg may jump. If not, it reads from the start.

    Yields:
        What reads packets, and PyAV's stream.

    Raises:
        DecodeError: FFmpeg cannot read it, here or in the body.
        TimeoutError: It takes too long.
    """
    max_pixels = file.stored[0] * file.stored[1]
    table = file.table
    with open_media(data, deadline, max_pixels, header_only=table is not None) as container:
        stream = media_stream(container, "video")
        if table is not None:
            yield TablePackets(data, table), stream
            return
        discard_others(container, stream)
        may_seek = may_seek and container.format.name.split(",")[0] in _SEEKABLE
        yield DemuxedPackets(container, stream, file.timeline, may_seek), stream


def _upright(file: VideoFile, frame: Any) -> Pixels:
    """Return the pixels of an RGB frame, turned as the file says."""
    height, width = file.stored
    plane = frame.planes[0]
    lines = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
    pixels = lines[:height, : 3 * width].reshape(height, width, 3)
    if file.orientation == UPRIGHT:
        return pixels
    if file.orientation.is_flipped:
        pixels = pixels[::-1]
    # torch needs it contiguous
    return np.ascontiguousarray(np.rot90(pixels, -file.orientation.rotation // 90))


def runs(timeline: Timeline, packets: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """Divide chosen packets into runs that are decoded in one go.

    Args:
        timeline: All packets.
        packets: The chosen ones, each once.

    Returns:
        (first packet to decode, end, chosen packets) of each run, in the order of the file. A run
        goes on over a key only where there is nothing to jump over.
    """
    result: list[tuple[int, int, list[int]]] = []
    for packet in sorted(packets):
        first, chosen = timeline.start_of(packet), [packet]
        while result and first < result[-1][1]:
            start, _, earlier = result.pop()
            first, chosen = min(start, first), earlier + chosen
        result.append((first, packet + 1, chosen))
    return result


def refuse_many_decoded(timeline: Timeline, packets: Sequence[int], max_decoded: int) -> None:
    """Refuse chosen packets for which too many are decoded.

    Raises:
        DecodeError: Names both numbers.
    """
    if timeline.is_counted:
        number = max(packets) + 1
    else:
        number = sum(end - start for start, end, _ in runs(timeline, sorted(set(packets))))
    if number > max_decoded:
        raise DecodeError(
            f"{number} frames must be decoded for {len(packets)}, more than "
            f"max_decoded_frames={max_decoded}"
        )


def is_leading(timeline: Timeline, start: int, packet: int) -> bool:
    """Tell whether a packet is left out where a decoder starts at packet `start`.

    A frame that is shown before the key may need frames before the key.
    """
    return 0 < start < packet and bool(timeline.pts[packet] < timeline.pts[start])


def decoded_frames(
    reader: PacketReader,
    context: Any,
    timeline: Timeline,
    packets: Sequence[int],
    deadline: Deadline,
    may_jump: bool = True,
) -> Iterator[tuple[int, Any]]:
    """Decode the frames of chosen packets.

    Args:
        reader: Where the packets come from.
        context: PyAV's codec context of the stream.
        timeline: All packets.
        packets: The chosen ones, each once.
        deadline: When to stop.
        may_jump: Whether to decode only what the frames need. If not, all frames are decoded from
            the start of the file to the last chosen one.

    Yields:
        (packet, PyAV's frame), run by run, and by time within a run.

    Raises:
        DamagedError: A frame is damaged, or does not come out.
        TimeoutError: It takes too long.
        UnseekableError: The reader does not find a packet.
    """
    if timeline.is_counted:
        yield from _counted_frames(reader, context, timeline, packets, deadline)
        return
    packet_runs = runs(timeline, packets) if may_jump else [(0, max(packets) + 1, list(packets))]
    reader.expect([(start, end) for start, end, _ in packet_runs])
    if packet_runs[0][0] > 0 and needs_first_packet(context):
        for _, packet in reader.packets(0, 1):
            context.decode(packet)
    can_skip = context.name in _MARK_UNUSED
    for start, end, chosen in packet_runs:
        context.flush_buffers()
        missing = _Missing(timeline, chosen)
        for number, packet in reader.packets(start, end):
            deadline.check()
            if is_leading(timeline, start, number):
                continue
            if can_skip:
                context.skip_frame = "DEFAULT" if number in missing.chosen else "NONREF"
            yield from missing.matching(context.decode(packet))
        yield from missing.matching(context.decode(None))
        missing.check()


def _counted_frames(
    reader: PacketReader,
    context: Any,
    timeline: Timeline,
    packets: Sequence[int],
    deadline: Deadline,
) -> Iterator[tuple[int, Any]]:
    """Decode from the start, and count the frames as they come out, in the order of display."""
    chosen = set(packets)
    number = 0
    fed: Iterator[Any] = (packet for _, packet in reader.packets(0, len(timeline.pts)))
    for packet in itertools.chain(fed, (None,)):
        deadline.check()
        for frame in context.decode(packet):
            if number in chosen:
                chosen.discard(number)
                if frame.is_corrupt:
                    raise DamagedError(f"frame {number} is damaged")
                yield number, frame
            number += 1
        if not chosen:
            return
    raise DamagedError(f"frame {min(chosen)} is damaged or lost")


def needs_first_packet(context: Any) -> bool:
    """Tell whether the decoder must see the start of the file, wherever it goes on.

    Old versions of x264 write 4:4:4 in a form of their own. Only the first packet states the
    version, and FFmpeg decodes wrong colours without it.
    """
    extradata = context.extradata
    return bool(
        context.name == "h264" and extradata and len(extradata) > 1 and extradata[1] in _HIGH_444
    )


class _Missing:
    """The chosen frames of a run that have not come out yet."""

    def __init__(self, timeline: Timeline, chosen: list[int]) -> None:
        self.chosen = frozenset(chosen)
        self._timeline = timeline
        self._packets: dict[int, list[int]] = {}
        for packet in chosen:
            self._packets.setdefault(int(timeline.pts[packet]), []).append(packet)

    def matching(self, frames: list[Any]) -> Iterator[tuple[int, Any]]:
        """Yield those frames that are chosen."""
        for frame in frames:
            packets = self._packets.get(frame.pts)
            if packets:
                packet = packets.pop(0)
                if frame.is_corrupt:
                    raise DamagedError(f"the frame at {self._seconds(frame.pts):.3f} s is damaged")
                yield packet, frame

    def check(self) -> None:
        """Refuse to go on where a frame did not come out."""
        missing = [pts for pts, packets in self._packets.items() if packets]
        if missing:
            seconds = self._seconds(min(missing))
            raise DamagedError(f"the frame at {seconds:.3f} s is damaged or lost")

    def _seconds(self, pts: int) -> float:
        first = self._timeline.pts[self._timeline.display_order[0]]
        return float((pts - int(first)) * self._timeline.time_base)


class TablePackets:
    """Reads packets of an MP4 straight from the file, and no other bytes.

    Args:
        data: The file.
        table: Where the packets lie.
    """

    def __init__(self, data: EncodedMedia, table: Mp4Table) -> None:
        self._data, self._table = data, table

    def expect(self, runs: Sequence[tuple[int, int]]) -> None:
        """Announce which packets will be read, from each first one to before each end.

        What lies between two packets is read too where it is short, such as the sound of a frame.
        """
        if isinstance(self._data, bytes):
            return
        ranges: list[tuple[int, int]] = []
        starts = np.concatenate([self._table.offsets[start:end] for start, end in runs])
        stops = starts + np.concatenate([self._table.sizes[start:end] for start, end in runs])
        for start, stop in sorted(zip(starts.tolist(), stops.tolist(), strict=True)):
            if ranges and start <= ranges[-1][1] + MAX_GAP_BYTES:
                ranges[-1] = ranges[-1][0], max(stop, ranges[-1][1])
            else:
                ranges.append((start, stop))
        self._data.expect(ranges)

    def packets(self, start: int, end: int) -> Iterator[tuple[int, Any]]:
        """Yield (number, PyAV's packet) from `start` to before `end`."""
        table, timeline = self._table, self._table.timeline
        for number in range(start, end):
            offset = int(table.offsets[number])
            data = self._data[offset : offset + int(table.sizes[number])]
            packet = av.Packet(len(data))  # with room after it, which decoders read into
            packet.update(data)
            packet.pts, packet.dts = int(timeline.pts[number]), int(timeline.dts[number])
            packet.time_base = timeline.time_base
            yield number, packet


class DemuxedPackets:
    """Reads packets through FFmpeg.

    A file may have no index, or a wrong one. So the first packet after a seek is looked up in the
    timeline, and the others are counted.

    Args:
        container: PyAV's container, just opened.
        stream: Its stream.
        timeline: All packets of the stream.
        may_seek: Whether to jump. If not, all packets are read, which always works.
    """

    def __init__(self, container: Any, stream: Any, timeline: Timeline, may_seek: bool) -> None:
        self._container, self._stream, self._timeline = container, stream, timeline
        self._demuxed = container.demux(stream)
        self._next = 0
        self._has_sought = False
        # Matroska states pts only. FFmpeg makes up the dts, and makes others after a seek.
        is_matroska = container.format.name.split(",")[0] == "matroska"
        self._dts = timeline.pts if is_matroska else timeline.dts
        times = zip(timeline.pts.tolist(), self._dts.tolist(), strict=True)
        self._numbers = {time: number for number, time in enumerate(times)} if may_seek else {}
        self._may_seek = len(self._numbers) == len(timeline.pts)  # no two packets are alike

    def expect(self, runs: Sequence[tuple[int, int]]) -> None:
        """Do nothing: FFmpeg knows where the packets lie."""

    def packets(self, start: int, end: int) -> Iterator[tuple[int, Any]]:
        """Yield (number, packet) from `start` to before `end`. `start` rises from call to call."""
        if self._may_seek and start > self._next:
            self._seek(start)
        timeline = self._timeline
        for packet in self._demuxed:
            if packet.size == 0:
                break
            if self._next < 0:
                self._next = self._number_of(packet, start)
            number, self._next = self._next, self._next + 1
            pts = packet.pts if packet.pts is not None else packet.dts
            if self._has_sought and pts != timeline.pts[number]:
                raise UnseekableError  # a damaged file has other packets after a seek
            if number >= start:
                packet.pts, packet.dts = int(timeline.pts[number]), int(timeline.dts[number])
                yield number, packet
            if self._next >= end:
                return

    def _seek(self, start: int) -> None:
        try:
            self._container.seek(int(self._dts[start]), stream=self._stream, backward=True)
        except av.FFmpegError:
            raise UnseekableError from None
        self._demuxed = self._container.demux(self._stream)
        self._next = -1
        self._has_sought = True

    def _number_of(self, packet: Any, start: int) -> int:
        pts = packet.pts if packet.pts is not None else packet.dts
        dts = pts if self._dts is self._timeline.pts or packet.dts is None else packet.dts
        number = self._numbers.get((pts, dts), start + 1)
        if number > start:
            raise UnseekableError
        return number
