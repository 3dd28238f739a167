"""An untrusted audio or video file, opened by FFmpeg (PyAV) with limits.

Place in the flow: the ground of the decoders of audio and video, and of the converter's check of
media files:

    bytes or LazyBytes -> `container_format` -> `read_mp4` -> OPEN -> packets -> frames

FFmpeg gets the format that the first bytes have, and can read nothing but those bytes: it opens no
other file and no host. It looks at a limited part of the file for what the headers do not say. It
decodes in the calling thread only, since the workers of a loader share the cores already.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import av
from av.container import InputContainer
from av.stream import Disposition

from mmstream.errors import DecodeError
from mmstream.media.limits import Deadline
from mmstream.media.mp4 import read_mp4
from mmstream.media.types import EncodedMedia, container_format
from mmstream.tar.lazy_bytes import LazyBytes

# -- the bytes of a file, as the file object that FFmpeg reads -------------------------------------
#
# FFmpeg takes an error of a read for the end of the file, at times, and goes on with what it has.
# So no read raises: after an error, and after the deadline, it returns nothing, which ends FFmpeg's
# work. `MediaSource.check` then raises what happened. A cut connection is never taken for a short
# video.

_INVALID_ARGUMENT = -22


class MediaSource:
    """A seekable file object over a file's bytes, read only.

    Args:
        data: The file.
        deadline: After it, reads return nothing.
    """

    def __init__(self, data: EncodedMedia, deadline: Deadline) -> None:
        self._data = data
        self._size = len(data)
        self._deadline = deadline
        self._position = 0
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise what ended the reading.

        Raises:
            TimeoutError: The deadline is over.
            BaseException: What reading a range raised, such as a StorageError.
        """
        if self._error is not None:
            raise self._error
        self._deadline.check()

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes at most. Nothing at the end, and after an error."""
        if self._error is not None or self._deadline.is_over or self._position >= self._size:
            return b""
        stop = self._size if size < 0 else min(self._position + size, self._size)
        try:
            if isinstance(self._data, LazyBytes):  # no further than what it has at hand
                piece = self._data.read_some(self._position, stop)
            else:
                piece = self._data[self._position : stop]
        except BaseException as error:  # a signal's too: FFmpeg's callback would swallow it
            self._error = error
            return b""
        # FFmpeg's buffer holds `size` bytes, and a longer piece would overrun it.
        piece = piece[: stop - self._position]
        self._position += len(piece)
        return piece

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position and return it. Below zero: FFmpeg's number for a wrong argument."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}.get(whence)
        if start is None or start + offset < 0:
            return _INVALID_ARGUMENT
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position


# -- opening ---------------------------------------------------------------------------------------

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
        DecodeError: The file is not audio or video, or FFmpeg cannot read it, here or in the body.
        TimeoutError: The deadline passed before the end of the body.
        Exception: What reading a range of the file raised, such as a StorageError. It is raised in
            place of any error in the body, which may follow from it.
    """
    name = container_format(data)
    if name is None:
        raise DecodeError("its first bytes are not those of a known audio or video format")
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
    """Return FFmpeg's best stream of a kind. The cover of a song is not a video.

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


# -- files that end before their end ---------------------------------------------------------------
#
# FFmpeg decodes what there is of a download that was cut, and says nothing at the end. The
# containers here state how long they are, so the cut is seen before. The others (MPEG-TS, Ogg, MP3,
# and Matroska that was streamed) state nothing.

_SEGMENT = b"\x18\x53\x80\x67"


def refuse_truncated(data: EncodedMedia, name: str) -> None:
    """Refuse a file that states more bytes than it has.

    Args:
        data: The file.
        name: FFmpeg's name of its format.

    Raises:
        DecodeError: Bytes are missing. It says how many at least. Or `read_mp4` refuses it.
    """
    stated = {"mov": _mp4_bytes, "matroska": _matroska_bytes, "avi": _avi_bytes}.get(name)
    num_missing = 0 if stated is None else stated(data) - len(data)
    if num_missing > 0:
        raise DecodeError(f"truncated: {num_missing:,} bytes are missing at least")


def _mp4_bytes(data: EncodedMedia) -> int:
    """Return where the boxes end that hold an index or frames, and check the numbers in them."""
    return read_mp4(data).num_bytes


def _matroska_bytes(data: EncodedMedia) -> int:
    """Return where the segment ends, which holds all frames; 0 if it does not say."""
    size, position = _vint(data[4:12])
    position += 4 + size
    head = data[position : position + 12]
    if head[:4] != _SEGMENT:
        return 0
    size, num_bytes = _vint(head[4:])
    is_unknown = size == (1 << 7 * num_bytes) - 1
    return 0 if is_unknown else position + 4 + num_bytes + size


def _vint(head: bytes) -> tuple[int, int]:
    """Return a number of EBML, and in how many bytes it is written (RFC 8794, section 4).

    The zeros in front of the first 1 count the bytes that follow: 0x40 0x02 is 2, in two bytes.
    """
    num_bytes = 9 - head[0].bit_length() if head and head[0] else 8
    number = int.from_bytes(head[:num_bytes], "big")
    return number & (1 << 7 * num_bytes) - 1, num_bytes


def _avi_bytes(data: EncodedMedia) -> int:
    """Return where the first RIFF chunk ends; 0 if it does not say."""
    size = int.from_bytes(data[4:8], "little")
    return 0 if size >= 0x7FFFFFFF else 8 + size
