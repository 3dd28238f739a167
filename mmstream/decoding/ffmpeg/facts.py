"""Facts about audio and video files: duration, size, rate. Nothing is decoded for them.

Place in the flow: the converter notes them beside its shards, and `dataset.statistics` measures
them.

WAV and FLAC state them in their first bytes. For all other files FFmpeg reads the headers. Files
of containers without an index, such as MKV, are read through to count their frames.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, TypeAlias

from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.mp4_boxes import mp4_rotation
from mmstream.decoding.ffmpeg.sniff import container_format
from mmstream.decoding.image.limits import MAX_PIXELS
from mmstream.errors import DecodeError

if TYPE_CHECKING:
    from av.container import InputContainer

    from mmstream.decoding.ffmpeg.open import MediaKind

__all__ = ["Facts", "media_facts"]

Facts: TypeAlias = dict[str, int | float | str]
"""What is known about a file, by name."""

MAX_CHUNKS = 1000
"""Most chunks of a file that are looked at."""
_UNCOUNTED = frozenset(("matroska", "avi", "mpegts", "mpeg", "flv", "asf", "mp3", "aac", "ogg"))
"""Formats whose headers tell no length, or one that nothing confirms: packets are counted."""

_PCM = 1
_FLOAT = 3
_EXTENSIBLE = 0xFFFE
_MAX_RATE = 0x7FFFFFFF


def media_facts(data: bytes, kind: MediaKind, deadline: Deadline, *, decode: bool = False) -> Facts:
    """Return the facts about an audio or video file.

    Args:
        data: The file.
        kind: "audio" or "video".
        deadline: When to stop.
        decode: Also decode all of it once.

    Returns:
        Those that are known of ``duration_s``, ``codec``, ``sample_rate`` and ``num_channels``, and
        of ``width``, ``height``, ``fps``, ``num_frames``, ``rotation`` for video. Width and height
        are as the video is shown; ``rotation`` says by how many degrees its frames are turned
        clockwise for that. A video without sound has no sample rate.

    Raises:
        DecodeError: It cannot be opened or decoded, has no stream of its kind, or ends too early.
        TimeoutError: It takes too long.
    """
    from mmstream.decoding.ffmpeg.open import media_stream, open_media  # loads PyAV

    name = container_format(data)
    if not decode and kind == "audio":
        stated = {"wav": _wav, "flac": _flac}.get(name or "", _unknown)(data)
        if stated:
            return stated
    with open_media(data, deadline, MAX_PIXELS) as container:
        facts = _facts(container, kind, data)
    if name in _UNCOUNTED or (kind == "video" and "num_frames" not in facts):
        with open_media(data, deadline, MAX_PIXELS) as container:
            facts |= _counted(container, media_stream(container, kind), kind, deadline)
    if decode:
        with open_media(data, deadline, MAX_PIXELS) as container:
            facts |= _decoded(container, media_stream(container, kind), kind, deadline)
    return facts


def _unknown(_data: bytes) -> Facts:
    return {}


def _wav(data: bytes) -> Facts:
    """Read the header of a WAV. Empty where FFmpeg must: the samples are compressed.

    The size of the samples is taken from the file where the header does not know it.
    """
    codec = sample_rate = num_channels = byte_rate = 0
    position = 12
    for _ in range(MAX_CHUNKS):
        if position + 8 > len(data):
            break
        name, size = data[position : position + 4], _u32(data, position + 4)
        if name == b"fmt " and size >= 16 and position + 24 <= len(data):
            codec, num_channels, sample_rate, byte_rate = struct.unpack_from(
                "<HHII", data, position + 8
            )
            if codec == _EXTENSIBLE and size >= 26:
                codec = int.from_bytes(data[position + 32 : position + 34], "little")
        if name == b"data":
            if codec not in (_PCM, _FLOAT) or not (byte_rate and sample_rate and num_channels):
                return {}
            if sample_rate > _MAX_RATE:
                return {}  # FFmpeg says what is wrong
            num_bytes = min(size, len(data) - position - 8)
            return {
                "duration_s": round(num_bytes / byte_rate, 6),
                "sample_rate": sample_rate,
                "num_channels": num_channels,
                "codec": "pcm" if codec == _PCM else "pcm_float",
            }
        position += 8 + size + size % 2
    return {}


def _flac(data: bytes) -> Facts:
    """Read the first block of a FLAC, which describes its samples (RFC 9639, section 8.2)."""
    if len(data) < 42 or not data.startswith(b"fLaC") or data[4] & 0x7F != 0:
        return {}  # a tag may come first
    bits = int.from_bytes(data[18:26], "big")
    sample_rate, num_channels, num_samples = bits >> 44, (bits >> 41 & 7) + 1, bits & (1 << 36) - 1
    if not (sample_rate and num_samples):
        return {}
    return {
        "duration_s": round(num_samples / sample_rate, 6),
        "sample_rate": sample_rate,
        "num_channels": num_channels,
        "codec": "flac",
    }


def _u32(data: bytes, position: int) -> int:
    return int.from_bytes(data[position : position + 4], "little")


def _facts(container: InputContainer, kind: MediaKind, data: bytes) -> Facts:
    from mmstream.decoding.ffmpeg.open import is_cover, media_stream

    if kind == "audio" and not all(map(is_cover, container.streams.video)):
        raise DecodeError("not an audio but a video")
    stream = media_stream(container, kind)
    facts: Facts = {"codec": stream.codec_context.codec.canonical_name}
    if stream.duration and stream.time_base:
        facts["duration_s"] = round(float(stream.duration * stream.time_base), 6)
    elif container.duration:
        facts["duration_s"] = round(container.duration / 1_000_000, 6)
    if facts.get("duration_s", 1) < 0:  # type: ignore[operator]
        del facts["duration_s"]
    if kind == "video":
        is_mp4 = container_format(data) == "mov"
        facts |= _video_facts(stream, mp4_rotation(data, stream.id) if is_mp4 else 0)
    return {**facts, **_sound_facts(container)}


def _sound_facts(container: InputContainer) -> Facts:
    """Return what is known of the track with sound that is decoded."""
    from mmstream.decoding.ffmpeg.open import media_stream

    try:
        context = media_stream(container, "audio").codec_context
    except DecodeError:
        return {}
    if context.sample_rate > 0 and context.channels > 0:
        return {"sample_rate": context.sample_rate, "num_channels": context.channels}
    return {}


def _video_facts(stream: Any, rotation: int) -> Facts:
    context = stream.codec_context
    facts: Facts = {}
    width, height = context.width, context.height
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise DecodeError(f"frames of {width}x{height}")
    facts["width"], facts["height"] = (height, width) if rotation in (90, 270) else (width, height)
    if stream.average_rate:
        facts["fps"] = round(float(stream.average_rate), 6)
    if stream.frames:
        num_hidden = sum(entry.is_discard for entry in stream.index_entries)  # by an edit list
        facts["num_frames"] = stream.frames - num_hidden
    if rotation:
        facts["rotation"] = rotation
    return facts


def _counted(container: InputContainer, stream: Any, kind: MediaKind, deadline: Deadline) -> Facts:
    """Count the packets of a stream, where no header tells what there is. Nothing is decoded."""
    starts, ends, num_packets = [], [], 0
    for packet in container.demux(stream):
        deadline.check()
        if packet.size and not packet.is_discard:
            num_packets += 1
            if packet.pts is not None:
                starts.append(packet.pts)
                ends.append(packet.pts + (packet.duration or 0))
    facts: Facts = {"num_frames": num_packets} if kind == "video" else {}
    if not starts or not stream.time_base:
        return facts
    first, last = min(starts), max(starts)
    ticks: float = max(ends) - first
    mean = (last - first) / max(1, len(starts) - 1)
    is_odd = kind == "audio" and ticks > last - first + 10 * mean > 0  # a wrong last duration
    if max(ends) == last or is_odd:
        ticks = last - first + mean
    seconds = ticks * float(stream.time_base)
    if seconds > 0:
        facts["duration_s"] = round(seconds, 6)
        if kind == "video":
            facts["fps"] = round(_fps(stream, num_packets / seconds), 6)
    return facts


def _fps(stream: Any, counted: float) -> float:
    """Return the average rate that a file states, unless its frames contradict."""
    stated = float(stream.average_rate or 0)
    return stated if 0.98 < stated / counted < 1.02 else counted


def _decoded(container: InputContainer, stream: Any, kind: MediaKind, deadline: Deadline) -> Facts:
    """Decode a stream, keep nothing, and return what was counted."""
    stream.codec_context.options = {**stream.codec_context.options, "err_detect": "explode"}
    num_frames = num_samples = sample_rate = 0
    for packet in container.demux(stream):
        for frame in packet.decode():
            num_frames += 1
            if kind == "audio":
                num_samples, sample_rate = num_samples + frame.samples, frame.sample_rate
        deadline.check()
    if not num_frames:
        raise DecodeError("no frame in it can be decoded")
    if kind == "video":
        return {"num_frames": num_frames}
    return {"duration_s": round(num_samples / sample_rate, 6)} if sample_rate > 0 else {}
