"""JPEG files -> pixels with libjpeg-turbo: strict about picture data, lenient about metadata.

Place in the flow: `formats.py` calls `decode_jpeg` for files that start as a JPEG does.

simplejpeg releases the GIL and can treat every *warning* of libjpeg as an error. But libjpeg
reports only the first warning of a file, so a harmless warning may hide a serious one. A refused
file is therefore decoded a second time, after `tidy` has repaired everything that cannot change its
pixels. If that fails too, the file is refused.

Accepted, because `tidy` removes the cause of the warning:
    ``N extraneous bytes before marker 0xXX``   junk between the header's segments (also FF 00)
    ``N extraneous bytes before marker 0xd9``   only when the junk is zero padding before the end
    ``bad ICC marker``                          metadata; colour profiles are not applied
    ``unknown JFIF revision number``            the pixel format did not change between revisions
    ``Invalid SOS parameters for sequential``   unused fields, written wrongly by some cameras
    ``Unknown Adobe color transform code``      YCbCr or YCCK is assumed, as libjpeg does
Bytes after the end marker are ignored (thumbnails, the video of a "motion photo").

Refused with DecodeError, because pixels are missing or invented:
    ``Premature end of JPEG file``              truncated, or the tail is zeroed
    ``premature end of data segment``           zeroed or damaged inside
    ``N extraneous bytes before marker``        inside the picture data: bytes were not decoded
    ``bad Huffman code``, ``bad arithmetic code``, ``found marker 0xXX instead of RST``,
    ``Inconsistent progression sequence``       damaged picture data
    ``Unsupported ...``                         lossless or 12-bit files, damaged markers

JPEG has no checksum. A flipped bit that gives other valid codes causes no warning: about 85 % of
single flips in a 500x375 photograph went unnoticed. Files with sampling factors that the TurboJPEG
API does not know (such as 4:1:0) are decoded by Pillow, which notices truncation but not damage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, JpegImagePlugin

from mmstream.decoding.image.orientation import SIDEWAYS, exif_orientation, upright, xmp_orientation
from mmstream.decoding.image.pillow import check_pixels, decode_with_pillow, one_line
from mmstream.decoding.image.reduced import decode_reduced
from mmstream.errors import DecodeError

_SOI = b"\xff\xd8"
_EOI = b"\xff\xd9"
_APP0, _APP1, _APP14, _APP15, _COM, _SOS = 0xE0, 0xE1, 0xEE, 0xEF, 0xFE, 0xDA
_SEQUENTIAL = (0xC0, 0xC1)
_FRAMES = (0xC0, 0xC1, 0xC2, 0xC9, 0xCA)
_BARE = (0x01, *range(0xD0, 0xD9))  # markers without a length


def jpeg_shape(data: bytes) -> tuple[int, int] | None:
    """Read the (height, width) of the upright JPEG from its header, without judging the file.

    Returns:
        None where libjpeg refuses the header. The file may still decode after `tidy`.
    """
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    if height < 1 or width < 1:
        return None
    return (width, height) if orientation_of(read_header(data)[0]) in SIDEWAYS else (height, width)


def decode_jpeg(data: bytes, max_pixels: int, factor: int = 1) -> tuple[NDArray[np.uint8], int]:
    """Decode a JPEG strictly, by the module's list, and turn it upright.

    Args:
        data: The file, starting with FF D8.
        max_pixels: Limit on height x width, checked from the header.
        factor: How many times smaller to decode it: 1, 2, 4 or 8. All picture data is read at every
            factor, so damage is noticed as at full size.

    Returns:
        The pixels: uint8 [H, W, 3], RGB, C-contiguous, sides divided by the factor and rounded up.
        And the factor that was used, which is 1 for CMYK and for what Pillow decodes. Grey is
        repeated. CMYK and YCCK are read as Adobe's inverted CMYK and converted without a colour
        profile, as Pillow does.

    Raises:
        DecodeError: The bytes are not a whole, undamaged JPEG, or the picture is too large.
    """
    try:
        image, factor = _decode_strictly(data, max_pixels, factor)
    except ValueError as first:
        tidied = tidy(data)
        try:
            image, factor = _decode_strictly(tidied, max_pixels, factor)
        except ValueError as second:
            if "nsufficient memory" in str(second):
                raise MemoryError(str(second)) from None
            if "subsampling" not in str(second):
                raise DecodeError(f"JPEG: {one_line(first)}") from None
            plugin = JpegImagePlugin.JpegImageFile
            image, factor = decode_with_pillow(plugin, data, max_pixels).pixels, 1
    return upright(image, orientation_of(read_header(data)[0])), factor


def _decode_strictly(data: bytes, max_pixels: int, factor: int) -> tuple[NDArray[np.uint8], int]:
    """Decode a JPEG as it is stored. Raises ValueError at libjpeg's first warning."""
    height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    check_pixels(height, width, max_pixels)
    if colorspace in ("CMYK", "YCCK"):
        image = simplejpeg.decode_jpeg(data, "CMYK")
        cmyk = Image.frombuffer("CMYK", (width, height), image, "raw", "CMYK;I", 0, 1)
        return np.array(cmyk.convert("RGB")), 1
    if factor == 1:
        return simplejpeg.decode_jpeg(data, "RGB"), 1
    reduced = decode_reduced(data, factor)
    if reduced is not None:
        return reduced, factor
    # simplejpeg has the scales n/8, and takes the smallest one that gives at least these sides.
    # That is 1/factor: at factor 4, 500x375 pixels become 125x94.
    small = (-(-height // factor), -(-width // factor))
    image = simplejpeg.decode_jpeg(data, "RGB", min_height=small[0], min_width=small[1])
    if image.shape[:2] != small:  # a tiny picture, where several scales round to one size
        return simplejpeg.decode_jpeg(data, "RGB"), 1
    return image, factor


class Segment(NamedTuple):
    """One segment of a header."""

    marker: int
    """The second byte of its marker; the first is FF."""
    payload: bytes
    """Its content, without marker and length."""


def read_header(data: bytes) -> tuple[list[Segment], int]:
    """List a JPEG's header segments, skipping junk between them as libjpeg does.

    Args:
        data: A JPEG file, possibly damaged.

    Returns:
        The segments up to and including the first start of scan. And the offset at which picture
        data starts, which is ``len(data)`` when the header never ends.
    """
    segments: list[Segment] = []
    position = len(_SOI)
    while True:
        position = data.find(b"\xff", position)
        if position < 0 or position + 4 > len(data):
            return segments, len(data)
        marker = data[position + 1]
        if marker in (0x00, 0xFF) or marker in _BARE:
            position += 1 if marker == 0xFF else 2
            continue
        stop = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        segments.append(Segment(marker, data[position + 4 : stop]))
        if marker == _SOS:
            return segments, min(stop, len(data))
        position = max(stop, position + 4)


def tidy(data: bytes) -> bytes:
    """Rewrite a JPEG without metadata, junk and zero padding, which cannot change its pixels.

    Args:
        data: A JPEG file, possibly damaged.

    Returns:
        A file with the same tables, frame, scans and colour conversion. The same bytes when there
        is no picture data.
    """
    segments, start = read_header(data)
    if start == len(data):
        return data
    frame = next((s for s in segments if s.marker in _FRAMES), None)
    chunks = [_SOI]
    for segment in segments:
        payload = _tidy_segment(segment, frame)
        if payload is not None:
            length = (len(payload) + 2).to_bytes(2, "big")
            chunks += [bytes((0xFF, segment.marker)), length, payload]
    return b"".join(chunks) + _without_padding(data[start:])


def _tidy_segment(segment: Segment, frame: Segment | None) -> bytes | None:
    """Return a segment's payload in its usual form. None: leave the segment out."""
    marker, payload = segment
    if marker == _APP0 and payload.startswith(b"JFIF\0"):
        return b"JFIF\0\1\1\0\0\1\0\1\0\0"
    if marker == _APP14 and payload.startswith(b"Adobe") and len(payload) >= 12:
        num_components = frame.payload[5] if frame and len(frame.payload) > 5 else 3
        default_transform = 2 if num_components == 4 else 1  # YCCK, YCbCr
        transform = payload[11] if payload[11] in (0, default_transform) else default_transform
        return payload[:11] + bytes((transform,))
    if _APP0 <= marker <= _APP15 or marker == _COM:
        return None
    if marker == _SOS and frame and frame.marker in _SEQUENTIAL:
        return payload[:-3] + b"\x00\x3f\x00"
    return payload


def _without_padding(body: bytes) -> bytes:
    """Cut the zeros before the end marker.

    Zeros that stand in place of lost data are cut too. The decoder then finds the data missing.
    """
    end = body.rfind(_EOI)
    if end < 0:
        return body
    kept = body[:end].rstrip(b"\0")
    stuffing = b"\0" if kept.endswith(b"\xff") else b""  # FF 00 is the data byte FF
    return kept + stuffing + body[end:]


def orientation_of(segments: list[Segment]) -> int | None:
    """Return the orientation that a header asks for: EXIF's, else XMP's, in Pillow's order."""
    xmp_value = None
    for marker, payload in segments:
        if marker == _APP1 and payload.startswith(b"Exif\0\0"):
            exif_value = exif_orientation(payload)
            if exif_value is not None:
                return exif_value
        elif marker == _APP1 and xmp_value is None:
            xmp_value = xmp_orientation(payload)
    return xmp_value
