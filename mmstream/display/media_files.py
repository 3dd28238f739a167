"""Files of videos and sounds for people: what they hold in words, frames, a waveform, a player.

    samples.py, cards.py -> media_files.py -> clips.py, sounds.py

The files may come from strangers: they are opened within limits, and only a part of them is
decoded. What cannot be decoded says why.
"""

from __future__ import annotations

from typing import Any

from mmstream.display.clips import SIDE, clip_tiles, frames_html
from mmstream.display.file_kinds import file_kind
from mmstream.display.markup import html_text, player, problem_html, size_text, small_line
from mmstream.display.recordings import Clip, Sound, seconds_text
from mmstream.display.sounds import waveform
from mmstream.errors import DecodeError
from mmstream.media_types import AUDIO_EXTENSIONS, VIDEO_EXTENSIONS

TIMEOUT_S = 5.0
"""Longest time to open a file, and to decode some of it."""

WAVEFORM_S = 60.0
"""Seconds of a sound that are drawn."""

WAVEFORM_RATE = 8000
"""Samples per second that are drawn: enough for a picture."""


def is_media_file(name: str, value: object) -> bool:
    """Tell whether a field holds the file of a video or a sound."""
    extension = name.rpartition(".")[2]
    return isinstance(value, bytes) and extension in VIDEO_EXTENSIONS | AUDIO_EXTENSIONS


def file_text(data: bytes) -> str:
    """Return what a file holds, from its headers, or why they cannot be read.

    For example: ``h264 640x360, 30 fps, 276 frames, 9.2 s; aac 44,100 Hz, 2 channels, 9.2 s``.
    """
    from mmstream.decoding.ffmpeg.deadline import Deadline
    from mmstream.decoding.ffmpeg.open import is_cover, open_media

    try:
        with open_media(data, Deadline.start(TIMEOUT_S)) as container:
            streams = [*container.streams.video, *container.streams.audio]
            kept = [stream for stream in streams if not is_cover(stream)]
            texts = [_stream_text(stream, container.duration) for stream in kept]
            return "; ".join(texts) or "no video or sound in it"
    except DecodeError as error:
        return str(error)


def _stream_text(stream: Any, duration: int | None) -> str:
    """Return the codec, size, rate and length of a stream.

    Args:
        stream: PyAV's stream.
        duration: Of the file, in microseconds; it is taken where the stream does not say its own.
    """
    context = stream.codec_context
    if context is None:
        return f"{stream.type} of an unknown codec"
    name = context.codec.canonical_name
    seconds = (duration or 0) / 1e6
    if stream.duration and stream.time_base:
        seconds = float(stream.duration * stream.time_base)
    length = [seconds_text(seconds)] if seconds > 0 else []
    if stream.type == "video":
        rate = [f"{float(stream.average_rate):.4g} fps"] if stream.average_rate else []
        frames = [f"{stream.frames:,} frames"] if stream.frames else []
        return ", ".join([f"{name} {context.width}x{context.height}", *rate, *frames, *length])
    channels = f"{context.channels} channel{'s' * (context.channels != 1)}"
    return ", ".join([f"{name} {context.sample_rate:,} Hz", channels, *length])


def field_text(data: bytes) -> str:
    """Return the size, kind and content of a file: ``481.2 kB MP4: h264 640x360, 30 fps, ...``."""
    kind = file_kind(data).partition(" ")[0]
    return f"{size_text(len(data))} {kind}: {file_text(data)}".replace(" :", ":")


def file_html(name: str, data: bytes, max_bytes: int) -> str:
    """Return a player for a file, frames of its video or the waveform of its sound, and facts.

    Args:
        name: Of the field. Its extension says which of the two it is.
        data: The file.
        max_bytes: Larger files get no player.
    """
    facts = small_line(html_text(file_text(data), 300))
    return f"{_drawn(name, data)}{player(name, data, max_bytes)}{facts}"


def file_thumbnail(name: str, data: bytes, side: int) -> str:
    """Return the first frame of a video, or the waveform of a sound, as a tile."""
    return _drawn(name, data, side, num_frames=1)


def _drawn(name: str, data: bytes, side: int = SIDE, num_frames: int = 8) -> str:
    """Return frames or a waveform, or why there are none."""
    try:
        if name.rpartition(".")[2] in VIDEO_EXTENSIONS:
            return frames_html(clip_tiles(_clip(data, num_frames), side, num_frames, label=name))
        sound = _sound(data)
        width = 480 if num_frames > 1 else side
        return f"<div>{waveform(sound.samples, width, label=name)}</div>"
    except DecodeError as error:
        return problem_html(error, 200, "max-width:40em")


def _clip(data: bytes, num_frames: int) -> Clip:
    """Return frames of a video that are spread over it."""
    import torch

    from mmstream.decoding.video.decoder import VideoDecoder

    decoder = VideoDecoder(num_frames=num_frames, timeout_s=TIMEOUT_S)
    decoded = decoder.decode(data)
    return Clip(torch.from_numpy(decoded.pixels).permute(0, 3, 1, 2), decoded.times_s)


def _sound(data: bytes) -> Sound:
    """Return the start of a sound."""
    from mmstream.decoding.audio.decoder import AudioDecoder

    decoder = AudioDecoder(
        sample_rate=WAVEFORM_RATE, channels=1, duration_s=WAVEFORM_S, timeout_s=TIMEOUT_S
    )
    return Sound(decoder.decode(data).samples)
