"""Write shards: samples in, a deterministic tar out. The converter writes with it."""

from __future__ import annotations

import struct
import tarfile
from collections.abc import Mapping
from typing import BinaryIO

from crc32c import crc32c

from mmstream.tar.header import BLOCK


class TarWriter:
    """Writes samples as a tar. The same samples give the same bytes on every machine.

    Headers have mtime 0, uid and gid 0, mode 0444 and no names of users. The format is ustar. A pax
    header is added only when a name is too long for it.

    Args:
        file: Where the tar is written. It stays open.

    Examples:
        >>> import io
        >>> file = io.BytesIO()
        >>> writer = TarWriter(file)
        >>> writer.add("0001", {"jpg": bytes(1000), "txt": b"a cat"})
        >>> writer.add("0002", {"txt": b"a dog"})
        >>> writer.close()
        >>> writer.offsets  # headers of 512 bytes, payloads padded to 1,024, 512 and 512
        [0, 2560, 3584]
        >>> [hex(checksum) for checksum in writer.checksums]  # of bytes [0, 2560), [2560, 3584)
        ['0x1f4656ac', '0xaff38c9']
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._position = 0
        self.offsets: list[int] = []
        """Byte offset of each sample. After `close`, also the end of the last one."""
        self.checksums: list[int] = []
        """CRC-32C of the bytes of each sample, with headers and padding."""

    def add(self, key: str, fields: Mapping[str, bytes]) -> None:
        """Append one sample.

        Args:
            key: Must be new and have no dots. Neither is checked here.
            fields: Extension -> payload, in the order of the members.
        """
        write, position, checksum = self._file.write, self._position, 0
        self.offsets.append(position)
        for field, data in fields.items():
            size = len(data)
            header, padding = _header(f"{key}.{field}", size), _PADDING[: -size % BLOCK]
            # A copy of a small payload is cheaper than four more calls.
            pieces = (header + data + padding,) if size <= _SMALL else (header, data, padding)
            for piece in pieces:
                checksum = crc32c(piece, checksum, 0)
                write(piece)
                position += len(piece)
        self._position = position
        self.checksums.append(checksum)

    def copy(self, sample: bytes) -> None:
        """Append a sample of another tar, with its headers and padding."""
        self.offsets.append(self._position)
        self._file.write(sample)
        self._position += len(sample)
        self.checksums.append(crc32c(sample, 0, 0))

    def close(self) -> None:
        """Write the two blocks of zeros that end a tar. The file stays open."""
        self.offsets.append(self._position)
        self._file.write(bytes(2 * BLOCK))
        self._position += 2 * BLOCK

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return self._position


def _info(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o444
    return info


_SMALL = 4096
"""A payload up to this size is joined with its header and padding."""
_PADDING = bytes(BLOCK)
_EMPTY = _info("", 0).tobuf(tarfile.PAX_FORMAT)
"""The header of an empty file without a name. Others differ in name, size and checksum only."""
_BETWEEN, _TIME, _AFTER = _EMPTY[100:124], _EMPTY[135:148], _EMPTY[154:]
_EMPTY_SUM = int(_EMPTY[148:154], 8) - sum(_EMPTY[124:135])
_MAX_NAME = 100
_MAX_SIZE = 8**11 - 1
_PACK = struct.Struct("100s 24s 11s 13s 6s 358s").pack
"""Joins name, `_BETWEEN`, size, `_TIME`, checksum and `_AFTER`. Zeros follow a shorter name."""


def _header(name: str, size: int) -> bytes:
    """Return the header of a member: of 512 bytes, or of more if its name is too long.

    The checksum of a header is the sum of its bytes. So that of ``a.txt`` with 3 bytes is the sum
    of the empty header, of the name, and of the digits ``00000000003``.
    """
    if not name.isascii() or len(name) > _MAX_NAME or size > _MAX_SIZE:
        return _info(name, size).tobuf(tarfile.PAX_FORMAT)
    encoded, digits = name.encode(), b"%011o" % size
    checksum = b"%06o" % (_EMPTY_SUM + sum(encoded) + sum(digits))
    return _PACK(encoded, _BETWEEN, digits, _TIME, checksum, _AFTER)
