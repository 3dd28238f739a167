"""Storage: a folder of this machine.

A disk is read once. What fails here is not tried again, other than requests to an object store.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from mmap import ACCESS_READ, mmap
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar

from mmstream.errors import StorageError
from mmstream.storage.retry import health_of, retry
from mmstream.storage.store import (
    Access,
    CommonCalls,
    NotAFileError,
    ObjectStat,
    Range,
    join_url,
    require_known,
    require_size,
)

# -- a new file: a temporary name, then renamed ----------------------------------------------------
#
# `LocalStore` writes all objects this way, and so does whoever rewrites a file of its own. The
# temporary name of ``a.tar`` is ``.a.tar.PID-RANDOM.tmp``: two processes never share one, and
# nobody can put a link in its place beforehand. A killed process leaves it behind;
# `remove_temporaries` is for whoever knows that no other process writes there.

EARLY_BYTES = 1 << 20
"""Pieces of this size go to the disk before the file is complete."""

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def create_file(
    path: Path, commit: Callable[[Path, Path], object] = Path.replace
) -> Iterator[BinaryIO]:
    """Open a new file for writing, front to back. It has its name when the block ends.

    After an error there is no new file; an old one stays as it was. If `path` is a link, the new
    file replaces the link and not the file that it leads to.

    Args:
        path: Its name.
        commit: (the complete file, its name) -> gives it the name. By default an old file of this
            name is replaced.

    Raises:
        StorageError: The file does not have all bytes that were written to it.
        OSError: The disk failed, or is full.
    """
    name = f".{path.name}.{os.getpid()}-{secrets.token_hex(6)}.tmp"
    temporary = path.with_name(name)
    descriptor = os.open(temporary, _FLAGS, 0o666)  # the umask takes its bits away
    try:
        with io.BufferedWriter(_EarlyWriter(descriptor, "wb")) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            num_written, size = file.tell(), os.fstat(file.fileno()).st_size
        if size != num_written:
            raise StorageError(
                f"{path}: {num_written} bytes were written, but the file has {size}; "
                "see which other program changes files there"
            )
        commit(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class _EarlyWriter(io.FileIO):
    """Lets the disk begin with large pieces at once.

    Else the `fsync` at the end waits for nearly all bytes. That was a seventh of the time in which
    pictures of 1 MB are converted.
    """

    def write(self, data: Any, /) -> int:
        num_bytes = super().write(data)
        if num_bytes >= EARLY_BYTES:
            with suppress(OSError):  # a hint; not all file systems take it
                start = self.tell() - num_bytes
                # Linux begins to write what it cannot drop yet. Other pages stay as they are.
                os.posix_fadvise(self.fileno(), start, num_bytes, os.POSIX_FADV_DONTNEED)
        return num_bytes


def remove_temporaries(folder: Path, name: str) -> None:
    """Remove what killed processes left of files that they were writing.

    Args:
        folder: It need not exist.
        name: Regular expression of the files' final names.
    """
    pattern = re.compile(rf"\.(?:{name})\.\d+-[0-9a-f]+\.tmp")
    for path in folder.glob(".*.tmp"):
        if pattern.fullmatch(path.name):
            path.unlink(missing_ok=True)


# -- a folder --------------------------------------------------------------------------------------

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
            StorageError: The object is not a file, or has more than `max_bytes`.
        """
        path = self.url_of(name)
        with os.fdopen(open_file(path), "rb") as file:
            require_size(path, os.fstat(file.fileno()).st_size, max_bytes)
            return file.read()

    def read_ranges(
        self, ranges: Sequence[Range], expected: MutableMapping[str, ObjectStat] | None = None
    ) -> list[bytes | OSError]:
        """Return the bytes of every range, or the error in its place."""
        outcomes: list[bytes | OSError] = []
        for name, of_file in groupby(ranges, itemgetter(0)):
            bounds = [(start, stop) for _, start, stop in of_file]
            outcomes += self._read_file(name, bounds, expected)
        return outcomes

    def _read_file(
        self,
        name: str,
        bounds: Sequence[tuple[int, int]],
        expected: MutableMapping[str, ObjectStat] | None,
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
                    require_known(path, name, current, expected)
                    outcomes.append(read_exactly(fd, path, start, stop, current.size))
                except OSError as error:
                    outcomes.append(error)
        finally:
            os.close(fd)
        return outcomes

    def drop_cache(self, name: str, start: int, stop: int) -> None:
        """Have the disk read again for bytes [start, stop). Pages that are mapped stay."""
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
        for entry in self._entries():
            if _leads_to(entry.is_file):
                with suppress(FileNotFoundError):  # removed by another thread since
                    stats[entry.name] = object_stat(entry.stat())
        return stats

    def folders(self) -> Sequence[str]:
        """Return the names of the folders directly under the root, sorted."""
        return [entry.name for entry in self._entries() if _leads_to(entry.is_dir)]

    def _entries(self) -> Sequence[os.DirEntry[str]]:
        """Return what lies in the folder, sorted by name. Names that start with a dot are not."""
        try:
            entries = [entry for entry in os.scandir(self.url) if not entry.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(entries, key=attrgetter("name"))

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a new object for writing; it appears whole when the block ends, or not at all."""
        path = Path(self.url, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return create_file(path)

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
        """Remove an object. It is not an error when there is none."""
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


def map_file(path: str, name: str, expected: MutableMapping[str, ObjectStat] | None = None) -> mmap:
    """Return the bytes of a file as a map of it.

    Args:
        path: Of the file.
        name: Of the object that the file is, in `expected`.
        expected: As for `Store.read_ranges`.

    Raises:
        FileNotFoundError: No such file.
        ReplacedError: The file is not the expected one.
        StorageError: It is not a file, or it is empty.
    """
    fd, status = open_with_status(path)
    try:
        current = object_stat(status)
        require_known(path, name, current, expected)
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


def read_exactly(fd: int, path: str, start: int, stop: int, size: int) -> bytes:
    """Return exactly bytes [start, stop) of an open file of `size` bytes."""
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


# -- file systems that are reached over a network --------------------------------------------------
#
# It is a folder like any other, but a read is a request: it waits, and it may fail for a while. So
# many ranges are read side by side, failed reads are tried again, and nothing is mapped: a map of a
# file that went away on the server ends the process (SIGBUS).
#
# `file_system_of` says what kind of file system a folder is on.

T = TypeVar("T")

MAX_PARALLEL_READS = 16
"""Ranges that are read side by side."""

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
        max_range_bytes=4 * 1024 * 1024,
        min_header_read_bytes=64 * 1024,
        max_header_read_bytes=1024 * 1024,
        concurrent=True,
        max_reads=MAX_PARALLEL_READS,
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
        self, ranges: Sequence[Range], expected: MutableMapping[str, ObjectStat] | None = None
    ) -> list[bytes | OSError]:
        """Return the bytes of every range, or the error in its place."""

        def read(one_range: Range) -> bytes | OSError:
            try:
                return self._retry(one_range[0], partial(self._read_once, one_range, expected))
            except OSError as error:
                return error

        if len(ranges) < 2:
            return list(map(read, ranges))
        with ThreadPoolExecutor(min(MAX_PARALLEL_READS, len(ranges))) as pool:
            return list(pool.map(read, ranges))

    def _read_once(
        self, one_range: Range, expected: MutableMapping[str, ObjectStat] | None
    ) -> bytes:
        (outcome,) = super().read_ranges([one_range], expected)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

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

        return retry(self.url_of(name), call_once, health_of(f"shared://{self.url}"))


def is_shared(path: str) -> bool:
    """Tell whether a path is on a file system that is reached over a network.

    False where the system does not say.
    """
    kind = file_system_of(os.path.realpath(path), mounts())
    is_fuse = kind == "fuse" or (kind.startswith("fuse.") and kind not in LOCAL_FUSE)
    return is_fuse or kind in SHARED_FILE_SYSTEMS


def mounts() -> str:
    """Return the text of ``/proc/self/mountinfo``. Some sandboxes hide it: then it is empty."""
    try:
        return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ""


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
        mount, _, source = line.partition(" - ")
        fields = mount.split(" ")
        if len(fields) < 5 or not source:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        is_under = f"{path.rstrip('/')}/".startswith(f"{point.rstrip('/')}/")
        if is_under and len(point) >= longest:  # of two at one point, the later one is on top
            longest, kind = len(point), source.split(" ")[0]
    return kind
