"""Facts about audio and video files: duration, size, rate. Nothing is decoded for them.

Place in the flow: the converter notes them beside its shards, and `measuring.statistics` measures
them. Both import this module where they have such a file, because FFmpeg is slow to load.

A video has the frames and times that training plans with. WAV and FLAC state their length in their
first bytes, and MP3 in the headers of its frames. Of all other sounds FFmpeg reads the headers, and
all packets where no header tells their length.
"""

from __future__ import annotations

from typing import Any

from av.container import InputContainer

from mmstream.errors import DecodeError
from mmstream.media.audio import AudioSource, open_audio, open_wav
from mmstream.media.audio_headers import check_rate, mp3_frames, refuse_short, states_length
from mmstream.media.ffmpeg import MediaKind, is_cover, media_stream, open_media
from mmstream.media.frames import FrameList
from mmstream.media.limits import Deadline
from mmstream.media.mp4 import video_tables
from mmstream.media.types import Facts, container_format
from mmstream.media.video import read_video

MAX_PIXELS = 128 * 2**20
"""Most pixels of a frame, as of an image."""

_UNCOUNTED = frozenset(("matroska", "avi", "mpegts", "mpeg", "flv", "asf", "mp3", "aac", "ogg"))
"""Formats whose headers tell no length, or one that nothing confirms: packets are counted."""

_MAX_DELAY_S = 0.5
"""Seconds that encoders put before the samples of an MP3 at most."""


def media_facts(
    data: bytes | FrameList, kind: MediaKind, deadline: Deadline, *, decode: bool = False
) -> Facts:
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
    if isinstance(data, FrameList):
        return data.facts(deadline, decode=decode)
    if kind == "video":
        return _video(data, deadline, decode)
    name = container_format(data)
    facts: Facts = {}
    if name == "mp3":
        facts = _mp3(data, deadline, decode)
    elif name == "wav" and (wav := open_wav(data)) is not None:
        facts = _sound(wav, "pcm" if wav.codec == 1 else "pcm_float")
    elif name == "flac" and states_length(data):
        with open_audio(data, deadline) as source:
            facts = _sound(source, "flac")
    if not facts:
        facts = _track(data, name in _UNCOUNTED, deadline)
    if "sample_rate" in facts:
        check_rate(int(facts["sample_rate"]))
    if decode and name != "mp3":
        with open_audio(data, deadline) as source:
            facts |= _heard(source)
    return facts


def _video(data: bytes, deadline: Deadline, decode: bool) -> Facts:
    """Return what training plans with, and what is known of the sound."""
    tables = video_tables(data)
    with open_media(data, deadline, MAX_PIXELS) as container:
        codec = media_stream(container, "video").codec_context.codec.canonical_name
        sound = _sound_facts(container)
        file = read_video(container, tables, deadline, MAX_PIXELS)
    height, width = file.picture
    facts: Facts = {"codec": codec}
    if file.timeline.duration_s > 0:
        facts["duration_s"] = round(file.timeline.duration_s, 6)
    facts |= {"width": width, "height": height}
    if file.timeline.duration_s > 0:
        facts["fps"] = round(file.fps, 6)
    facts["num_frames"] = _num_decoded(data, deadline) if decode else file.timeline.num_frames
    if file.orientation.rotation:
        facts["rotation"] = file.orientation.rotation
    return facts | sound


def _num_decoded(data: bytes, deadline: Deadline) -> int:
    """Decode a video, keep nothing, and return the number of its frames."""
    num_frames = 0
    with open_media(data, deadline, MAX_PIXELS) as container:
        stream = media_stream(container, "video")
        context = stream.codec_context
        context.options = {**context.options, "err_detect": "explode"}
        for packet in container.demux(stream):
            num_frames += len(packet.decode())
            deadline.check()
    if not num_frames:
        raise DecodeError("no frame in it can be decoded")
    return num_frames


def _mp3(data: bytes, deadline: Deadline, decode: bool) -> Facts:
    """Count the frames of an MP3 once, and return what training hears of them."""
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


def _heard(source: AudioSource) -> Facts:
    """Decode a sound as training does, keep nothing, and return how long it is."""
    length_s = source.num_samples / source.sample_rate
    num_heard = sum(len(block) for block in source.blocks(0, source.num_samples))
    refuse_short(length_s, num_heard / source.sample_rate)
    if not num_heard:
        raise DecodeError("no frame in it can be decoded")
    return {"duration_s": round(length_s, 6)}


def _track(data: bytes, is_uncounted: bool, deadline: Deadline) -> Facts:
    """Read the header of a sound by FFmpeg. Where that tells no length, packets are counted."""
    with open_media(data, deadline, MAX_PIXELS) as container:
        if not all(map(is_cover, container.streams.video)):
            raise DecodeError("not an audio but a video")
        stream = media_stream(container, "audio")
        facts: Facts = {"codec": stream.codec_context.codec.canonical_name}
        seconds = (container.duration or 0) / 1_000_000
        if stream.duration and stream.time_base:
            seconds = float(stream.duration * stream.time_base)
        sound = _sound_facts(container)
        if is_uncounted:
            seconds = _counted_s(container, stream, deadline) or seconds
    if seconds > 0:
        facts["duration_s"] = round(seconds, 6)
    return facts | sound


def _sound_facts(container: InputContainer) -> Facts:
    """Return what is known of the track with sound that is decoded."""
    try:
        context = media_stream(container, "audio").codec_context
    except DecodeError:
        return {}
    if context.sample_rate > 0 and context.channels > 0:
        return {"sample_rate": context.sample_rate, "num_channels": context.channels}
    return {}


def _counted_s(container: InputContainer, stream: Any, deadline: Deadline) -> float:
    """Return how long the packets of a sound last; 0 if they do not say. Nothing is decoded."""
    starts, ends = [], []
    for packet in container.demux(stream):
        deadline.check()
        if packet.size and not packet.is_discard and packet.pts is not None:
            starts.append(packet.pts)
            ends.append(packet.pts + (packet.duration or 0))
    if not starts or not stream.time_base:
        return 0.0
    first, last = min(starts), max(starts)
    ticks: float = max(ends) - first
    mean = (last - first) / max(1, len(starts) - 1)
    is_odd = ticks > last - first + 10 * mean > 0  # a wrong last duration
    if max(ends) == last or is_odd:
        ticks = last - first + mean
    return max(0.0, ticks * float(stream.time_base))
