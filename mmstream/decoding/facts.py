"""Facts about audio and video files: duration, size, rate. Nothing is decoded for them.

Place in the flow: the converter notes them beside its shards, and `dataset.statistics` measures
them.

WAV and FLAC state them in their first bytes, and MP3 in the headers of its frames. For all other
files FFmpeg reads the headers. Files of containers without an index, such as MKV, are read through
to count their frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from mmstream.decoding.audio.limits import check_rate, refuse_short
from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.mp4_tables import mp4_rotation
from mmstream.decoding.image.limits import MAX_PIXELS
from mmstream.errors import DecodeError
from mmstream.media_types import container_format

if TYPE_CHECKING:
    from av.container import InputContainer

    from mmstream.decoding.audio.source import AudioSource
    from mmstream.decoding.ffmpeg.open import MediaKind

Facts: TypeAlias = dict[str, int | float | str]
"""What is known about a file, by name."""

_UNCOUNTED = frozenset(("matroska", "avi", "mpegts", "mpeg", "flv", "asf", "mp3", "aac", "ogg"))
"""Formats whose headers tell no length, or one that nothing confirms: packets are counted."""

_MAX_DELAY_S = 0.5
"""Seconds that encoders put before the samples of an MP3 at most."""


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
    facts: Facts = {}
    if kind == "audio" and name == "mp3":
        facts = _mp3(data, deadline, decode)
    elif kind == "audio" and name in _READERS:
        facts = _READERS[name](data)
    if not facts:
        with open_media(data, deadline, MAX_PIXELS) as container:
            facts = _facts(container, kind, data)
        if name in _UNCOUNTED or (kind == "video" and "num_frames" not in facts):
            with open_media(data, deadline, MAX_PIXELS) as container:
                facts |= _counted(container, media_stream(container, kind), kind, deadline)
    if kind == "audio" and "sample_rate" in facts:
        check_rate(int(facts["sample_rate"]))
    if decode and kind == "audio" and name != "mp3":
        from mmstream.decoding.audio.source import open_audio  # loads libsndfile

        with open_audio(data, deadline) as source:
            facts |= _heard(source)
    elif decode and kind == "video":
        with open_media(data, deadline, MAX_PIXELS) as container:
            facts["num_frames"] = _num_decoded(container, media_stream(container, kind), deadline)
    return facts


def _wav(data: bytes) -> Facts:
    """Read the header of a WAV. Empty where FFmpeg must: the samples are compressed."""
    from mmstream.decoding.audio.source import open_wav

    wav = open_wav(data)
    if wav is None:
        return {}
    return _sound(wav, "pcm" if wav.codec == 1 else "pcm_float")


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


def _mp3(data: bytes, deadline: Deadline, decode: bool) -> Facts:
    """Count the frames of an MP3 once, and return what training hears of them."""
    from mmstream.decoding.audio.headers import mp3_frames
    from mmstream.decoding.audio.source import open_audio  # loads libsndfile

    frames = counted = mp3_frames(data, deadline)
    if frames is not None and frames.is_trusted:
        counted = mp3_frames(data, deadline, trusts_header=False)
    with open_audio(data, deadline, frames) as source:
        num_lost = counted.num_samples - source.num_samples if counted is not None else 0
        if num_lost > _MAX_DELAY_S * source.sample_rate:
            raise DecodeError(f"damaged: {num_lost:,} samples more than its header says")
        return {**_sound(source, "mp3"), **(_heard(source) if decode else {})}


def _sound(source: AudioSource, codec: str) -> Facts:
    return {
        "duration_s": round(source.num_samples / source.sample_rate, 6),
        "sample_rate": source.sample_rate,
        "num_channels": source.num_channels,
        "codec": codec,
    }


_READERS = {"wav": _wav, "flac": _flac}
"""Readers of formats that need no FFmpeg. They return nothing where FFmpeg must read the file."""


def _heard(source: AudioSource) -> Facts:
    """Decode a sound as training does, keep nothing, and return how long it is."""
    length_s = source.num_samples / source.sample_rate
    num_heard = sum(len(block) for block in source.blocks(0, source.num_samples))
    refuse_short(length_s, num_heard / source.sample_rate)
    if not num_heard:
        raise DecodeError("no frame in it can be decoded")
    return {"duration_s": round(length_s, 6)}


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


def _num_decoded(container: InputContainer, stream: Any, deadline: Deadline) -> int:
    """Decode a video, keep nothing, and return the number of its frames."""
    stream.codec_context.options = {**stream.codec_context.options, "err_detect": "explode"}
    num_frames = 0
    for packet in container.demux(stream):
        num_frames += len(packet.decode())
        deadline.check()
    if not num_frames:
        raise DecodeError("no frame in it can be decoded")
    return num_frames
