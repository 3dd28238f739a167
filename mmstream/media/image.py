"""Image files of any known format: their sizes by the headers, and upright RGB pixels.

Place in the flow: converter, statistics, notebooks and `ImageDecoder` read images here:

    first bytes say the format -> libjpeg-turbo or `pillow` decodes -> `orientation` turns it

The name of the field does not matter: a PNG called ``.jpg`` is decoded as a PNG.

JPEG is decoded strictly where picture data is concerned, and leniently where metadata is.
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

Refused too, because a few bytes would cause much work: more than `MAX_SCANS` scans, or than
`SCANS_OF_LARGEST` scans of a picture of the largest size; a header of more than `MAX_SEGMENTS`
segments, or with more than `MAX_JUNK_BYTES` of junk between two of them.

JPEG has no checksum. A flipped bit that gives other valid codes causes no warning: about 85 % of
single flips in a 500x375 photograph went unnoticed. Files with sampling factors that the TurboJPEG
API does not know (such as 4:1:0) are decoded by Pillow, which notices truncation but not damage.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageFile, JpegImagePlugin, PngImagePlugin

from mmstream.errors import DecodeError
from mmstream.media.limits import Limits, out_of_memory_refused
from mmstream.media.orientation import (
    SIDEWAYS,
    picture_orientation,
    upright,
    upright_bytes,
)
from mmstream.media.pillow import (
    FORMATS,
    check_png,
    decode_with_pillow,
    has_late_metadata,
    one_line,
    pillow_shape,
    to_numbers,
    to_rgb,
)
from mmstream.media.types import Shape

JPEG_START = b"\xff\xd8"
"""The first bytes of every JPEG: its marker "start of image"."""


def decode_bytes(
    data: bytes | memoryview,
    limits: Limits,
    factor: int = 1,
    check_shape: Callable[[int, int], None] | None = None,
) -> tuple[NDArray[np.uint8], int]:
    """Decode an image of any known format.

    Args:
        data: The file.
        limits: Limits on pixels, memory and time.
        factor: How many times smaller a JPEG may be decoded: 1, 2, 4 or 8.
        check_shape: As in `decode_with_pillow`. Not used for a JPEG.

    Returns:
        The pixels: uint8 [H, W, 3], RGB, upright, C-contiguous. And the factor that was used. It is
        1 where the format, or the kind of JPEG, cannot be decoded smaller.

    Raises:
        DecodeError: The bytes are not a whole image, or exceed a limit.
    """
    if data[:2] == JPEG_START:
        return decode_jpeg(data, limits, factor)
    return _decode_other(bytes(data), limits, check_shape, to_rgb), 1


@out_of_memory_refused("image")
def decode_whole(data: bytes, limits: Limits) -> NDArray[np.uint8]:
    """Decode an image at its full size; as `decode_bytes`, and too little memory is its error."""
    return decode_bytes(data, limits)[0]


def decode_mask(
    data: bytes | memoryview,
    limits: Limits,
    check_shape: Callable[[int, int], None] | None,
) -> NDArray[np.uint8]:
    """Decode a picture of class numbers.

    Args:
        data: The file.
        limits: Limits on pixels, memory and time.
        check_shape: As in `decode_with_pillow`.

    Returns:
        The numbers as they are stored: uint8 [H, W, 1], upright, C-contiguous.

    Raises:
        DecodeError: The bytes are not a whole image, exceed a limit, or are not a mask.
    """
    if data[:2] == JPEG_START:
        raise DecodeError("a JPEG does not keep class numbers exactly: masks are PNG files")
    return _decode_other(bytes(data), limits, check_shape, to_numbers)


def _decode_other(
    data: bytes,
    limits: Limits,
    check_shape: Callable[[int, int], None] | None,
    convert: Callable[[Image.Image], NDArray[np.uint8]],
) -> NDArray[np.uint8]:
    """Decode an image that is not a JPEG, and turn it upright; arguments as of its callers."""
    plugin = plugin_of(data)
    if plugin is PngImagePlugin.PngImageFile:
        check_png(data)
    picture = decode_with_pillow(plugin, data, limits, check_shape, convert)
    height, width, _ = picture.pixels.shape
    limits.check_memory(upright_bytes(height, width, picture.orientation), height, width)
    return upright(picture.pixels, picture.orientation)


def header_shape(data: bytes | memoryview, limits: Limits) -> Shape | None:
    """Read the (height, width) of the upright image from its header, without judging the file.

    Returns:
        The shape that `decode_bytes` gives at factor 1, if it succeeds. None where the header alone
        does not tell: libjpeg or Pillow refuse it, or the orientation may follow a PNG's pixels.

    Raises:
        DecodeError: The format is not known, or the header exceeds a limit.
    """
    if data[:2] == JPEG_START:
        header = readable_header(data)
        return header.picture if header is not None and min(header.stored) > 0 else None
    data = bytes(data)
    plugin = plugin_of(data)
    if plugin is PngImagePlugin.PngImageFile and has_late_metadata(data):
        return None
    return pillow_shape(plugin, data, limits)


def plugin_of(data: bytes) -> Callable[[io.BytesIO], ImageFile.ImageFile]:
    """Return the class of the Pillow plugin that the first bytes ask for."""
    for image_format in FORMATS:
        if re.match(image_format.first_bytes, data):
            return image_format.plugin
    if not data:
        raise DecodeError("empty, not an image")
    raise DecodeError(f"not an image of a known format: starts with {data[:12]!r}")


# -- JPEG by libjpeg-turbo -------------------------------------------------------------------------

_EOI = b"\xff\xd9"
_APP0, _APP1, _APP14, _APP15, _COM, _SOS = 0xE0, 0xE1, 0xEE, 0xEF, 0xFE, 0xDA
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_SEQUENTIAL = (0xC0, 0xC1)
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ONE_SCAN = (0xC0, 0xC1, 0xC9)
_ARITHMETIC = (0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
_FILL = (0x00, 0xFF)  # no marker, but stuffing or padding
_BARE = (0x01, *range(0xD0, 0xD9))  # markers without a length

MAX_SCANS = 500
"""Most scans of a JPEG. Encoders write 10; each scan may cost a pass over the whole picture."""
SCANS_OF_LARGEST = 32
"""Most scans x height x width, in pictures of the largest size. A scan that is empty in the file
costs 0.1 to 0.7 ns per pixel: 3 s for the default of max_pixels."""
ARITHMETIC_COST = 8
"""How many times more a scan with arithmetic coding counts. It costs up to 2.6 ns per pixel."""
MAX_SEGMENTS = 1000
"""Most segments of a header. A profile has up to 255, other large metadata 16 per MiB."""
MAX_JUNK_BYTES = 2**16
"""Most bytes between two segments of a header."""
MAX_MARKERS = 10 * MAX_SCANS
"""Most markers after the header that are looked at in order to count scans."""
_PIECE_BYTES = 2**18

_MARKER = re.compile(rb"\xff[^\x00\xff]")
_MARKER_IN_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


class Segment(NamedTuple):
    """One segment of a header."""

    marker: int
    """The second byte of its marker; the first is FF."""
    payload: bytes
    """Its content, without marker and length."""


class JpegHeader(NamedTuple):
    """What stands before the picture data of a JPEG."""

    segments: list[Segment]
    """Those of `read_header`."""
    start: int
    """Where the picture data starts."""
    stored: Shape
    """(height, width) as the file stores the picture."""
    is_cmyk: bool
    """Whether it is decoded at full size only."""
    orientation: int | None
    """1 to 8 as the EXIF standard counts them. None: upright."""

    @property
    def picture(self) -> Shape:
        """(height, width) of the picture when it is upright."""
        return self.stored[::-1] if self.orientation in SIDEWAYS else self.stored


def _header_of(data: bytes | memoryview, segments: list[Segment], start: int) -> JpegHeader:
    """Return the header of a JPEG whose segments `read_header` has listed, within limits.

    Raises:
        ValueError: libjpeg refuses the header. The file may still decode after `tidy`.
    """
    height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    is_cmyk = colorspace in ("CMYK", "YCCK")
    return JpegHeader(segments, start, (height, width), is_cmyk, orientation_of(segments))


def readable_header(data: bytes | memoryview) -> JpegHeader | None:
    """Read the header of a JPEG, without judging the file. None where libjpeg refuses it.

    Raises:
        DecodeError: The header exceeds a limit.
    """
    try:
        return _header_of(data, *read_header(data))
    except ValueError:
        return None


def check_jpeg(data: bytes | memoryview, header: JpegHeader, factor: int, limits: Limits) -> None:
    """Refuse a JPEG that costs too much. No pixel of it is decoded yet.

    Args:
        data: The file.
        header: What `readable_header` returns for it.
        factor: How many times smaller it will be decoded: 1, 2, 4 or 8.
        limits: Limits on pixels, scans and memory.

    Raises:
        DecodeError: Names the limit.
    """
    check_scans(data, header.segments, header.start, limits.max_pixels)
    _check_size(header, factor, limits)


def decode_jpeg(
    data: bytes | memoryview, limits: Limits, factor: int = 1, header: JpegHeader | None = None
) -> tuple[NDArray[np.uint8], int]:
    """Decode a JPEG strictly, by the module's list, and turn it upright.

    Args:
        data: The file, starting with FF D8.
        limits: Limits on pixels and memory, checked from the header, and on time.
        factor: How many times smaller to decode it: 1, 2, 4 or 8. All picture data is read at every
            factor, so damage is noticed as at full size.
        header: Of this file, which `check_jpeg` has passed. None: it is read and checked now.

    Returns:
        The pixels: uint8 [H, W, 3], RGB, C-contiguous, sides divided by the factor and rounded up.
        And the factor that was used, which is 1 for CMYK and for what Pillow decodes. Grey is
        repeated. CMYK and YCCK are read as Adobe's inverted CMYK and converted without a colour
        profile, as Pillow does.

    Raises:
        DecodeError: The bytes are not a whole, undamaged JPEG, or the picture is too large.
    """
    try:
        if header is None:
            header = _header_of(data, *read_header(data))
            check_jpeg(data, header, factor, limits)
        image, used = _decode_strictly(data, header, factor)
    except ValueError as error:
        limits.deadline.check()
        return _decode_tidied(bytes(data), limits, factor, error)
    return upright(image, header.orientation), used


def _decode_tidied(
    data: bytes, limits: Limits, factor: int, first: ValueError
) -> tuple[NDArray[np.uint8], int]:
    """Decode what libjpeg has refused for the error `first`, without what cannot change pixels."""
    segments, start = read_header(data)
    check_scans(data, segments, start, limits.max_pixels)
    tidied = tidy(data, segments, start)
    try:
        header = _header_of(tidied, segments, start)
        _check_size(header, factor, limits)
        image, factor = _decode_strictly(tidied, header, factor)
    except ValueError as second:
        if "nsufficient memory" in str(second):
            raise MemoryError(str(second)) from None
        if "subsampling" not in str(second) or tidied is data:
            raise DecodeError(f"JPEG: {one_line(first)}") from None
        # Without the metadata, of which Pillow would parse more than is needed.
        plugin = JpegImagePlugin.JpegImageFile
        image, factor = decode_with_pillow(plugin, tidied, limits).pixels, 1
    return upright(image, orientation_of(segments)), factor


def _decode_strictly(
    data: bytes | memoryview, header: JpegHeader, factor: int
) -> tuple[NDArray[np.uint8], int]:
    """Decode a JPEG as it is stored. Raises ValueError at libjpeg's first warning."""
    height, width = header.stored
    if header.is_cmyk:
        image = simplejpeg.decode_jpeg(data, "CMYK")
        cmyk = Image.frombuffer("CMYK", (width, height), image, "raw", "CMYK;I", 0, 1)
        return to_rgb(cmyk), 1
    if factor == 1:
        return simplejpeg.decode_jpeg(data, "RGB"), 1
    # simplejpeg has the scales n/8, and takes the smallest one that gives at least these sides.
    # That is 1/factor: at factor 4, 500x375 pixels become 125x94.
    small = (-(-height // factor), -(-width // factor))
    image = simplejpeg.decode_jpeg(data, "RGB", min_height=small[0], min_width=small[1])
    if image.shape[:2] != small:  # a tiny picture, where several scales round to one size
        return simplejpeg.decode_jpeg(data, "RGB"), 1
    return image, factor


def read_header(data: bytes | memoryview) -> tuple[list[Segment], int]:
    """List a JPEG's header segments, skipping junk between them as libjpeg does.

    Args:
        data: A JPEG file, possibly damaged.

    Returns:
        The segments up to and including the first start of scan. And the offset at which picture
        data starts, which is ``len(data)`` when the header never ends.

    Raises:
        DecodeError: There are more than `MAX_SEGMENTS` segments or other markers, or more than
            `MAX_JUNK_BYTES` between two of them.
    """
    segments: list[Segment] = []
    position, size = len(JPEG_START), len(data)
    for _ in range(MAX_SEGMENTS):
        if position + 4 > size:
            return segments, size
        marker = data[position + 1]
        if data[position] != 0xFF or marker in _FILL:
            position = _next_marker(data, position)
            if position + 4 > size:
                return segments, size
            marker = data[position + 1]
        if marker in _BARE:
            position += 2
            continue
        stop = position + 2 + (data[position + 2] << 8 | data[position + 3])
        segments.append(Segment(marker, bytes(data[position + 4 : stop])))
        if marker == _SOS:
            return segments, min(stop, size)
        position = max(stop, position + 4)
    raise DecodeError(f"JPEG: more than {MAX_SEGMENTS} segments in the header")


def _next_marker(data: bytes | memoryview, position: int) -> int:
    """Return where the next marker of a header starts, or the length of a file that ends first."""
    match = _MARKER.search(data, position, position + MAX_JUNK_BYTES)
    if match is not None:
        return match.start()
    if len(data) - position > MAX_JUNK_BYTES:
        raise DecodeError(f"JPEG: more than {MAX_JUNK_BYTES} bytes of junk in the header")
    return len(data)


def check_scans(
    data: bytes | memoryview, segments: list[Segment], start: int, max_pixels: int
) -> None:
    """Refuse a JPEG with more scans than its size allows.

    A scan of a progressive file can be a few bytes that cost a pass over the whole picture.

    Args:
        data: The file.
        segments: What `read_header` returns for it.
        start: The same.
        max_pixels: `SCANS_OF_LARGEST` times it is the limit on scans x height x width.

    Raises:
        DecodeError: Names the limit.
    """
    frame = _frame_of(segments)
    if frame is None or not _has_many_scans(segments):
        return
    height, width = (int.from_bytes(frame.payload[i : i + 2], "big") for i in (1, 3))
    cost = ARITHMETIC_COST if frame.marker in _ARITHMETIC else 1
    most = SCANS_OF_LARGEST * max_pixels // max(1, height * width * cost)
    max_scans = min(MAX_SCANS, max(1, most))
    # All places that look like a scan are no fewer than the scans, and are counted at once.
    if _most_scans(data, start) >= max_scans and _exceeds(data, start, max_scans):
        raise DecodeError(f"JPEG: more than {max_scans} scans in a picture of {width}x{height}")


def _most_scans(data: bytes | memoryview, start: int) -> int:
    """Count what looks like the start of a scan. ``bytes.count`` takes ten times as long."""
    body = np.frombuffer(data, np.uint8)
    num_scans = 0
    for top in range(start, len(data), _PIECE_BYTES):
        piece = body[top : top + _PIECE_BYTES + 1]  # a marker may lie on the border
        num_scans += int(np.count_nonzero((piece[:-1] == 0xFF) & (piece[1:] == _SOS)))
    return num_scans


def _exceeds(data: bytes | memoryview, start: int, max_scans: int) -> bool:
    """Tell whether a file has more scans, walking through its segments from the first scan's data.

    Bytes in segments and after the end marker, such as a thumbnail's, are not scans.
    """
    num_scans, position = 1, start
    for _ in range(MAX_MARKERS):
        match = _MARKER_IN_SCAN.search(data, position)
        if match is None or match[0] == _EOI:
            return num_scans > max_scans
        num_scans += data[match.end() - 1] == _SOS
        if num_scans > max_scans:
            return True
        length = int.from_bytes(data[match.end() : match.end() + 2], "big")
        position = match.end() + max(2, length)
    return True


def _has_many_scans(segments: list[Segment]) -> bool:
    """Tell whether libjpeg would read more than one scan.

    A sequential file whose first scan has all components ends after it.
    """
    frame = _frame_of(segments)
    return (
        frame is None
        or frame.marker not in _ONE_SCAN
        or segments[-1].payload[:1] != frame.payload[5:6]
    )


def _frame_of(segments: list[Segment]) -> Segment | None:
    return next((segment for segment in segments if segment.marker in _FRAMES), None)


def _check_size(header: JpegHeader, factor: int, limits: Limits) -> None:
    """Refuse a picture that is too large, or needs too much memory to be decoded and turned.

    libjpeg keeps all coefficients of a file with several scans, 2 bytes each. Example: 4:2:0 has
    half a coefficient of each colour per pixel's one of brightness. So it needs 3 bytes per pixel,
    and 3 more for the result.
    """
    height, width = header.stored
    limits.check_picture(height, width)
    factor = 1 if header.is_cmyk else factor
    num_pixels = height * width
    result = num_pixels * (11 if header.is_cmyk else 3) / factor**2
    coefficients = 0.0
    if _has_many_scans(header.segments):
        frame = _frame_of(header.segments)
        sampling = [(s >> 4, s & 15) for s in frame.payload[7::3]] if frame else []
        full = max((h for h, _ in sampling), default=0) * max((v for _, v in sampling), default=0)
        blocks = sum(h * v for h, v in sampling) / full if full else 4
        coefficients = 2 * blocks * num_pixels
    turned = upright_bytes(height, width, header.orientation) / factor**2
    limits.check_memory(max(result + coefficients, turned), height, width)


def tidy(data: bytes, segments: list[Segment], start: int) -> bytes:
    """Rewrite a JPEG without metadata, junk and zero padding, which cannot change its pixels.

    Args:
        data: A JPEG file, possibly damaged.
        segments: What `read_header` returns for it.
        start: The same.

    Returns:
        A file with the same tables, frame, scans and colour conversion. The same bytes when there
        is not picture data.
    """
    if start == len(data):
        return data
    frame = _frame_of(segments)
    chunks = [JPEG_START]
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
    """Return the orientation that a header asks for. A large EXIF block has several segments."""
    blocks = [payload for marker, payload in segments if marker == _APP1]
    exif = b"".join(block[len(_EXIF) :] for block in blocks if block.startswith(_EXIF))
    xmp = [block for block in blocks if block.startswith(_XMP)]
    return picture_orientation(exif, xmp[-1] if xmp else None)
