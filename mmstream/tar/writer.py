"""Write shards: samples in, a deterministic tar out. The converter writes with it."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from typing import BinaryIO

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
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._position = 0
        self.offsets: list[int] = []
        """Byte offset of each sample. After `close`, also the end of the last one."""

    def add(self, key: str, fields: Mapping[str, bytes]) -> None:
        """Append one sample.

        Args:
            key: Must be new and have no dots. Neither is checked here.
            fields: Extension -> payload, in the order of the members.
        """
        self.offsets.append(self._position)
        for field, data in fields.items():
            info = tarfile.TarInfo(f"{key}.{field}")
            info.size, info.mode = len(data), 0o444
            self._write(info.tobuf(tarfile.PAX_FORMAT))
            self._write(data)
            self._write(bytes(-len(data) % BLOCK))

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
