"""The types of media files: by their extensions, and by their first bytes.

    a name -> `kind_of`                   which decoder takes it, what a row names
    the bytes -> `sniff`, `sniff_file`    what it really is; convert stores it under this extension
    the bytes -> `container_format`       FFmpeg's name of it, for what FFmpeg may open

A name says what a field or path is meant to be. The bytes say what it is: a PNG named ``a.jpg`` is
accepted and stored as ``png``, an HTML page named ``a.jpg`` is rejected.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from mmstream.tar.lazy_bytes import LazyBytes

Kind: TypeAlias = Literal["image", "video", "audio"]
"""A kind of media."""

Shape: TypeAlias = tuple[int, int]
"""(height, width) in pixels."""

Facts: TypeAlias = dict[str, int | float | str]
"""What is known about a file, by name."""


EncodedMedia: TypeAlias = bytes | LazyBytes
"""An audio or video file: all of its bytes, or a way to read some. Both are sliced."""


class MediaType(NamedTuple):
    """A type of media files."""

    kind: Kind
    extension: str
    """What convert names such a file."""
    synonyms: tuple[str, ...] = ()
    """Other extensions of such files."""
    magic: tuple[bytes, ...] = ()
    """First bytes, where they alone tell the type."""
    container: str | None = None
    """FFmpeg's name, where `magic` tells it. Other containers: see `container_format`."""
    played_as: str | None = None
    """Media type of what browsers play."""
    is_decoded: bool = True
    """False: no decoder of ours takes it. Convert may still store or turn it into another type."""


TYPES = (
    MediaType("image", "jpg", ("jpeg",), (b"\xff\xd8\xff",)),
    MediaType("image", "png", (), (b"\x89PNG\r\n\x1a\n",)),
    MediaType("image", "gif", (), (b"GIF87a", b"GIF89a")),
    MediaType("image", "webp"),
    MediaType("image", "bmp"),
    MediaType("image", "avif"),
    MediaType("image", "tiff", ("tif",), (b"II*\0", b"MM\0*"), is_decoded=False),
    MediaType("image", "heic", is_decoded=False),
    MediaType("video", "mp4", ("m4v",), played_as="video/mp4"),
    MediaType("video", "mov", played_as="video/mp4"),
    MediaType("video", "3gp"),
    MediaType("video", "webm", played_as="video/webm"),
    MediaType("video", "mkv"),
    MediaType("video", "avi"),
    MediaType("video", "ogv", played_as="video/ogg"),
    MediaType("video", "mpg", ("mpeg",), (b"\0\0\x01\xba",), "mpeg"),
    MediaType("video", "ts", ("m2ts",)),
    MediaType("video", "flv", (), (b"FLV\x01",), "flv"),
    MediaType("video", "wmv", (), (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11",), "asf"),
    MediaType("video", "frames"),  # the times of a list of pictures: see `media.frames`
    MediaType("audio", "wav", played_as="audio/wav"),
    MediaType("audio", "flac", (), (b"fLaC",), "flac", "audio/flac"),
    MediaType("audio", "ogg", ("opus",), (b"OggS",), "ogg", "audio/ogg"),
    MediaType("audio", "mp3", (), (b"ID3",), played_as="audio/mpeg"),
    MediaType("audio", "m4a", played_as="audio/mp4"),
    MediaType("audio", "m4b"),
    MediaType("audio", "aac", played_as="audio/aac"),
    MediaType("audio", "aiff", ("aif",)),
    MediaType("audio", "mka"),
    MediaType("audio", "wma"),
    MediaType("audio", "sph", is_decoded=False),
)
"""Every type that is known."""

BY_EXTENSION = {
    name: media_type
    for media_type in TYPES
    for name in (media_type.extension, *media_type.synonyms)
}


def _decoded(kind: Kind) -> frozenset[str]:
    return frozenset(
        name
        for name, media_type in BY_EXTENSION.items()
        if media_type.kind == kind and media_type.is_decoded
    )


IMAGE_EXTENSIONS = _decoded("image")
"""Last extensions of fields that the image decoder takes."""
VIDEO_EXTENSIONS = _decoded("video")
AUDIO_EXTENSIONS = _decoded("audio")

HEAD_BYTES = 400
"""What `container_format` looks at: two packets of an MPEG transport stream."""
MAX_TAGS = 100
"""Most ID3 tags in a row that are passed over."""

_EMPTY_BOXES = (b"free", b"skip", b"wide", b"pnot")
_MP4_BOXES = (b"ftyp", b"moov", b"mdat", *_EMPTY_BOXES)
_TRANSPORT_PACKETS = (188, 192, 204)
"""Bytes of a packet of an MPEG transport stream, with and without time stamps or parity."""
_IN_RIFF = {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}
_OF_CONTAINER = {"mpegts": "ts", "aac": "aac", "aiff": "aiff"}
_BY_MAGIC = [(magic, media_type) for media_type in TYPES for magic in media_type.magic]


def kind_of(name: str) -> Kind | None:
    """Return the kind of the decoder that takes a field or file, by its last extension."""
    media_type = BY_EXTENSION.get(name.rpartition(".")[2])
    return media_type.kind if media_type is not None and media_type.is_decoded else None


def sniff_file(data: bytes) -> MediaType | None:
    """Return the type of a file, or None if it is unknown. Some show it after 64 bytes only."""
    if data.startswith(b"ID3"):
        return BY_EXTENSION[container_format(data) or "mp3"]
    media_type = sniff(data[_behind_empty_boxes(data) :][:64])
    return media_type or BY_EXTENSION.get(_OF_CONTAINER.get(container_format(data) or "", ""))


def _behind_empty_boxes(data: bytes) -> int:
    """Return where the first box with content begins; 0 where the file is none of the MP4 family.

    Such boxes hold room for later edits.
    """
    position = 0
    while data[position + 4 : position + 8] in _EMPTY_BOXES:
        size = int.from_bytes(data[position : position + 4], "big")
        if size < 8 or position + size > len(data):
            return 0
        position += size
    return position


def sniff(head: bytes) -> MediaType | None:
    """Return the type of a file by its first 64 bytes, or None if it is unknown."""
    name = _extension(head)
    return _by_magic(head) if name is None else BY_EXTENSION[name]


def _by_magic(head: bytes) -> MediaType | None:
    return next((media_type for magic, media_type in _BY_MAGIC if head.startswith(magic)), None)


def _extension(head: bytes) -> str | None:
    """Return the extension of a file whose type is told by more than its first bytes."""
    if head[:4] == b"RIFF":
        return _IN_RIFF.get(head[8:12])
    if head[4:8] == b"ftyp":
        return _mp4_family(head)
    if head[4:8] in (b"moov", b"mdat", b"wide") and head[:2] == b"\0\0":
        return "mov"  # old QuickTime, without a file type
    if head[:4] == b"\x1aE\xdf\xa3":
        return "webm" if b"webm" in head else "mkv"
    if head[:2] == b"BM" and head[6:10] == bytes(4) and head[15:18] == bytes(3):
        return "bmp"  # "BM" alone is too short: check the fields after it
    return "mp3" if _is_layer_3(head) else None


def _mp4_family(head: bytes) -> str:
    """Return the extension of a file of the MP4 family (ISO 14496-12), by its brands."""
    brands = head[8 : max(16, min(int.from_bytes(head[:4], "big"), 64))]
    if b"avif" in brands or b"avis" in brands:
        return "avif"
    if brands[:4] in (b"heic", b"heix", b"hevc", b"mif1", b"msf1"):
        return "heic"
    if brands[:4] in (b"M4A ", b"M4B "):
        return "m4a"
    return "mov" if brands[:4] == b"qt  " else "mp4"


def _is_layer_3(head: bytes) -> bool:
    """Tell whether a frame of MPEG layer III begins here, without an ID3 tag."""
    return len(head) > 2 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2


def container_format(data: EncodedMedia) -> str | None:
    """Return FFmpeg's name of the format of an audio or video file, or None if it is not known.

    Only formats of this list are opened, whatever else FFmpeg could read: a playlist named
    ``a.mp4`` is none of them, so it cannot make FFmpeg open other files or hosts.

    Args:
        data: The file. Its first bytes are read. After an ID3 tag those after the tag.

    Examples:
        >>> container_format(b"RIFF....WAVEfmt ")
        'wav'
    """
    start = behind_id3(data, 0)
    name = _container(data[start : start + HEAD_BYTES])
    return name if not start or name in ("flac", "aac") else "mp3"


def _container(head: bytes) -> str | None:
    if (media_type := _by_magic(head)) is not None and media_type.container is not None:
        return media_type.container
    if head[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if head[8:16] == b"WAVEfmt " and head[20:22] == b"\x55\0":
        return "mp3"  # in a WAV
    if head[:4] in (b"RIFF", b"RF64"):
        return _IN_RIFF.get(head[8:12]) if head[8:12] != b"WEBP" else None
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        return "aiff"
    if head[4:8] in _MP4_BOXES:
        return "mov"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:
        return "aac"  # ADTS: a frame of layer 0
    if _is_layer_3(head):
        return "mp3"
    if any(_is_transport_stream(head, size) for size in _TRANSPORT_PACKETS):
        return "mpegts"
    return None


def _is_transport_stream(head: bytes, packet_bytes: int) -> bool:
    """Tell whether two packets start with their sync byte. Time stamps of 4 bytes precede it."""
    start = 4 if packet_bytes == 192 else 0
    return head[start : start + 1] == head[start + packet_bytes :][:1] == b"\x47"


def behind_id3(data: EncodedMedia, position: int) -> int:
    """Return where the ID3v2 tags end that begin at a position; the position if there is none.

    A size has 7 bits in a byte. Of a tag with another size, or one beyond the file, only the header
    is passed over. A flag says that a footer follows, as long as the header.
    """
    for _ in range(MAX_TAGS):
        head = data[position : position + 10]
        if not head.startswith(b"ID3") or len(head) < 10:
            break
        position += 10
        size = sum(byte << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
        if max(head[6:]) < 0x80 and position + size <= len(data):
            position += size + (10 if head[5] & 0x10 else 0)
    return position
