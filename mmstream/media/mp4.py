"""The header of an MP4 or MOV: checked before FFmpeg believes it, and where each frame lies.

    bytes or LazyBytes -> READ_MP4 -> FFmpeg opens the file
                                   -> VIDEO_TABLES: packets are read straight from the file

FFmpeg builds an entry of 24 bytes in memory for each sample (frame) that the tables of an MP4
state. Some tables state a number that no bytes stand behind: a file of 650 bytes can state 80
million frames of one size each, and FFmpeg makes 2.8 GB of them in one call that nothing can
interrupt. So the tables are read here first. All boxes are looked at that FFmpeg looks into,
wherever they stand.

The same look finds the tables of the tracks of video, from which training reads a few frames of a
large file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from mmstream.errors import DecodeError
from mmstream.media.timeline import Timeline, without_undecodable_start
from mmstream.media.types import EncodedMedia, container_format
from mmstream.tar.lazy_bytes import LazyBytes
from mmstream.types import IntArray


class Orientation(NamedTuple):
    """What a player does with each stored frame."""

    rotation: int
    """Degrees clockwise: 0, 90, 180 or 270."""
    is_flipped: bool = False
    """Whether the frame is turned upside down before that, as in a mirror."""


UPRIGHT = Orientation(0)
"""Nothing is done."""


def parse_matrix(matrix: Sequence[int]) -> Orientation:
    """Return what a matrix means (ISO 14496-12, section 6.2.2).

    Args:
        matrix: At least its first five numbers: ``x' = a x + c y`` and ``y' = b x + d y`` are
            stored as a, b, 0, c, d, in any fixed point.

    Examples:
        >>> parse_matrix([0, 1, 0, -1, 0])
        Orientation(rotation=90, is_flipped=False)
        >>> parse_matrix([-1, 0, 0, 0, 1])  # left and right are exchanged
        Orientation(rotation=180, is_flipped=True)
    """
    a, b, _, c, d = matrix[:5]
    rotation = round(math.degrees(math.atan2(b, a)) / 90) * 90 % 360
    return Orientation(rotation, a * d - b * c < 0)


# -- boxes -----------------------------------------------------------------------------------------


class Box(NamedTuple):
    """A box of a file."""

    name: bytes
    start: int
    """Where its content starts."""
    stop: int
    """Where it ends, as it says: that may be after the box that it lies in."""


def boxes(data: EncodedMedia, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a range, one after another, until one makes no sense."""
    while start + 8 <= stop:
        head = data[start : min(start + 16, stop)]
        if len(head) < 8:
            return
        size, header = int.from_bytes(head[:4], "big"), 8
        if size == 1 and len(head) == 16:
            size, header = int.from_bytes(head[8:16], "big"), 16
        elif size == 0:
            size = stop - start  # it goes to the end
        if size < header:
            return
        yield Box(head[4:8], start + header, start + size)
        start += size


def _number_behind_times(header: bytes) -> int:
    """Return a track's number of its ``tkhd``, or the ticks per second of a ``mvhd`` or ``mdhd``.

    The times before it have 4 bytes in version 0, and 8 in version 1 (section 8.3.2).
    """
    position = 20 if header[:1] == b"\1" else 12
    return int.from_bytes(header[position : position + 4], "big")


def _track_orientation(header: bytes) -> Orientation:
    """Return how the frames of a track are turned, by its header, which holds a matrix.

    A header that ends before it turns nothing.
    """
    matrix = header[52 if header[:1] == b"\1" else 40 :][:20]
    return parse_matrix(struct.unpack(">5i", matrix)) if len(matrix) == 20 else UPRIGHT


# -- one look at all of them -----------------------------------------------------------------------

MAX_SAMPLES = 5_000_000
"""Most samples of all tracks. 23 hours at 60 frames a second have as many. FFmpeg needs 175 MB."""

MAX_BOXES = 1_000_000
"""Most boxes. A recording of eight hours in fragments of a second has 300,000."""

MAX_DEPTH = 12
"""FFmpeg looks into boxes 10 deep."""

_CONTAINERS = frozenset(
    b"moov trak mdia minf stbl edts mvex moof traf udta dinf meta gmhd tapt wave hoov free".split()
)
"""Boxes with boxes in them. FFmpeg takes some ``hoov`` and ``free`` for a ``moov``."""

_COUNTED = frozenset(b"stsz stz2 stts stsc stco co64 elst trun hdlr".split())
_KEPT = frozenset(b"moov trak mdia stbl edts".split())
"""Boxes whose content `video_tables` reads."""
_HOLDING = (b"moov", b"mdat", b"moof")
"""Boxes that hold an index or frames."""
_SAMPLES_AT_ONCE = 1024
"""FFmpeg makes one entry for so many samples of plain sound."""


@dataclass
class Track:
    """What the boxes of one track state.

    Attributes:
        boxes: Those that `video_tables` reads, by the names of the box around them and their own:
            at most two of a name.
        num_samples: Samples that its tables state.
        num_edits: Entries of its edit lists.
        num_chunks: Chunks in which its samples lie.
        handlers: Its kinds of media, such as ``vide``.
        durations: Its tables of durations.
        runs_of_chunks: Its tables of how many samples a chunk has.
    """

    boxes: dict[tuple[bytes, bytes], list[Box]] = field(default_factory=dict)
    num_samples: int = 0
    num_edits: int = 0
    num_chunks: int = 0
    handlers: set[bytes] = field(default_factory=set)
    durations: list[bytes] = field(default_factory=list)
    runs_of_chunks: list[bytes] = field(default_factory=list)

    @property
    def num_entries(self) -> int:
        """Entries that FFmpeg makes at most: for each edit one for each sample."""
        num_samples = self.num_samples
        if self._is_plain_sound():
            num_samples = self._num_pieces()
        return num_samples * max(1, self.num_edits)

    def keep(self, parent: bytes, box: Box) -> None:
        """Keep a box of the track, if it is one to read. A third of a name says no more."""
        if parent in _KEPT:
            same = self.boxes.setdefault((parent, box.name), [])
            if len(same) < 2:
                same.append(box)

    def content(self, data: EncodedMedia, parent: bytes, name: bytes) -> bytes:
        """Return the content of a box. Empty: it is absent, or there are several."""
        boxes = self.boxes.get((parent, name), [])
        return data[boxes[0].start : boxes[0].stop] if len(boxes) == 1 else b""

    def _is_plain_sound(self) -> bool:
        """Tell whether each sample is one number per channel: FFmpeg joins these to pieces."""
        is_sound = b"soun" in self.handlers and b"vide" not in self.handlers
        ticks = [table[4:8] for table in self.durations]
        return (
            is_sound and [len(table) for table in self.durations] == [8] and ticks == [b"\0\0\0\1"]
        )

    def _num_pieces(self) -> int:
        """Return in how many pieces plain sound is read: those of all chunks."""
        num_pieces = 0
        for table in self.runs_of_chunks:
            runs = np.frombuffer(table[: len(table) // 12 * 12], ">u4").reshape(-1, 3)
            first_chunk, num_samples = runs[:, 0].astype(np.float64), runs[:, 1]
            num_chunks = np.diff(first_chunk, append=self.num_chunks + 1).clip(min=0)
            num_pieces += int(num_chunks @ np.ceil(num_samples / _SAMPLES_AT_ONCE))
        return num_pieces


class Mp4(NamedTuple):
    """What the header of an MP4 or MOV states."""

    movie: Track
    """What stands outside the tracks, such as the header of the film, and tables of fragments."""
    tracks: list[Track]
    """The tracks of the header."""
    is_in_one_header: bool
    """Whether there is one header, and no fragments with headers of their own."""
    num_bytes: int
    """Where the boxes end that hold an index or frames. The file is cut where it ends before."""


def read_mp4(data: EncodedMedia) -> Mp4:
    """Look at all boxes of an MP4 or MOV.

    Raises:
        DecodeError: Its tables state more than FFmpeg should be given: more than `MAX_SAMPLES`
            frames and pieces of sound. It has more than `MAX_BOXES` boxes, or its header is
            compressed.
    """
    walk = _Walk(data)
    movie = Track()
    walk.visit(Box(b"", 0, len(data)), 0, movie)
    walk.add(movie)
    is_in_one_header = walk.num_headers == 1 and (b"moov", b"mvex") not in movie.boxes
    return Mp4(movie, walk.tracks, is_in_one_header, walk.num_bytes)


class _Walk:
    """One look at all boxes of a file."""

    def __init__(self, data: EncodedMedia) -> None:
        self._data = data
        self._num_boxes = 0
        self._num_entries = 0
        self.tracks: list[Track] = []
        self.num_headers = 0
        self.num_bytes = 0

    def visit(self, parent: Box, depth: int, track: Track) -> None:
        """Look at the boxes that FFmpeg finds in a box, each cut to it."""
        for name, start, stop in boxes(self._data, parent.start, parent.stop):
            self._num_boxes += 1
            if self._num_boxes > MAX_BOXES:
                raise DecodeError(f"has more than {MAX_BOXES:,} boxes")
            box = Box(name, start, min(stop, parent.stop))
            if depth == 0 and name in _HOLDING:
                self._visit_holding(box, stop)
            track.keep(parent.name, box)
            if name == b"cmov":
                raise DecodeError("its header is compressed: rewrite it with ffmpeg -c copy")
            if name == b"trak" and depth < MAX_DEPTH:
                own = Track()
                self.visit(box, depth + 1, own)
                self.add(own)
                if depth == 1 and parent.name == b"moov":
                    self.tracks.append(own)
            elif name in _CONTAINERS and depth < MAX_DEPTH:
                # `meta` has a version in front of its boxes, in MP4 and not in MOV.
                has_version = name == b"meta" and self._data[start : start + 4] == bytes(4)
                self.visit(box._replace(start=start + 4 * has_version), depth + 1, track)
            elif name in _COUNTED:
                self._count(box, track)

    def _visit_holding(self, box: Box, stated_stop: int) -> None:
        self.num_bytes = max(self.num_bytes, stated_stop)
        self.num_headers += box.name != b"mdat"
        if box.name == b"moov" and isinstance(self._data, LazyBytes):
            self._data.expect([(box.start, box.stop)])  # all of it comes with one read

    def _count(self, box: Box, track: Track) -> None:
        """Note what a table states. Each starts with a version and flags."""
        name, start, end = box
        head = self._data[start : min(start + 12, end)]
        if len(head) < 8:
            return
        stated = int.from_bytes(head[4:8], "big")
        if name in (b"stsz", b"stz2"):
            track.num_samples += int.from_bytes(head[8:12], "big")
        elif name == b"trun":
            track.num_samples += stated
        elif name == b"elst":
            track.num_edits += min(stated, (end - start) // 12)
        elif name in (b"stco", b"co64"):
            track.num_chunks += stated
        elif name == b"hdlr":
            track.handlers.add(head[8:12])
        else:
            size = {b"stts": 8, b"stsc": 12}[name] * stated
            table = self._data[start + 8 : min(start + 8 + size, end)]
            (track.durations if name == b"stts" else track.runs_of_chunks).append(table)

    def add(self, track: Track) -> None:
        """Count what a track states. Refuse the file where it is too much."""
        self._num_entries += track.num_entries
        if self._num_entries > MAX_SAMPLES:
            raise DecodeError(
                f"its tables state {self._num_entries:,} samples, more than {MAX_SAMPLES:,}"
            )


# -- where the frames of a video lie ---------------------------------------------------------------
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
_FASTEST_CLOCK = (1 << 31) - 1
_LARGEST_FILE = 1 << 62
_FULL_RATE = b"\0\1\0\0"
_EMPTY = -1

Tables = dict[bytes, bytes]


class Mp4Table(NamedTuple):
    """What the header of an MP4 says about the frames of a track."""

    timeline: Timeline
    """The times of all frames."""
    offsets: IntArray
    """Where each packet starts in the file."""
    sizes: IntArray
    """Bytes of each packet."""
    orientation: Orientation
    """How frames are turned to be shown."""


def video_tables(data: EncodedMedia) -> dict[int, Mp4Table]:
    """Return the tables of an MP4's tracks of video, by the number of the track.

    Returns:
        Only tracks whose header says all, and only files whose frames are all in one header. Of
        other formats nothing.

    Raises:
        DecodeError: The file is shorter than its header says, or states too much for `read_mp4`.
    """
    tables: dict[int, Mp4Table] = {}
    if container_format(data) != "mov":
        return tables
    mp4 = read_mp4(data)  # what is read here takes memory for each frame and box that it states
    if not mp4.is_in_one_header:
        return tables
    clock = _number_behind_times(mp4.movie.content(data, b"moov", b"mvhd"))
    for track in mp4.tracks:
        with suppress(_UnusualError):
            number, table = _video_table(data, track, clock)
            tables[number] = table
    return tables


class _UnusualError(Exception):
    """Something of a track is not as in most files: FFmpeg has to find its frames."""


def _require(is_usual: object) -> None:
    if not is_usual:
        raise _UnusualError


def _video_table(data: EncodedMedia, track: Track, movie_clock: int) -> tuple[int, Mp4Table]:
    """Return the number and the table of a track of video."""
    header = track.content(data, b"trak", b"tkhd")
    handler = track.content(data, b"mdia", b"hdlr")
    clock = _number_behind_times(track.content(data, b"mdia", b"mdhd"))
    _require(header and handler[8:12] == b"vide")
    _require(movie_clock and 0 < clock <= _FASTEST_CLOCK)
    names = [name for parent, name in track.boxes if parent == b"stbl"]
    _require(all(len(track.boxes[b"stbl", name]) == 1 for name in names))
    tables = {name: track.content(data, b"stbl", name) for name in names}
    sizes = _sizes(tables, len(data))
    timeline, offsets = _timeline(tables, clock, len(sizes)), _offsets(tables, sizes)
    if (b"trak", b"edts") in track.boxes:
        edits = track.content(data, b"edts", b"elst")
        _require(_shows_all(edits, timeline.pts, Fraction(clock, movie_clock)))
    missing = int((offsets + sizes).max()) - len(data)
    if missing > 0:
        raise DecodeError(f"truncated: {missing:,} bytes are missing at least")
    table = Mp4Table(
        without_undecodable_start(timeline), offsets, sizes, _track_orientation(header)
    )
    return _number_behind_times(header), table


def _timeline(tables: Tables, clock: int, num_samples: int) -> Timeline:
    """Return the times of all samples, where one codec is known and marks its key frames."""
    entries = tables.get(b"stsd", b"")
    _require(entries[4:8] == b"\0\0\0\1" and entries[12:16] in _CODECS)
    dts, pts, last_duration = _times(tables, num_samples)
    is_key = np.ones(num_samples, bool)
    if b"stss" in tables:
        keys = _table(tables[b"stss"], 1)[:, 0]
        _require(len(keys) and keys.min() >= 1 and keys.max() <= num_samples)
        is_key[:] = False
        is_key[keys - 1] = True
    is_shown = np.ones(num_samples, bool)
    return Timeline(pts, dts, is_key, is_shown, Fraction(1, clock), last_duration)


def _table(content: bytes, num_columns: int, dtype: str = ">u4") -> IntArray:
    """Return a table of numbers after version, flags and a count. It may not be cut."""
    count = int.from_bytes(content[4:8], "big") * num_columns
    _require(len(content) >= 8 + np.dtype(dtype).itemsize * count)
    numbers = np.frombuffer(content, dtype, count, 8)
    return numbers.astype(np.int64).reshape(-1, num_columns)


def _times(tables: Tables, num_samples: int) -> tuple[IntArray, IntArray, int]:
    """Return dts and pts of all samples, and the duration of the last one.

    A run may state any number of samples, so it is compared before it takes memory.
    """
    durations = _table(tables.get(b"stts", b""), 2)
    _require(durations[:, 0].sum() == num_samples and durations[:, 1].max() < 1 << 31)
    delta = np.repeat(durations[:, 1], durations[:, 0])
    dts = np.cumsum(delta) - delta
    if b"ctts" not in tables:
        return dts, dts, int(delta[-1])
    runs = _table(tables[b"ctts"], 2, ">i4")
    _require((runs[:, 0] >= 0).all() and runs[:, 0].sum() == num_samples)
    _require(np.abs(runs[:, 1]).max() < _LARGEST_OFFSET)
    shift = np.repeat(runs[:, 1], runs[:, 0])
    return dts, dts + shift, int(delta[-1])


def _sizes(tables: Tables, file_size: int) -> IntArray:
    """Return the bytes of all samples: of each one, or one size before their number."""
    content = tables.get(b"stsz", b"")
    size, count = (int.from_bytes(content[start : start + 4], "big") for start in (4, 8))
    if size:
        _require(0 < count * size <= file_size)
        return np.full(count, size)
    sizes = _table(content[4:], 1)[:, 0]
    _require(len(sizes) and sizes.min() > 0)
    return sizes


def _offsets(tables: Tables, sizes: IntArray) -> IntArray:
    """Return where all samples start in the file."""
    name, dtype = (b"stco", ">u4") if b"stco" in tables else (b"co64", ">i8")
    starts = _table(tables.get(name, b""), 1, dtype)[:, 0]
    _require(len(starts) and starts.min() >= 0 and starts.max() < _LARGEST_FILE)
    first_chunk, samples_per_chunk, entry = _table(tables.get(b"stsc", b""), 3).T
    _require(len(entry) and first_chunk[0] == 1 and (entry == 1).all())
    num_chunks = np.diff(first_chunk, append=len(starts) + 1)
    _require((num_chunks[:-1] > 0).all() and num_chunks[-1] >= 0)
    per_chunk = np.repeat(samples_per_chunk, num_chunks)
    _require(per_chunk.sum() == len(sizes))
    before = np.cumsum(sizes) - sizes  # as if there were one chunk
    chunk = np.repeat(np.arange(len(starts)), per_chunk)
    first_sample = np.minimum(np.cumsum(per_chunk) - per_chunk, len(sizes) - 1)
    offsets: IntArray = starts[chunk] + before - before[first_sample][chunk]
    return offsets


def _shows_all(edits: bytes, pts: IntArray, ratio: Fraction) -> bool:
    """Tell whether the edit list shows every sample once, at its own speed.

    Args:
        edits: The list.
        pts: When samples are shown, without the edit list.
        ratio: Ticks of the track in a tick of the movie, in which edits are measured.
    """
    row = struct.Struct(">Qq4s" if edits[:1] == b"\1" else ">Ii4s")
    count = int.from_bytes(edits[4:8], "big")
    if not 1 <= count <= 2 or len(edits) < 8 + count * row.size:
        return False
    rows = [row.unpack_from(edits, 8 + number * row.size) for number in range(count)]
    duration, start, _ = rows[-1]
    # An empty edit before it only delays it.
    is_one = start != _EMPTY and all(earlier == _EMPTY for _, earlier, _ in rows[:-1])
    end = start + duration * ratio if duration else math.inf
    is_at_its_speed = all(rate == _FULL_RATE for *_, rate in rows)
    return is_one and is_at_its_speed and bool(pts.min() >= start and pts.max() < end)
