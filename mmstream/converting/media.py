"""Convert's third step: the bytes of a media file, and what they really are.

A file is known by its first bytes, not by its name: a PNG that is called ``a.jpg`` is accepted and
stored as ``png``; an HTML page that is called ``a.jpg`` is a reject. Bytes are never re-encoded.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import unquote

from mmstream.converting.draft import Kind, MediaRef, RowError

__all__ = ["MediaType", "load_media", "sniff"]

MAX_ROW_BYTES = 1 << 30
"""Media of one row: a sample is held in memory whole, here and by every reader."""

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):(?=//|[^/\\])")
_NOT_DECODED = ("tiff", "avif", "heic")
_BAD_PATH = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)


class MediaType(NamedTuple):
    """What a file's first bytes say."""

    kind: Kind
    extension: str


def load_media(refs: Sequence[MediaRef], root: str | None) -> list[tuple[str, bytes]]:
    """Return (extension, bytes) of every reference, in order.

    Args:
        refs: paths relative to `root`, absolute ones inside it, or ``file://`` URLs of such.
        root: real path of the folder that no reference may leave, by ``..`` or by a link;
            None when there is no such folder.

    Raises:
        RowError: a file that is missing, outside, empty, too large, or not of its kind.
        OSError: the disk failed; a fault of the machine is not the row's.
    """
    found: list[tuple[str, bytes]] = []
    left = MAX_ROW_BYTES
    for ref in refs:
        if root is None:
            raise RowError(f"{_shown(ref.path)}: no media root; remote rows need one to be named")
        data = _read(ref.path, root, left)
        left -= len(data)
        found.append((_extension(ref, data), data))
    return found


def sniff(head: bytes) -> MediaType | None:
    """Return the type that a file's first 64 bytes show, or None for no known one."""
    for magic, found in _MAGIC:
        if head.startswith(magic):
            return found
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12])
    if head[4:8] == b"ftyp":
        return _iso(head)
    if head[4:8] in (b"moov", b"mdat", b"wide") and head[:2] == b"\0\0":
        return MediaType("video", "mov")  # QuickTime from before it had a file type
    if head[:4] == b"\x1aE\xdf\xa3":
        return MediaType("video", "webm" if b"webm" in head else "mkv")
    if head[:2] == b"BM" and head[6:10] == bytes(4) and head[15:18] == bytes(3):
        return MediaType("image", "bmp")  # two letters are too few: look at the fields behind
    if len(head) > 2 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2:
        return MediaType("audio", "mp3")  # a bare MPEG frame of layer III, without an ID3 tag
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
_RIFF = {
    b"WEBP": MediaType("image", "webp"),
    b"WAVE": MediaType("audio", "wav"),
    b"AVI ": MediaType("video", "avi"),
}


def _iso(head: bytes) -> MediaType | None:
    """Tell the members of the MP4 family apart by their brands."""
    brands = head[8 : max(16, min(int.from_bytes(head[:4], "big"), 64))]
    if b"avif" in brands or b"avis" in brands:
        return MediaType("image", "avif")
    if brands[:4] in (b"heic", b"heix", b"hevc", b"mif1", b"msf1"):
        return MediaType("image", "heic")
    if brands[:4] in (b"M4A ", b"M4B "):
        return MediaType("audio", "m4a")
    return MediaType("video", "mov" if brands[:4] == b"qt  " else "mp4")


def _extension(ref: MediaRef, data: bytes) -> str:
    found = sniff(data[:64])
    article = "a" if ref.kind == "video" else "an"
    if found is None:
        raise RowError(f"{_shown(ref.path)}: not {article} {ref.kind} (starts with {data[:12]!r})")
    if found.kind != ref.kind:
        raise RowError(f"{_shown(ref.path)}: not {article} {ref.kind} but {found.extension}")
    if found.extension in _NOT_DECODED:
        # Stored, it would be a sample without image to every reader: worse than a named reject.
        raise RowError(
            f"{_shown(ref.path)}: {found.extension} is not supported; make it png or jpg"
        )
    return found.extension


def _read(path: str, root: str, limit: int) -> bytes:
    real = _resolve(path, root)
    try:
        fd = os.open(real, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer must not block
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise RowError(f"{_shown(path)}: not a file")
            if status.st_size > limit:
                raise RowError(
                    f"{_shown(path)}: the row's media are over the limit of {MAX_ROW_BYTES} bytes"
                )
            data = file.read()
    except PermissionError:
        raise RowError(f"{_shown(path)}: no permission to read it") from None
    except OSError as error:
        if error.errno in _BAD_PATH:
            raise RowError(f"{_shown(path)}: no such file") from None
        if error.errno in (errno.EISDIR, errno.ENXIO, errno.ENODEV):
            raise RowError(f"{_shown(path)}: not a file") from None
        raise
    if not data:
        raise RowError(f"{_shown(path)}: empty file")
    return data


def _resolve(path: str, root: str) -> str:
    """Return the real path of a reference; it lies under `root`."""
    if path.startswith("file://"):
        local = unquote(path.removeprefix("file://").removeprefix("localhost"))
    elif scheme := _SCHEME.match(path):
        raise RowError(f"{_shown(path)}: {scheme[1]}: is not a local file; fetch the media first")
    else:
        local = path
    if "\0" in local:
        raise RowError(f"{_shown(path)}: not a path")
    real = os.path.realpath(os.path.join(root, local))  # noqa: PTH118 - twice as fast as pathlib
    if not real.startswith(root.rstrip("/") + "/"):
        raise RowError(f"{_shown(path)}: lies outside the media root")
    return real


def _shown(path: str) -> str:
    return path if len(path) <= 200 else f"{path[:80]}...{path[-80:]}"
