"""What the libraries do not tell about a FLAC or an Ogg: how long it is, and whether it is whole.

Place in the flow: `source.py` asks before it opens a file, and `container.py` for its length.
"""

from __future__ import annotations

from mmstream.decoding.ffmpeg.source import EncodedMedia, read_range
from mmstream.errors import DecodeError

__all__ = ["check_last_page", "flac_tells_length", "num_opus_samples"]

_OGG_PAGE = b"OggS"
_MAX_PAGE_BYTES = 65_307
"""A header of 27 bytes, 255 sizes, and 255 pieces of 255 bytes (RFC 3533, section 6)."""


def flac_tells_length(data: EncodedMedia) -> bool:
    """Tell whether a FLAC states its number of samples. One that was written to a pipe does not.

    The number has 36 bits. They end at byte 26 (RFC 9639, section 8.2).
    """
    head = read_range(data, 0, 26)
    return head.startswith(b"fLaC") and int.from_bytes(head[18:26], "big") % (1 << 36) > 0


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
    if start < 0 or len(page) < 18 or head[14:18] != page[14:18]:
        return None
    num_skipped = int.from_bytes(head[start + 10 : start + 12], "little")
    return int.from_bytes(page[6:14], "little", signed=True) - num_skipped


def _last_page(data: EncodedMedia) -> bytes:
    """Return the last page of an Ogg and all that follows it. Empty where there is none."""
    tail = read_range(data, max(0, len(data) - _MAX_PAGE_BYTES), len(data))
    start = tail.rfind(_OGG_PAGE)
    return tail[start:] if start >= 0 else b""
