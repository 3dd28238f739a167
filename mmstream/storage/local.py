"""Storage: a local folder. The disk is asked once; only remote calls are retried."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from mmstream.errors import StorageError
from mmstream.storage.store import Access
from mmstream.storage.urls import Range, join_url

__all__ = ["LocalFile", "LocalStore"]

NOWAIT = getattr(os, "RWF_NOWAIT", 0)
"""Linux: read what lies in memory, or fail at once."""


class LocalFile:
    """A file held open; a slice of it reads these bytes, when it is asked for.

    Args:
        path: of the file.

    Raises:
        FileNotFoundError: no such file.
    """

    def __init__(self, path: str) -> None:
        self._path, self._fd = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd).atexit = False
        self._version = _version(self._fd)

    def __getitem__(self, part: slice) -> bytes:
        """Return exactly these bytes. Raises StorageError: it was written to, or ends before."""
        if _version(self._fd) != self._version:
            raise StorageError(f"{self._path}: was written to while it was read")
        data = os.pread(self._fd, part.stop - part.start, part.start)
        if len(data) < part.stop - part.start:
            return _read(self._fd, self._path, part.start, part.stop)
        return data

    def is_cached(self, start: int, stop: int) -> bool:
        """Tell whether the system holds the file's bytes [start, stop) in its page cache.

        Asked of both ends. False, too, where the file system cannot tell: tmpfs and most network
        file systems among them.
        """
        byte = bytearray(1)
        try:
            return bool(NOWAIT) and all(
                os.preadv(self._fd, [byte], at, NOWAIT) for at in (start, stop - 1)
            )
        except OSError:
            return False


@dataclass(frozen=True)
class LocalStore:
    """A local folder. Missing folders are made by the first write."""

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
        """Return the path of an object, whether it exists or not; of the folder for ""."""
        return join_url(self.url, name)

    def read(self, name: str) -> bytes:
        """Return a whole object. Raises FileNotFoundError when there is none."""
        return Path(self.url, name).read_bytes()

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes | OSError]:
        """Return the bytes of every range, or in its place the error that it met."""
        return [_attempt(self.read_range, *item) for item in ranges]

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return exactly bytes [start, stop) of an object.

        Raises:
            FileNotFoundError: no such object.
            StorageError: the object is shorter than `stop`.
        """
        fd = os.open(self.url_of(name), os.O_RDONLY)
        try:
            return _read(fd, self.url_of(name), start, stop)
        finally:
            os.close(fd)

    def open(self, name: str) -> LocalFile:
        """Return an object held open. Raises FileNotFoundError when there is none."""
        return LocalFile(self.url_of(name))

    def map(self, name: str) -> mmap:
        """Return an object mapped into memory, for reading: its pages come when they are touched.

        A file that is cut while it is mapped ends the process at the next touch (SIGBUS).

        Raises:
            FileNotFoundError: no such object.
            ValueError: an empty one.
        """
        fd = os.open(self.url_of(name), os.O_RDONLY)
        try:
            return mmap(fd, 0, access=ACCESS_READ)
        finally:
            os.close(fd)

    def size(self, name: str) -> int:
        """Return an object's size in bytes. Raises FileNotFoundError when there is none."""
        return Path(self.url, name).stat().st_size

    def exists(self, name: str) -> bool:
        """Tell whether an object of this name exists."""
        return Path(self.url, name).is_file()

    def list(self) -> dict[str, int]:
        """Return {name: size in bytes} of what lies directly under the root, sorted by name.

        Names that start with a dot are left out.
        """
        try:
            entries = [e for e in os.scandir(self.url) if e.is_file() and e.name[0] != "."]
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {e.name: e.stat().st_size for e in sorted(entries, key=lambda e: e.name)}

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
        """Remove an object; one that is absent is fine."""
        Path(self.url, name).unlink(missing_ok=True)


def _version(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns


def _read(fd: int, path: str, start: int, stop: int) -> bytes:
    size = os.fstat(fd).st_size
    if size < stop:  # asked first: a damaged index may name more bytes than there is memory
        raise StorageError(f"{path}: ends {stop - size} bytes before {stop}")
    parts: list[bytes] = []
    while start < stop and (part := os.pread(fd, stop - start, start)):
        parts.append(part)
        start += len(part)
    if start < stop:
        raise StorageError(f"{path}: cut while it was read")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _attempt(call: Callable[[str, int, int], bytes], *item: Any) -> bytes | OSError:
    try:
        return call(*item)
    except OSError as error:
        return error
