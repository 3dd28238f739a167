r"""What a row's path or URL of a medium means, and the bytes behind it.

    load -> REFERENCES -> the bytes

    a/b.jpg, /root/a/b.jpg, file:///root/a.jpg    a file under the media root
    a\b.jpg, C:\a\b.jpg                           the same, as Windows writes it
    https://host/a.jpg                            a download
    s3://bucket/a.jpg, gs://, az://, hf://        an object, where the caller allows its prefix
    data:image/png;base64,...                     the bytes themselves, as plain base64 too
    tar://b.jpg::a.tar                            a member of a tar, as fsspec writes it
    zip://b.jpg::a.zip                            a member of a zip
    a.bin:4096:100                                100 bytes from byte 4096, as fairseq writes them

Rows may be a stranger's, and objects are read with the user's credentials. So rows never reach
fsspec as they are: only known schemes pass, no chains of URLs, and only under the prefixes that the
caller named. Of local files, nothing outside the media root is read.

`MediaAccess` says what a conversion may read. It is made once, in the main process; `load.py` gets
it with the rows of a shard. It is no part of the plan: the same files may lie somewhere else later.

Storage or a disk that fails ends the conversion: that is no fault of a row. So does a media root
that was there at the beginning and is gone, such as a network mount that was lost. An object or a
file that is missing is a fault of its row.
"""

from __future__ import annotations

import binascii
import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import quote, unquote, unquote_to_bytes

from mmstream.converting.draft import RowError
from mmstream.converting.media.hosts import shown_url
from mmstream.converting.options import DownloadOptions
from mmstream.errors import ConfigError, StorageError, escaped
from mmstream.storage import NotAFileError, Store, is_remote, open_file, open_store
from mmstream.storage.store import TooLargeError
from mmstream.storage.urls import file_path, require_no_secret


@dataclass(frozen=True)
class MediaAccess:
    """What a conversion may read for its rows."""

    root: str | None
    """Real path of the folder that media paths are relative to, or a URL prefix. Nothing outside it
    is read, unless `allow_urls` has it. None: there is none, so rows cannot name files."""
    allow_urls: tuple[str, ...] = ()
    """Other URL prefixes that rows may name, such as ``s3://bucket/photos/``."""
    downloads: DownloadOptions = field(default_factory=DownloadOptions)
    """How media behind http(s) URLs are downloaded."""
    num_processes: int = 1
    """Processes of this machine that download at the same time."""
    root_stamp: tuple[int, int] | None = None
    """`folder_stamp` of a local root when the conversion began."""


def folder_stamp(path: str) -> tuple[int, int] | None:
    """Return what identifies a folder on this machine, or None where it cannot be opened.

    A network mount that is lost leaves an empty folder of the same name, with another stamp.
    """
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return (stat.st_dev, stat.st_ino) if os.access(path, os.X_OK) else None


def require_prefixes(allow_urls: Sequence[str]) -> tuple[str, ...]:
    """Return URL prefixes that rows may name, checked.

    Raises:
        ConfigError: One of them is no URL of a bucket or folder.
    """
    for prefix in allow_urls:
        require_no_secret(prefix)
        scheme, _, rest = prefix.partition("://")
        if not is_remote(prefix) or "::" in prefix or not rest.strip("/"):
            raise ConfigError(
                f"allow_urls: {prefix!r} is not the URL of a bucket or a folder in it; "
                "write s3://bucket/folder/"
            )
        if scheme in ("http", "https"):
            raise ConfigError(
                f"allow_urls: {prefix!r}: rows may name {scheme}:// anyway; private addresses need "
                "an allowed host"
            )
    return tuple(allow_urls)


_DATA_URL = re.compile(r"data:([^,;]{0,100})((?:;[^,;]{0,200}){0,8}),", re.IGNORECASE)

_BASE64_STARTS = (
    "/9j/",  # JPEG
    "iVBORw0KGgo",  # PNG
    "R0lGODdh",  # GIF
    "R0lGODlh",
    "UklGR",  # WebP, WAV, AVI
    "T2dnUw",  # Ogg
    "ZkxhQw",  # FLAC
    "SUQz",  # MP3
)
"""How base64 begins of files whose type is known by their first bytes."""
MIN_BASE64_CHARS = 64
"""A shorter text is a path. No media file is that small."""
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
_HEAD_CHARS = 1024
"""What lies behind the beginning is not looked at: a path is not that long."""
MAX_ESCAPES = 1 << 18
"""Most percent signs of a ``data:`` URL. Each costs a third of a microsecond."""


def is_inline(text: str) -> bool:
    """Tell whether a text in place of a path is a ``data:`` URL or a media file in base64."""
    is_base64 = (
        len(text) >= MIN_BASE64_CHARS
        and text.startswith(_BASE64_STARTS)
        and _BASE64.fullmatch(text, 0, _HEAD_CHARS) is not None
    )
    return is_base64 or text[:5].lower() == "data:"


def inline_bytes(text: str) -> bytes | None:
    """Return the bytes that a text in place of a path is. None: it is a path or a URL.

    Raises:
        RowError: They are damaged.
    """
    if not is_inline(text):
        return None
    return _decode_data_url(text) if text[:5].lower() == "data:" else _decode_base64(text)


def _decode_data_url(url: str) -> bytes:
    """Return the bytes of a ``data:`` URL (RFC 2397). Its type is not trusted.

    Raises:
        RowError: It is damaged.
    """
    match = _DATA_URL.match(url)
    if match is None:
        raise RowError("a data: URL without a comma")
    text = url[match.end() :]
    if text.count("%") > MAX_ESCAPES:
        raise RowError(f"a data: URL of more than {MAX_ESCAPES:,} percent signs; use base64")
    if not match[2].lower().endswith(";base64"):
        return unquote_to_bytes(text)
    return _decode_base64(unquote_to_bytes(text).decode("latin-1") if "%" in text else text)


def _decode_base64(text: str) -> bytes:
    """Return the bytes of base64, with or without padding and line ends, in either alphabet.

    Raises:
        RowError: It is damaged.
    """
    text = "".join(text.split()).rstrip("=")
    if "-" in text or "_" in text:
        text = text.replace("-", "+").replace("_", "/")
    try:
        return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
    except ValueError as error:  # also characters outside ASCII
        raise RowError(f"damaged base64: {error}") from None


Source: TypeAlias = Literal["file", "object", "web"]

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):(?=//|[^/\\])")
_SPAN = re.compile(r"(?s)(.*\.\w+):(\d{1,15}):(\d{1,15})")
_MEMBER = re.compile(r"(tar|zip)://")
_MAX_NAME_CHARS = 200
MAX_REFERENCE_CHARS = 16_384
"""Longest path or URL. To look up one of megabytes would take hours."""


class Reference(NamedTuple):
    """Where the bytes of a medium are."""

    source: Source
    location: str
    """Path of a file as the row has it, or a whole URL."""
    member: str | None = None
    """Name of a member of the tar or zip at `location`."""
    is_zip: bool = False
    """Whether `location` is a zip and not a tar."""
    span: tuple[int, int] | None = None
    """(start, stop) in bytes, of the file at `location`."""


def parse_reference(text: str, access: MediaAccess) -> Reference:
    """Return what a path or URL means. Nothing is read.

    Raises:
        RowError: It means nothing, or it may not be read. The message does not name it.
    """
    if len(text) > MAX_REFERENCE_CHARS:
        raise RowError(f"{len(text):,} characters; no path or URL is that long")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a character: Python can hold it, no name can
        raise RowError("not a path or URL") from None
    member, span, is_zip = None, None, False
    if (archive := _MEMBER.match(text)) is not None:
        member, separator, text = text[archive.end() :].partition("::")
        is_zip = archive[1] == "zip"
        if not separator or not member or not text:
            raise RowError("not a member; write tar://MEMBER::TAR or zip://MEMBER::ZIP")
    elif "::" not in text and (match := _SPAN.fullmatch(text)) is not None:
        text, start, length = match[1], int(match[2]), int(match[3])
        span = (start, start + length)
        if not length:
            raise RowError("a span of no bytes")
    scheme = _SCHEME.match(text)
    meaning = _OF_SCHEME.get(scheme[1].lower(), _object) if scheme else _file
    reference = meaning(text, access)
    if reference.source == "web" and (member or span):
        raise RowError("a part of a file that would have to be downloaded; download it first")
    return reference._replace(member=member, is_zip=is_zip, span=span)


def object_prefix(url: str, access: MediaAccess) -> str | None:
    """Return the allowed prefix that a URL lies under, or None."""
    prefixes: list[str] = [access.root or "", *access.allow_urls]
    for prefix in prefixes:
        if is_remote(prefix) and url.startswith(prefix.rstrip("/") + "/"):
            return prefix.rstrip("/")
    return None


def short_name(path: str) -> str:
    """Return a path or URL for a message: without data and signatures, and not too long."""
    if is_inline(path):
        return f"{path[:40]}... ({len(path):,} characters)"
    if path.startswith(("http://", "https://")):
        path = shown_url(path)
    if len(path) <= _MAX_NAME_CHARS:
        return path
    return f"{path[:80]}...{path[-80:]}"


def _file(path: str, access: MediaAccess) -> Reference:
    """Return what a path means: a file under the media root, or what a URL prefix makes of it."""
    if access.root is None:
        raise RowError("no media root; remote rows need one to be named")
    if not is_remote(access.root):
        return Reference("file", path)
    name = path.replace("\\", "/")
    if name.startswith(("/", "file://")) or re.match(r"[A-Za-z]:/", name):
        raise RowError("lies outside the media root")
    root, name = access.root.rstrip("/"), name.removeprefix("./")
    if root.startswith(("http://", "https://")):
        _refuse_ways_out(f"{root}/{name}")
        return Reference("web", f"{root}/{quote(name)}")
    return _object(f"{root}/{name}", access)


def _download(url: str, _access: MediaAccess) -> Reference:
    return Reference("web", url)


def _object(url: str, access: MediaAccess) -> Reference:
    _refuse_ways_out(url)
    if object_prefix(url, access) is not None:
        return Reference("object", url)
    scheme = url.partition(":")[0].lower()
    if scheme not in _OF_SCHEME:
        raise RowError(f"{scheme}: is not read for rows; fetch the media first")
    bucket = "/".join(url.split("/")[:3])
    raise RowError(
        f"rows may not name objects there: they are read with your credentials. "
        f"Allow them with --allow-url {bucket[:80]}/"
    )


_OF_SCHEME: dict[str, Callable[[str, MediaAccess], Reference]] = {
    "file": _file,
    **dict.fromkeys(("http", "https"), _download),
    **dict.fromkeys(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "memory"), _object),
}
"""What a path or URL means, by its scheme. A URL of another scheme is an object, too, where the
caller allows its prefix."""


def _refuse_ways_out(url: str) -> None:
    """Refuse a URL that may lead out of its prefix, or that a client may read in another way."""
    path = url.partition("://")[2]
    if "::" in path:
        raise RowError(
            "chains of URLs are not read, except for tar://MEMBER::TAR and zip://MEMBER::ZIP"
        )
    if any(segment in (".", "..") for segment in unquote(path).replace("\\", "/").split("/")):
        raise RowError("lies outside the media root")
    if any(ord(character) < 32 for character in path):
        raise RowError("not a URL")


class Objects:
    """Media in object stores, under the prefixes that the caller allows.

    Args:
        access: What may be read.
    """

    def __init__(self, access: MediaAccess) -> None:
        self._access = access

    def read(self, url: str, max_bytes: int) -> bytes:
        """Return a whole object of at most `max_bytes`.

        Raises:
            RowError: It is missing, empty or too large. The message does not name it.
            StorageError: Storage failed after retries.
        """
        with self._located(url) as (store, name):
            try:
                data = store.read(name, max_bytes)
            except TooLargeError:
                raise RowError(f"more than {max_bytes:,} bytes") from None
        if not data:
            raise RowError("empty file")
        return data

    def read_range(self, url: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of an object; errors as `read`."""
        size = self.stamp(url)[1]
        if stop > size:
            raise RowError(f"bytes {start} to {stop} of an object of {size}")
        with self._located(url) as (store, name):
            return store.read_range(name, start, stop)

    def stamp(self, url: str) -> tuple[str, int]:
        """Return (URL, bytes) of an object; errors as `read`."""
        with self._located(url) as (store, name):
            return url, store.size(name)

    @contextmanager
    def _located(self, url: str) -> Iterator[tuple[Store, str]]:
        """Yield the store and the name of an object. That it is missing is an error of its row."""
        prefix = object_prefix(url, self._access)
        assert prefix is not None  # `parse_reference` refused it
        try:
            yield _store(prefix), url[len(prefix) + 1 :]
        except FileNotFoundError as error:
            if str(error).endswith("no such bucket"):
                raise StorageError(str(error)) from None
            raise RowError("no such object") from None


@lru_cache(maxsize=64)
def _store(prefix: str) -> Store:
    return open_store(prefix)


_KERNEL_FOLDERS = ("/proc/", "/sys/", "/dev/")
"""Their files are no data. Some of them fail when they are read, or never end."""

_BAD_PATH = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
_MAX_FOLDERS = 1000
_DRIVE = re.compile(r"/?[A-Za-z]:[/\\]+")


class LocalFolder:
    """A folder of media files on this machine.

    Args:
        root: Its real path. No path may lead out of it, by ``..`` or by a link.
        stamp: What `folder_stamp` gave for it when the conversion began. None: not compared.
    """

    def __init__(self, root: str, stamp: tuple[int, int] | None = None) -> None:
        self._root, self._stamp = root, stamp
        # Each level of a path costs a system call.
        self._real_folder = lru_cache(_MAX_FOLDERS)(os.path.realpath)

    def read(self, path: str, max_bytes: int) -> bytes:
        r"""Return a whole file.

        Args:
            path: Relative to the root, absolute and inside it, a ``file://`` URL, or a path of
                Windows. The drive of such a path is left out: ``C:\a\b.jpg`` is ``a/b.jpg``.
            max_bytes: The largest file that is read.

        Raises:
            RowError: It is missing, outside the root, empty, too large, or no plain file. The
                message does not name the path.
            StorageError: The disk failed, or the root is gone.
        """
        with self._open(path) as (descriptor, size):
            if size > max_bytes:
                raise RowError(f"{size:,} bytes, {max_bytes:,} are left of the limit of a row")
            return _read(descriptor, 0, size, size)

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file; errors as `read`."""
        with self._open(path) as (descriptor, size):
            if stop > size:
                raise RowError(f"bytes {start} to {stop} of a file of {size}")
            return _read(descriptor, start, stop, size)

    def stamp(self, path: str) -> tuple[str, int, int]:
        """Return (real path, bytes, time of the last change in ns) of a file; errors as `read`."""
        with self._open(path) as (descriptor, size):
            return self._resolve(path), size, os.fstat(descriptor).st_mtime_ns

    @contextmanager
    def _open(self, path: str) -> Iterator[tuple[int, int]]:
        """Open a file. Yield its descriptor and its size in bytes."""
        try:
            descriptor = self._open_any(path)
            try:
                size = os.fstat(descriptor).st_size
                if not size:  # the files of /proc have no size either, wherever it is mounted
                    raise RowError("empty file")
                yield descriptor, size
            finally:
                os.close(descriptor)
        except NotAFileError:
            raise RowError("not a file") from None
        except PermissionError:
            self._require_root()
            raise RowError("no permission to read it") from None
        except OSError as error:
            if error.errno in _BAD_PATH:
                self._require_root()
                raise RowError(f"no such file{_tried(path)}") from None
            raise StorageError(
                f"{escaped(self._root)}/{escaped(path)}: {error.strerror}; this is no fault of a "
                "row, so the conversion stops. Mend the disk, then run the same command again"
            ) from error

    def _open_any(self, path: str) -> int:
        """Open a file by its path as it is, or else as a path of Windows."""
        try:
            return open_file(self._resolve(path))
        except FileNotFoundError:
            if "\\" not in path and not _DRIVE.match(path):
                raise
            return open_file(self._resolve(plain_path(path)))

    def _resolve(self, path: str) -> str:
        """Return the real path of a media file. It lies under the root."""
        if path.startswith("file://"):
            path = plain_path(path)
        if "\0" in path:
            raise RowError("not a path")
        # os.path is twice as fast as pathlib.
        folder, name = os.path.split(os.path.join(self._root, path))  # noqa: PTH118
        real = os.path.join(self._real_folder(folder), name)  # noqa: PTH118
        if name in ("", ".", "..") or os.path.islink(real):  # noqa: PTH114
            real = os.path.realpath(real)
        if not real.startswith(self._root.rstrip("/") + "/"):
            spelled = os.path.normpath(os.path.join(self._root, path))  # noqa: PTH118
            is_link = spelled.startswith(self._root.rstrip("/") + "/")
            raise RowError(
                f"lies outside the media root{', behind a link' * is_link}; name a higher folder "
                "as the media root if you trust the rows"
            )
        if real.startswith(_KERNEL_FOLDERS) and not real.startswith("/dev/shm/"):
            raise RowError("not a file")
        return real

    def _require_root(self) -> None:
        """Raise a StorageError where the root is another folder than at the beginning."""
        if self._stamp is not None and folder_stamp(self._root) != self._stamp:
            raise StorageError(
                f"{escaped(self._root)}: the media root is gone or was replaced while rows were "
                "converted. Mount it again, then run the same command again"
            )


def plain_path(path: str) -> str:
    r"""Return a path as it is looked for last: no ``file://``, no drive of Windows, no ``\``."""
    if path.startswith("file://"):
        return _without_drive(file_path(path))
    return _without_drive(path).replace("\\", "/")


def _without_drive(path: str) -> str:
    match = _DRIVE.match(path)
    return path[match.end() :] if match else path


def _tried(path: str) -> str:
    """Say which path in the root was looked for last, where the row spells it otherwise."""
    last = plain_path(path)
    return f"; tried {escaped(repr(last), 200)} in the media root" if last != path else ""


def _read(descriptor: int, start: int, stop: int, size: int) -> bytes:
    """Return bytes [start, stop) of an open file of `size` bytes. It must not change meanwhile."""
    data = os.pread(descriptor, stop - start, start)
    while len(data) < stop - start:  # the kernel gives at most 2 GiB at once
        more = os.pread(descriptor, stop - start - len(data), start + len(data))
        if not more:
            break
        data += more
    if len(data) != stop - start or os.fstat(descriptor).st_size != size:
        raise RowError("changed its size while it was read")
    return data
