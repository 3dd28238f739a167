"""Files of videos and sounds for people: what they hold in words, and a player.

    samples.py, cards.py -> media_files.py -> markup.py

The files may come from strangers: they are opened within limits. What cannot be opened says why.
"""

from __future__ import annotations

from typing import Any

from mmstream.decoding.fields import AUDIO_EXTENSIONS, VIDEO_EXTENSIONS
from mmstream.display.file_kinds import file_kind
from mmstream.display.markup import QUIET, html_text, player, size_text
from mmstream.display.recordings import seconds_text
from mmstream.errors import DecodeError

__all__ = ["field_text", "file_html", "file_text", "file_thumbnail", "is_media_file"]

TIMEOUT_S = 5.0
"""Longest time to open a file."""


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
    """Return a player for a file, and what it holds.

    Args:
        name: Of the field.
        data: The file.
        max_bytes: Larger files get no player.
    """
    facts = f'<div style="{QUIET};font-size:11px">{html_text(file_text(data), 300)}</div>'
    return f"{player(name, data, max_bytes)}{facts}"


def file_thumbnail(name: str, data: bytes) -> str:
    """Return a file as a tile: its name and what it holds."""
    return f'<div style="{QUIET}">{html_text(name, 60)}: {html_text(file_text(data), 100)}</div>'
