"""JPEGs of which nothing is odd, as their headers and ends show: those that a GPU may decode.

Part of the decode stage. nvJPEG says less than libjpeg about what it dislikes, and nothing about
much that is missing. So whatever libjpeg would have to be told twice, whatever Pillow would decode,
and the damage that storage does most often, a file cut short or with a hole, stays with the CPU's
strict decoder. What is left to the GPU can still be damaged inside, and then is not always noticed.
"""

from __future__ import annotations

import numpy as np

from mmstream.decoding.image.geometry import Shape
from mmstream.decoding.image.jpeg import Segment, orientation_of, read_header

__all__ = ["plain_jpeg"]

_SOF0, _SOF2, _SOS, _APP0, _APP14 = 0xC0, 0xC2, 0xDA, 0xE0, 0xEE
_USUAL = frozenset((_SOF0, _SOF2, _SOS, 0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE))
"""Markers that a header may have: frame, scan, tables, restart interval, metadata, comment."""
_LUMA = (0x11, 0x21, 0x12, 0x22, 0x41)
"""Sampling of brightness beside 1x1 of colour: 4:4:4, 4:2:2, 4:4:0, 4:2:0, 4:1:1."""
_EOI = b"\xff\xd9"
_HOLE = bytes(32)
"""Zeros in a row that picture data hardly has, and a file that lost a part of its content has."""


def plain_jpeg(data: bytes) -> tuple[Shape, int | None] | None:
    """Read (height, width) as stored and the orientation of a JPEG that a GPU may decode.

    Returns:
        None for every other file: arithmetic, lossless, 12-bit and CMYK files, unusual sampling or
        colours, a header that libjpeg would dislike, junk, an end marker anywhere but at the end,
        and a hole of zeros.
    """
    segments, start = read_header(data)
    frames = [segment for segment in segments if segment.marker in (_SOF0, _SOF2)]
    if len(frames) != 1 or segments[-1].marker != _SOS:
        return None
    frame, scan = frames[0], segments[-1].payload
    if (
        start != 2 + sum(4 + len(segment.payload) for segment in segments)  # junk in between
        or not _USUAL.issuperset(segment.marker for segment in segments)
        or not _is_usual_frame(frame.payload)
        or not _has_usual_colours(segments, frame.payload)
        or (frame.marker == _SOF0 and (scan[:1] != frame.payload[5:6] or scan[-3:] != b"\0\x3f\0"))
        or not _ends_once(data, start, is_baseline=frame.marker == _SOF0)
        or (data[-3] == 0 and data[-4] != 0xFF)  # zeros in place of data
        or data.find(_HOLE, start) >= 0
    ):
        return None
    height, width = (int.from_bytes(frame.payload[at : at + 2], "big") for at in (1, 3))
    return ((height, width), orientation_of(segments)) if height and width else None


def _ends_once(data: bytes, start: int, *, is_baseline: bool) -> bool:
    """Tell whether picture data goes on to an end marker at the end, as far as markers show.

    In the only scan of a baseline file there are none but restarts; of a progressive file's other
    scans and tables this only says that none ends it early.
    """
    body = np.frombuffer(data, np.uint8, offset=start)
    if not data.endswith(_EOI) or len(body) < 4:
        return False
    codes = body[np.flatnonzero(body[:-2] == 0xFF) + 1]
    if is_baseline:
        return bool(((codes == 0) | ((codes & 0xF8) == 0xD0)).all())
    return not (codes == _EOI[1]).any()


def _is_usual_frame(payload: bytes) -> bool:
    """Tell whether a frame is of 8 bits, and grey or of three components in a usual sampling."""
    sampling = payload[7::3]
    if len(payload) < 6 or payload[0] != 8 or len(payload) != 6 + 3 * payload[5]:
        return False
    return len(sampling) == 1 or (
        len(sampling) == 3 and sampling[0] in _LUMA and sampling[1:] == b"\x11\x11"
    )


def _has_usual_colours(segments: list[Segment], frame: bytes) -> bool:
    """Tell whether three components are YCbCr beyond doubt, by JFIF, Adobe's marker or numbers."""
    jfif = [s.payload for s in segments if s.marker == _APP0 and s.payload[:5] == b"JFIF\0"]
    adobe = [s.payload for s in segments if s.marker == _APP14 and s.payload[:5] == b"Adobe"]
    if any(payload[5:6] != b"\1" for payload in jfif):  # a revision that libjpeg does not know
        return False
    if any(len(payload) < 12 or payload[11] != (len(frame) > 9) for payload in adobe):
        return False
    return frame[6::3] in (b"\1", b"\1\2\3") or bool(jfif or adobe) or len(frame) == 9
