"""Media files on local disk: their bytes, and their real type.

    load -> FILES

The type is recognised by the first bytes, not by the file's name. A PNG named ``a.jpg`` is accepted
and stored as ``png``. An HTML page named ``a.jpg`` is rejected. Bytes are never re-encoded.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import unquote

from mmstream.converting.draft import Kind, Media, MediaRef, RowError
from mmstream.errors import StorageError, escaped
from mmstream.storage import NotAFileError, open_file

__all__ = ["MediaType", "read_media", "short_name", "sniff"]

MAX_ROW_BYTES = 1 << 30
"""Limit on the media of one row. A sample is held in memory whole, when written and when read."""

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):(?=//|[^/\\])")
_KERNEL_FOLDERS = ("/proc/", "/sys/", "/dev/")
"""Their files are no data. Some of them fail when they are read, or never end."""

_NOT_DECODED = ("tiff", "heic")
_BAD_PATH = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)


class MediaType(NamedTuple):
    """The type of a media file."""

    kind: Kind
    extension: str


def read_media(refs: Sequence[MediaRef], root: str | None) -> list[Media]:
    """Return every media file, in the order of `refs`.

    Args:
        refs: Their paths are relative to `root`, absolute and inside it, or ``file://`` URLs.
        root: Real path of the media's folder. No path may lead out of it, by ``..`` or by a link.
            None: there is no such folder, so every file is an error.

    Raises:
        RowError: A file is missing, outside the root, empty, too large, or of another kind; or it
            is one of the kernel's, such as those in ``/proc``.
        StorageError: The disk failed. That is not the row's fault, so the conversion stops.
    """
    media: list[Media] = []
    bytes_left = MAX_ROW_BYTES
    for ref in refs:
        if root is None:
            raise RowError(
                f"{short_name(ref.path)}: no media root; remote rows need one to be named"
            )
        data = _read(ref.path, root, bytes_left)
        bytes_left -= len(data)
        media.append(Media(_extension(ref, data), data))
    return media


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


def _extension(ref: MediaRef, data: bytes) -> str:
    media_type = sniff(data[:64])
    article = "a" if ref.kind == "video" else "an"
    if media_type is None:
        raise RowError(
            f"{short_name(ref.path)}: not {article} {ref.kind} (starts with {data[:12]!r})"
        )
    if media_type.kind != ref.kind:
        raise RowError(
            f"{short_name(ref.path)}: not {article} {ref.kind} but {media_type.extension}"
        )
    if media_type.extension in _NOT_DECODED:
        # No decoder reads it: the sample would silently have no image. A reject names it.
        raise RowError(
            f"{short_name(ref.path)}: {media_type.extension} is not supported; make it png or jpg"
        )
    return media_type.extension


def _read(path: str, root: str, limit: int) -> bytes:
    real = _resolve(path, root)
    try:
        with os.fdopen(open_file(real), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:  # the files of /proc have no size either, wherever it is mounted
                raise RowError(f"{short_name(path)}: empty file")
            if size > limit:
                raise RowError(
                    f"{short_name(path)}: the row's media are over the limit of "
                    f"{MAX_ROW_BYTES} bytes"
                )
            data = file.read(size + 1)
    except NotAFileError:
        raise RowError(f"{short_name(path)}: not a file") from None
    except PermissionError:
        raise RowError(f"{short_name(path)}: no permission to read it") from None
    except OSError as error:
        if error.errno in _BAD_PATH:
            raise RowError(f"{short_name(path)}: no such file") from None
        raise StorageError(
            f"{escaped(real)}: {error.strerror}; this is no fault of a row, so the conversion "
            "stops. Mend the disk, then run the same command again"
        ) from error
    if len(data) != size:
        raise RowError(f"{short_name(path)}: changed its size while it was read")
    return data


def _resolve(path: str, root: str) -> str:
    """Return the real path of a media file. It lies under `root`."""
    if path.startswith("file://"):
        local_path = unquote(path.removeprefix("file://").removeprefix("localhost"))
    elif scheme := _SCHEME.match(path):
        raise RowError(
            f"{short_name(path)}: {scheme[1]}: is not a local file; fetch the media first"
        )
    else:
        local_path = path
    if "\0" in local_path:
        raise RowError(f"{short_name(path)}: not a path")
    real = os.path.realpath(os.path.join(root, local_path))  # noqa: PTH118 - twice as fast as pathlib
    if not real.startswith(root.rstrip("/") + "/"):
        raise RowError(f"{short_name(path)}: lies outside the media root")
    if real.startswith(_KERNEL_FOLDERS) and not real.startswith("/dev/shm/"):
        raise RowError(f"{short_name(path)}: not a file")
    return real


def short_name(path: str) -> str:
    """Return a path or URL for a message, without the middle of a long one."""
    return path if len(path) <= 200 else f"{path[:80]}...{path[-80:]}"
