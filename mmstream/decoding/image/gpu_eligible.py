"""Which JPEGs a GPU may decode: plain files, as far as header and end show.

Place in the flow: `ImageDecoder.plan` asks here, before a picture is left to the GPU.

nvJPEG reports less than libjpeg about a damaged file, and does not report much that is missing. So
the CPU's strict decoder keeps three kinds of files: those that `jpeg` must judge twice, those that
Pillow decodes, and those with the commonest damage of storage (cut short, or with a hole of zeros).
A file that goes to the GPU can still be damaged inside. Then the damage is not always noticed.
"""

from __future__ import annotations

import numpy as np

from mmstream.decoding.image.geometry import Shape
from mmstream.decoding.image.jpeg import Segment, check_scans, orientation_of, read_header

__all__ = ["plain_jpeg"]

_SOF0, _SOF2, _SOS, _APP0, _APP14 = 0xC0, 0xC2, 0xDA, 0xE0, 0xEE
_USUAL = frozenset((_SOF0, _SOF2, _SOS, 0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE))
"""Markers that a header may have: frame, scan, tables, restart interval, metadata, comment."""
_LUMA = (0x11, 0x21, 0x12, 0x22, 0x41)
"""Sampling factors of brightness where those of colour are 1x1: 4:4:4, 4:2:2, 4:4:0, 4:2:0, 4:1:1.
The high four bits are horizontal: 0x21 is 2x1."""
_EOI = b"\xff\xd9"
_HOLE = bytes(32)
"""Zeros in a row: rare in picture data, common in a file whose content was partly lost."""


def plain_jpeg(data: bytes, max_pixels: int) -> tuple[Shape, int | None] | None:
    """Judge whether a GPU may decode a JPEG.

    Args:
        data: The file.
        max_pixels: Of the decoder. It limits the number of scans too.

    Returns:
        (height, width) as stored, and the orientation (1 to 8, or None). None for a file that the
        CPU must decode: arithmetic, lossless, 12-bit or CMYK; with unusual sampling or colours;
        with a header that libjpeg would not accept; with junk or a hole of zeros; with an end
        marker that is missing or not at the end.

    Raises:
        DecodeError: The header exceeds a limit, or there are too many scans.
    """
    header = read_header(data)
    check_scans(data, header, max_pixels)
    segments, start = header
    frames = [segment for segment in segments if segment.marker in (_SOF0, _SOF2)]
    if len(frames) != 1 or segments[-1].marker != _SOS:
        return None
    frame, scan = frames[0], segments[-1].payload
    if (
        start != 2 + sum(4 + len(segment.payload) for segment in segments)  # junk between them
        or not _USUAL.issuperset(segment.marker for segment in segments)
        or not _is_usual_frame(frame.payload)
        or not _has_usual_colours(segments, frame.payload)
        or (frame.marker == _SOF0 and (scan[:1] != frame.payload[5:6] or scan[-3:] != b"\0\x3f\0"))
        or not _ends_once(data, start, is_baseline=frame.marker == _SOF0)
        or (data[-3] == 0 and data[-4] != 0xFF)  # zeros in place of data
        or data.find(_HOLE, start) >= 0
    ):
        return None
    height = int.from_bytes(frame.payload[1:3], "big")
    width = int.from_bytes(frame.payload[3:5], "big")
    return ((height, width), orientation_of(segments)) if height and width else None


def _ends_once(data: bytes, start: int, *, is_baseline: bool) -> bool:
    """Tell whether the picture data has its only end marker at the end of the file.

    A baseline file has one scan, so only restart markers are allowed in it. A progressive file has
    more scans and tables, so only an early end marker is refused.
    """
    body = np.frombuffer(data, np.uint8, offset=start)
    if not data.endswith(_EOI) or len(body) < 4:
        return False
    codes = body[np.flatnonzero(body[:-2] == 0xFF) + 1]
    if is_baseline:
        return bool(((codes == 0) | ((codes & 0xF8) == 0xD0)).all())
    return not (codes == _EOI[1]).any()


def _is_usual_frame(payload: bytes) -> bool:
    """Tell whether a frame has 8 bits, and is grey or has three components in a usual sampling."""
    sampling = payload[7::3]
    if len(payload) < 6 or payload[0] != 8 or len(payload) != 6 + 3 * payload[5]:
        return False
    return len(sampling) == 1 or (
        len(sampling) == 3 and sampling[0] in _LUMA and sampling[1:] == b"\x11\x11"
    )


def _has_usual_colours(segments: list[Segment], frame: bytes) -> bool:
    """Tell whether three components certainly are YCbCr: JFIF, Adobe's marker or their ids say so.

    A grey file passes too, if its JFIF and Adobe markers are usual ones.
    """
    jfif = [s.payload for s in segments if s.marker == _APP0 and s.payload[:5] == b"JFIF\0"]
    adobe = [s.payload for s in segments if s.marker == _APP14 and s.payload[:5] == b"Adobe"]
    if any(payload[5:6] != b"\1" for payload in jfif):  # a revision that libjpeg does not know
        return False
    if any(len(payload) < 12 or payload[11] != (len(frame) > 9) for payload in adobe):
        return False
    return frame[6::3] in (b"\1", b"\1\2\3") or bool(jfif or adobe) or len(frame) == 9
