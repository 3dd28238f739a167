"""Write shards: samples in, a deterministic tar out. The converter writes with it."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from typing import BinaryIO

from crc32c import crc32c

from mmstream.tar.header import BLOCK

__all__ = ["TarWriter"]


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
        self.offsets.append(self._position)
        self.checksums.append(0)
        for field, data in fields.items():
            info = tarfile.TarInfo(f"{key}.{field}")
            info.size, info.mode = len(data), 0o444
            for content in (info.tobuf(tarfile.PAX_FORMAT), data, bytes(-len(data) % BLOCK)):
                self._write(content)
                self.checksums[-1] = crc32c(content, self.checksums[-1], 0)

    def close(self) -> None:
        """Write the two blocks of zeros that end a tar. The file stays open."""
        self.offsets.append(self._position)
        self._write(bytes(2 * BLOCK))

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return self._position

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._position += len(data)
