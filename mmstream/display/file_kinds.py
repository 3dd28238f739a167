"""What a file is, told from its first bytes: ``JPEG 640x480``, ``WAV 1.2 s``, ``MP4``.

    sample_dict.py, contents.py -> file_kinds.py

Nothing is decoded, and nothing heavy is imported: it must be cheap enough for a ``repr``. The sizes
of pictures are those in the file, before any rotation.
"""

from __future__ import annotations

import struct

__all__ = ["file_kind"]

MAX_JPEG_SEGMENTS = 200
"""Segments of a JPEG to look at. Its size stands in one of the first."""

_FTYP = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"M4A ": "M4A", b"qt  ": "MOV"}

_MAGIC = (
    (b"fLaC", "FLAC"),
    (b"OggS", "OGG"),
    (b"ID3", "MP3"),
    (b"\xff\xfb", "MP3"),
    (b"\xff\xf3", "MP3"),
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
    try:
        return _kind(data)
    except struct.error:  # the file ends within its header
        return ""


def _kind(data: bytes) -> str:
    if data[:3] == b"\xff\xd8\xff":
        return f"JPEG{_jpeg_size(data)}"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "PNG {}x{}".format(*struct.unpack_from(">II", data, 16))
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF {}x{}".format(*struct.unpack_from("<HH", data, 6))
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return f"WebP{_webp_size(data)}"
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return f"WAV{_wav_length(data)}"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "AVI"
    if data[:4] == b"\x1aE\xdf\xa3":  # EBML, whose header names the kind of document
        return "WebM" if b"webm" in data[:64] else "MKV"
    if data[4:8] == b"ftyp":
        return _FTYP.get(data[8:12], "MP4")
    if data[:2] == b"BM" and data[6:10] == b"\0\0\0\0":
        width, height = struct.unpack_from("<ii", data, 18)
        return f"BMP {width}x{abs(height)}"
    return next((kind for magic, kind in _MAGIC if data.startswith(magic)), "")


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
