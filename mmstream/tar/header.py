"""Ground floor: the headers of a tar. What one member is, and where the next one starts.

By the rules of POSIX.1-1988 (ustar), GNU tar's long names and POSIX.1-2001 (pax), accepting what
`tarfile` accepts. Nearly every header of a real shard is a plain file's with a short name, which
`plain_file` reads in under a microsecond; `read_member` knows the rest, and says what is wrong.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

from mmstream.errors import ShardError

__all__ = ["BLOCK", "Member", "padded", "plain_file", "read_member"]

BLOCK = 512
MAX_EXTENSION_BYTES = 1 << 20  # a long name or pax record beyond this is an attack, not a name
MAX_EXTENSIONS = 16  # extension headers in front of one member

_REGULAR = frozenset(b"0\x007")  # regular, old regular, contiguous: what tarfile calls a file

_USTAR = struct.Struct("100s 24x 12s 12x 8s c 188x 155s 12x")
"""name, size, checksum, type, prefix"""

_ADLER = 65521
"""Adler-32's modulus: its low 16 bits are one more than the sum of all bytes."""


class Member(NamedTuple):
    """One member of a tar; offsets are bytes from the start of the tar."""

    name: str
    offset: int
    """Where its headers start, long-name and pax headers included."""
    data_offset: int
    size: int
    """Payload bytes, without the padding to 512."""
    is_file: bool

    @property
    def end(self) -> int:
        """Where the next member's headers start."""
        return self.data_offset + padded(self.size)


def plain_file(data: bytes | memoryview, offset: int) -> tuple[str, int] | None:
    """Return (name, size) of the plain file whose header is at `offset`; None: ask `read_member`.

    The checksum is compared modulo 65,521, so that one call to zlib takes the place of a loop.
    """
    try:
        name, size, stated, kind, prefix = _USTAR.unpack_from(data, offset)
        size, stated = size.rstrip(b"\0 "), stated.rstrip(b"\0 ")
        if kind != b"0" or prefix[0] or not (size.isdigit() and stated.isdigit()):
            return None
        before = zlib.adler32(data[offset : offset + 148])  # without the checksum's own 8 bytes
        total = zlib.adler32(data[offset + 156 : offset + BLOCK], before) & 0xFFFF
        if total != (int(stated, 8) - 8 * 32 + 1) % _ADLER:
            return None
        return name.partition(b"\0")[0].decode(), int(size, 8)
    except (ValueError, struct.error):  # not octal, not UTF-8, or not a whole header
        return None


def read_member(
    read: Callable[[int, int], bytes | memoryview], header: bytes, offset: int, size: int
) -> Member | None:
    """Return the member whose first header, at `offset`, is `header`; None for a zero block.

    Args:
        read: returns bytes [start, stop) of the tar: of what lies behind the first header.
        header: 512 bytes.
        offset: of the header.
        size: of the tar.

    Raises:
        ShardError: a damaged header, or one that goes past the end.
    """
    start, long_name, pax_size = offset, "", -1
    for _ in range(MAX_EXTENSIONS + 1):
        if offset == start and not any(header):
            return None
        kind, length = header[156], _number(header[124:136], offset)
        _check(header, offset)
        if kind not in b"xgXLK":
            return _member(header, start, offset, long_name, pax_size)
        payload = _extension(read, offset, length, size)
        offset += BLOCK + padded(length)
        # Where two headers say the same thing the first one holds, as in tarfile.
        if kind in b"xX":
            name, stated = _pax(payload, start)
            long_name = long_name or name
            pax_size = pax_size if pax_size >= 0 else stated
        elif kind == ord("L"):
            long_name = long_name or _text(payload)
        elif kind == ord("g") and not long_name and pax_size < 0:
            start = offset  # it describes the whole tar and is no part of the member behind it
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


def _member(header: bytes, start: int, offset: int, long_name: str, pax_size: int) -> Member:
    kind, length = header[156], _number(header[124:136], offset)
    if kind == ord("S"):
        raise _sparse(start)
    if kind == 0 and _text(header[:100]).endswith("/"):
        kind = ord("5")  # how tars older than POSIX mark a folder
    name = long_name or _ustar_name(header)
    size = _payload_size(kind, length, pax_size)
    return Member(name, start, offset + BLOCK, size, kind in _REGULAR)


def _payload_size(kind: int, length: int, pax_size: int) -> int:
    # Links, folders and devices have no payload whatever their size field says; of unknown types
    # POSIX says that they are files.
    return 0 if kind in b"123456" else (pax_size if pax_size >= 0 else length)


def _check(header: bytes, offset: int) -> None:
    """Verify a header's checksum, summed as unsigned or, as some old tars did, signed bytes."""
    stated = _number(header[148:156], offset)
    unsigned = sum(header) - sum(header[148:156]) + 8 * 32
    if stated != unsigned:
        signed = unsigned - 256 * sum(b > 127 for b in header[:148] + header[156:])
        if stated != signed:
            raise ShardError(f"not a tar header at byte {offset}: wrong checksum")


def _number(field: bytes, offset: int) -> int:
    """Return a header's number: octal text, or base 256 when the first bit is set (GNU)."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip() or b"0"
    if digits.strip(b"01234567"):
        raise ShardError(f"not a tar header at byte {offset}: bad number {field!r}")
    return int(digits, 8)


def _ustar_name(header: bytes) -> str:
    name, prefix = _text(header[:100]), _text(header[345:500])
    return f"{prefix}/{name}" if prefix and header[156] not in b"LKS" else name


def _pax(payload: bytes, offset: int) -> tuple[str, int]:
    """Return (path or "", size or -1) of a pax header: lines of ``LENGTH KEY=VALUE``."""
    name, size, position = "", -1, 0
    while position < len(payload) and payload[position] != 0:
        digits, space, _ = payload[position : position + 20].partition(b" ")
        if not space or not digits.isdigit() or int(digits) < 5:
            raise ShardError(f"bad pax header at byte {offset}")
        record = payload[position + len(digits) + 1 : position + int(digits) - 1]
        key, _, value = record.partition(b"=")
        if key == b"path":
            name = value.decode("utf-8", "surrogateescape").rstrip("/")
        elif key == b"size":
            size = _pax_size(value, offset)
        elif key.startswith(b"GNU.sparse"):
            raise _sparse(offset)
        position += int(digits)
    return name, size


def _pax_size(value: bytes, offset: int) -> int:
    if not value.isdigit() or len(value) > 20:
        raise ShardError(f"bad pax size at byte {offset}")
    return int(value)


def _sparse(offset: int) -> ShardError:
    return ShardError(f"sparse file at byte {offset}: pack this tar without --sparse")


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def padded(size: int) -> int:
    """Return the bytes that a payload takes in a tar: whole blocks."""
    return -(-size // BLOCK) * BLOCK
