"""Samples of remote shards on a disk of this machine, so that the next epoch need not fetch them.

All processes of a machine share the folder. There is no server and no process that must end well:
a file is usable as soon as its first sample is in it, and whatever a crash left is noticed when it
is read. A sample that was written once stays while a run plans it: each epoch needs each sample
once, so nothing could take its place that is needed sooner.

    find  -> a thread of the caller -> where the samples are that are there
    read  -> a thread of the caller -> the bytes of one of them, if they are right
    write -> a queue of at most `MAX_QUEUED_BYTES` -> one thread -> files

Nobody waits for a write. Where the disk is slower than the storage, the queue is full, and what
comes then is not written: the next epoch brings it again. `node_cache_file` has one file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmstream.errors import ConfigError, escaped
from mmstream.storage.local import file_system_of, is_shared, mounts
from mmstream.storage.node_cache_file import (
    CachedSamples,
    CacheFile,
    CacheLocation,
    find_samples,
    read_sample,
    write_samples,
)
from mmstream.storage.transfers import SharedCounts
from mmstream.storage.urls import local_path
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
            target=self._write_all, args=arguments, name="mmstream-cache-write", daemon=True
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

    def _write_all(self, needs: Mapping[str, int], max_bytes: int | None) -> None:
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

    @property
    def num_bytes(self) -> int:
        """Bytes that the cache takes, as counted."""
        with self._counts() as counts:
            return sum(counts.values())

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
