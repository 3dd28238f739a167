"""The node cache of one process: finds and reads at once, and writes in a thread.

    find  -> a thread of the caller -> the samples that are there; any process reads and compares
    read  -> a thread of the caller -> the samples that are there and right
    write -> a queue of at most `MAX_QUEUED_BYTES` -> one thread -> files

Nobody waits for a write. Where the disk is slower than the storage, the queue is full, and what
comes then is not written: the next epoch brings it again.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from mmstream.errors import escaped
from mmstream.storage.node_cache.cache_file import (
    CachedSamples,
    CacheFile,
    Flags,
    Reading,
    find_samples,
    read_samples,
    write_samples,
)
from mmstream.storage.node_cache.room import CacheRoom

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 256 << 20
"""Bytes that wait to be written. Windows hold most of them anyway."""

CLOSE_S = 1.0
"""Seconds in which `close` lets the queue be written."""

OF_THE_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""Errors of one file that is no file: a link, a folder, a socket."""


class _Write(NamedTuple):
    file: CacheFile
    samples: CachedSamples
    data: memoryview
    first: int


class _Damaged(NamedTuple):
    file: CacheFile
    samples: CachedSamples
    """Those of which one was wrong at least."""


class NodeCache:
    """Reads and writes cached files. `find` and `read` may be called in any thread, `write` in one.

    Args:
        root: The folder of the cache, as `open_cache_dir` returned it.
        needs: As `CacheRoom`.
        max_bytes: As `CacheRoom`.
    """

    def __init__(self, root: str, needs: Mapping[str, int], max_bytes: int | None = None) -> None:
        self._root = root
        self._room: CacheRoom | None = None
        self._epochs_began_at = deque([0.0, time.time()], maxlen=3)
        self._is_writing = True
        self._is_closed = False
        self._queue: deque[_Write] = deque()
        self._damaged: list[_Damaged] = []
        self._has_warned = False
        self._num_queued_bytes = 0
        self._changed = threading.Condition()
        self._counts: Counter[str] = Counter()
        arguments = (dict(needs), max_bytes)
        self._thread = threading.Thread(
            target=self._write_all, args=arguments, name="mmstream-cache-write", daemon=True
        )
        self._thread.start()

    def path(self, file: CacheFile) -> str:
        """Return where a file lies."""
        return file.path(self._root)

    def find(self, file: CacheFile, samples: CachedSamples) -> Flags:
        """Find the samples that a file has, and let the disk read them ahead.

        Their bytes are not compared: `read_sample` does it. What it cannot use is for `read`.

        Args:
            file: Which one.
            samples: Which samples are wanted.
        """
        path, began_at = self.path(file), self._epochs_began_at[-1]
        return self._looked_into(file, samples, lambda: find_samples(path, file, samples, began_at))

    def read(
        self,
        file: CacheFile,
        samples: CachedSamples,
        new_data: Callable[[], memoryview],
        first: int,
    ) -> Flags:
        """Read the samples that a file has.

        A file that is damaged is removed, and counts as absent.

        Args:
            file: Which one.
            samples: Which samples are wanted.
            new_data: Returns the memory for them. It is called only if the file has one of them.
            first: The byte of the shard that comes first in this memory.

        Returns:
            Which samples are in the memory now, with the right bytes.
        """
        path, began_at = self.path(file), self._epochs_began_at[-1]
        is_there = self._looked_into(
            file,
            samples,
            lambda: read_samples(path, file, samples, new_data, first, began_at),
        )
        num_bytes = int((samples.stop - samples.start)[is_there].sum())
        self._count(num_cache_hit_bytes=num_bytes)
        return is_there

    def write(self, file: CacheFile, samples: CachedSamples, data: memoryview, first: int) -> None:
        """Write samples soon, if there is room. Nobody waits, and nothing is raised.

        Args:
            file: Where they belong.
            samples: Which samples.
            data: Their bytes, which nobody changes any more.
            first: The byte of the shard that comes first in `data`.
        """
        with self._changed:
            is_full = self._room is not None and self._room.is_full(file.folder)
            if is_full or not self._is_writing:
                return
            if self._num_queued_bytes + len(data) > MAX_QUEUED_BYTES:
                self._counts["num_cache_dropped_bytes"] += len(data)
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
            if self._room is not None:
                self._room.begin_epoch(self._epochs_began_at[0])

    def pop_counts(self) -> dict[str, int]:
        """Return what was counted since the previous call: fields of `TransferCounts`."""
        with self._changed:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """Write for `CLOSE_S` at most what is queued, and give up the locks."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def _looked_into(
        self, file: CacheFile, samples: CachedSamples, look: Callable[[], Reading]
    ) -> Flags:
        """Return which samples are there; let a damaged file be removed."""
        try:
            is_there, is_damaged = look()
        except OSError as error:
            is_there = np.zeros(samples.number.size, dtype=np.bool_)
            is_damaged = error.errno in OF_THE_FILE
            if not is_damaged:
                self._stop_writing(error)
        if is_damaged:
            self._put_damaged(_Damaged(file, samples))
        return is_there

    def _put_damaged(self, damaged: _Damaged) -> None:
        """Let the thread that writes remove a damaged file."""
        with self._changed:
            self._counts["num_cache_damaged"] += 1
            self._damaged.append(damaged)
            self._changed.notify_all()
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            logger.warning(
                "the node cache has a damaged file: it is removed, and its samples are read from "
                "storage; no more of these are logged: %s",
                escaped(damaged.file.path(self._root)),
            )

    def _count(self, **counts: int) -> None:
        with self._changed:
            self._counts.update(counts)

    def _write_all(self, needs: Mapping[str, int], max_bytes: int | None) -> None:
        """Write what is queued, until the cache is closed. It runs in a thread."""
        try:
            room = self._room = CacheRoom(self._root, needs, max_bytes)
        except OSError as error:
            self._stop_writing(error)
            return
        while (task := self._next()) is not None:
            try:
                if isinstance(task, _Damaged):
                    self._remove(task, room)
                else:
                    self._write(task, room)
            except OSError as error:
                if error.errno not in OF_THE_FILE:
                    self._stop_writing(error)
        room.close()

    def _write(self, task: _Write, room: CacheRoom) -> None:
        folder = task.file.folder
        reserve = partial(room.reserve, folder)
        num_bytes = write_samples(task.file.path(self._root), *task, reserve)
        self._count(num_cached_bytes=num_bytes)

    def _remove(self, task: _Damaged, room: CacheRoom) -> None:
        """Remove a damaged file, unless it was removed and written anew meanwhile."""
        file, samples = task
        path, first = file.path(self._root), int(samples.start[0])
        data = memoryview(bytearray(int(samples.stop[-1]) - first))
        is_damaged = True
        with suppress(OSError):
            is_damaged = read_samples(path, file, samples, lambda: data, first, 0.0).is_damaged
        if is_damaged:
            room.remove(file.folder, path)

    def _next(self) -> _Write | _Damaged | None:
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
