"""Some frames of a video as a file of their own: the same packets. Nothing is encoded anew.

    load -> CUT -> check

One file may hold the episodes of hours. Each sample gets the packets of its frames, and of a large
file no more than the header and these packets are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import av
import numpy as np

from mmstream.converting.draft import FrameSpan, RowError
from mmstream.converting.media.mp4 import mp4_of
from mmstream.converting.media.probe import DECODE_TIMEOUT_S
from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.source import EncodedMedia, read_range
from mmstream.decoding.image.limits import MAX_PIXELS
from mmstream.decoding.video.file import VideoFile, read_video_file
from mmstream.decoding.video.frames import PacketReader, UnseekableError
from mmstream.errors import DecodeError

__all__ = ["cut_frames"]

_SAME_TIME_S = 1e-4


def cut_frames(data: EncodedMedia, frames: FrameSpan, max_bytes: int) -> bytes:
    """Return a video of the given frames alone. The first one is shown at 0 s.

    A file that has no other frames is returned as it is. Sound is left out otherwise.

    Args:
        data: The whole video.
        frames: Which of them.
        max_bytes: The largest result.

    Raises:
        RowError: The video has other frames, another one is needed to decode them, or they are
            too large.
    """
    deadline = Deadline.start(DECODE_TIMEOUT_S)
    try:
        file = read_video_file(data, deadline, MAX_PIXELS)
        first = _first(file, frames)
        if frames.num_frames == file.timeline.num_frames:
            _require_fitting(len(data), max_bytes)
            return read_range(data, 0, len(data))
        packets = file.timeline.display_order[first : first + frames.num_frames]
        start, end = int(packets.min()), int(packets.max()) + 1
        shown = int(file.timeline.is_shown[start:end].sum())
        if not file.timeline.is_key[start] or packets[0] != start or shown != len(packets):
            raise RowError(
                f"its frame at {frames.start_s:g} s cannot be decoded without those before it; "
                "write the data set again, with a key frame where an episode begins"
            )
        start_pts = int(file.timeline.pts[packets[0]])
        copy = _copied(data, file, (start, end), start_pts, max_bytes, deadline)
        _require_same(file, first, read_video_file(copy, deadline, MAX_PIXELS), frames.num_frames)
    except (av.FFmpegError, ValueError, UnseekableError) as error:
        raise RowError(f"its packets cannot be copied ({type(error).__name__})") from None
    except DecodeError as error:
        raise RowError(str(error)) from None
    return copy


def _first(file: VideoFile, frames: FrameSpan) -> int:
    """Return the number of the first frame, after a look at the times of the first and the last."""
    times, half = file.timeline.times_s, 0.5 / frames.fps
    if frames.start_s is None:
        if len(times) != frames.num_frames:
            raise RowError(f"{len(times)} frames, and the episode has {frames.num_frames}")
        return 0
    first = int(np.searchsorted(times, frames.start_s - half))
    last = first + frames.num_frames - 1
    if last >= len(times):
        raise RowError(
            f"{len(times) - first} frames from {frames.start_s:g} s on, and the episode has "
            f"{frames.num_frames}"
        )
    expected = np.array([0, frames.num_frames - 1]) / frames.fps + frames.start_s
    if np.abs(times[[first, last]] - expected).max() > half:
        raise RowError(
            f"its frames from {frames.start_s:g} s on are not {frames.fps:g} per second, as those "
            "of the episode"
        )
    return first


def _copied(
    data: EncodedMedia,
    file: VideoFile,
    packets: tuple[int, int],
    start_pts: int,
    max_bytes: int,
    deadline: Deadline,
) -> bytes:
    """Return an MP4 of some packets. `start_pts` becomes 0."""
    timeline = file.timeline
    duration = round(1 / (file.fps * timeline.time_base))

    def moved(reader: PacketReader) -> Iterator[tuple[Any, Any]]:
        num_bytes = 0
        for number, packet in reader.packets(*packets):
            deadline.check()
            packet.time_base = timeline.time_base
            packet.pts = int(timeline.pts[number]) - start_pts
            packet.dts = int(timeline.dts[number]) - start_pts
            packet.duration = duration
            packet.is_keyframe = bool(timeline.is_key[number])
            num_bytes += packet.size
            _require_fitting(num_bytes, max_bytes)
            yield template, packet

    with file.opened(data, deadline, may_seek=True) as (reader, template):
        reader.expect([packets])
        copy = mp4_of([template], moved(reader), timeline.time_base)
    _require_fitting(len(copy), max_bytes)
    return copy


def _require_fitting(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise RowError(f"its frames are over {max_bytes:,} bytes, which are left of those of a row")


def _require_same(file: VideoFile, first: int, copy: VideoFile, num_frames: int) -> None:
    """Refuse a copy with other frames, or frames at other times."""
    times = file.timeline.times_s[first : first + num_frames]
    copied_times = copy.timeline.times_s
    if len(copied_times) != num_frames or not np.allclose(
        copied_times, times - times[0], rtol=0, atol=_SAME_TIME_S
    ):
        raise RowError("an MP4 cannot hold its frames as they are")
