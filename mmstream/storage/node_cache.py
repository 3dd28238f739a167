"""Samples of remote shards on a disk of this machine, so that the next epoch need not fetch them.

All processes of a machine share the folder. There is no server and no process that must end well:
a file is usable as soon as its first sample is in it, and whatever a crash left is noticed when it
is read. A sample that was written once stays while a run plans it: each epoch needs each sample
once, so nothing could take its place that is needed sooner.

    find  -> a thread of the caller -> where the samples are that are there
    read  -> a thread of the caller -> the bytes of one of them, if they are right
    write -> a queue of at most `MAX_QUEUED_BYTES` -> one thread -> files

Nobody waits for a write. Where the disk is slower than the storage, the queue is full, and what
comes then is not written: the next epoch brings it again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from mmstream.errors import ConfigError, escaped
from mmstream.storage.local import file_system_of, is_shared, mounts
from mmstream.storage.store import local_path
from mmstream.storage.transfers import SharedCounts
from mmstream.types import IntArray

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 256 << 20
"""Bytes that wait to be written. Windows hold most of them anyway."""

CLOSE_S = 1.0
"""Seconds in which `close` lets the queue be written."""

OF_THE_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""Errors of one file that is not a file: a link, a folder, a socket."""


class _Write(NamedTuple):
    file: CacheFile
    samples: CachedSamples
    data: memoryview
    first: int


class NodeCache:
    """Reads and writes cached files. `find` and `read` may be called in any thread, `write` in one.

    Args:
        root: The folder of the cache, as `open_cache_dir` returned it.
        needs: As `CacheQuota`.
        max_bytes: As `CacheQuota`.

    Attributes:
        counts: Fields of `TransferCounts`.
    """

    def __init__(self, root: str, needs: Mapping[str, int], max_bytes: int | None = None) -> None:
        self._root = root
        self._quota: CacheQuota | None = None
        self._epochs_began_at = deque([0.0, time.time()], maxlen=3)
        self._is_writing = True
        self._is_closed = False
        self._queue: deque[_Write] = deque()
        self._damaged: set[CacheFile] = set()
        self._has_warned = False
        self._num_queued_bytes = 0
        self._changed = threading.Condition()
        self.counts = SharedCounts()
        arguments = (dict(needs), max_bytes)
        self._thread = threading.Thread(
            target=self._write_queued, args=arguments, name="mmstream-cache-write", daemon=True
        )
        self._thread.start()

    def find(self, file: CacheFile, samples: CachedSamples) -> dict[int, CacheLocation]:
        """Find the samples that a file has, and let the disk read them ahead.

        Their bytes are not compared: `read` does it. A file that is damaged is removed.

        Args:
            file: Which one.
            samples: Which samples are wanted.

        Returns:
            Where they lie, by their number among `samples`.
        """
        path = file.path(self._root)
        try:
            is_there = find_samples(path, file, samples, self._epochs_began_at[-1])
        except OSError as error:
            self._note_error(error, file)
            return {}
        if is_there is None:
            self._put_damaged(file)
            return {}
        starts = (file.data_start + samples.start).tolist()
        columns = samples.number.tolist(), starts, samples.checksum.tolist()
        locations = list(map(partial(CacheLocation, file), *columns))
        return {number: locations[number] for number in np.flatnonzero(is_there).tolist()}

    def read(self, location: CacheLocation, view: memoryview) -> bool:
        """Read a sample that was found. Return whether its bytes are there and right."""
        try:
            is_right = read_sample(self._root, location, view)
        except FileNotFoundError:  # it was removed since
            return False
        except OSError as error:
            self._note_error(error, location.file)
            return False
        if is_right:
            self.counts.add(num_cache_hit_bytes=len(view))
        elif is_right is False:
            self._put_damaged(location.file)
        return bool(is_right)

    def write(self, file: CacheFile, samples: CachedSamples, data: memoryview, first: int) -> None:
        """Write samples soon, if there is room. Nobody waits, and nothing is raised.

        Args:
            file: Where they belong.
            samples: Which samples.
            data: Their bytes, which nobody changes any more.
            first: The byte of the shard that comes first in `data`.
        """
        with self._changed:
            is_full = self._quota is not None and self._quota.is_full(file.folder)
            if is_full or not self._is_writing:
                return
            if self._num_queued_bytes + len(data) > MAX_QUEUED_BYTES:
                self.counts.add(num_cache_dropped_bytes=len(data))
                return
            self._queue.append(_Write(file, samples, data, first))
            self._num_queued_bytes += len(data)
            self._changed.notify_all()

    def begin_epoch(self) -> None:
        """Note that an epoch begins. What was not used in the two before it is a leftover.

        Two, because the first samples of an epoch are read before it begins.
        """
        with self._changed:
            self._epochs_began_at.append(time.time())
            if self._quota is not None:
                self._quota.begin_epoch(self._epochs_began_at[0])

    def close(self) -> None:
        """Write for `CLOSE_S` at most what is queued, and give up the locks."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def _note_error(self, error: OSError, file: CacheFile) -> None:
        """Note that a file could not be read."""
        if error.errno in OF_THE_FILE:
            self._put_damaged(file)
        else:
            self._stop_writing(error)

    def _put_damaged(self, file: CacheFile) -> None:
        """Let the thread that writes remove a file, also if another process rewrites it."""
        with self._changed:
            self._damaged.add(file)
            self._changed.notify_all()

    def _write_queued(self, needs: Mapping[str, int], max_bytes: int | None) -> None:
        """Write what is queued, until the cache is closed. It runs in a thread."""
        try:
            quota = self._quota = CacheQuota(self._root, needs, max_bytes)
        except OSError as error:
            self._stop_writing(error)
            return
        while (task := self._next()) is not None:
            try:
                if isinstance(task, CacheFile):
                    self._remove_damaged(task, quota)
                    continue
                reserve = partial(quota.reserve, task.file.folder)
                num_bytes = write_samples(task.file.path(self._root), *task, reserve)
                self.counts.add(num_cached_bytes=num_bytes)
            except OSError as error:
                if error.errno not in OF_THE_FILE:
                    self._stop_writing(error)
        quota.close()

    def _remove_damaged(self, file: CacheFile, quota: CacheQuota) -> None:
        path = file.path(self._root)
        is_removed = quota.remove(file.folder, path)
        self.counts.add(num_cache_damaged=is_removed)
        if is_removed and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the node cache has a damaged file: it is removed, and its samples are read from "
                "storage; no more of these are logged: %s",
                escaped(path),
            )

    def _next(self) -> _Write | CacheFile | None:
        """Wait for what is to be written, or for a damaged file; None: the cache is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._damaged or self._is_closed)
            if self._damaged:
                return self._damaged.pop()
            if not self._queue:
                return None
            write = self._queue.popleft()
            self._num_queued_bytes -= len(write.data)
            return write

    def _stop_writing(self, error: OSError) -> None:
        with self._changed:
            was_writing, self._is_writing = self._is_writing, False
            self._queue.clear()
            self._num_queued_bytes = 0
        if was_writing:
            logger.warning(
                "the node cache %s takes nothing more: %s; what it has is used, and the rest is "
                "read from storage",
                escaped(self._root),
                os.strerror(error.errno) if error.errno else error,
            )


# -- how many bytes the files may take -------------------------------------------------------------
#
#     CACHE_DIR/mmstream-UID/    0700, and of this user
#         room                   bytes of each folder, as JSON; changed under a lock (flock)
#         3f9a.../               a dataset
#             in-use             locked by each process that uses the dataset (flock, shared)
#             7c/7c51...         cached files
#
# Locks end with their processes, however these end. So a dataset that nobody has locked is a
# leftover of runs that are over. Leftovers go first when room is needed, those that were used
# longest ago before others. What this run's dataset has, but nobody has used for a whole epoch, is
# a leftover too: it is of an earlier run with other ranks. Nothing else is ever removed.
#
# A process that is killed may leave room counted that it did not use: one range, about 8 MiB at
# most. The next process that is alone with a dataset counts its files again.

FREE_SHARE = 0.8
"""Part of the space that is free without the cache, which it takes where nobody set a limit."""

DEFAULT_FREE_SHARE = 0.15
"""Part of the disk that it leaves free then. Some schedulers end jobs where less is free."""

MIN_FREE_SHARE = 0.01
"""Part of the disk that stays free whatever the limit is: others write there too."""

MEMORY_FILE_SYSTEMS = ("ramfs", "tmpfs")

RETRY_S = 10.0
"""Seconds after which a full cache is asked for room again."""

_FOLDER, _SUBFOLDER, _FILE = (re.compile(f"[0-9a-f]{{{size}}}") for size in (16, 2, 40))
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def open_cache_dir(cache_dir: str, max_bytes: int | None) -> str:
    """Make the folder of this user in a local folder, if there is none.

    Args:
        cache_dir: Local folder, which may belong to others.
        max_bytes: Most bytes that the cache may take. None: what `CacheQuota` computes.

    Returns:
        The absolute path of ``CACHE_DIR/mmstream-UID``. Only this user may look into it.

    Raises:
        ConfigError: It cannot be made, is not on a local disk, or others may change it.
    """
    parent = Path(local_path(os.fspath(cache_dir))).resolve()
    path = parent / f"mmstream-{os.geteuid()}"
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = parent.stat().st_mode
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(
            f"cache_dir {escaped(cache_dir)}: {error.strerror}; give another folder"
        ) from None
    folder = escaped(str(path))
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_mode & 0o077:
        raise ConfigError(
            f"cache_dir: {folder} is not a folder of this user alone (mode 0700): remove it, or "
            "give another cache_dir"
        )
    if mode & 0o002 and not mode & stat.S_ISVTX:
        raise ConfigError(
            f"cache_dir: all users may rename what is in {escaped(str(parent))}: run chmod +t on "
            "it, or give another folder"
        )
    kind = file_system_of(str(path), mounts())
    if is_shared(str(path)):
        raise ConfigError(
            f"cache_dir: {folder} is on {escaped(kind)}, which is reached over a network: give a "
            "folder of a disk of this machine"
        )
    if kind in MEMORY_FILE_SYSTEMS and max_bytes is None:
        raise ConfigError(
            f"cache_dir: {folder} is in memory ({kind}): give max_cache_bytes, too, or a folder of "
            "a disk"
        )
    return str(path)


class _Leftover(NamedTuple):
    used_at: float
    folder: str
    path: str


class CacheQuota:
    """How many bytes the files of a cache may take, and do, as one process sees it.

    Args:
        root: The folder of the cache.
        needs: Bytes that this machine needs of each dataset, by its folder. The dataset whose
            samples are used most often comes first: room that it will need is not given to others.
        max_bytes: Most bytes that the cache may take. None: `FREE_SHARE` of what would be free
            without it, while `DEFAULT_FREE_SHARE` of the disk stays free.

    Raises:
        OSError: The disk failed, or is full.
    """

    def __init__(self, root: str, needs: Mapping[str, int], max_bytes: int | None) -> None:
        self._root, self._needs = root, dict(needs)
        self._lock = threading.Lock()
        self._in_use: dict[str, int] = {}
        self._leftovers: deque[_Leftover] = deque()
        self._listed_at = -RETRY_S
        self._full_until: dict[str, float] = {}
        self._file = os.open(f"{root}/room", _FLAGS, 0o600)
        self._unused_since = 0.0
        for folder in self._needs:
            self._use(folder)
        with self._counts() as counts:
            disk = os.statvfs(root)
            free = disk.f_bavail * disk.f_frsize
            used = sum(counts.values())
        if max_bytes is None:  # the same at each start, however full the cache is
            least_free = int(DEFAULT_FREE_SHARE * disk.f_blocks * disk.f_frsize)
            max_bytes = max(0, min(int(FREE_SHARE * (free + used)), free + used - least_free))
        self.max_bytes = max_bytes
        logger.log(
            logging.INFO if max_bytes else logging.WARNING,
            "the node cache %s may take %.3f GB: it has %.3f GB, this run needs %.3f GB here, "
            "and %.3f GB of the disk are free",
            escaped(root),
            max_bytes / 1e9,
            used / 1e9,
            sum(needs.values()) / 1e9,
            free / 1e9,
        )

    def is_full(self, folder: str) -> bool:
        """Tell whether there was no room for a dataset a moment ago."""
        return time.monotonic() < self._full_until.get(folder, 0.0)

    def reserve(self, folder: str, num_bytes: IntArray) -> int:
        """Take room for samples of a dataset, from the first on.

        Args:
            folder: Of the dataset.
            num_bytes: Bytes of the first sample, of the first two, of the first three, and so on.

        Returns:
            How many of the samples have room now.
        """
        if self.is_full(folder):
            return 0
        with self._counts() as counts:
            if self._num_free(counts, folder) < num_bytes[-1]:
                self._remove_leftovers(counts, folder, int(num_bytes[-1]))
            num_fitting = int(num_bytes.searchsorted(self._num_free(counts, folder), "right"))
            if num_fitting < num_bytes.size:
                self._full_until[folder] = time.monotonic() + RETRY_S
            if num_fitting:
                counts[folder] = counts.get(folder, 0) + int(num_bytes[num_fitting - 1])
        return num_fitting

    def begin_epoch(self, unused_since: float) -> None:
        """Note that an epoch begins. Files that were not used since a time are leftovers now."""
        if unused_since != self._unused_since:
            self._unused_since = unused_since
            self._leftovers = deque()  # the thread that writes may go through the old ones
            self._listed_at = -RETRY_S
            self._full_until.clear()

    def remove(self, folder: str, path: str) -> bool:
        """Remove a file of a dataset. Return whether it was there.

        Raises:
            OSError: The disk failed.
        """
        with self._counts() as counts, suppress(OSError):
            _remove(path, folder, counts)
            return True
        return False

    def close(self) -> None:
        """Give up the locks. The files stay."""
        for descriptor in (*self._in_use.values(), self._file):
            with suppress(OSError):
                os.utime(descriptor)
            os.close(descriptor)
        self._in_use.clear()

    def _use(self, folder: str) -> None:
        """Lock a dataset as used. Count its files if no other process uses it."""
        Path(self._root, folder).mkdir(mode=0o700, exist_ok=True)
        descriptor = self._in_use[folder] = os.open(f"{self._root}/{folder}/in-use", _FLAGS, 0o600)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with self._counts() as counts:
                counts[folder] = sum(size for _, size, _ in _files(self._root, folder))
        fcntl.flock(descriptor, fcntl.LOCK_SH)

    @contextmanager
    def _counts(self) -> Iterator[dict[str, int]]:
        """Hold the bytes of each dataset; what is changed is written."""
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                data = os.pread(self._file, 1 << 20, 0)
                counts = _decoded(data)
                if counts is None:  # new, or cut by a power failure
                    counts = {
                        folder: sum(size for _, size, _ in _files(self._root, folder))
                        for folder in _folders(self._root)
                    }
                try:
                    yield counts
                finally:
                    new_data = json.dumps(counts).encode()
                    if new_data != data:
                        os.pwrite(self._file, new_data, 0)
                        os.ftruncate(self._file, len(new_data))
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _num_free(self, counts: Mapping[str, int], folder: str) -> int:
        """Return how many more bytes a dataset may take; below 0 where others need its room."""
        owed = 0
        for other, need in self._needs.items():
            if other == folder:
                break
            owed += max(0, need - counts.get(other, 0))
        disk = os.statvfs(self._root)
        least_free = int(MIN_FREE_SHARE * disk.f_blocks * disk.f_frsize)
        return min(
            disk.f_bavail * disk.f_frsize - least_free,
            self.max_bytes - sum(counts.values()) - owed,
        )

    def _remove_leftovers(self, counts: dict[str, int], folder: str, num_bytes: int) -> None:
        """Remove leftovers, oldest first, until there is room."""
        if not self._leftovers and time.monotonic() - self._listed_at >= RETRY_S:
            self._leftovers = deque(sorted(self._list_leftovers()))
            self._listed_at = time.monotonic()
        leftovers, unused = self._leftovers, dict[str, int]()
        try:
            while leftovers and self._num_free(counts, folder) < num_bytes:
                leftover = leftovers.popleft()
                if leftover.folder not in self._in_use and leftover.folder not in unused:
                    lock = _locked_alone(f"{self._root}/{leftover.folder}/in-use")
                    if lock is None:  # a run has begun to use it
                        continue
                    unused[leftover.folder] = lock
                with suppress(OSError):
                    if os.lstat(leftover.path).st_mtime == leftover.used_at:
                        _remove(leftover.path, leftover.folder, counts)
        finally:
            for lock in unused.values():
                os.close(lock)

    def _list_leftovers(self) -> Iterator[_Leftover]:
        for folder in _folders(self._root):
            unused_since = self._unused_since
            if folder not in self._in_use:
                lock = _locked_alone(f"{self._root}/{folder}/in-use")
                if lock is None:
                    continue
                os.close(lock)
                unused_since = float("inf")
            for path, _, used_at in _files(self._root, folder):
                if used_at < unused_since:
                    yield _Leftover(used_at, folder, path)


def _remove(path: str, folder: str, counts: dict[str, int]) -> None:
    size = os.lstat(path).st_blocks * 512
    Path(path).unlink()
    counts[folder] = max(0, counts.get(folder, 0) - size)


def _locked_alone(path: str) -> int | None:
    """Return the descriptor of a file that only this process has locked; None: another has."""
    try:
        descriptor = os.open(path, _FLAGS, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _folders(root: str) -> list[str]:
    with os.scandir(root) as entries:
        return [
            entry.name
            for entry in entries
            if _FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]


def _files(root: str, folder: str) -> Iterator[tuple[str, int, float]]:
    """Yield the path, the bytes on disk and the time of last use of each cached file."""
    with suppress(OSError), os.scandir(f"{root}/{folder}") as subfolders:
        for subfolder in subfolders:
            is_own = _SUBFOLDER.fullmatch(subfolder.name)
            if not (is_own and subfolder.is_dir(follow_symlinks=False)):
                continue
            with os.scandir(subfolder.path) as entries:
                for entry in entries:
                    with suppress(OSError):
                        if _FILE.fullmatch(entry.name):
                            status = entry.stat(follow_symlinks=False)
                            yield entry.path, status.st_blocks * 512, status.st_mtime


def _decoded(data: bytes) -> dict[str, int] | None:
    with suppress(ValueError):
        counts = json.loads(data)
        if isinstance(counts, dict) and all(
            type(count) is int and count >= 0 for count in counts.values()
        ):
            return counts
    return None


# -- one file: some samples of one shard that follow one another -----------------------------------
#
#     magic, name           40 bytes: which file it is
#     (length, CRC-32C)     two u32 for each sample; a length of 0: the sample is not there
#     ...                   zeros up to a multiple of 4,096 bytes
#     the shard             byte b of the shard is byte `data_start` + b of the file
#
# So each sample has a place of its own, and the file is sparse: what was not written takes no room.
# Samples come in any order, from several processes, and a range of samples is one read, however it
# was written. Two processes that write the same sample write the same bytes to the same place.
#
# A sample is written before its length and CRC-32C. So a process that is killed leaves a sample
# that is not there. After a power failure a sample may have a checksum and no bytes, or a part of
# them: whoever reads it compares, and the file is removed.

MAGIC = b"mmcache\x01"
TABLE_START = 40
PAGE_BYTES = 4096
"""Disks give room in pages."""

MAX_SAMPLE_BYTES = (1 << 32) - 1

READ_AHEAD_BYTES = 128 << 10
"""What is asked for at once of the disk. Some systems leave out what is beyond their own limit."""

_SAFE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""A link is not followed, and a pipe is not waited for."""

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class CacheFile:
    """Which file of the cache has some samples of a shard."""

    folder: str
    """Of the dataset."""
    name: str
    """40 hexadecimal digits: a hash of the shard, and of which samples of it the file has."""
    num_samples: int
    """Samples that it has room for."""
    object_bytes: int
    """Size of the shard."""

    @property
    def data_start(self) -> int:
        """Where byte 0 of the shard would lie in the file."""
        return -(-(TABLE_START + 8 * self.num_samples) // PAGE_BYTES) * PAGE_BYTES

    @property
    def num_bytes(self) -> int:
        """Length of the file. It takes far less room."""
        return self.data_start + self.object_bytes

    @property
    def head(self) -> bytes:
        """The first bytes of the file, which say that it is this one."""
        return (MAGIC + bytes.fromhex(self.name)).ljust(TABLE_START, b"\0")

    def path(self, root: str) -> str:
        """Return where the file lies in a cache."""
        return f"{root}/{self.folder}/{self.name[:2]}/{self.name}"


class CachedSamples(NamedTuple):
    """Samples of a file, in the order of their shard. Arrays have one entry per sample."""

    number: IntArray
    """In the file, from 0."""
    start: IntArray
    """The sample is bytes [start, stop) of the shard."""
    stop: IntArray
    checksum: IntArray
    """CRC-32C of the sample's bytes, as the index of the shard says."""

    def select(self, is_wanted: Flags) -> CachedSamples:
        """Return some of the samples."""
        return CachedSamples(*(column[is_wanted] for column in self))


class CacheLocation(NamedTuple):
    """Where a sample lies in the cache."""

    file: CacheFile
    number: int
    """In the file, from 0."""
    start: int
    """The byte of the file where the sample begins."""
    checksum: int
    """CRC-32C of its bytes, as the index of the shard says."""


def find_samples(
    path: str, file: CacheFile, samples: CachedSamples, began_at: float
) -> Flags | None:
    """Find the samples that a file has, and let the disk read them ahead. None is compared yet.

    Args:
        path: Where the file lies.
        file: Which one it is.
        samples: Which samples are wanted.
        began_at: A file that was not used since then is marked as used now.

    Returns:
        Which of the samples are there. None: the file is damaged.

    Raises:
        OSError: The disk failed.
    """
    with _opened(path, os.O_RDONLY) as descriptor:
        if descriptor is None:
            return np.zeros(samples.number.size, dtype=np.bool_)
        status = os.fstat(descriptor)
        table = _table(descriptor, file, status)
        if table is None:
            return None
        table = table[samples.number]
        is_there: Flags = table[:, 0] == samples.stop - samples.start
        # The file may hold an older shard of this name and size. Its bytes are not wanted then.
        is_there &= table[:, 1] == samples.checksum
        if is_there.any() and status.st_mtime < began_at:
            with suppress(OSError):
                os.utime(descriptor)
        for begin, end in _adjacent(samples, is_there):
            start, stop = (
                file.data_start + samples.start[begin],
                file.data_start + samples.stop[end - 1],
            )
            for piece in range(int(start), int(stop), READ_AHEAD_BYTES):
                os.posix_fadvise(descriptor, piece, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
    return is_there


def read_sample(root: str, location: CacheLocation, view: memoryview) -> bool | None:
    """Read a sample that `find_samples` has found.

    The file may have been cut or rewritten since: nothing but the checksum decides.

    Args:
        root: The folder of the cache.
        location: Of the sample.
        view: Memory for the sample, which has any content if the bytes are not right.

    Returns:
        Whether its bytes are right. None: the file does not have the sample any more. False: it
        says that it has it, so it is damaged.

    Raises:
        OSError: The file was removed, or the disk failed.
    """
    descriptor = os.open(location.file.path(root), os.O_RDONLY | _SAFE_FLAGS)
    try:
        entry = struct.pack("<II", len(view), location.checksum)
        for _ in range(2):  # it may have been written between its bytes and its entry
            left, position = view, location.start
            while left and (num_bytes := os.preadv(descriptor, [left], position)):
                left, position = left[num_bytes:], position + num_bytes
            if not left and crc32c(view, 0, 0) == location.checksum:
                return True
            if os.pread(descriptor, 8, TABLE_START + 8 * location.number) != entry:
                return None
        return False
    finally:
        os.close(descriptor)


def write_samples(
    path: str,
    file: CacheFile,
    samples: CachedSamples,
    data: memoryview,
    first: int,
    reserve: Callable[[IntArray], int],
) -> int:
    """Write the samples that a file lacks, from the first on, as far as there is room.

    Args:
        path: Where the file lies.
        file: Which one it is.
        samples: Which samples are given.
        data: Their bytes, which fit their checksums.
        first: The byte of the shard that comes first in `data`.
        reserve: Called with the bytes that the first sample takes from the disk, the first two, the
            first three, and so on. It returns how many samples have room, and takes it for them.

    Returns:
        Bytes of the samples that were written.

    Raises:
        OSError: The disk failed, or is full.
    """
    samples = samples.select(samples.stop - samples.start <= MAX_SAMPLE_BYTES)
    entries = np.column_stack([samples.stop - samples.start, samples.checksum])
    with _opened(path, os.O_RDWR) as descriptor:
        is_new, table = descriptor is None, np.zeros((file.num_samples, 2), dtype=np.int64)
        if descriptor is not None:
            present = _table(descriptor, file, os.fstat(descriptor))
            if present is None:  # whoever reads it removes it
                return 0
            table = present
        is_missing = (table[samples.number] != entries).any(axis=1)
        if not is_missing.any():
            return 0
        if descriptor is not None:
            os.utime(descriptor)  # in use, so that no room is made by removing it
            if not os.fstat(descriptor).st_nlink:  # it was, before: room for it would be lost
                return 0
        num_bytes = PAGE_BYTES * np.cumsum(_num_new_pages(file, table, samples.select(is_missing)))
        num_fitting = reserve(num_bytes + is_new * file.data_start)
        is_missing[np.flatnonzero(is_missing)[num_fitting:]] = False
        groups = _adjacent(samples, is_missing)
        if not groups:
            return 0
        if descriptor is not None:  # also if it was removed now: a new one would take more room
            _write_groups(descriptor, file, samples, entries, groups, data, first)
        else:
            with _opened(path, os.O_RDWR | os.O_CREAT) as created:
                assert created is not None
                _write_groups(created, file, samples, entries, groups, data, first)
    return int((samples.stop - samples.start)[is_missing].sum())


def _write_groups(
    descriptor: int,
    file: CacheFile,
    samples: CachedSamples,
    entries: IntArray,
    groups: list[tuple[int, int]],
    data: memoryview,
    first: int,
) -> None:
    """Write groups of samples whose bytes follow one another, and then their rows of the table.

    Args:
        descriptor: Of the file, which is empty or has this shape.
        file: Which one it is.
        samples: Which samples are given.
        entries: Their rows of the table: lengths and checksums, [num_samples, 2].
        groups: [begin, end) of the samples that are written.
        data: Bytes of the samples.
        first: The byte of the shard that comes first in `data`.
    """
    if os.fstat(descriptor).st_size == 0:
        os.ftruncate(descriptor, file.num_bytes)
    _write_all(descriptor, memoryview(file.head), 0)
    for begin, end in groups:
        start, stop = int(samples.start[begin]), int(samples.stop[end - 1])
        _write_all(descriptor, data[start - first : stop - first], file.data_start + start)
        rows = entries[begin:end].astype("<u4").tobytes()  # their numbers follow one another, too
        _write_all(descriptor, memoryview(rows), TABLE_START + 8 * int(samples.number[begin]))


def _table(descriptor: int, file: CacheFile, status: os.stat_result) -> IntArray | None:
    """Return the lengths and checksums of a file, int64 [num_samples, 2]; None: it is damaged."""
    size = TABLE_START + 8 * file.num_samples
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    head = os.pread(descriptor, size, 0) if is_own and status.st_size else b""
    if is_own and not any(head[:TABLE_START]):  # its writer has just begun, or was killed then
        return np.zeros((file.num_samples, 2), dtype=np.int64)
    if head[:TABLE_START] != file.head or status.st_size != file.num_bytes or len(head) < size:
        return None
    return np.frombuffer(head, "<u4", offset=TABLE_START).reshape(-1, 2).astype(np.int64)


def _adjacent(samples: CachedSamples, is_wanted: Flags) -> list[tuple[int, int]]:
    """Return the groups [begin, end) of wanted samples whose bytes follow one another."""
    numbers = np.flatnonzero(is_wanted)
    if not numbers.size:
        return []
    is_next = np.diff(numbers) == 1
    is_next &= samples.start[numbers[1:]] == samples.stop[numbers[:-1]]
    ends = np.append(np.flatnonzero(~is_next), numbers.size - 1)
    begins = np.append(0, ends[:-1] + 1)
    return list(zip(numbers[begins].tolist(), (numbers[ends] + 1).tolist(), strict=True))


def _num_new_pages(file: CacheFile, table: IntArray, samples: CachedSamples) -> IntArray:
    """Return how many pages of the disk each sample takes, after those before it; int64 [n].

    A page may be there already, with the end of the sample before or the begin of the one after.
    Disks tell what a file takes only some time after it was written.

    Args:
        file: Which file.
        table: Of the file, as it is.
        samples: Those that are written.
    """
    start, stop = samples.start + file.data_start, samples.stop + file.data_start
    end = -(-stop // PAGE_BYTES)
    begin = np.maximum(start // PAGE_BYTES, np.append(0, end[:-1]))
    has_sample = np.pad(table[:, 0] > 0, 1)
    is_begin_there = has_sample[samples.number] & (begin * PAGE_BYTES < start)
    is_end_there = has_sample[samples.number + 2] & (stop % PAGE_BYTES > 0)
    num_pages: IntArray = end - begin - is_begin_there - is_end_there
    return np.maximum(num_pages, 0)


@contextmanager
def _opened(path: str, flags: int) -> Iterator[int | None]:
    """Open a file that is not a link; None: there is none."""
    try:
        descriptor = os.open(path, flags | _SAFE_FLAGS, 0o600)
    except FileNotFoundError:
        if flags & os.O_CREAT == 0:
            yield None
            return
        Path(path).parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, flags | _SAFE_FLAGS, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, view: memoryview, start: int) -> None:
    while view:
        num_bytes = os.pwrite(descriptor, view, start)
        view, start = view[num_bytes:], start + num_bytes
