"""Write shards: samples in, a deterministic tar out.

The converter writes with it. The same samples give the same bytes on every machine.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from typing import BinaryIO

from mmstream.tar.header import BLOCK

__all__ = ["TarWriter"]


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
