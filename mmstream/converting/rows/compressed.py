"""Compressed files of rows: gzip, zstd, bzip2, xz -> a plain temporary file.

Files of several frames or members are read to their end. The compression is recognised by the first
bytes, whatever the file is called.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmstream.errors import ConfigError

__all__ = ["compression_of", "decompress", "plain_head"]

_BLOCK = 4 << 20
_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, ValueError)
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
}


def compression_of(head: bytes) -> str | None:
    """Return the name of a file's compression by its first bytes. None: it has none."""
    if head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50:
        return "zstd"  # a skippable frame in front
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def plain_head(head: bytes, num_bytes: int) -> bytes:
    """Return the first bytes of a file's content, by the first bytes of the file.

    Fewer come back where the file is damaged, or where so few bytes hold no more.
    """
    compression = compression_of(head)
    if compression is None:
        return head[:num_bytes]
    try:
        with _OPEN[compression](io.BytesIO(head)) as source:
            content: bytes = source.read(num_bytes)
            return content
    except _DAMAGE:
        return b""


def decompress(path: Path, target: Path, compression: str, rows: str) -> Path:
    """Write the plain content of a compressed file to `target`, a block at a time. Return it.

    Raises:
        ConfigError: The file is damaged or cut off.
    """
    with target.open("wb") as file:
        writer = _Writer(file.write)
        try:
            with _OPEN[compression](path) as source:
                shutil.copyfileobj(source, writer, _BLOCK)
        except _DAMAGE as error:
            if error is writer.error:
                raise
            raise ConfigError(
                f"{rows}: damaged {compression} ({error}); fetch or write it again"
            ) from None
    return target


class _Writer:
    """Remembers the error of a write, so that a full disk is not taken for a damaged file."""

    def __init__(self, write: Callable[[bytes], int]) -> None:
        self._write = write
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._write(data)
        except OSError as error:
            self.error = error
            raise


def _open_zstd(source: Path | io.BytesIO) -> Any:
    import pyarrow as pa

    if isinstance(source, Path):
        return pa.CompressedInputStream(pa.OSFile(str(source)), "zstd")
    return pa.CompressedInputStream(pa.BufferReader(source.getvalue()), "zstd")


_OPEN: dict[str, Callable[[Any], Any]] = {
    "gzip": gzip.open,
    "zstd": _open_zstd,
    "bzip2": bz2.open,
    "xz": lzma.open,
}
