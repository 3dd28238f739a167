"""Media that are members of a tar or a zip.

    references -> ARCHIVES -> the bytes, or where they lie

Directories of the archives that rows name: which members each tar or zip has.

    archive -> DIRECTORIES -> its members by their names

A directory is read once, and kept for the rows that follow. Rows usually name the members of few
archives at a time.

Media that are members of a tar: which bytes of the tar they are.

    references -> TAR_MEMBERS -> a span of the tar

A tar has no directory: all its headers are read.

Media that are members of a zip: where they lie in it, and their bytes.

    references -> ZIP_MEMBERS -> the bytes

The module `zipfile` reads the directory of a zip. Members are read here, by ranges and within
limits. Each is stored as it is, or compressed by deflate, as nearly all zips are.
"""

from __future__ import annotations

import io
import struct
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from mmstream.converting.draft import RowError
from mmstream.errors import ShardError
from mmstream.lazy_bytes import LazyBytes
from mmstream.tar.samples import iter_members, links_of

MAX_KEPT_MEMBERS = 500_000
"""Most members that are remembered, of all archives together: about 200 MB. The archive that was
named last is always kept, even if it alone has more."""

Member = TypeVar("Member")
ReadRange = Callable[[int, int], bytes]
"""(start, stop) -> these bytes of an archive."""


class _Directory(NamedTuple, Generic[Member]):
    members: dict[str, Member]
    fault: str | None
    """Why the archive cannot be read."""

    @property
    def num_kept(self) -> int:
        return max(1, len(self.members))  # what has no members takes memory, too


class Directories(Generic[Member]):
    """The directories of the archives that were named last. Safe to use from several threads.

    Args:
        read_directory: (reads a range, size in bytes) -> the members by their plain names. It
            raises a `RowError` where the archive cannot be read.
    """

    def __init__(self, read_directory: Callable[[ReadRange, int], dict[str, Member]]) -> None:
        self._read_directory = read_directory
        self._directories: OrderedDict[Hashable, _Directory[Member]] = OrderedDict()
        self._num_kept = 0
        self._lock = threading.Lock()

    def members(self, archive: Hashable, read: ReadRange, num_bytes: int) -> dict[str, Member]:
        """Return the members of an archive by their plain names.

        Args:
            archive: What identifies it: two archives have the same only if they are the same.
            read: Returns bytes [start, stop) of the archive.
            num_bytes: Size of the archive.

        Raises:
            RowError: The archive cannot be read. That is remembered, too.
        """
        with self._lock:
            if archive not in self._directories:
                self._keep(archive, self._directory(read, num_bytes))
            self._directories.move_to_end(archive)
            members, fault = self._directories[archive]
        if fault is not None:
            raise RowError(fault)
        return members

    def _directory(self, read: ReadRange, num_bytes: int) -> _Directory[Member]:
        try:
            return _Directory(self._read_directory(read, num_bytes), None)
        except RowError as error:
            return _Directory({}, str(error))

    def _keep(self, archive: Hashable, directory: _Directory[Member]) -> None:
        """Keep a directory, and forget those that were named least recently."""
        self._directories[archive] = directory
        self._num_kept += directory.num_kept
        while len(self._directories) > 1 and self._num_kept > MAX_KEPT_MEMBERS:
            _, oldest = self._directories.popitem(last=False)
            self._num_kept -= oldest.num_kept


def plain_name(name: str) -> str:
    """Return the name of a member without ``./`` before it."""
    return name.removeprefix("./")


MAX_TAR_MEMBERS = 1 << 24
"""Most members of one tar."""

_SOUNDS = ("flac", "wav", "opus", "mp3", "ogg", "m4a", "sph")
"""Types of sounds that a tar of Shar may hold. Its rows do not say which."""

Spans = dict[str, tuple[int, int]]


class TarMembers:
    """The members of tars that were named last. Safe to use from several threads."""

    def __init__(self) -> None:
        self._directories = Directories(_spans)

    def span(self, tar: Hashable, member: str, read: ReadRange, num_bytes: int) -> tuple[int, int]:
        """Return where in a tar the bytes of a member are: (start, stop).

        Args:
            tar: What identifies it: two tars have the same only if they are the same.
            member: Its name, with or without ``./`` before it. Where a tar has a name twice, the
                first one counts. ``NAME.*`` is the sound of this name, whatever its type.
            read: Returns bytes [start, stop) of the tar.
            num_bytes: Size of the tar.

        Raises:
            RowError: It is no plain tar, or it has no such file.
        """
        spans, name = self._directories.members(tar, read, num_bytes), plain_name(member)
        names = [name]
        if name.endswith(".*"):
            names += [f"{name[:-1]}{extension}" for extension in _SOUNDS]
        span = next((spans[name] for name in names if name in spans), None)
        if span is None:
            raise RowError("no such member of the tar")
        if span[0] == span[1]:
            raise RowError("empty file")
        return span


def _spans(read: ReadRange, num_bytes: int) -> Spans:
    spans: Spans = {}
    try:
        members = list(islice(iter_members(read, num_bytes), MAX_TAR_MEMBERS + 1))
    except ShardError as error:
        raise RowError(f"not a plain tar: {error}") from None
    if len(members) > MAX_TAR_MEMBERS:
        raise RowError(f"a tar of more than {MAX_TAR_MEMBERS:,} members")
    links = links_of(members)
    for member in members:
        span = links.get(member.offset)
        if member.is_file:
            span = (member.data_offset, member.data_offset + member.size)
        if span is not None:
            spans.setdefault(plain_name(member.name), span)
    return spans


MAX_DIRECTORY_BYTES = 1 << 28
"""Longest directory that is read: about two million members."""

_HEADER = struct.Struct("<4s22xHH")
"""What stands before a member: its mark, and the lengths of its name and of what follows that."""
_MARK = b"PK\3\4"
_IS_ENCRYPTED = 1


class _Member(NamedTuple):
    header_offset: int
    num_stored_bytes: int
    num_bytes: int
    crc32: int
    method: int
    is_encrypted: bool


class ZipMembers:
    """The members of zips that were named last. Safe to use from several threads."""

    def __init__(self) -> None:
        self._directories = Directories(_directory)

    def read(
        self, archive: Hashable, name: str, read: ReadRange, num_bytes: int, max_bytes: int
    ) -> bytes:
        """Return the bytes of a member.

        Args:
            archive: What identifies the zip: two zips have the same only if they are the same.
            name: Of the member. Where a zip has it twice, the first one counts.
            read: Returns bytes [start, stop) of the zip.
            num_bytes: Size of the zip.
            max_bytes: The largest member that is read.

        Raises:
            RowError: It is no zip, or has no such file, or it is damaged, encrypted, too large, or
                compressed in a rare way.
        """
        member = self._directories.members(archive, read, num_bytes).get(plain_name(name))
        if member is None:
            raise RowError("no such member of the zip")
        if not member.num_bytes:
            raise RowError("empty file")
        if max(member.num_bytes, member.num_stored_bytes) > max_bytes:
            raise RowError(f"more than {max_bytes:,} bytes")
        return _data(member, read, num_bytes)


def _directory(read: ReadRange, num_bytes: int) -> dict[str, _Member]:
    """Return the members of a zip by their names."""
    num_read = 0

    def read_ranges(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        nonlocal num_read
        num_read += sum(stop - start for start, stop in ranges)
        if num_read > MAX_DIRECTORY_BYTES:
            raise RowError(f"a zip whose directory has more than {MAX_DIRECTORY_BYTES:,} bytes")
        return [read(start, stop) for start, stop in ranges]

    members: dict[str, _Member] = {}
    try:
        # A buffer gives `zipfile` all bytes that it asks for, also where they come in pieces.
        file = io.BufferedReader(LazyBytes(num_bytes, read_ranges).open())
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    member = _Member(
                        info.header_offset,
                        info.compress_size,
                        info.file_size,
                        info.CRC,
                        info.compress_type,
                        bool(info.flag_bits & _IS_ENCRYPTED),
                    )
                    members.setdefault(plain_name(info.filename), member)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError) as error:
        raise RowError(f"not a zip ({type(error).__name__})") from None
    return members


def _data(member: _Member, read: ReadRange, num_bytes: int) -> bytes:
    """Return the bytes of a member, compared with its checksum."""
    if member.is_encrypted:
        raise RowError("is encrypted; unpack the zip first")
    if member.method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise RowError("is not compressed by deflate; unpack the zip first")
    start = member.header_offset
    header = read(start, start + _HEADER.size) if start + _HEADER.size <= num_bytes else b""
    if not header.startswith(_MARK):
        raise RowError("is not where the zip's directory says")
    _, name_bytes, extra_bytes = _HEADER.unpack(header)
    start += _HEADER.size + name_bytes + extra_bytes
    stop = start + member.num_stored_bytes
    if stop > num_bytes:
        raise RowError("is not where the zip's directory says")
    data = read(start, stop)
    if member.method == zipfile.ZIP_DEFLATED:
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.num_bytes + 1)
        except zlib.error:
            raise RowError("is damaged: it cannot be unpacked") from None
    if len(data) != member.num_bytes or zlib.crc32(data) != member.crc32:
        raise RowError("is damaged: it has another checksum than the zip says")
    return data
