"""Media that are members of a tar or a zip.

    references -> ARCHIVES (directory of the archive -> bytes of a member) -> load

The directory of an archive is read once, and kept for the rows that follow, because rows usually
name the members of few archives at a time. A tar has no directory: all its headers are read. The
module `zipfile` reads the directory of a zip and unpacks its members. These are fetched by ranges
and within limits. Each is stored as it is, or compressed by deflate, as nearly all zips are.
"""

from __future__ import annotations

import io
import struct
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from mmstream.converting.draft import RowError
from mmstream.errors import ShardError
from mmstream.tar.lazy_bytes import LazyBytes
from mmstream.tar.samples import iter_members, links_of

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
        self._directories: OrderedDict[tuple[Any, ...], Mapping[str, Any] | RowError]
        self._directories = OrderedDict()
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
            RowError: It is no archive, or has no such file, or that is damaged, encrypted, too
                large, or compressed in a rare way. The message does not name it.
        """
        members, name = self._members(archive), _plain_name(member)
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
                directory: Mapping[str, Any] | RowError
                try:
                    directory = _zip_members(archive) if archive.is_zip else _tar_members(archive)
                except RowError as error:
                    directory = error
                self._directories[key] = directory
                self._num_kept += _weight(directory)
                while len(self._directories) > 1 and self._num_kept > MAX_KEPT_MEMBERS:
                    self._num_kept -= _weight(self._directories.popitem(last=False)[1])
            self._directories.move_to_end(key)
            members = self._directories[key]
        if isinstance(members, RowError):
            raise RowError(str(members))
        return members


def _weight(directory: Mapping[str, Any] | RowError) -> int:
    return 1 if isinstance(directory, RowError) else max(1, len(directory))


def _plain_name(name: str) -> str:
    return name.removeprefix("./")


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
            spans.setdefault(_plain_name(member.name), span)
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
                    members.setdefault(_plain_name(info.filename), info)
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
