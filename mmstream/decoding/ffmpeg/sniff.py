"""FFmpeg's name of a file's format, by the file's first bytes.

Only formats of this list are opened, whatever else FFmpeg could read: a playlist named ``a.mp4`` is
none of them, so it cannot make FFmpeg open other files or hosts.
"""

from __future__ import annotations

from mmstream.decoding.ffmpeg.source import EncodedMedia, read_range

__all__ = ["container_format"]

HEAD_BYTES = 400
"""What is looked at: two packets of an MPEG transport stream."""

_MAGIC = (
    (b"\x1aE\xdf\xa3", "matroska"),
    (b"OggS", "ogg"),
    (b"fLaC", "flac"),
    (b"FLV\x01", "flv"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "asf"),
    (b"\0\0\x01\xba", "mpeg"),
)
_IN_RIFF = {b"WAVE": "wav", b"AVI ": "avi"}
_MP4_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_TRANSPORT_PACKETS = (188, 192, 204)
"""Bytes of a packet of an MPEG transport stream, with and without time stamps or parity."""


def container_format(data: EncodedMedia) -> str | None:
    """Return the format of an audio or video file, or None if it is not one of the known.

    Args:
        data: The file. Its first bytes are read. After an ID3 tag those behind the tag.

    Examples:
        >>> container_format(b"RIFF....WAVEfmt ")
        'wav'
    """
    head = read_range(data, 0, HEAD_BYTES)
    if head.startswith(b"ID3") and len(head) > 10:
        return _behind_id3(data, head)
    return _format(head)


def _behind_id3(data: EncodedMedia, head: bytes) -> str:
    """Return the format of a file that starts with a tag. Its size has 7 bits in a byte."""
    size = sum(
        (byte & 0x7F) << shift for byte, shift in zip(head[6:10], (21, 14, 7, 0), strict=True)
    )
    name = _format(read_range(data, 10 + size, 10 + size + HEAD_BYTES))
    return name if name in ("flac", "aac") else "mp3"


def _format(head: bytes) -> str | None:
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] in (b"RIFF", b"RF64"):
        return _IN_RIFF.get(head[8:12])
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        return "aiff"
    if head[4:8] in _MP4_BOXES:
        return "mov"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:
        return "aac"  # ADTS: a frame of layer 0
    if len(head) > 2 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2:
        return "mp3"  # a frame of layer III
    if any(_is_transport_stream(head, size) for size in _TRANSPORT_PACKETS):
        return "mpegts"
    return None


def _is_transport_stream(head: bytes, packet_bytes: int) -> bool:
    """Tell whether two packets start with their sync byte. Time stamps of 4 bytes precede it."""
    start = 4 if packet_bytes == 192 else 0
    return head[start : start + 1] == head[start + packet_bytes :][:1] == b"\x47"
