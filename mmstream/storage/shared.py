"""Storage: a folder of a file system that is reached over a network, such as NFS or Lustre.

It is a folder like any other, but a read is a request: it waits, and it may fail for a while. So
many ranges are read side by side, failed reads are tried again, and nothing is mapped: a map of a
file that went away on the server ends the process (SIGBUS). Files stay open, as opening one is a
request too.

`file_system_of` says what kind of file system a folder is on.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import ClassVar, TypeVar

from mmstream.errors import StorageError
from mmstream.storage.local import LocalStore, object_stat, open_file, read_exactly
from mmstream.storage.patience import patience_of, retry
from mmstream.storage.store import Access, ObjectStat, require_known
from mmstream.storage.urls import Range

T = TypeVar("T")

MAX_READ_BYTES = 4 << 20
"""Bytes of one read."""

MAX_READS = 16
"""Ranges that are read side by side."""

MAX_OPEN_FILES = 1024
"""Files that stay open; at most half of what the process may open."""

PASSING_ERRORS = {
    errno.EIO,
    errno.ESTALE,  # the server has forgotten the file: it is opened again
    errno.ETIMEDOUT,
    errno.ENOTCONN,  # FUSE, whose process has ended
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ESHUTDOWN,  # Lustre, after an eviction
    errno.EREMOTEIO,
    errno.EAGAIN,
}
"""Errors of a server or a network that may come back."""

SHARED_FILE_SYSTEMS = {
    "9p",
    "afs",
    "beegfs",
    "beegfs_nodev",
    "ceph",
    "cifs",
    "gpfs",
    "lustre",
    "ncpfs",
    "nfs",
    "nfs4",
    "orangefs",
    "panfs",
    "pvfs2",
    "smb3",
    "smbfs",
    "wekafs",
}
"""Names of types in ``/proc/self/mountinfo``. "fuse" and all "fuse.NAME" count too."""

LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.mergerfs", "fuse.ntfs-3g"}
"""FUSE file systems that show folders of this machine."""


@dataclass(frozen=True)
class SharedStore(LocalStore):
    """A folder on a file system that is reached over a network."""

    access: ClassVar[Access] = Access(
        max_gap_bytes=64 * 1024,
        max_range_bytes=MAX_READ_BYTES,
        min_header_read_bytes=64 * 1024,
        max_header_read_bytes=1024 * 1024,
        concurrent=True,
        max_reads=MAX_READS,
    )

    def local_path(self, _name: str) -> None:
        """Return None: objects are files, but they are not mapped."""

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Return a whole object; errors as `LocalStore.read`."""
        return self._retry(name, partial(super().read, name, max_bytes))

    def stat(self, name: str) -> ObjectStat:
        """Return the size and the version of an object; errors as `read`."""
        return self._retry(name, partial(super().stat, name))

    def read_ranges(
        self, ranges: Sequence[Range], known: MutableMapping[str, ObjectStat] | None = None
    ) -> list[bytes | OSError]:
        """Return the bytes of every range, or the error in its place."""

        def read(one_range: Range) -> bytes | OSError:
            try:
                return self._retry(one_range[0], partial(self._read_once, *one_range, known))
            except OSError as error:
                return error

        if len(ranges) < 2:
            return list(map(read, ranges))
        with ThreadPoolExecutor(min(MAX_READS, len(ranges))) as pool:
            return list(pool.map(read, ranges))

    def drop_cache(self, name: str, start: int, stop: int) -> None:
        """Have the file opened again, and its bytes [start, stop) read again."""
        _open_files().forget(self.url_of(name))
        super().drop_cache(name, start, stop)

    def _read_once(
        self, name: str, start: int, stop: int, known: MutableMapping[str, ObjectStat] | None
    ) -> bytes:
        path = self.url_of(name)
        files = _open_files()
        try:
            file = files.open(path)
            current = file.stat()
            require_known(path, name, current, known)
            return file.read(start, stop, current.size)
        except BaseException:
            files.forget(path)
            raise

    def _retry(self, name: str, call: Callable[[], T]) -> T:
        """Call a function that reads, again and again while it fails for a passing reason."""

        def call_once() -> T:
            try:
                return call()
            except (StorageError, FileNotFoundError):
                raise
            except OSError as error:
                if error.errno in PASSING_ERRORS:
                    raise
                raise StorageError(f"{self.url_of(name)}: {error.strerror}") from error

        return retry(self.url_of(name), call_once, patience_of(f"shared://{self.url}"))


class _OpenFile:
    """A file that is open until nobody uses it any more."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = open_file(path)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):  # it was not opened
            os.close(self._fd)

    def stat(self) -> ObjectStat:
        """Return the present size and version: it may be written over while it is open."""
        return object_stat(os.fstat(self._fd))  # mostly from what the system keeps of its status

    def read(self, start: int, stop: int, size: int) -> bytes:
        """Return exactly bytes [start, stop) of a file of `size` bytes."""
        return read_exactly(self._fd, self._path, start, stop, size, MAX_READ_BYTES)


class _OpenFiles:
    """The files that a process keeps open: those that were read last."""

    def __init__(self) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = min(MAX_OPEN_FILES, limit // 2) if limit > 0 else MAX_OPEN_FILES
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, path: str) -> _OpenFile:
        """Return a file, open for reading; errors as `open_file`."""
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                return file
        file = _OpenFile(path)
        with self._lock:
            self._files[path] = file
            dropped = self._files.popitem(last=False) if len(self._files) > self._most else None
        del dropped  # closed outside of the lock, unless another thread still reads it
        return file

    def forget(self, path: str) -> None:
        """Open a file anew at its next use."""
        with self._lock:
            file = self._files.pop(path, None)
        del file


def _open_files() -> _OpenFiles:
    return _open_files_of(os.getpid())


@lru_cache(maxsize=1)
def _open_files_of(_pid: int) -> _OpenFiles:
    """A child process opens files of its own: a lock that is held at a fork stays locked."""
    return _OpenFiles()


def is_shared(path: str) -> bool:
    """Tell whether a path is on a file system that is reached over a network.

    False where the system does not say, as on macOS.
    """
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return False
    kind = file_system_of(os.path.realpath(path), mounts)
    is_fuse = kind == "fuse" or (kind.startswith("fuse.") and kind not in LOCAL_FUSE)
    return is_fuse or kind in SHARED_FILE_SYSTEMS


def file_system_of(path: str, mounts: str) -> str:
    r"""Return the type of the file system that a path is on, such as "ext4" or "nfs4".

    Names of types are used, not the numbers that `statfs` has: FUSE has one number for all.

    Args:
        path: Absolute, without links. It need not exist.
        mounts: The text of ``/proc/self/mountinfo``.

    Examples:
        >>> mounts = (
        ...     "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"
        ...     "40 22 0:51 / /mnt/my\\040data rw,relatime shared:9 - nfs4 server:/data rw\n"
        ... )
        >>> file_system_of("/mnt/my data/shards", mounts)
        'nfs4'
        >>> file_system_of("/mnt/my dataset", mounts)
        'ext4'
    """
    longest, kind = -1, ""
    for line in mounts.splitlines():
        words, _, source = line.partition(" - ")
        fields = words.split(" ")
        if len(fields) < 5 or not source:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        is_under = f"{path.rstrip('/')}/".startswith(f"{point.rstrip('/')}/")
        if is_under and len(point) >= longest:  # of two at one point, the later one is on top
            longest, kind = len(point), source.split(" ")[0]
    return kind
