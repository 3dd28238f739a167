"""Media that are members of a zip: where they lie in it, and their bytes.

    references -> ZIP_MEMBERS -> the bytes

The module `zipfile` reads the directory of a zip. Members are read here, by ranges and within
limits. Each is stored as it is, or compressed by deflate, as nearly all zips are.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from mmstream.converting.draft import RowError
from mmstream.converting.media.directories import Directories, ReadRange, plain_name
from mmstream.lazy_bytes import LazyBytes

__all__ = ["ZipMembers"]

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
