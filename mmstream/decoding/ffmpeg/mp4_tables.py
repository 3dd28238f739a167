"""The numbers that an MP4 states, checked before FFmpeg believes them.

    open -> MP4_TABLES -> FFmpeg

FFmpeg builds an entry of 24 bytes in memory for each sample (frame) that the tables of an MP4
state. Some tables state a number that no bytes stand behind: a file of 650 bytes can state 80
million frames of one size each, and FFmpeg makes 2.8 GB of them in one call that nothing can
interrupt. So the tables are read here first. All boxes are looked at that FFmpeg looks into,
wherever they stand.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mmstream.errors import DecodeError
from mmstream.lazy_bytes import LazyBytes
from mmstream.media_types import EncodedMedia, read_range


class Turn(NamedTuple):
    """What a player does with each stored frame."""

    rotation: int
    """Degrees clockwise: 0, 90, 180 or 270."""
    is_flipped: bool = False
    """Whether the frame is turned upside down before that, as in a mirror."""


UPRIGHT = Turn(0)
"""Nothing is done."""


def turn_of(matrix: Sequence[int]) -> Turn:
    """Return what a matrix means (ISO 14496-12, section 6.2.2).

    Args:
        matrix: At least its first five numbers: ``x' = a x + c y`` and ``y' = b x + d y`` are
            stored as a, b, 0, c, d, in any fixed point.

    Examples:
        >>> turn_of([0, 1, 0, -1, 0])
        Turn(rotation=90, is_flipped=False)
        >>> turn_of([-1, 0, 0, 0, 1])  # left and right are exchanged
        Turn(rotation=180, is_flipped=True)
    """
    a, b, _, c, d = matrix[:5]
    rotation = round(math.degrees(math.atan2(b, a)) / 90) * 90 % 360
    return Turn(rotation, a * d - b * c < 0)


# -- boxes -----------------------------------------------------------------------------------------


class Box(NamedTuple):
    """A box of a file."""

    name: bytes
    start: int
    """Where its content starts."""
    stop: int
    """Where it ends, as it says: that may be behind the box that it lies in."""


def boxes(data: EncodedMedia, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a range, one after another, until one makes no sense."""
    while start + 8 <= stop:
        head = read_range(data, start, min(start + 16, stop))
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


def mp4_rotation(data: EncodedMedia, number: int) -> int:
    """Return by how many degrees clockwise a track is turned to be shown: 0, 90, 180 or 270."""
    for movie in boxes(data, 0, len(data)):
        if movie.name != b"moov":
            continue
        for track in boxes(data, movie.start, movie.stop):
            if track.name != b"trak":
                continue
            for header in boxes(data, track.start, track.stop):
                if header.name == b"tkhd":
                    content = read_range(data, header.start, min(header.stop, header.start + 64))
                    if track_id(content) == number:
                        return track_turn(content).rotation
    return 0


def track_id(header: bytes) -> int:
    """Return a track's number, by its header, a ``tkhd`` (section 8.3.2).

    The times before it have 4 bytes in version 0, and 8 in version 1.
    """
    position = 20 if header[:1] == b"\1" else 12
    return int.from_bytes(header[position : position + 4], "big")


def track_turn(header: bytes) -> Turn:
    """Return how the frames of a track are turned, by its header, which holds a matrix.

    A header that ends before it turns nothing.
    """
    matrix = header[52 if header[:1] == b"\1" else 40 :][:20]
    return turn_of(struct.unpack(">5i", matrix)) if len(matrix) == 20 else UPRIGHT


# -- their numbers ---------------------------------------------------------------------------------

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
_SAMPLES_AT_ONCE = 1024
"""FFmpeg makes one entry for so many samples of plain sound."""


@dataclass
class _Track:
    """What the tables of one track state."""

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


def check_mp4(data: EncodedMedia) -> None:
    """Refuse an MP4 or MOV whose tables state more than FFmpeg should be given.

    Raises:
        DecodeError: It states more than `MAX_SAMPLES` frames and pieces of sound, has more than
            `MAX_BOXES` boxes, or its header is compressed.
    """
    _Walk(data).check()


class _Walk:
    """One look at all boxes of a file."""

    def __init__(self, data: EncodedMedia) -> None:
        self._data = data
        self._num_boxes = 0
        self._num_entries = 0

    def check(self) -> None:
        outside = _Track()  # tables outside a track, and those of fragments
        self._visit(0, len(self._data), 0, outside)
        self._add(outside)

    def _visit(self, start: int, stop: int, depth: int, track: _Track) -> None:
        for name, content, end in self._boxes(start, stop):
            if name == b"cmov":
                raise DecodeError("its header is compressed: write it anew with ffmpeg -c copy")
            if name == b"moov" and depth == 0 and isinstance(self._data, LazyBytes):
                self._data.expect([(content, end)])  # all of it comes with one read
            if name == b"trak" and depth < MAX_DEPTH:
                own = _Track()
                self._visit(content, end, depth + 1, own)
                self._add(own)
            elif name in _CONTAINERS and depth < MAX_DEPTH:
                # `meta` has a version in front of its boxes, in MP4 and not in MOV.
                skipped = (
                    4 if name == b"meta" and self._read(content, content + 4) == bytes(4) else 0
                )
                self._visit(content + skipped, end, depth + 1, track)
            elif name in _COUNTED:
                self._count(name, content, end, track)

    def _boxes(self, start: int, stop: int) -> Iterator[Box]:
        """Yield the boxes that FFmpeg finds in a range, each cut to the range."""
        for box in boxes(self._data, start, stop):
            self._num_boxes += 1
            if self._num_boxes > MAX_BOXES:
                raise DecodeError(f"has more than {MAX_BOXES:,} boxes")
            yield Box(box.name, box.start, min(box.stop, stop))

    def _count(self, name: bytes, start: int, end: int, track: _Track) -> None:
        """Note what a table states. Each starts with a version and flags."""
        head = self._read(start, min(start + 12, end))
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
            table = self._read(start + 8, min(start + 8 + size, end))
            (track.durations if name == b"stts" else track.runs_of_chunks).append(table)

    def _add(self, track: _Track) -> None:
        self._num_entries += track.num_entries
        if self._num_entries > MAX_SAMPLES:
            raise DecodeError(
                f"its tables state {self._num_entries:,} samples, more than {MAX_SAMPLES:,}"
            )

    def _read(self, start: int, stop: int) -> bytes:
        return read_range(self._data, start, stop)
