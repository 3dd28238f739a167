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
it with the rows of a shard. It is not part of the plan: the same files may be elsewhere later.

The directory of an archive is read once, and kept for the rows that follow, because rows usually
name the members of few archives at a time. A tar has no directory: all its headers are read. The
module `zipfile` reads the directory of a zip and unpacks its members. These are fetched by ranges
and within limits. Each is stored as it is, or compressed by deflate, as nearly all zips are.

Storage or a disk that fails ends the conversion: that is not a fault of a row. So does a media root
that was there at the beginning and is gone, such as a network mount that was lost. An object or a
file that is missing is a fault of its row.
"""

from __future__ import annotations

import binascii
import errno
import io
import os
import re
import struct
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import quote, unquote, unquote_to_bytes

from mmstream.converting.draft import RowError
from mmstream.converting.formats.fields import is_base64_media
from mmstream.converting.media.hosts import shown_url
from mmstream.converting.options import DownloadOptions
from mmstream.errors import ShardError, StorageError, escaped
from mmstream.settings import refuse_broken
from mmstream.storage import NotAFileError, Store, is_remote, open_file, open_store
from mmstream.storage.local import read_exactly
from mmstream.storage.store import TooLargeError, file_path, require_no_secret
from mmstream.tar.lazy_bytes import LazyBytes
from mmstream.tar.samples import iter_members, links_of


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
        ConfigError: One of them is not a URL of a bucket or folder.
    """
    for prefix in allow_urls:
        require_no_secret(prefix)
        scheme, _, location = prefix.partition("://")
        refuse_broken(
            (
                not is_remote(prefix) or "::" in prefix or not location.strip("/"),
                f"allow_urls: {prefix!r} is not the URL of a bucket or a folder in it; "
                "write s3://bucket/folder/",
            ),
            (
                scheme in ("http", "https"),
                f"allow_urls: {prefix!r}: rows may name {scheme}:// anyway; private addresses need "
                "an allowed host",
            ),
        )
    return tuple(allow_urls)


_DATA_URL = re.compile(r"data:([^,;]{0,100})((?:;[^,;]{0,200}){0,8}),", re.IGNORECASE)

MAX_ESCAPES = 1 << 18
"""Most percent signs of a ``data:`` URL. Each costs a third of a microsecond."""


def is_inline(text: str) -> bool:
    """Tell whether a text in place of a path is a ``data:`` URL or a media file in base64."""
    return text[:5].lower() == "data:" or is_base64_media("".join(text[:1024].split()))


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
    **dict.fromkeys(("http", "https"), lambda url, _: Reference("web", url)),
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
"""Their files are not data. Some of them fail when they are read, or never end."""

_BAD_PATH = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
_MAX_FOLDERS = 1000
_DRIVE = re.compile(r"^/?[A-Za-z]:[/\\]+")


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
                f"{escaped(self._root)}/{escaped(path)}: {error.strerror}; this is not "
                "a fault of a row, so the conversion stops. Repair the disk, then run it again"
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
        return _DRIVE.sub("", file_path(path))
    return _DRIVE.sub("", path).replace("\\", "/")


def _tried(path: str) -> str:
    """Say which path in the root was looked for last, where the row spells it otherwise."""
    last = plain_path(path)
    return f"; tried {escaped(repr(last), 200)} in the media root" if last != path else ""


def _read(descriptor: int, start: int, stop: int, size: int) -> bytes:
    """Return bytes [start, stop) of an open file of `size` bytes. It must not change meanwhile."""
    with suppress(StorageError):  # it became shorter
        data = read_exactly(descriptor, "", start, stop, size)
        if os.fstat(descriptor).st_size == size:
            return data
    raise RowError("changed its size while it was read")


# -- media that are members of a tar or a zip


MAX_KEPT_MEMBERS = 200_000
"""Most members that are remembered, of all archives together: about 150 MB. The archive that was
named last is always kept, even if it alone has more."""

MAX_TAR_MEMBERS = 1 << 24
"""Most members of one tar."""

MAX_DIRECTORY_BYTES = 1 << 28
"""Longest directory of a zip that is read: about two million members."""

_SOUNDS = ("flac", "wav", "opus", "mp3", "ogg", "m4a", "sph")
"""Types of sounds that a tar of Shar may hold. Its rows do not say which."""

_HEADER = struct.Struct("<4s22xHH")
"""What stands before a member: its mark, and the lengths of its name and of what follows that."""
_MARK = b"PK\3\4"
_IS_ENCRYPTED = 1


class Archive(NamedTuple):
    """A tar or a zip in a folder or in an object store."""

    is_zip: bool
    stamp: tuple[Any, ...]
    """Its place, its size in bytes, and more: two archives have the same only if they are one."""
    read: Callable[[int, int], bytes]
    """Returns bytes [start, stop) of it."""

    @property
    def num_bytes(self) -> int:
        """Size of the archive."""
        return int(self.stamp[1])


class Archives:
    """The directories of the archives that were named last. Safe to use from several threads."""

    def __init__(self) -> None:
        self._directories = OrderedDict[tuple[Any, ...], Mapping[str, Any] | RowError]()
        self._num_kept = 0
        self._lock = threading.Lock()

    def read(self, archive: Archive, member: str, max_bytes: int) -> bytes:
        """Return the bytes of a member.

        Args:
            archive: The tar or zip.
            member: Its name, with or without ``./`` before it. Where an archive has a name twice,
                the first one counts. In a tar, ``NAME.*`` is the sound of this name, whatever its
                type.
            max_bytes: The largest member that is read.

        Raises:
            RowError: It is not an archive, or has no such file, or that is damaged, encrypted, too
                large, or compressed in a rare way. The message does not name it.
        """
        members, name = self._members(archive), member.removeprefix("./")
        names = [name]
        if name.endswith(".*"):
            names += [f"{name[:-1]}{extension}" for extension in _SOUNDS]
        entry = next((members[name] for name in names if name in members), None)
        if entry is None:
            raise RowError(f"no such member of the {'zip' if archive.is_zip else 'tar'}")
        if archive.is_zip:
            return _read_from_zip(archive, entry, max_bytes)
        start, stop = entry
        _require_size(stop - start, max_bytes)
        return archive.read(start, stop)

    def _members(self, archive: Archive) -> Mapping[str, Any]:
        """Return the members of an archive by their plain names. Faults are remembered, too."""
        key = (archive.is_zip, *archive.stamp)
        with self._lock:
            if key not in self._directories:
                read_members = _zip_members if archive.is_zip else _tar_members
                try:
                    self._directories[key] = read_members(archive)
                except RowError as error:
                    self._directories[key] = error
                self._num_kept += _weight(self._directories[key])
                while len(self._directories) > 1 and self._num_kept > MAX_KEPT_MEMBERS:
                    self._num_kept -= _weight(self._directories.popitem(last=False)[1])
            self._directories.move_to_end(key)
            members = self._directories[key]
        if isinstance(members, RowError):
            raise RowError(str(members))
        return members


def _weight(directory: Mapping[str, Any] | RowError) -> int:
    return 1 if isinstance(directory, RowError) else max(1, len(directory))


def _tar_members(archive: Archive) -> dict[str, tuple[int, int]]:
    """Return where the bytes of each file of a tar are: {name: (start, stop)}."""
    try:
        members = list(islice(iter_members(archive.read, archive.num_bytes), MAX_TAR_MEMBERS + 1))
    except ShardError as error:
        raise RowError(f"not a plain tar: {error}") from None
    if len(members) > MAX_TAR_MEMBERS:
        raise RowError(f"a tar of more than {MAX_TAR_MEMBERS:,} members")
    spans: dict[str, tuple[int, int]] = {}
    links = links_of(members)
    for member in members:
        span = links.get(member.offset)
        if member.is_file:
            span = (member.data_offset, member.data_offset + member.size)
        if span is not None:
            spans.setdefault(member.name.removeprefix("./"), span)
    return spans


def _zip_members(archive: Archive) -> dict[str, zipfile.ZipInfo]:
    """Return the members of a zip by their names."""
    num_read = 0

    def read_ranges(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        nonlocal num_read
        num_read += sum(stop - start for start, stop in ranges)
        if num_read > MAX_DIRECTORY_BYTES:
            raise RowError(f"a zip whose directory has more than {MAX_DIRECTORY_BYTES:,} bytes")
        return [archive.read(start, stop) for start, stop in ranges]

    members: dict[str, zipfile.ZipInfo] = {}
    try:
        # A buffer gives `zipfile` all bytes that it asks for, also where they come in pieces.
        file = io.BufferedReader(LazyBytes(archive.num_bytes, read_ranges).open())
        with zipfile.ZipFile(file) as directory:
            for info in directory.infolist():
                if not info.is_dir():
                    members.setdefault(info.filename.removeprefix("./"), info)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError) as error:
        raise RowError(f"not a zip ({type(error).__name__})") from None
    return members


def _require_size(num_bytes: int, max_bytes: int) -> None:
    if not num_bytes:
        raise RowError("empty file")
    if num_bytes > max_bytes:
        raise RowError(f"more than {max_bytes:,} bytes")


def _read_from_zip(archive: Archive, member: zipfile.ZipInfo, max_bytes: int) -> bytes:
    """Return the bytes of a member, compared with its checksum."""
    _require_size(member.file_size, max_bytes)
    _require_size(member.compress_size, max_bytes)
    if member.flag_bits & _IS_ENCRYPTED:
        raise RowError("is encrypted; unpack the zip first")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise RowError("is not compressed by deflate; unpack the zip first")
    start = member.header_offset + _HEADER.size
    header = archive.read(member.header_offset, start) if start <= archive.num_bytes else b""
    if header.startswith(_MARK):
        _, name_bytes, extra_bytes = _HEADER.unpack(header)
        start += name_bytes + extra_bytes
    stop = start + member.compress_size
    if not header.startswith(_MARK) or stop > archive.num_bytes:
        raise RowError("is not where the zip's directory says")
    # Every thread has a file of its own: `ZipFile.open` would let them wait for each other.
    file = io.BytesIO(archive.read(start, stop))
    try:
        data = zipfile.ZipExtFile(file, "r", member).read(member.file_size)
    except (zipfile.BadZipFile, EOFError):
        data = b""
    except zlib.error:
        raise RowError("is damaged: it cannot be unpacked") from None
    if len(data) != member.file_size:
        raise RowError("is damaged: it has another checksum than the zip says")
    return data
