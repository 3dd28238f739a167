"""A video file: what is known of it before decoding, and the pictures of chosen packets."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np
from av.stream import Discard
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.mp4_tables import (
    UPRIGHT,
    Turn,
    boxes,
    check_mp4,
    track_id,
    track_turn,
    turn_of,
)
from mmstream.decoding.ffmpeg.open import media_stream, open_media
from mmstream.decoding.image.geometry import Shape
from mmstream.decoding.video.frames import (
    DamagedError,
    DemuxedPackets,
    PacketReader,
    UnseekableError,
    decoded_frames,
)
from mmstream.decoding.video.timeline import Timeline, demuxed_timeline, without_undecodable_start
from mmstream.errors import DecodeError
from mmstream.media_types import EncodedMedia, container_format, read_range
from mmstream.types import IntArray

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


# -- MP4 and MOV, from the tables of the header ----------------------------------------------------
#
# The tables (ISO 14496-12, section 8.6 and 8.7) count samples: here one sample is the packet of one
# frame. They are stored in runs and in chunks. Worked example, with three samples of 5, 6 and 7
# bytes in two chunks:
#
#     stco  chunks start at byte 100 and 200          offsets  100, 105, 200
#     stsc  2 samples in chunk 1, 1 from chunk 2 on
#     stts  3 samples, 10 ticks each                  dts      0, 10, 20
#     ctts  +10, +20, +0 ticks                        pts      10, 30, 20

_CODECS = frozenset(
    (b"avc1", b"avc3", b"hvc1", b"hev1", b"av01", b"vp08", b"vp09", b"mp4v", b"mjpa", b"jpeg")
)
"""Sample entries of codecs whose packets go to the decoder as they are stored."""

_LARGEST_OFFSET = 1 << 28
"""FFmpeg takes larger differences of dts and pts for damage."""
MAX_GAP_BYTES = 16 << 10
"""Bytes between two packets that are read rather than skipped: several seconds of sound."""
_FASTEST_CLOCK = (1 << 31) - 1
_LARGEST_FILE = 1 << 62
_FULL_RATE = b"\0\1\0\0"
_EMPTY = -1

Boxes = dict[bytes, bytes]


class Mp4Table(NamedTuple):
    """What the header of an MP4 says about the frames of a track."""

    timeline: Timeline
    """The times of all frames."""
    offsets: IntArray
    """Where each packet starts in the file."""
    sizes: IntArray
    """Bytes of each packet."""
    turn: Turn
    """How frames are turned to be shown."""


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
            data = read_range(self._data, offset, offset + int(table.sizes[number]))
            packet = av.Packet(len(data))  # with room behind it, which decoders read into
            packet.update(data)
            packet.pts, packet.dts = int(timeline.pts[number]), int(timeline.dts[number])
            packet.time_base = timeline.time_base
            yield number, packet


def mp4_tables(data: EncodedMedia) -> dict[int, Mp4Table]:
    """Return the tables of an MP4's tracks of video, by the number of the track.

    Returns:
        Only tracks whose header says all, and only files whose frames are all in one header.

    Raises:
        DecodeError: The file is shorter than its header says, or states too much for `check_mp4`.
    """
    check_mp4(data)  # what is read here takes memory for each frame and box that the file states
    moov = _moov(data)
    if moov is None:
        return {}
    boxes = list(_boxes(moov))
    if any(name == b"mvex" for name, _ in boxes):
        return {}  # more frames follow, each fragment with a header of its own
    header = next((content for name, content in boxes if name == b"mvhd"), b"")
    clock = _clock(header)
    tables = {}
    for name, content in boxes:
        if name == b"trak":
            number_and_table = _track(content, clock, len(data))
            if number_and_table is not None:
                tables[number_and_table[0]] = number_and_table[1]
    return tables


def _moov(data: EncodedMedia) -> bytes | None:
    """Return the content of the header. None: there is none."""
    header: tuple[int, int] | None = None
    for box in boxes(data, 0, len(data)):
        if box.name == b"moof":
            return None
        if box.name == b"moov" and header is None:
            header = box.start, box.stop
    return None if header is None else read_range(data, *header)


def _boxes(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (name, content) of the boxes in a box."""
    for box in boxes(content, 0, len(content)):
        yield box.name, content[box.start : box.stop]


def _inside(content: bytes, *path: bytes) -> bytes | None:
    """Return the content of a box by its path. None: it is absent, or there are several."""
    for name in path:
        inner = [box for box_name, box in _boxes(content) if box_name == name]
        if len(inner) != 1:
            return None
        content = inner[0]
    return content


def _clock(header: bytes) -> int:
    """Return the ticks per second of a ``mvhd`` or ``mdhd``. Version 1 has times of 8 bytes."""
    position = 20 if header[:1] == b"\1" else 12
    return int.from_bytes(header[position : position + 4], "big")


def _track(content: bytes, movie_clock: int, file_size: int) -> tuple[int, Mp4Table] | None:
    """Return the number and the table of a track of video. None: something is unusual."""
    header, media = _inside(content, b"tkhd"), _inside(content, b"mdia") or b""
    samples = _inside(media, b"minf", b"stbl") or b""
    handler, clock = _inside(media, b"hdlr") or b"", _clock(_inside(media, b"mdhd") or b"")
    if (
        header is None
        or handler[8:12] != b"vide"
        or not 0 < clock <= _FASTEST_CLOCK
        or not movie_clock
    ):
        return None
    tables = dict(_boxes(samples))
    if len(tables) != sum(1 for _ in _boxes(samples)):
        return None
    sizes = _sizes(tables, file_size)
    if sizes is None:
        return None
    timeline, offsets = _timeline(tables, clock, len(sizes)), _offsets(tables, sizes)
    if timeline is None or offsets is None:
        return None
    if not _shows_all(content, timeline.pts, Fraction(clock, movie_clock)):
        return None
    missing = int((offsets + sizes).max()) - file_size
    if missing > 0:
        raise DecodeError(f"truncated: {missing:,} bytes are missing at least")
    table = Mp4Table(without_undecodable_start(timeline), offsets, sizes, track_turn(header))
    return track_id(header), table


def _timeline(tables: Boxes, clock: int, num_samples: int) -> Timeline | None:
    """Return the times of all samples, where one codec is known and marks its key frames."""
    entries = tables.get(b"stsd", b"")
    times = _times(tables, num_samples)
    if entries[4:8] != b"\0\0\0\1" or entries[12:16] not in _CODECS or times is None:
        return None
    dts, pts, last_duration = times
    is_key = np.ones(len(dts), bool)
    if b"stss" in tables:
        keys = _table(tables[b"stss"], 1)
        if keys is None or not len(keys) or keys.min() < 1 or keys.max() > len(dts):
            return None
        is_key[:] = False
        is_key[keys[:, 0] - 1] = True
    is_shown = np.ones(len(dts), bool)
    return Timeline(pts, dts, is_key, is_shown, Fraction(1, clock), last_duration)


def _table(content: bytes, num_columns: int, dtype: str = ">u4") -> IntArray | None:
    """Return a table of 4-byte numbers behind version, flags and a count. None: it is cut."""
    count = int.from_bytes(content[4:8], "big")
    if len(content) < 8 + 4 * num_columns * count:
        return None
    numbers = np.frombuffer(content, dtype, count * num_columns, 8)
    return numbers.astype(np.int64).reshape(count, num_columns)


def _times(tables: Boxes, num_samples: int) -> tuple[IntArray, IntArray, int] | None:
    """Return dts and pts of all samples, and the duration of the last one.

    A run may state any number of samples, so it is compared before it takes memory.
    """
    durations = _table(tables.get(b"stts", b""), 2)
    if durations is None or durations[:, 0].sum() != num_samples:
        return None
    if durations[:, 1].max() >= 1 << 31:
        return None
    delta = np.repeat(durations[:, 1], durations[:, 0])
    dts = np.cumsum(delta) - delta
    if b"ctts" not in tables:
        return dts, dts, int(delta[-1])
    runs = _table(tables[b"ctts"], 2, ">i4")
    if runs is None or (runs[:, 0] < 0).any() or runs[:, 0].sum() != num_samples:
        return None
    if np.abs(runs[:, 1]).max() >= _LARGEST_OFFSET:
        return None
    shift = np.repeat(runs[:, 1], runs[:, 0])
    return dts, dts + shift, int(delta[-1])


def _sizes(tables: Boxes, file_size: int) -> IntArray | None:
    """Return the bytes of all samples."""
    content = tables.get(b"stsz", b"")
    size, count = (int.from_bytes(content[start : start + 4], "big") for start in (4, 8))
    if size:  # of all samples
        return np.full(count, size) if 0 < count * size <= file_size else None
    if not count or len(content) < 12 + 4 * count:
        return None
    sizes = np.frombuffer(content, ">u4", count, 12).astype(np.int64)
    return sizes if sizes.min() > 0 else None


def _offsets(tables: Boxes, sizes: IntArray) -> IntArray | None:
    """Return where all samples start in the file."""
    starts = _chunk_starts(tables)
    runs = _table(tables.get(b"stsc", b""), 3)
    if starts is None or runs is None or not len(runs) or not len(starts):
        return None
    first_chunk = runs[:, 0]
    if first_chunk[0] != 1 or (np.diff(first_chunk) <= 0).any() or (runs[:, 2] != 1).any():
        return None
    num_chunks = np.diff(first_chunk, append=len(starts) + 1)
    if (num_chunks < 0).any():
        return None
    per_chunk = np.repeat(runs[:, 1], num_chunks)
    if per_chunk.sum() != len(sizes):
        return None
    before = np.cumsum(sizes) - sizes  # as if there were one chunk
    chunk = np.repeat(np.arange(len(starts)), per_chunk)
    first_sample = np.minimum(np.cumsum(per_chunk) - per_chunk, len(sizes) - 1)
    offsets: IntArray = starts[chunk] + before - before[first_sample][chunk]
    return offsets


def _chunk_starts(tables: Boxes) -> IntArray | None:
    if b"stco" in tables:
        table = _table(tables[b"stco"], 1)
        return None if table is None else table[:, 0]
    content = tables.get(b"co64", b"")
    count = int.from_bytes(content[4:8], "big")
    if len(content) < 8 + 8 * count:
        return None
    starts = np.frombuffer(content, ">u8", count, 8)
    return None if (starts >= _LARGEST_FILE).any() else starts.astype(np.int64)


def _shows_all(content: bytes, pts: IntArray, ratio: Fraction) -> bool:
    """Tell whether the edit list shows every sample once, at its own speed.

    Args:
        content: Of the track.
        pts: When samples are shown, without the edit list.
        ratio: Ticks of the track in a tick of the movie, in which edits are measured.
    """
    edits = _inside(content, b"edts", b"elst")
    if edits is None:
        return all(name != b"edts" for name, _ in _boxes(content))
    is_long = edits[:1] == b"\1"
    size = 20 if is_long else 12
    count = int.from_bytes(edits[4:8], "big")
    rows = [edits[start : start + size] for start in range(8, 8 + size * min(count, 2), size)]
    shown = []
    for row in rows:
        width = 8 if is_long else 4
        duration = int.from_bytes(row[:width], "big")
        start = int.from_bytes(row[width : 2 * width], "big", signed=True)
        if len(row) < size or row[2 * width :] != _FULL_RATE:
            return False
        if start != _EMPTY:  # an empty edit only delays what follows
            shown.append((start, duration))
    if count > 2 or len(shown) != 1 or (count == 2 and shown[0][0] != start):
        return False
    start, duration = shown[0]
    end = start + duration * ratio if duration else math.inf
    return int(pts.min()) >= start and int(pts.max()) < end
