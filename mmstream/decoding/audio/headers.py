"""What the libraries do not tell about a FLAC, an MP3 or an Ogg: its length, and if it is whole.

Place in the flow: `source.py` asks before it opens a file, and `container.py` for its length.
"""

from __future__ import annotations

from typing import NamedTuple

from mmstream.decoding.ffmpeg.source import EncodedMedia, read_range
from mmstream.errors import DecodeError

__all__ = [
    "check_last_page",
    "flac_tells_length",
    "is_single_stream",
    "mp3_tells_length",
    "num_opus_samples",
]

_OGG_PAGE = b"OggS"
_MAX_PAGE_BYTES = 65_307
"""A header of 27 bytes, 255 sizes, and 255 pieces of 255 bytes (RFC 3533, section 6)."""
_MAX_GAP_BYTES = 1 << 12
"""What may stand between the tag of an MP3 and its first frame."""
_WINDOW_BYTES = 1 << 20
_KBITS_1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_KBITS_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
"""Bit rates of MPEG 1 and of MPEG 2 and 2.5, layer III (ISO 11172-3, section 2.4.2.3)."""
_RATES_1 = (44_100, 48_000, 32_000)


class _Mp3Frame(NamedTuple):
    """A frame of an MP3."""

    position: int
    """Where it begins in the file."""
    head: bytes
    """Its first four bytes."""
    num_bytes: int
    """Its length without padding, which is one byte."""

    @property
    def end(self) -> int:
        """Where the next frame begins."""
        return self.position + self.num_bytes + (self.head[2] >> 1 & 1)


def flac_tells_length(data: EncodedMedia) -> bool:
    """Tell whether a FLAC states its number of samples. One that was written to a pipe does not.

    The number has 36 bits. They end at byte 26 (RFC 9639, section 8.2).
    """
    head = read_range(data, 0, 26)
    return head.startswith(b"fLaC") and int.from_bytes(head[18:26], "big") % (1 << 36) > 0


def mp3_tells_length(data: EncodedMedia) -> bool:
    """Tell whether libsndfile knows the length of an MP3.

    It goes by the Xing header of the first frame. Without one it takes all frames for as large as
    the first: a variable bit rate then loses its end. Where files were joined, the header is that
    of the first file alone. A file in which no frame is found is left to libsndfile too.
    """
    first = _first_mp3_frame(data, 0)
    if first is None:
        return True
    num_bytes = _xing_bytes(read_range(data, first.position, first.end))
    if num_bytes is None:
        return _has_constant_bit_rate(data, first)
    return not num_bytes or _first_mp3_frame(data, first.position + num_bytes) is None


def _first_mp3_frame(data: EncodedMedia, position: int) -> _Mp3Frame | None:
    """Return the first frame from a position on, behind a tag. Another frame follows it."""
    head = read_range(data, position, position + 10)
    if head.startswith(b"ID3") and len(head) == 10:
        bits = zip(head[6:], (21, 14, 7, 0), strict=True)
        position += 10 + sum((byte & 0x7F) << shift for byte, shift in bits)
    near = read_range(data, position, position + _MAX_GAP_BYTES)
    start = near.find(b"\xff")
    while start >= 0:
        frame = _mp3_frame(data, position + start)
        if frame is not None and _mp3_frame(data, frame.end) is not None:
            return frame
        start = near.find(b"\xff", start + 1)
    return None


def _mp3_frame(data: EncodedMedia, position: int) -> _Mp3Frame | None:
    """Return the frame at a position. None: there is none of layer III."""
    head = read_range(data, position, position + 4)
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return None
    version, kbits, rate = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or kbits in (0, 15) or rate == 3:
        return None
    slots, rates = (144, _KBITS_1) if version == 3 else (72, _KBITS_2)
    hertz = _RATES_1[rate] >> {3: 0, 2: 1, 0: 2}[version]
    return _Mp3Frame(position, head, slots * 1000 * rates[kbits] // hertz)


def _xing_bytes(frame: bytes) -> int | None:
    """Return how many bytes of frames a Xing header states; 0 if it does not say. None: no header.

    A header that states no number of frames is none.
    """
    start = max(frame.find(b"Xing"), frame.find(b"Info"))
    flags = int.from_bytes(frame[start + 4 : start + 8], "big")
    if start < 0 or not flags & 1:
        return None
    return int.from_bytes(frame[start + 12 : start + 16], "big") if flags & 2 else 0


def _has_constant_bit_rate(data: EncodedMedia, first: _Mp3Frame) -> bool:
    """Tell whether all frames have the bit rate of the first one."""
    second, third = first.head[1:3]
    window, window_start, position = b"", 0, first.position
    while True:
        offset = position - window_start
        if offset + 4 > len(window):
            window = read_range(data, position, position + _WINDOW_BYTES)
            window_start, offset = position, 0
            if len(window) < 4:
                return True
        padded = window[offset + 2] ^ third
        if window[offset] != 0xFF or window[offset + 1] != second or padded & 0xFD:
            return _mp3_frame(data, position) is None  # a tag at the end is no frame
        position += first.num_bytes + (window[offset + 2] >> 1 & 1)


def is_single_stream(data: EncodedMedia) -> bool:
    """Tell whether the last page of an Ogg belongs to the stream that its first page starts."""
    head, page = read_range(data, 0, 18), _last_page(data)
    return head[14:18] == page[14:18]


def check_last_page(data: EncodedMedia) -> None:
    """Refuse an Ogg that ends within a page. The libraries take it for a shorter recording.

    Raises:
        DecodeError: Bytes of the last page are missing.
    """
    page = _last_page(data)
    num_sizes = page[26] if len(page) > 26 else 0
    sizes = page[27 : 27 + num_sizes]
    num_missing = 27 + num_sizes + sum(sizes) - len(page)
    if page and num_missing > 0:
        raise DecodeError(f"truncated ogg: {num_missing:,} bytes at least are missing")


def num_opus_samples(data: EncodedMedia) -> int | None:
    """Return the length of an Ogg Opus at 48 kHz, by its first and last page.

    The last page says how many samples there are up to its end, and the head how many of them come
    before the recording (RFC 7845, sections 4 and 5.1). None where other streams are in the file.
    """
    head, page = read_range(data, 0, 64), _last_page(data)
    start = head.find(b"OpusHead")
    if start < 0 or len(page) < 18 or not is_single_stream(data):
        return None
    num_skipped = int.from_bytes(head[start + 10 : start + 12], "little")
    return int.from_bytes(page[6:14], "little", signed=True) - num_skipped


def _last_page(data: EncodedMedia) -> bytes:
    """Return the last page of an Ogg and all that follows it. Empty where there is none."""
    tail = read_range(data, max(0, len(data) - _MAX_PAGE_BYTES), len(data))
    start = tail.rfind(_OGG_PAGE)
    return tail[start:] if start >= 0 else b""
