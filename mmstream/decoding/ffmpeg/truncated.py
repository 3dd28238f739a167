"""Files that end before their end.

    open -> TRUNCATED -> FFmpeg

FFmpeg decodes what there is of a download that was cut, and says nothing at the end. The containers
here state how long they are, so the cut is seen before. The others (MPEG-TS, Ogg, MP3, and Matroska
that was streamed) state nothing.
"""

from __future__ import annotations

from itertools import islice

from mmstream.decoding.ffmpeg.mp4_boxes import boxes
from mmstream.errors import DecodeError
from mmstream.media_types import EncodedMedia, read_range

MAX_BOXES = 1_000_000
_HOLDING = (b"moov", b"mdat", b"moof")
_SEGMENT = b"\x18\x53\x80\x67"


def refuse_truncated(data: EncodedMedia, name: str) -> None:
    """Refuse a file that states more bytes than it has.

    Args:
        data: The file.
        name: FFmpeg's name of its format.

    Raises:
        DecodeError: Bytes are missing. It says how many at least.
    """
    stated = {"mov": _mp4_bytes, "matroska": _matroska_bytes, "avi": _avi_bytes}.get(name)
    num_missing = 0 if stated is None else stated(data) - len(data)
    if num_missing > 0:
        raise DecodeError(f"truncated: {num_missing:,} bytes are missing at least")


def _mp4_bytes(data: EncodedMedia) -> int:
    """Return where the boxes end that hold an index or frames."""
    held = (box for box in islice(boxes(data, 0, len(data)), MAX_BOXES) if box.name in _HOLDING)
    return max((box.stop for box in held), default=0)


def _matroska_bytes(data: EncodedMedia) -> int:
    """Return where the segment ends, which holds all frames; 0 if it does not say."""
    size, position = _vint(read_range(data, 4, 12))
    position += 4 + size
    head = read_range(data, position, position + 12)
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
    size = int.from_bytes(read_range(data, 4, 8), "little")
    return 0 if size >= 0x7FFFFFFF else 8 + size
