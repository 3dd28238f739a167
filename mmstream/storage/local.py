"""Storage: a folder of this machine.

A disk is read once. What fails here is not tried again, other than requests to an object store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

from mmstream.errors import StorageError
from mmstream.storage.store import Access
from mmstream.storage.urls import Range, join_url

__all__ = ["LocalStore"]


@dataclass(frozen=True)
class LocalStore:
    """A local folder. The first write makes the folders that are missing."""

    url: str

    access: ClassVar[Access] = Access(
        max_gap_bytes=4 * 1024,
        # Short ranges: the memory of one serves the next.
        max_range_bytes=2 * 1024 * 1024,
        # Several small members come with one system call. Where the next header is hardly further,
        # reads grow: small members are read through, large ones are skipped.
        min_header_read_bytes=16 * 1024,
        max_header_read_bytes=256 * 1024,
        concurrent=False,
    )

    def url_of(self, name: str) -> str:
        """Return the path of an object, whether it exists or not."""
        return join_url(self.url, name)

    def local_path(self, name: str) -> str:
        """Return the path of an object, whether it exists or not. "" stands for the folder."""
        return join_url(self.url, name)

    def read(self, name: str) -> bytes:
        """Return a whole object. Raises FileNotFoundError when there is none."""
        return Path(self.url, name).read_bytes()

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes | OSError]:
        """Return the bytes of every range, or the error in its place."""
        outcomes: list[bytes | OSError] = []
        for name, start, stop in ranges:
            try:
                outcomes.append(self.read_range(name, start, stop))
            except OSError as error:
                outcomes.append(error)
        return outcomes

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return exactly bytes [start, stop) of an object.

        Raises:
            FileNotFoundError: No such object.
            StorageError: The object is shorter than `stop`.
        """
        fd = os.open(self.url_of(name), os.O_RDONLY)
        try:
            return _read(fd, self.url_of(name), start, stop)
        finally:
            os.close(fd)

    def size(self, name: str) -> int:
        """Return the size of an object in bytes. Raises FileNotFoundError when there is none."""
        return Path(self.url, name).stat().st_size

    def exists(self, name: str) -> bool:
        """Tell whether an object of this name exists."""
        return Path(self.url, name).is_file()

    def list(self) -> dict[str, int]:
        """Return {name: size in bytes} of the objects directly under the root, sorted by name.

        Names that start with a dot are left out.
        """
        sizes = {}
        try:
            for entry in os.scandir(self.url):
                if entry.is_file() and not entry.name.startswith("."):
                    with suppress(FileNotFoundError):  # removed by another thread since
                        sizes[entry.name] = entry.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return dict(sorted(sizes.items()))

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a new object for writing; it appears whole when the block ends, or not at all."""
        path = Path(self.url, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def write(self, name: str, data: bytes) -> None:
        """Write one object, whole or not at all."""
        with self.create(name) as file:
            file.write(data)

    def remove(self, name: str) -> None:
        """Remove an object. It is no error when there is none."""
        Path(self.url, name).unlink(missing_ok=True)


def _read(fd: int, path: str, start: int, stop: int) -> bytes:
    """Return exactly bytes [start, stop) of an open file."""
    size = os.fstat(fd).st_size
    # Checked before the read: a damaged index may name more bytes than there is memory.
    if size < stop:
        raise StorageError(f"{path}: ends {stop - size} bytes before {stop}")
    chunks: list[bytes] = []
    while start < stop and (chunk := os.pread(fd, stop - start, start)):
        chunks.append(chunk)
        start += len(chunk)
    if start < stop:
        raise StorageError(f"{path}: became shorter while it was read")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
