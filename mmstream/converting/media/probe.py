"""Facts about audio and video files: duration, size, rate. Nothing is decoded for them.

    check -> PROBE

WAV and FLAC state them in their first bytes. For all other files FFmpeg reads the headers.
`decoding.ffmpeg.open` opens the file, as safely as in training.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from mmstream.converting.draft import RowError
from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.image.limits import MAX_PIXELS
from mmstream.errors import DecodeError

if TYPE_CHECKING:
    from av.container import InputContainer

    from mmstream.decoding.ffmpeg.open import MediaKind

__all__ = ["Facts", "probe"]

Facts: TypeAlias = dict[str, int | float | str]
"""What is known about a file, by the names of `Media.facts`."""

DECODE_TIMEOUT_S = 300.0
"""Seconds that reading or decoding a file may take."""
MAX_CHUNKS = 1000
"""Most chunks or boxes of a file that are looked at."""

_PCM = 1
_FLOAT = 3
_EXTENSIBLE = 0xFFFE
_BOX_HEADER_BYTES = 8


def probe(data: bytes, kind: MediaKind, extension: str, decode: bool) -> Facts:
    """Return the facts about an audio or video file.

    Args:
        data: The file.
        kind: "audio" or "video".
        extension: Its type by its first bytes.
        decode: Also decode all of it once.

    Returns:
        Those that are known of ``duration_s``, ``codec``, and of ``sample_rate``, ``num_channels``
        for audio, ``width``, ``height``, ``fps``, ``num_frames``, ``rotation`` for video. Width and
        height are as the video is shown; ``rotation`` says by how many degrees its frames are
        turned clockwise for that.

    Raises:
        RowError: It cannot be opened or decoded, has no stream of its kind, or ends too early.
    """
    if not decode:
        facts = {"wav": _wav, "flac": _flac}.get(extension, _unknown)(data)
        if facts:
            return facts
    boxes = list(_boxes(data, 0, len(data))) if extension in ("mp4", "mov", "m4a") else []
    for name, start, stop in boxes:
        if name in (b"moov", b"mdat") and stop > len(data):
            raise RowError(f"truncated: {stop - len(data):,} bytes are missing at least")
        if name == b"moov":
            return _read(data, kind, decode, _mp4_rotation(data, start, stop))
    return _read(data, kind, decode, 0)


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
    if len(data) < 42 or data[4] & 0x7F != 0:
        return {}
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


def _boxes(data: bytes, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (name, start of the content, end) of the boxes of an MP4. The end may lie beyond."""
    for _ in range(MAX_CHUNKS):
        if start + _BOX_HEADER_BYTES > stop:
            return
        size, header = int.from_bytes(data[start : start + 4], "big"), _BOX_HEADER_BYTES
        if size == 1:
            size, header = int.from_bytes(data[start + 8 : start + 16], "big"), 16
        elif size == 0:
            size = stop - start
        if size < header:
            return
        yield data[start + 4 : start + 8], start + header, start + size
        start += size


def _mp4_rotation(data: bytes, start: int, stop: int) -> int:
    """Return the rotation of the first track that has one: degrees clockwise, 0, 90, 180 or 270.

    The track's header holds a matrix in 16.16 fixed point (ISO 14496-12, 8.3.2). Its first two
    numbers are the cosine and the sine.
    """
    for name, track_start, track_stop in _boxes(data, start, stop):
        if name != b"trak":
            continue
        for inner, header_start, _ in _boxes(data, track_start, min(track_stop, stop)):
            if inner != b"tkhd" or header_start >= len(data):
                continue
            # Times and duration take 4 bytes each in version 0, 8 in version 1.
            matrix = header_start + (52 if data[header_start] == 1 else 40)
            if matrix + 8 > len(data):
                continue
            cosine, sine = struct.unpack_from(">ii", data, matrix)
            rotation = round(math.degrees(math.atan2(sine, cosine)) / 90) * 90 % 360
            if rotation:
                return rotation
    return 0


def _read(data: bytes, kind: MediaKind, decode: bool, rotation: int) -> Facts:
    """Read the facts with FFmpeg."""
    from mmstream.decoding.ffmpeg.open import open_media  # loads PyAV

    deadline = Deadline.start(DECODE_TIMEOUT_S)
    try:
        with open_media(data, deadline, MAX_PIXELS) as container:
            facts = _facts(container, kind, rotation)
            if decode:
                _decode(container, kind, deadline)
    except DecodeError as error:
        raise RowError(str(error)) from None
    return facts


def _facts(container: InputContainer, kind: MediaKind, rotation: int) -> Facts:
    from mmstream.decoding.ffmpeg.open import is_cover, media_stream

    if kind == "audio" and not all(map(is_cover, container.streams.video)):
        raise RowError("not an audio but a video")
    stream = media_stream(container, kind)
    context = stream.codec_context
    facts: Facts = {"codec": context.codec.canonical_name}
    if stream.duration and stream.time_base:
        facts["duration_s"] = round(float(stream.duration * stream.time_base), 6)
    elif container.duration:
        facts["duration_s"] = round(container.duration / 1_000_000, 6)
    if facts.get("duration_s", 1) < 0:  # type: ignore[operator]
        del facts["duration_s"]
    if kind == "audio":
        return {**facts, "sample_rate": context.sample_rate, "num_channels": context.channels}
    return {**facts, **_video_facts(stream, rotation)}


def _video_facts(stream: Any, rotation: int) -> Facts:
    context = stream.codec_context
    facts: Facts = {}
    width, height = context.width, context.height
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise RowError(f"frames of {width}x{height}")
    facts["width"], facts["height"] = (height, width) if rotation in (90, 270) else (width, height)
    if stream.average_rate:
        facts["fps"] = round(float(stream.average_rate), 6)
    if stream.frames:
        facts["num_frames"] = stream.frames
    if rotation:
        facts["rotation"] = rotation
    return facts


def _decode(container: InputContainer, kind: MediaKind, deadline: Deadline) -> None:
    """Decode the first stream of a kind, and keep nothing."""
    from mmstream.decoding.ffmpeg.open import media_stream

    stream = media_stream(container, kind)
    stream.codec_context.options = {**stream.codec_context.options, "err_detect": "explode"}
    num_frames = 0
    for packet in container.demux(stream):
        num_frames += len(packet.decode())
        deadline.check()
    if not num_frames:
        raise RowError("no frame in it can be decoded")
