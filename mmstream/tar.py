"""Ground floor: the tar format. Members of a tar, samples from members, and a writer of shards.

The stdlib's `tarfile` can do neither of the two things that random access needs: parse one sample
out of a range of bytes, and hop over headers without touching payloads. So headers are parsed here,
by the rules of POSIX.1-1988 (ustar), GNU tar's long names and POSIX.1-2001 (pax), accepting what
`tarfile` accepts. Grouping into samples is WebDataset's: the key is the path up to the first dot
of the file's name, the field is the rest in lower case, files named ``__x__`` are skipped.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

from mmstream.errors import SampleError, ShardError

__all__ = ["Member", "TarWriter", "iter_members", "parse_sample", "sample_offsets", "split_name"]

BLOCK = 512
MAX_EXTENSION_BYTES = 1 << 20  # a long name or pax record beyond this is an attack, not a name
MAX_EXTENSIONS = 16  # extension headers in front of one member

_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")
_REGULAR = frozenset(b"0\x007")  # regular, old regular, contiguous: what tarfile calls a file


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
        return self.data_offset + _padded(self.size)


def iter_members(
    read: Callable[[int, int], bytes | memoryview], size: int, start: int = 0
) -> Iterator[Member]:
    """Yield the members of a tar in order, touching headers only.

    Args:
        read: returns bytes [start, stop) of the tar.
        size: of the tar in bytes.
        start: where to begin; the start of some member.

    Raises:
        ShardError: not a tar, a damaged header, or a member that goes past the end.
    """
    offset = start
    while offset + BLOCK <= size:
        member = _read_member(read, offset, size)
        if member is None:
            return  # a zero block ends the archive
        if member.end > size:
            raise ShardError(
                f"truncated: {member.name!r} at byte {offset} goes {member.end - size} bytes "
                "past the end; fetch or convert this tar again"
            )
        yield member
        offset = member.end
    if start == 0 and offset == 0:
        raise ShardError(f"not a tar: only {size} bytes")
    if offset < size:
        raise ShardError(f"truncated: ends within the header at byte {offset}")


def sample_offsets(members: Iterable[Member]) -> list[int]:
    """Return where each sample's first header starts, and the end of the last member.

    Folders and skipped files behind a sample lie in its range, as in Energon's indexes.
    """
    offsets: list[int] = []
    key, end = None, 0
    for member in members:
        end = member.end
        name = split_name(member.name) if member.is_file else None
        if name is not None and name[0] != key:
            key = name[0]
            offsets.append(member.offset)
    return [*offsets, end]


def split_name(name: str) -> tuple[str, str] | None:
    """Return (key, field) of a member's name, or None for a name that belongs to no sample.

    Source: WebDataset's `base_plus_ext` and its rules for metadata files.
    """
    if _META.match(name):
        return None
    match = _NAME.match(name)
    return (match[1], match[2].lower()) if match else None


def parse_sample(data: bytes | memoryview, url: str) -> dict[str, Any]:
    """Return the sample in a byte range: ``__key__``, ``__url__``, then fields as bytes.

    Raises:
        SampleError: no file in the range, two samples in it (the index is not this tar's), a field
            twice, or a damaged header.
    """
    view = memoryview(data)
    sample: dict[str, Any] = {"__key__": "", "__url__": url}
    try:
        for member in iter_members(lambda start, stop: view[start:stop], len(view)):
            name = split_name(member.name) if member.is_file else None
            if name is None:
                continue
            key, field = name
            if not sample["__key__"]:
                sample["__key__"] = key
            elif key != sample["__key__"]:
                raise SampleError(
                    f"{sample['__key__']}: {key!r} lies in the same range: the index is not this "
                    "tar's; run `mmstream index --overwrite`"
                )
            if field in sample:
                raise SampleError(f"{key}.{field}: this field comes twice in the sample")
            sample[field] = bytes(view[member.data_offset : member.data_offset + member.size])
    except ShardError as error:
        raise SampleError(f"{sample['__key__']}: damaged tar header: {error}") from error
    if not sample["__key__"]:
        raise SampleError("no file of a sample in this range of the tar")
    return sample


class TarWriter:
    """Writes samples as a deterministic tar: same samples, same bytes, on any machine.

    Headers carry mtime 0, uid and gid 0, mode 0444 and no names of users; ustar, with a pax header
    only where a name is too long for it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._position = 0
        self.offsets: list[int] = []
        """Byte offset of every sample so far, and after `close` the end of the last one."""

    def add(self, key: str, fields: Mapping[str, bytes]) -> None:
        """Append one sample. A key must be new and without dots; neither is checked here."""
        self.offsets.append(self._position)
        for field, data in fields.items():
            info = tarfile.TarInfo(f"{key}.{field}")
            info.size, info.mode = len(data), 0o444
            self._write(info.tobuf(tarfile.PAX_FORMAT))
            self._write(data)
            self._write(bytes(-len(data) % BLOCK))

    def close(self) -> None:
        """Write the two zero blocks that end a tar; the file itself stays open."""
        self.offsets.append(self._position)
        self._write(bytes(2 * BLOCK))

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return self._position

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._position += len(data)


def _read_member(
    read: Callable[[int, int], bytes | memoryview], offset: int, size: int
) -> Member | None:
    """Return the member whose (first) header is at `offset`, or None at a zero block."""
    start, long_name, pax_size = offset, "", -1
    for _ in range(MAX_EXTENSIONS + 1):
        if offset + BLOCK > size:
            raise ShardError(f"truncated: no header at byte {offset}")
        header = bytes(read(offset, offset + BLOCK))
        if offset == start and not any(header):
            return None
        kind, length = header[156], _number(header[124:136], offset)
        _check(header, offset)
        if kind not in b"xgXLK":
            return _member(header, start, offset, long_name, pax_size)
        payload = _extension(read, offset, length, size)
        offset += BLOCK + _padded(length)
        # Where two headers say the same thing the first one holds, as in tarfile.
        if kind in b"xX":
            name, stated = _pax(payload, start)
            long_name = long_name or name
            pax_size = pax_size if pax_size >= 0 else stated
        elif kind == ord("L"):
            long_name = long_name or _text(payload)
        elif kind == ord("g") and not long_name and pax_size < 0:
            start = offset  # it describes the whole tar and is no part of the member behind it
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


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
