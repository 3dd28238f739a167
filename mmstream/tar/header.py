"""The headers of a tar: what a member is, and where the next one starts.

A tar is a sequence of blocks of 512 bytes. Each member is one header block, then its payload,
padded with zeros to whole blocks. A long name takes extension headers in front.

Nearly every header of a real shard belongs to a plain file with a short name. `plain_file` reads
those quickly. `read_member` knows the other kinds too, and says what is wrong with a bad header.

Sources: POSIX.1-1988 (ustar), POSIX.1-2001 (pax), and GNU tar for its long names. What Python's
`tarfile` accepts is accepted here.
"""

from __future__ import annotations

import posixpath
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

from mmstream.errors import ShardError

BLOCK = 512
"""Bytes of a block."""

MAX_EXTENSION_BYTES = 1 << 20
"""Longest extension header. A longer name or pax record is an attack, not a name."""

MAX_EXTENSIONS = 16
"""Extension headers in front of one member."""

_REGULAR = frozenset(b"0\x007")
"""Types that are files: regular, regular of old tars, contiguous. The same as in `tarfile`."""

_SYMBOLIC = ord("2")
_LINKS = (ord("1"), _SYMBOLIC)

_USTAR = struct.Struct("100s 24x 12s 12x 8s c 188x 155s 12x")
"""The fields of a header that are used: name, size, checksum, type, prefix."""

_ADLER_MODULUS = 65521
"""The low 16 bits of Adler-32 are 1 + the sum of all bytes, modulo this."""


class Member(NamedTuple):
    """One member of a tar. Offsets are bytes from the start of the tar."""

    name: str
    offset: int
    """Where its headers start, those of a long name included."""
    data_offset: int
    """Where its payload starts."""
    size: int
    """Bytes of its payload, without the padding."""
    is_file: bool
    link: str | None = None
    """The member whose bytes a link stands for, by its name in the tar. None: it is not a link."""

    @property
    def end(self) -> int:
        """Where the headers of the next member start."""
        return self.data_offset + padded(self.size)


def plain_file(data: bytes | memoryview, offset: int) -> tuple[str, int] | None:
    """Return (name, size) of a plain file with a short name.

    The checksum is compared modulo 65,521, so that one call to zlib replaces a loop over bytes.

    Args:
        data: Bytes of a tar.
        offset: Of the header.

    Returns:
        None when the header is something else, or bad. `read_member` then says what it is.
    """
    try:
        name, size_text, checksum_text, kind, prefix = _USTAR.unpack_from(data, offset)
        size_digits, checksum_digits = size_text.rstrip(b"\0 "), checksum_text.rstrip(b"\0 ")
        if kind != b"0" or prefix[0] or not (size_digits.isdigit() and checksum_digits.isdigit()):
            return None
        # The checksum is the sum of all bytes, with 8 spaces instead of the checksum itself.
        total = int(checksum_digits, 8) - 8 * ord(" ") + sum(checksum_text)
        if zlib.adler32(data[offset : offset + BLOCK]) & 0xFFFF != (1 + total) % _ADLER_MODULUS:
            return None
        return name.partition(b"\0")[0].decode(), int(size_digits, 8)
    except (ValueError, struct.error):  # not octal, not UTF-8, or not a whole header
        return None


def read_member(
    read: Callable[[int, int], bytes | memoryview], header: bytes, offset: int, size: int
) -> Member | None:
    """Return the member of any kind that starts at `offset`.

    Args:
        read: Returns bytes [start, stop) of the tar. Called for extension headers only.
        header: The first header of the member, 512 bytes.
        offset: Of this header.
        size: Of the tar in bytes.

    Returns:
        None for a block of zeros, which ends the tar. And for a header of a whole tar at the end.

    Raises:
        ShardError: A damaged header, or one that goes past the end.
    """
    start, long_name, long_link, pax_size = offset, "", "", -1
    for _ in range(MAX_EXTENSIONS + 1):
        if offset == start and not any(header):
            return None
        kind, length = header[156], _number(header[124:136], offset)
        _check(header, offset)
        if kind not in b"xgXLK":
            return _member(header, start, offset, long_name, long_link, pax_size)
        payload = _extension(read, offset, length, size)
        offset += BLOCK + padded(length)
        # When two headers say the same thing, the first one counts, as in `tarfile`.
        if kind in b"xX":
            name, link, size_in_pax = _pax(payload, start)
            long_name, long_link = long_name or name, long_link or link
            pax_size = pax_size if pax_size >= 0 else size_in_pax
        elif kind == ord("L"):
            long_name = long_name or _text(payload)
        elif kind == ord("K"):
            long_link = long_link or _text(payload)
        elif kind == ord("g") and not long_name and pax_size < 0:
            start = offset  # describes the whole tar, so it is not part of the next member
            if offset == size:  # after a sample, before the next of joined tars
                return None
        if offset + BLOCK > size:
            raise ShardError(f"truncated: no header at byte {offset}")
        header = bytes(read(offset, offset + BLOCK))
    raise ShardError(f"more than {MAX_EXTENSIONS} extension headers at byte {start}")


def _extension(
    read: Callable[[int, int], bytes | memoryview], offset: int, length: int, size: int
) -> bytes:
    if length > MAX_EXTENSION_BYTES:
        raise ShardError(f"extension header of {length} bytes at byte {offset}")
    if offset + BLOCK + length > size:
        raise ShardError(f"truncated: extension header at byte {offset}")
    return bytes(read(offset + BLOCK, offset + BLOCK + length))


def _member(
    header: bytes, start: int, offset: int, long_name: str, long_link: str, pax_size: int
) -> Member:
    kind, length = header[156], _number(header[124:136], offset)
    if kind == ord("S"):
        raise _sparse(start)
    name, prefix = _text(header[:100]), _text(header[345:500])
    if kind == 0 and name.endswith("/"):
        kind = ord("5")  # how tars older than POSIX mark a folder
    name, link = long_name or (f"{prefix}/{name}" if prefix else name), None
    if kind in _LINKS:
        link = long_link or _text(header[157:257])
        # A symbolic link names its target from its own folder.
        link = posixpath.join(posixpath.dirname(name) if kind == _SYMBOLIC else "", link)
    size = pax_size if pax_size >= 0 else length
    if kind in b"123456":  # links, folders and devices have no payload, whatever their size says
        size = 0
    return Member(name, start, offset + BLOCK, size, kind in _REGULAR, link)


def _check(header: bytes, offset: int) -> None:
    """Verify the checksum of a header: the sum of its bytes. Some old tars took signed bytes."""
    checksum = _number(header[148:156], offset)
    unsigned_sum = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if checksum != unsigned_sum:
        signed_sum = unsigned_sum - 256 * sum(b > 127 for b in header[:148] + header[156:])
        if checksum != signed_sum:
            raise ShardError(f"not a tar header at byte {offset}: wrong checksum")


def _number(field: bytes, offset: int) -> int:
    """Return the number in a field: octal digits, or base 256 when the first bit is set (GNU)."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip() or b"0"
    if digits.strip(b"01234567"):
        raise ShardError(f"not a tar header at byte {offset}: bad number {field!r}")
    return int(digits, 8)


def _pax(payload: bytes, offset: int) -> tuple[str, str, int]:
    """Return (path or "", target of a link or "", size or -1) of a pax header.

    It consists of lines ``LENGTH KEY=VALUE``, where LENGTH counts the whole line with its line end:
    ``18 path=a/b/c.txt`` and a line end are 18 bytes.
    """
    name, link, size, position = "", "", -1, 0
    while position < len(payload) and payload[position] != 0:
        digits, space, _ = payload[position : position + 20].partition(b" ")
        if not space or not digits.isdigit() or int(digits) < 5:
            raise ShardError(f"bad pax header at byte {offset}")
        record = payload[position + len(digits) + 1 : position + int(digits) - 1]
        key, _, value = record.partition(b"=")
        if key == b"path":
            name = value.decode("utf-8", "surrogateescape").rstrip("/")
        elif key == b"linkpath":
            link = value.decode("utf-8", "surrogateescape")
        elif key == b"size":
            if not value.isdigit() or len(value) > 20:
                raise ShardError(f"bad pax size at byte {offset}")
            size = int(value)
        elif key.startswith(b"GNU.sparse"):
            raise _sparse(offset)
        position += int(digits)
    return name, link, size


def _sparse(offset: int) -> ShardError:
    return ShardError(f"sparse file at byte {offset}: pack this tar without --sparse")


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def padded(size: int) -> int:
    """Return the bytes that a payload takes in a tar: 700 bytes take 2 blocks, 1,024 bytes."""
    return -(-size // BLOCK) * BLOCK
