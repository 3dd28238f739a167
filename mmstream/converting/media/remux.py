"""Videos of other containers as MP4: the same packets, and a table of them.

    load -> REMUX -> the bytes that are stored

The header of an MP4 says where each frame lies and when it is shown. So training reads a few frames
of a large file without the rest. Of an MKV or an MPEG-TS it must read everything. Nothing is
re-encoded.
"""

from __future__ import annotations

import io
import math
from typing import Any

import av
import numpy as np
from crc32c import crc32c

from mmstream.errors import DecodeError, TimeoutError
from mmstream.media.audio import open_container
from mmstream.media.facts import MAX_PIXELS
from mmstream.media.ffmpeg import NoStreamError, media_stream, open_media
from mmstream.media.limits import Deadline
from mmstream.media.video import VideoFile, read_video_file

_SAME_TIME_S = 1e-6
_SAME_RATE = 0.01
"""Matroska states a rate such as 30. That of an MP4 is of the times, which are whole milliseconds
there: 30.01 for three seconds."""
_SAME_START_S = 2e-3
"""Milliseconds again: when the sound begins."""
_SAME_BYTES = {"fflags": "+bitexact"}
"""No version of FFmpeg and no time of day in the file."""


def remuxed(data: bytes, deadline: Deadline) -> bytes | None:
    """Return a video as an MP4 of the same packets.

    The best video and all sound are taken along. Subtitles and other streams are left out.

    Args:
        data: The video.
        deadline: When to stop.

    Returns:
        None where it has a table of its packets already, as nearly every MP4 has. Or an MP4 cannot
        hold it: frames, their times or the sound would be others. Or it has several tracks of
        sound, of which one alone could be compared.

    Raises:
        DecodeError: It is not a whole video.
        TimeoutError: It takes too long.
    """
    file = read_video_file(data, deadline, MAX_PIXELS)
    if file.table is not None:
        return None
    try:
        copy = _copied(data, file.fps, deadline)
        if copy is None:
            return None
        is_same = _has_same_frames(file, read_video_file(copy, deadline, MAX_PIXELS))
        return copy if is_same and _has_same_sound(data, copy, deadline) else None
    except TimeoutError:
        raise
    except (av.FFmpegError, ValueError, DecodeError):
        return None


def _copied(data: bytes, fps: float, deadline: Deadline) -> bytes | None:
    """Return an MP4 of the same packets: the same bytes each time. None: several tracks of sound.

    Raises:
        FFmpegError: An MP4 cannot hold them.
    """
    target = io.BytesIO()
    with open_media(data, deadline, MAX_PIXELS) as source:
        video = media_stream(source, "video")
        streams = [video, *source.streams.audio]
        if len(streams) > 2:
            return None
        with av.open(target, "w", format="mp4", options=_SAME_BYTES) as out:
            copies: dict[int, Any] = {}
            for stream in streams:
                copies[stream.index] = out.add_stream_from_template(stream, opaque=True)
            for packet in source.demux(*streams):
                deadline.check()
                if packet.size == 0:
                    continue
                if packet.stream_index == video.index and not packet.duration:
                    packet.duration = round(1 / (fps * packet.time_base))
                packet.stream = copies[packet.stream_index]
                out.mux(packet)
    return target.getvalue()


def _has_same_frames(file: VideoFile, copy: VideoFile) -> bool:
    """Tell whether a copy has a table, and the same frames at the same times."""
    times, copied_times = file.timeline.times_s, copy.timeline.times_s
    return (
        copy.table is not None
        and (copy.stored, copy.orientation, copy.codec)
        == (file.stored, file.orientation, file.codec)
        and len(copied_times) == len(times)
        and np.allclose(copied_times, times, rtol=0, atol=_SAME_TIME_S)
        and math.isclose(copy.fps, file.fps, rel_tol=_SAME_RATE)
    )


def _has_same_sound(data: bytes, copy: bytes, deadline: Deadline) -> bool:
    """Tell whether a copy has the same samples, from the same time on. All are decoded."""
    try:
        start_s, *sound = _sound(data, deadline)
    except NoStreamError:
        return True
    copied_start_s, *copied_sound = _sound(copy, deadline)
    return copied_sound == sound and abs(copied_start_s - start_s) < _SAME_START_S


def _sound(data: bytes, deadline: Deadline) -> tuple[float, int, int, int, int]:
    """Return when a sound starts, its rate, its channels, its samples, and a checksum of these."""
    with open_container(data, deadline) as source:
        checksum = 0
        for block in source.blocks(0, source.num_samples):
            checksum = crc32c(np.ascontiguousarray(block), checksum)
        return (
            *(source.start_s, source.sample_rate, source.num_channels),
            *(source.num_samples, checksum),
        )
