"""What a file is, told from its first bytes: ``JPEG 640x480``, ``WAV 1.2 s``, ``MP4``.

    sample_dict.py, contents.py -> file_kinds.py

Nothing is decoded, and nothing heavy is imported: it must be cheap enough for a ``repr``. The sizes
of pictures are those in the file, before any rotation.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from mmstream.media_types import sniff

MAX_JPEG_SEGMENTS = 200
"""Segments of a JPEG to look at. Its size stands in one of the first."""

_NAMES = {"jpg": "JPEG", "webp": "WebP", "webm": "WebM"}
"""Names of types that are not their extension in upper case."""

_OTHER = (
    (b"\x93NUMPY", "NPY"),
    (b"%PDF", "PDF"),
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "zip"),
)


def file_kind(data: bytes) -> str:
    """Return the type of a file and the size of a picture, or "" where the bytes do not tell.

    Examples:
        >>> file_kind(b"GIF89a" + bytes([64, 1, 240, 0]))
        'GIF 320x240'
        >>> file_kind(b"a cat on a mat")
        ''
    """
    media_type = sniff(data[:64])
    if media_type is None:
        return next((kind for magic, kind in _OTHER if data.startswith(magic)), "")
    extension = media_type.extension
    try:
        size = _SIZES[extension](data) if extension in _SIZES else ""
    except struct.error:  # the file ends within its header
        return ""
    return f"{_NAMES.get(extension, extension.upper())}{size}"


def _jpeg_size(data: bytes) -> str:
    """Return `` 640x480`` from the frame header of a JPEG, or "" where there is none.

    A segment is FF, its marker, and its length as big-endian u16, which counts itself. Frame
    headers are the markers C0 to CF, but for C4, C8 and CC.
    """
    offset = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        if offset + 4 > len(data) or data[offset] != 0xFF:
            return ""
        marker, length = struct.unpack_from(">xBH", data, offset)
        if marker == 0xFF:  # a fill byte
            offset += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, offset + 5)
            return f" {width}x{height}"
        offset += 2 + length
    return ""


def _webp_size(data: bytes) -> str:
    chunk = data[12:16]
    if chunk == b"VP8X":
        width, height = (int.from_bytes(data[i : i + 3], "little") + 1 for i in (24, 27))
    elif chunk == b"VP8 ":
        width, height = (n & 0x3FFF for n in struct.unpack_from("<HH", data, 26))
    elif chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        return ""
    return f" {width}x{height}"


def _wav_length(data: bytes) -> str:
    """Return `` 1.2 s``, from the bytes per second in the header and the size of the file."""
    (bytes_per_s,) = struct.unpack_from("<I", data, 28)
    return f" {len(data) / bytes_per_s:.1f} s" if data[12:16] == b"fmt " and bytes_per_s else ""


def _bmp_size(data: bytes) -> str:
    width, height = struct.unpack_from("<ii", data, 18)
    return f" {width}x{abs(height)}"


_SIZES: dict[str, Callable[[bytes], str]] = {
    "jpg": _jpeg_size,
    "png": lambda data: " {}x{}".format(*struct.unpack_from(">II", data, 16)),
    "gif": lambda data: " {}x{}".format(*struct.unpack_from("<HH", data, 6)),
    "webp": _webp_size,
    "bmp": _bmp_size,
    "wav": _wav_length,
}
"""What the header tells beside the type: `` 640x480`` of a picture, `` 1.2 s`` of a sound."""
