"""The packets that chosen frames need, as a small video file of their own. Nothing is decoded.

Place in the flow: `encoded.py` sends such a clip to the device instead of frames. It holds the
groups of pictures that `frames.py` would decode, up to the last chosen frame of each.

A clip is a Matroska file, which can hold every codec. Its frames are 40 ms apart, whatever their
times were, so that every decoder counts them alike. Worked example: frames 1 and 8 are chosen, in
groups that start at frames 0 and 6:

    frames of the file    0  1  6  7  8
    frames of the clip    0  1  2  3  4      `numbers` are (1, 4)
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np

from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.source import EncodedMedia
from mmstream.decoding.video.file import VideoFile
from mmstream.decoding.video.frames import (
    PacketReader,
    UnseekableError,
    is_leading,
    needs_first_packet,
    runs,
)
from mmstream.errors import DecodeError

__all__ = ["FRAME_TIME", "Clip", "UncopiedError", "cut_clip"]

FRAME_TIME = Fraction(1, 25)
"""Seconds from frame to frame of a clip: whole milliseconds, in which Matroska counts."""
_SAME_BYTES = {"fflags": "+bitexact"}


class UncopiedError(Exception):
    """The packets of a file cannot be copied to a clip. The reason is a few words."""


class Clip(NamedTuple):
    """A small video file, and where the chosen frames are in it."""

    data: bytes
    """A Matroska file with one video."""
    numbers: tuple[int, ...]
    """The number of each chosen frame, from 0, in the order in which the clip shows its frames."""


def cut_clip(
    data: EncodedMedia, file: VideoFile, packets: Sequence[int], deadline: Deadline
) -> Clip:
    """Copy the packets that chosen frames need.

    Args:
        data: The file.
        file: What is known of it.
        packets: The packet of each chosen frame. One may stand here repeatedly.
        deadline: When to stop.

    Raises:
        UncopiedError: The packets cannot be copied.
        DecodeError: The file is damaged.
        TimeoutError: It takes too long.
        StorageError: Reading a part of the file failed.
    """
    for may_seek in (True, False):
        try:
            return _cut(data, file, packets, deadline, may_seek)
        except UnseekableError:
            continue
    raise DecodeError("its packets are others when they are read again")


def _cut(
    data: EncodedMedia,
    file: VideoFile,
    packets: Sequence[int],
    deadline: Deadline,
    may_seek: bool,
) -> Clip:
    timeline = file.timeline
    parts = [(start, end) for start, end, _ in runs(timeline, sorted(set(packets)))]
    copied = [
        number
        for start, end in parts
        for number in range(start, end)
        if not is_leading(timeline, start, number)
    ]
    shown = np.argsort(timeline.pts[copied], kind="stable")
    ranks = np.empty(len(copied), np.int64)
    ranks[shown] = np.arange(len(copied))
    rank_of = dict(zip(copied, ranks.tolist(), strict=True))
    with file.opened(data, deadline, may_seek) as (reader, stream):
        if needs_first_packet(stream.codec_context):
            raise UncopiedError("H.264 with colours at full resolution")
        reader.expect(parts)
        clip = _written(reader, stream, file, parts, rank_of, deadline)
    return Clip(clip, tuple(rank_of[packet] for packet in packets))


def _written(
    reader: PacketReader,
    template: Any,
    file: VideoFile,
    parts: Sequence[tuple[int, int]],
    rank_of: dict[int, int],
    deadline: Deadline,
) -> bytes:
    """Return a Matroska file of packets.

    Args:
        reader: Where the packets come from.
        template: PyAV's stream of the file.
        file: What is known of the file.
        parts: The runs of packets.
        rank_of: Which packets are copied, in the order of the file, and which frame of the clip
            each becomes.
        deadline: When to stop.
    """
    # No frame is shown before its packet was decoded.
    delay = max(position - rank for position, rank in enumerate(rank_of.values()))
    target = io.BytesIO()
    position = 0
    try:
        with av.open(target, "w", format="matroska", options=_SAME_BYTES) as out:
            # "opaque" copies what FFmpeg can decode but not encode.
            stream: Any = out.add_stream_from_template(template, opaque=True)
            for start, end in parts:
                for number, packet in reader.packets(start, end):
                    deadline.check()
                    if number not in rank_of:
                        continue
                    packet.stream = stream
                    packet.time_base = FRAME_TIME
                    packet.pts, packet.dts = rank_of[number] + delay, position
                    packet.duration = 1
                    packet.is_keyframe = bool(file.timeline.is_key[number])
                    out.mux(packet)
                    position += 1
    except (av.FFmpegError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise UncopiedError(f"its packets cannot be copied ({reason})") from None
    if position < len(rank_of):
        raise UncopiedError("some of its packets are missing")
    return target.getvalue()
