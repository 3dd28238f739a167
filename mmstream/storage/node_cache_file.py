"""One file of the node cache: some samples of one shard that follow one another.

    magic, name           40 bytes: which file it is
    (length, CRC-32C)     two u32 for each sample; a length of 0: the sample is not there
    ...                   zeros up to a multiple of 4,096 bytes
    the shard             byte b of the shard is byte `data_start` + b of the file

So each sample has a place of its own, and the file is sparse: what was not written takes no room.
Samples come in any order, from several processes, and a range of samples is one read, however it
was written. Two processes that write the same sample write the same bytes to the same place.

A sample is written before its length and CRC-32C. So a process that is killed leaves a sample that
is not there. After a power failure a sample may have a checksum and no bytes, or a part of them:
whoever reads it compares, and the file is removed.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from mmstream.types import IntArray

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
