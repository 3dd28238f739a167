"""The boxes of an MP4 or MOV (ISO 14496-12, section 4.2), read without FFmpeg."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from mmstream.decoding.ffmpeg.display_matrix import UPRIGHT, Turn, turn_of
from mmstream.media_types import EncodedMedia, read_range


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
