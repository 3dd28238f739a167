"""The real type of a media file, by its first bytes.

    load -> TYPES -> check

The file's name does not matter. A PNG named ``a.jpg`` is accepted and stored as ``png``. An HTML
page named ``a.jpg`` is rejected.
"""

from __future__ import annotations

from typing import NamedTuple

from mmstream.converting.draft import Kind
from mmstream.decoding.ffmpeg.sniff import container_format

__all__ = ["MediaType", "sniff", "sniff_file"]


class MediaType(NamedTuple):
    """The type of a media file."""

    kind: Kind
    extension: str


def sniff_file(data: bytes) -> MediaType | None:
    """Return the type of a file, or None if it is unknown. Some show it behind 64 bytes only."""
    return sniff(data[:64]) or _BY_CONTAINER.get(container_format(data) or "")


def sniff(head: bytes) -> MediaType | None:
    """Return the type of a file by its first 64 bytes, or None if it is unknown."""
    for magic, media_type in _MAGIC:
        if head.startswith(magic):
            return media_type
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12])
    if head[4:8] == b"ftyp":
        return _mp4_family(head)
    if head[4:8] in (b"moov", b"mdat", b"wide") and head[:2] == b"\0\0":
        return MediaType("video", "mov")  # old QuickTime, without a file type
    if head[:4] == b"\x1aE\xdf\xa3":
        return MediaType("video", "webm" if b"webm" in head else "mkv")
    if head[:2] == b"BM" and head[6:10] == bytes(4) and head[15:18] == bytes(3):
        return MediaType("image", "bmp")  # "BM" alone is too short: check the fields behind it
    if len(head) > 2 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2:
        return MediaType("audio", "mp3")  # an MPEG layer III frame without an ID3 tag
    return None


_MAGIC = (
    (b"\xff\xd8\xff", MediaType("image", "jpg")),
    (b"\x89PNG\r\n\x1a\n", MediaType("image", "png")),
    (b"GIF87a", MediaType("image", "gif")),
    (b"GIF89a", MediaType("image", "gif")),
    (b"II*\0", MediaType("image", "tiff")),
    (b"MM\0*", MediaType("image", "tiff")),
    (b"ID3", MediaType("audio", "mp3")),
    (b"fLaC", MediaType("audio", "flac")),
    (b"OggS", MediaType("audio", "ogg")),
)
_BY_CONTAINER = {
    "mpegts": MediaType("video", "ts"),
    "mpeg": MediaType("video", "mpg"),
    "flv": MediaType("video", "flv"),
    "asf": MediaType("video", "wmv"),
    "aac": MediaType("audio", "aac"),
    "aiff": MediaType("audio", "aiff"),
}
_RIFF = {
    b"WEBP": MediaType("image", "webp"),
    b"WAVE": MediaType("audio", "wav"),
    b"AVI ": MediaType("video", "avi"),
}


def _mp4_family(head: bytes) -> MediaType | None:
    """Return the type of a file of the MP4 family (ISO 14496-12), by its brands."""
    brands = head[8 : max(16, min(int.from_bytes(head[:4], "big"), 64))]
    if b"avif" in brands or b"avis" in brands:
        return MediaType("image", "avif")
    if brands[:4] in (b"heic", b"heix", b"hevc", b"mif1", b"msf1"):
        return MediaType("image", "heic")
    if brands[:4] in (b"M4A ", b"M4B "):
        return MediaType("audio", "m4a")
    return MediaType("video", "mov" if brands[:4] == b"qt  " else "mp4")
