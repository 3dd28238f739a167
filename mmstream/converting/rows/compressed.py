"""Compressed files of rows: gzip, zstd, bzip2, xz -> a plain temporary file.

Files of several frames or members are read to their end. The compression is recognised by the first
bytes, whatever the file is called.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmstream.converting.rows.detect import HEAD_BYTES, is_tar
from mmstream.converting.rows.fetch import InputFile, download, local_path, read_head
from mmstream.errors import ConfigError
from mmstream.storage import is_remote

__all__ = ["compression_of", "plain_file", "plain_head"]

_BLOCK = 4 << 20
_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, ValueError)
_MAGIC = {
    "gzip": re.compile(rb"\x1f\x8b"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    "bzip2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
}
"""How compressed files begin. A file of zstd may begin with a frame that is skipped, and a file of
bzip2 without content with its end."""


def compression_of(head: bytes) -> str | None:
    """Return the name of a file's compression by its first bytes. None: it has none."""
    if is_tar(head):  # it begins with the name of a member, which may be any bytes
        return None
    return next((name for name, magic in _MAGIC.items() if magic.match(head)), None)


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


def plain_file(file: InputFile, target: Path, downloaded: Path) -> Path:
    """Return a plain local file with the content of a file.

    It is the file itself where that is plain and local. Otherwise it is `target`.

    Args:
        file: Any file. A copy of standard input is moved or removed.
        target: Where the content is written. No such file exists.
        downloaded: Where a remote file lies meanwhile.

    Raises:
        ConfigError: The file is damaged or cut off.
        StorageError: It could not be read.
    """
    is_ours = file.copy is not None or is_remote(file.url)
    if file.copy is None and is_ours:
        path = download(file.url, downloaded)
    else:
        path = file.copy or Path(local_path(file.url))
    compression = compression_of(read_head(str(path), HEAD_BYTES))
    if compression is not None:
        _decompress(path, target, compression, file.url)
        if is_ours:
            path.unlink()
        return target
    return path.rename(target) if is_ours else path


def _decompress(path: Path, target: Path, compression: str, rows: str) -> None:
    """Write the plain content of a compressed file to `target`, a block at a time.

    Raises:
        ConfigError: The file is damaged or cut off.
    """
    with target.open("xb") as file:
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
