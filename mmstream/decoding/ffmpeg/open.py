"""A stranger's audio or video file, opened by FFmpeg (PyAV) with limits.

Place in the flow: the ground of `decoding.audio` and `decoding.video`, and of the converter's
check of media files:

    bytes or LazyBytes -> `container_format` -> `check_mp4` -> OPEN -> packets -> frames

FFmpeg gets the format that the first bytes have, and can read nothing but those bytes: it opens no
other file and no host. It looks at a limited part of the file for what the headers do not say. It
decodes in the calling thread only, since the workers of a loader share the cores already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import av
from av.container import InputContainer
from av.stream import Disposition

from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.mp4_tables import check_mp4
from mmstream.decoding.ffmpeg.source import MediaSource
from mmstream.decoding.ffmpeg.truncated import refuse_truncated
from mmstream.errors import DecodeError
from mmstream.media_types import EncodedMedia, container_format

MediaKind: TypeAlias = Literal["audio", "video"]

_OPTIONS = {
    "probesize": str(5 << 20),
    "analyzeduration": "5000000",
    "max_streams": "64",
    "protocol_whitelist": "none",
    "enable_drefs": "0",
}
"""FFmpeg looks at so many bytes, and microseconds, to learn what the headers do not say."""
_HEADER_ONLY = {"probesize": "32", "skip_frame": "all"}
_BUFFER_BYTES = 64 * 1024
_PADDING_PIXELS = 1 << 16
_SHOWN_REASON = 160
_KNOWN_AS = {"mov": "mp4", "matroska": "mkv"}
"""What people call a format, where FFmpeg's name is another."""


class NoStreamError(DecodeError):
    """A file has no audio, or no video, in it."""


@contextmanager
def open_media(
    data: EncodedMedia,
    deadline: Deadline,
    max_pixels: int | None = None,
    header_only: bool = False,
) -> Iterator[InputContainer]:
    """Open an audio or video file for the body of a with statement.

    Args:
        data: The file, or a way to read parts of it.
        deadline: After it FFmpeg gets no more bytes. A loop over packets must ask it too.
        max_pixels: Limit on height x width of a frame. FFmpeg counts its padding too, so it gets
            twice as much: a decoder must check the size that the header states.
        header_only: Whether FFmpeg may not decode frames to learn more than the header says. It
            takes a tenth of the time, and suffices for an MP4.

    Yields:
        PyAV's container. Its streams decode in the calling thread.

    Raises:
        DecodeError: The file is no audio or video, or FFmpeg cannot read it, here or in the body.
        TimeoutError: The deadline passed before the end of the body.
        Exception: What reading a range of the file raised, such as a StorageError. It is raised in
            place of any error in the body, which may follow from it.
    """
    name = container_format(data)
    if name is None:
        raise DecodeError("its first bytes are not those of a known audio or video format")
    if name == "mov":
        check_mp4(data)
    refuse_truncated(data, name)
    source = MediaSource(data, deadline)
    options = {**_OPTIONS, **(_HEADER_ONLY if header_only else {})}
    if max_pixels is not None:
        options["max_pixels"] = str(2 * max_pixels + _PADDING_PIXELS)
    try:
        with _open(source, name, options) as container:
            yield container
    except (av.FFmpegError, MemoryError) as error:
        source.check()
        if isinstance(error, MemoryError):
            raise DecodeError(f"out of memory: {error or 'the file needs more'}") from None
        raise DecodeError(f"damaged {_KNOWN_AS.get(name, name)}: {_reason(error)}") from None
    except BaseException:
        source.check()
        raise
    source.check()


def _open(source: MediaSource, name: str, options: dict[str, str]) -> InputContainer:
    try:
        container = av.open(source, "r", format=name, options=options, buffer_size=_BUFFER_BYTES)
    except (ValueError, OverflowError, ArithmeticError) as error:  # nonsense in headers
        source.check()
        raise DecodeError(f"damaged {_KNOWN_AS.get(name, name)}: {_reason(error)}") from None
    for stream in container.streams:
        if stream.codec_context is not None:
            stream.codec_context.thread_count = 1
            if "max_pixels" in options:
                stream.codec_context.options = {"max_pixels": options["max_pixels"]}
    return container


def media_stream(container: InputContainer, kind: MediaKind) -> Any:
    """Return FFmpeg's best stream of a kind. The cover of a song is no video.

    A file may have several videos, such as one in a smaller size. FFmpeg takes the one that is
    marked as the default, then the one with the most bits. All of its tools take the same one.

    Raises:
        NoStreamError: There is none.
        DecodeError: Its codec is not known.
    """
    stream: Any = container.streams.best(kind)
    if stream is None or is_cover(stream):
        streams: Any = container.streams.audio if kind == "audio" else container.streams.video
        stream = next((stream for stream in streams if not is_cover(stream)), None)
    if stream is None:
        raise NoStreamError(f"has no {kind} in it")
    if stream.codec_context is None:
        raise DecodeError(f"the codec of its {kind} is not known")
    return stream


def is_cover(stream: Any) -> bool:
    """Tell whether the pictures of a stream are the cover of a song."""
    return bool(stream.disposition & Disposition.attached_pic)


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)[:_SHOWN_REASON]
