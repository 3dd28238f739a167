"""What the libraries do not tell about a FLAC, an MP3 or an Ogg: its length, and if it is whole.

Place in the flow: `audio.py` asks before it opens a file, and `facts.py` for the length of an MP3.

Of an MP3, libsndfile goes by the Xing header of the first frame. Without one it takes all frames
for as large as the first, which is too much or too little. So frames are counted here by their
headers. The libraries get them without tags and junk, of which each refuses another kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import NamedTuple

from mmstream.errors import DecodeError
from mmstream.media.limits import Deadline
from mmstream.media.types import EncodedMedia, behind_id3
from mmstream.tar.lazy_bytes import LazyBytes

TOLERANCE_S = 0.1
"""Seconds by which a file may be shorter than its header says: some programs count too many bytes.
It ends in silence then."""
_RATES = range(1_000, 1_000_001)
"""Samples per second that files have. The filter of an absurd rate takes seconds to compute."""

_OGG_PAGE = b"OggS"
_MAX_PAGE_BYTES = 65_307
"""A header of 27 bytes, 255 sizes, and 255 pieces of 255 bytes (RFC 3533, section 6)."""
_KBITS_1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0)
_KBITS_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0)
"""Bit rates of MPEG 1 and of MPEG 2 and 2.5, layer III (ISO 11172-3, section 2.4.2.3)."""
_RATES_1 = (44_100, 48_000, 32_000)
_MONO = 0xC0
"""Least fourth byte of a frame with one channel."""
_SYNC = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb]")
"""How a frame of layer III starts, with or without a checksum: MPEG 2.5, 2, and 1."""
_WINDOW_BYTES = 1 << 20
_MAX_GAP_BYTES = 1 << 12
"""What may stand between two frames besides tags. More is a hole: sound is missing."""
_MAX_RUNS = 10_001
_HEADERS = (b"Xing", b"Info", b"VBRI")
_MAX_HEADER_START = 44
"""A header in the first frame begins after 4 bytes, a checksum, and up to 32 bytes of zeros."""


class Mp3Frames(NamedTuple):
    """The frames of a file."""

    data: EncodedMedia
    """They alone, or all from the first one on."""
    num_samples: int
    """Samples per channel in them."""
    is_stated: bool
    """Whether a header states them. Then libsndfile knows how many of them are heard."""
    is_tagged: bool
    """Whether a header may say that some of the samples are not heard."""
    is_trusted: bool = False
    """Whether a header was believed, so that no frame was counted."""


class _Frame(NamedTuple):
    position: int
    """Where it begins in the file."""
    head: bytes
    """Its first four bytes."""

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Version (3: MPEG 1, 2: MPEG 2, 0: MPEG 2.5), number of the rate, whether it is mono."""
        return self.head[1] >> 3 & 3, self.head[2] >> 2 & 3, self.head[3] >= _MONO

    @property
    def num_samples(self) -> int:
        return 1152 if self.kind[0] == 3 else 576

    @property
    def end(self) -> int:
        """Where the next frame begins. Padding is one byte."""
        return self.position + _sizes(self.kind)[self.head[2] >> 4] + (self.head[2] >> 1 & 1)


def _rate_of(kind: tuple[int, int, bool]) -> int:
    """Return the samples per second of a kind of frames."""
    return _RATES_1[kind[1]] >> {3: 0, 2: 1, 0: 2}[kind[0]]


@cache
def _sizes(kind: tuple[int, int, bool]) -> list[int]:
    """Return the bytes of a frame without padding, by the number of its bit rate. 0: none."""
    rates, slots = (_KBITS_1, 144) if kind[0] == 3 else (_KBITS_2, 72)
    return [slots * 1000 * kbits // _rate_of(kind) for kbits in rates]


class _Header(NamedTuple):
    """What the first frame says in place of sound."""

    name: bytes = b""
    """Empty: there is none."""
    num_frames: int = 0
    num_bytes: int = 0


def check_rate(sample_rate: int) -> None:
    """Refuse a file with a rate that no recording has, in conversion as in training.

    Raises:
        DecodeError: Names the rate.
    """
    if sample_rate not in _RATES:
        raise DecodeError(f"its audio has a sample rate of {sample_rate} Hz")


def refuse_short(stated_s: float, found_s: float, tolerance_s: float = TOLERANCE_S) -> None:
    """Refuse a file that ends before the length that its header states.

    Raises:
        DecodeError: Names both lengths.
    """
    if stated_s - found_s > tolerance_s:
        raise DecodeError(
            f"damaged or truncated: its header promises {stated_s:.2f} s, and it ends after "
            f"{found_s:.2f} s"
        )


def states_length(flac: EncodedMedia) -> bool:
    """Tell whether a FLAC says how long it is, in its first block (RFC 9639, section 8.2).

    The number of its samples has the last 36 bits of the bytes 18 to 25.
    """
    block = flac[:26]
    has_block = block.startswith(b"fLaC") and block[4:5] in (b"\0", b"\x80")
    return has_block and int.from_bytes(block[18:], "big") % (1 << 36) > 0


def is_single_stream(data: EncodedMedia) -> bool:
    """Tell whether the last page of an Ogg belongs to the stream that its first page starts."""
    head, page = data[:18], _last_page(data)
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
    head, page = data[:64], _last_page(data)
    start = head.find(b"OpusHead")
    if start < 0 or len(page) < 18 or not is_single_stream(data):
        return None
    num_skipped = int.from_bytes(head[start + 10 : start + 12], "little")
    return int.from_bytes(page[6:14], "little", signed=True) - num_skipped


def _last_page(data: EncodedMedia) -> bytes:
    """Return the last page of an Ogg and all that follows it. Empty where there is none."""
    tail = data[-_MAX_PAGE_BYTES:]
    start = tail.rfind(_OGG_PAGE)
    return tail[start:] if start >= 0 else b""


def mp3_frames(
    data: EncodedMedia, deadline: Deadline, trusts_header: bool = True
) -> Mp3Frames | None:
    """Find the frames of an MP3. None: there are none of layer III.

    Args:
        data: The file.
        deadline: When the time of the sample is over.
        trusts_header: Whether a header that states frames and bytes is believed. Then only the
            beginning is read, and what is after those bytes. False: all frames are counted.

    Raises:
        DecodeError: Frames are missing, or change their kind.
        TimeoutError: The time of the sample is over.
    """
    first = _next_frame(data, behind_id3(data, 0), deadline)
    if first is None:
        return None
    header = _header_of(data[first.position : first.end])
    stop = first.position + header.num_bytes
    num_stated, sizes = header.num_frames, _sizes(first.kind)
    fits = num_stated * sizes[1] <= header.num_bytes <= (num_stated + 2) * (sizes[14] + 1)
    has_end = num_stated > 0 and fits and stop <= len(data)
    if trusts_header and has_end and _next_frame(data, behind_id3(data, stop), deadline) is None:
        num_samples = header.num_frames * first.num_samples
        return Mp3Frames(_part(data, first.position, len(data)), num_samples, True, True, True)
    start = first.end if header.name else first.position
    runs = list(islice(_runs(data, first, start, deadline), _MAX_RUNS))
    if len(runs) == _MAX_RUNS:
        raise DecodeError(f"damaged: its frames lie in more than {_MAX_RUNS - 1:,} pieces")
    num_frames = sum(num for _, _, num in runs)
    frame_s = first.num_samples / _rate_of(first.kind)
    refuse_short(header.num_frames * frame_s, num_frames * frame_s)
    if not num_frames:
        raise DecodeError("no frame in it can be decoded")
    is_tagged = header.name in _HEADERS[:2]
    spans = [(start, stop) for start, stop, _ in runs]
    if is_tagged:
        spans[0] = first.position, spans[0][1]
    frames = _part(data, *spans[0])
    if len(spans) > 1:
        frames = b"".join(data[slice(*span)] for span in spans)
    is_stated = is_tagged and header.num_frames >= num_frames
    return Mp3Frames(frames, num_frames * first.num_samples, is_stated, is_tagged)


def _part(data: EncodedMedia, start: int, stop: int) -> EncodedMedia:
    return data.within(start, stop) if isinstance(data, LazyBytes) else data[start:stop]


def _next_frame(data: EncodedMedia, position: int, deadline: Deadline) -> _Frame | None:
    """Return the first frame from a position on that one of its kind follows."""
    num_bytes = _MAX_GAP_BYTES
    while position < len(data):
        deadline.check()
        window = data[position : position + num_bytes]
        for match in _SYNC.finditer(window):
            frame = _frame(data, position + match.start())
            follower = None if frame is None else _frame(data, frame.end)
            if frame is not None and follower is not None and follower.kind == frame.kind:
                return frame
        position += max(1, len(window) - 1)
        num_bytes = _WINDOW_BYTES
    return None


def _frame(data: EncodedMedia, position: int) -> _Frame | None:
    """Return the frame at a position. None: there is none of layer III with a known length."""
    head = data[position : position + 4]
    if len(head) < 4 or not _SYNC.match(head) or head[2] & 0x0C == 0x0C or head[2] >> 4 in (0, 15):
        return None
    return _Frame(position, head)


def _runs(
    data: EncodedMedia, first: _Frame, position: int, deadline: Deadline
) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, number of frames) of frames that follow each other, without gaps."""
    while True:
        start = position
        position, num_frames = _run(data, first, position, deadline)
        if num_frames:
            yield start, position, num_frames
        end = behind_id3(data, position)
        frame = _next_frame(data, end, deadline)
        if frame is None:
            return
        if frame.kind != first.kind:
            raise DecodeError("its audio changes its sample rate or its number of channels")
        if frame.position - end > _MAX_GAP_BYTES:
            raise DecodeError(f"damaged: {frame.position - end:,} bytes within it are not frames")
        position = frame.position


def _run(data: EncodedMedia, first: _Frame, position: int, deadline: Deadline) -> tuple[int, int]:
    """Return where frames like the first one end, and how many there are from a position on."""
    second, rate, is_mono = first.head[1] | 1, first.head[2] & 0x0C, first.kind[2]
    sizes = _sizes(first.kind)
    window, window_start, num_frames = data if isinstance(data, bytes) else b"", 0, 0
    while True:
        offset = position - window_start
        if offset + 4 > len(window):
            deadline.check()
            window = data[position : position + _WINDOW_BYTES]
            window_start, offset = position, 0
            if len(window) < 4:
                break
        third = window[offset + 2]
        size = sizes[third >> 4]
        end = position + size + (third >> 1 & 1)
        if window[offset] != 0xFF or window[offset + 1] | 1 != second or third & 0x0C != rate:
            break
        if not size or (window[offset + 3] >= _MONO) != is_mono or end > len(data):
            break
        position, num_frames = end, num_frames + 1
    return position, num_frames


def _header_of(frame: bytes) -> _Header:
    """Read the header of Xing, LAME or Fraunhofer that may stand in the first frame."""
    for name in _HEADERS:
        start = frame.find(name, 0, _MAX_HEADER_START)
        if start >= 0:
            fields = [int.from_bytes(frame[start + i : start + i + 4]) for i in (4, 8, 12, 14)]
            if name == b"VBRI":
                return _Header(name, fields[3])
            flags, *numbers, _ = fields
            num_frames = numbers.pop(0) if flags & 1 else 0
            return _Header(name, num_frames, numbers[0] if flags & 2 else 0)
    return _Header()
