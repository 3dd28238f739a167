"""Storage: a folder of this machine.

A disk is read once. What fails here is not tried again, other than requests to an object store.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from mmap import ACCESS_READ, mmap
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, ClassVar

from mmstream.errors import StorageError
from mmstream.storage.new_file import create_file
from mmstream.storage.store import (
    Access,
    CommonCalls,
    NotAFileError,
    ObjectStat,
    require_known,
    require_size,
)
from mmstream.storage.urls import Range, join_url

_NO_FLOCK = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""NFS locks no folders."""

_SPECIAL_FILES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True)
class LocalStore(CommonCalls):
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

    def local_path(self, name: str) -> str | None:
        """Return the path of an object, whether it exists or not. "" stands for the folder."""
        return join_url(self.url, name)

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Return a whole object.

        Raises:
            FileNotFoundError: No such object.
            StorageError: The object is no file, or has more than `max_bytes`.
        """
        path = self.url_of(name)
        with os.fdopen(open_file(path), "rb") as file:
            require_size(path, os.fstat(file.fileno()).st_size, max_bytes)
            return file.read()

    def read_ranges(
        self, ranges: Sequence[Range], known: MutableMapping[str, ObjectStat] | None = None
    ) -> list[bytes | OSError]:
        """Return the bytes of every range, or the error in its place."""
        outcomes: list[bytes | OSError] = []
        for name, of_file in groupby(ranges, itemgetter(0)):
            bounds = [(start, stop) for _, start, stop in of_file]
            outcomes += self._read_file(name, bounds, known)
        return outcomes

    def _read_file(
        self,
        name: str,
        bounds: Sequence[tuple[int, int]],
        known: MutableMapping[str, ObjectStat] | None,
    ) -> list[bytes | OSError]:
        """Return ranges of one object, or the error in the place of each."""
        path = self.url_of(name)
        try:
            fd, status = open_with_status(path)
        except OSError as error:
            return [error] * len(bounds)
        outcomes: list[bytes | OSError] = []
        current = object_stat(status)
        try:
            for start, stop in bounds:
                try:
                    require_known(path, name, current, known)
                    outcomes.append(read_exactly(fd, path, start, stop, current.size))
                except OSError as error:
                    outcomes.append(error)
        finally:
            os.close(fd)
        return outcomes

    def drop_cache(self, name: str, start: int, stop: int) -> None:
        """Have the disk read again for bytes [start, stop). Pages that are mapped stay."""
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        with suppress(OSError):  # the read that follows says it
            fd = open_file(self.url_of(name))
            try:
                os.posix_fadvise(fd, start, stop - start, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def stat(self, name: str) -> ObjectStat:
        """Return the size and the version of an object; errors as `read`."""
        path = self.url_of(name)
        try:
            status = os.stat(path)  # noqa: PTH116 - half the time of Path's
        except OSError as error:
            raise _plain(path, error) from None
        return object_stat(_require_file(path, status))

    def exists(self, name: str) -> bool:
        """Tell whether an object of this name exists."""
        return Path(self.url, name).is_file()

    def list(self) -> dict[str, ObjectStat]:
        """Return the objects directly under the root by their names, sorted by name.

        Names that start with a dot are left out.
        """
        stats = {}
        try:
            for entry in os.scandir(self.url):
                if not entry.name.startswith(".") and _leads_to(entry.is_file):
                    with suppress(FileNotFoundError):  # removed by another thread since
                        stats[entry.name] = object_stat(entry.stat())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return dict(sorted(stats.items()))

    def folders(self) -> Sequence[str]:
        """Return the names of the folders directly under the root, sorted."""
        try:
            entries = [entry for entry in os.scandir(self.url) if _leads_to(entry.is_dir)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(entry.name for entry in entries if not entry.name.startswith("."))

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a new object for writing; it appears whole when the block ends, or not at all."""
        path = Path(self.url, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with create_file(path) as file:
            yield file

    def write(self, name: str, data: bytes) -> None:
        """Write one object, whole or not at all."""
        with self.create(name) as file:
            file.write(data)

    def write_if(self, name: str, data: bytes, version: str | None) -> bool:
        """Write one object if nobody else wrote it meanwhile. Return whether it was written."""
        path = Path(self.url, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_written = False

        def commit(new: Path, path: Path) -> None:
            nonlocal is_written
            with _locked(path.parent):
                if _version_of(path) != version:
                    return
                if version is not None or not _link(new, path):
                    new.replace(path)
                is_written = True

        with suppress(FileExistsError), create_file(path, commit) as file:
            file.write(data)
        return is_written

    def remove(self, name: str) -> None:
        """Remove an object. It is no error when there is none."""
        Path(self.url, name).unlink(missing_ok=True)


def open_file(path: str) -> int:
    """Open a file for reading, and return its descriptor.

    A FIFO or a device is never waited for: it is refused as soon as it is open.

    Raises:
        FileNotFoundError: No such file.
        NotAFileError: A folder, a FIFO, a socket or a device.
    """
    return open_with_status(path)[0]


def open_with_status(path: str) -> tuple[int, os.stat_result]:
    """Return the descriptor of `open_file`, and the status of the file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _plain(path, error) from None
    try:
        return fd, _require_file(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise


def map_file(path: str, name: str, known: MutableMapping[str, ObjectStat] | None = None) -> mmap:
    """Return the bytes of a file as a map of it.

    Args:
        path: Of the file.
        name: Of the object that the file is, in `known`.
        known: As for `Store.read_ranges`.

    Raises:
        FileNotFoundError: No such file.
        ReplacedError: The file is not the known one.
        StorageError: It is no file, or it is empty.
    """
    fd, status = open_with_status(path)
    try:
        current = object_stat(status)
        require_known(path, name, current, known)
        if not current.size:
            raise StorageError(f"{path}: is empty and cannot be mapped")
        return mmap(fd, 0, access=ACCESS_READ)
    finally:
        os.close(fd)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes and threads out of the same block, where the file system can."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
        yield
    finally:
        os.close(fd)


def _link(new: Path, path: Path) -> bool:
    """Give a file one more name, unless there is such a file. False: no links there."""
    try:
        os.link(new, path)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True


def _version_of(path: Path) -> str | None:
    """Return the version of a file, or None if there is none."""
    # NFS asks its server about a file that is opened, and trusts its cache otherwise.
    try:
        fd, status = open_with_status(str(path))
    except FileNotFoundError:
        return None
    os.close(fd)
    return object_stat(status).version


def _plain(path: str, error: OSError) -> OSError:
    """Return a NotAFileError in place of an error that says that a path leads to no file."""
    # A socket, a device without a driver, or a link that leads to itself.
    if error.errno in (errno.ENXIO, errno.ENODEV, errno.ELOOP):
        return NotAFileError(f"{path}: {error.strerror}; a file is needed")
    return error


def _leads_to(is_kind: Callable[[], bool]) -> bool:
    """Call `is_file` or `is_dir` of an entry. A link that leads to itself is neither."""
    try:
        return is_kind()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _require_file(path: str, status: os.stat_result) -> os.stat_result:
    """Return the status of a file. Raises NotAFileError for everything else."""
    if not stat.S_ISREG(status.st_mode):
        kind = _SPECIAL_FILES.get(stat.S_IFMT(status.st_mode), "a special file")
        raise NotAFileError(f"{path}: {kind}; a file is needed")
    return status


def object_stat(status: os.stat_result) -> ObjectStat:
    """Return the size and the version of a file."""
    # A replaced file may keep the time of its last change: `cp -p` keeps it. Its number tells the
    # two apart, but only on a disk: FUSE makes numbers up and forgets them. The kernel numbers
    # such file systems as devices of major number 0.
    number = f"-{status.st_ino}" if os.major(status.st_dev) else ""
    return ObjectStat(status.st_size, f"{status.st_mtime_ns}{number}")


def read_exactly(
    fd: int, path: str, start: int, stop: int, size: int, most: int = sys.maxsize
) -> bytes:
    """Return exactly bytes [start, stop) of an open file of `size` bytes, `most` at a time."""
    # Checked before the read: a damaged index may name more bytes than there is memory.
    if size < stop:
        raise StorageError(f"{path}: ends {stop - size} bytes before {stop}")
    chunks: list[bytes] = []
    while start < stop and (chunk := os.pread(fd, min(most, stop - start), start)):
        chunks.append(chunk)
        start += len(chunk)
    if start < stop:
        raise StorageError(f"{path}: became shorter while it was read")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
