"""The timeline of an MP4 or MOV from its tables, so that none of its frames is read.

Place in the flow: `file.py` asks here first. FFmpeg has already read the tables when it opened the
file, and says where each packet lies and when it is decoded. When its frame is shown, and for how
long, stands in two more tables, ``ctts`` and ``stts``, which are read here.

Files whose tables say more than that have none here, and all of their packets are read: those in
fragments, with cuts (edit lists that leave frames out), with several descriptions of a track, or
that end too early.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from operator import attrgetter
from typing import Any, NamedTuple

import av
import numpy as np

from mmstream.decoding.ffmpeg.mp4_tables import MAX_SAMPLES
from mmstream.decoding.ffmpeg.source import EncodedMedia, read_range
from mmstream.decoding.video.timeline import Timeline, without_undecodable_start
from mmstream.types import IntArray

__all__ = ["PacketBytes", "StoredPackets", "mp4_timeline"]

_MAX_BOXES = 10_000
_LEAST_PACKET_BYTES = 8

_CODECS = frozenset({"h264", "hevc", "av1", "libdav1d", "libaom-av1", "vp9", "libvpx-vp9", "mpeg4"})
"""Those whose packets FFmpeg hands from the file to the decoder as they are."""


class PacketBytes(NamedTuple):
    """Where the packets of a stream lie in their file. Both are int64 [num_packets]."""

    start: IntArray
    stop: IntArray

    def of_run(self, first: int, end: int) -> tuple[int, int]:
        """Return the bytes [start, stop) that packets `first` to before `end` lie in."""
        return int(self.start[first:end].min()), int(self.stop[first:end].max())


class StoredPackets:
    """Reads packets from where they lie, and nothing else of the file.

    FFmpeg's own seek in an MP4 goes to a key by the time at which its frame is shown, and may find
    the key before.

    Args:
        data: The file.
        stored: Where its packets lie.
        timeline: All packets of the stream.
    """

    def __init__(self, data: EncodedMedia, stored: PacketBytes, timeline: Timeline) -> None:
        self._data, self._stored, self._timeline = data, stored, timeline

    def packets(self, start: int, end: int) -> Iterator[tuple[int, Any]]:
        """Yield (number, packet) from `start` to before `end`."""
        timeline = self._timeline
        for number in range(start, min(end, len(timeline.pts))):
            packet = av.Packet(read_range(self._data, *self._stored.of_run(number, number + 1)))
            packet.pts, packet.dts = int(timeline.pts[number]), int(timeline.dts[number])
            packet.time_base = timeline.time_base
            packet.is_keyframe = bool(timeline.is_key[number])
            yield number, packet


def mp4_timeline(
    data: EncodedMedia, container: Any, stream: Any
) -> tuple[Timeline, PacketBytes] | None:
    """Return the timeline of a video stream, and where its packets lie. Reads no packet.

    Args:
        data: The file.
        container: PyAV's container, just opened.
        stream: Its stream.

    Returns:
        None where all packets must be read.

    Raises:
        DecodeError: The file has no frame that can be decoded.
    """
    is_mp4 = "mov" in container.format.name.split(",")
    if not is_mp4 or stream.codec_context.name not in _CODECS:
        return None
    entries = stream.index_entries
    num_packets = len(entries)
    if num_packets > len(data) // _LEAST_PACKET_BYTES:
        return None  # tables of this file state what is not there
    tables = _tables(data, stream.id, num_packets)
    if tables is None:
        return None
    offsets, durations = tables
    start, size, dts, is_key, is_discard = (
        np.fromiter(map(attrgetter(name), entries), np.int64, num_packets)
        for name in ("pos", "size", "timestamp", "is_keyframe", "is_discard")
    )
    # FFmpeg moves all dts so that none comes after its pts. It leaves out the last two entries.
    first_offsets, shown_late = offsets[:-2], 0
    if first_offsets.size:
        shown_late = max(0, -int(first_offsets.min()))
    pts = dts + offsets + shown_late
    is_cut = (start < 0).any() or (start + size > len(data)).any()
    if is_cut or is_discard.any() or (np.diff(dts) < 0).any():
        return None
    last = int(np.argmax(pts))
    timeline = Timeline(
        pts,
        dts,
        is_key.astype(np.bool_),
        np.ones(num_packets, dtype=np.bool_),
        Fraction(stream.time_base),
        int(durations[last]),
    )
    return without_undecodable_start(timeline), PacketBytes(start, start + size)


def _tables(
    data: EncodedMedia, track_id: int, num_packets: int
) -> tuple[IntArray, IntArray] | None:
    """Return how much later than it is decoded each frame of a track is shown, and how long.

    Returns:
        None where the tables do not describe exactly these packets.
    """
    if not 0 < num_packets <= MAX_SAMPLES:
        return None
    boxes = _Boxes(data)
    for name, start, stop in boxes.inside(0, len(data)):
        if name == b"moof":
            return None
        if name == b"moov":
            tracks = []
            for inner, track_start, track_stop in boxes.inside(start, stop):
                if inner == b"mvex":
                    return None
                if inner == b"trak":
                    tracks.append((track_start, track_stop))
            for track_start, track_stop in tracks:
                if boxes.track_id(track_start, track_stop) == track_id:
                    return boxes.tables(track_start, track_stop, num_packets)
    return None


class _Boxes:
    """Reads the boxes of a file, and few enough of them."""

    def __init__(self, data: EncodedMedia) -> None:
        self._data = data
        self._num_left = _MAX_BOXES

    def inside(self, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield (name, start, stop) of the content of each box."""
        while start + 8 <= stop and self._num_left:
            self._num_left -= 1
            head = read_range(self._data, start, min(start + 16, stop))
            size, header = int.from_bytes(head[:4], "big"), 8
            if size == 1 and len(head) == 16:
                size, header = int.from_bytes(head[8:16], "big"), 16
            elif size == 0:
                size = stop - start
            if size < header:
                return
            yield head[4:8], start + header, min(start + size, stop)
            start += size

    def content(self, path: bytes, start: int, stop: int) -> bytes | None:
        """Return the content of the box with a path, ``mdia/minf``. None: there is none."""
        bounds = self._find(path.split(b"/"), start, stop)
        return None if bounds is None else read_range(self._data, *bounds)

    def _find(self, names: list[bytes], start: int, stop: int) -> tuple[int, int] | None:
        for name, inner_start, inner_stop in self.inside(start, stop):
            if name == names[0]:
                if len(names) == 1:
                    return inner_start, inner_stop
                return self._find(names[1:], inner_start, inner_stop)
        return None

    def track_id(self, start: int, stop: int) -> int | None:
        """Return the number of a track."""
        header = self.content(b"tkhd", start, stop)
        if header is None or len(header) < 24:
            return None
        position = 20 if header[0] == 1 else 12
        return int.from_bytes(header[position : position + 4], "big")

    def tables(self, start: int, stop: int, num_packets: int) -> tuple[IntArray, IntArray] | None:
        """Return what `_tables` does, for the track in these bytes."""
        tables = b"mdia/minf/stbl/"
        description = self.content(tables + b"stsd", start, stop)
        if description is None or int.from_bytes(description[4:8], "big") != 1:
            return None
        edits = self.content(b"edts/elst", start, stop)
        # One edit: where the film begins. With an empty one before it, when. More are cuts.
        if edits is not None and int.from_bytes(edits[4:8], "big") > 2:
            return None
        offsets: IntArray | None = np.zeros(num_packets, np.int64)
        if (table := self.content(tables + b"ctts", start, stop)) is not None:
            offsets = _of_each_packet(table, num_packets)
        durations = _of_each_packet(self.content(tables + b"stts", start, stop), num_packets)
        return None if offsets is None or durations is None else (offsets, durations)


def _of_each_packet(table: bytes | None, num_packets: int) -> IntArray | None:
    """Return the value of each packet in a table of (number of packets, value).

    Values are signed numbers for FFmpeg, whatever the version of the table says.

    Returns:
        None where there is no such table, or it is of other packets.
    """
    if table is None:
        return None
    size = 8 * int.from_bytes(table[4:8], "big")
    runs = np.frombuffer(table[8 : 8 + min(size, len(table) // 8 * 8 - 8)], ">u4")
    counts, values = runs.reshape(-1, 2).T
    if int(counts.sum(dtype=np.uint64)) != num_packets:
        return None
    return np.repeat(values.astype(np.uint32).view(np.int32).astype(np.int64), counts)
