"""Parts of remote indexes as files of this machine, shared by all its processes and runs.

    ~/.cache/mmstream/index/<SHA-256 of the part>       or below $XDG_CACHE_HOME

A part never changes, so a file of this name is the part. It is compared with its SHA-256 when it
arrives. Processes that need the same part at once agree by a lock: one of them fetches it. Files
that no process has opened for `MAX_UNUSED_S` are removed when another one arrives.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path

from mmstream.dataset.manifest import IndexPart
from mmstream.errors import ShardError
from mmstream.storage import ObjectStat, Store
from mmstream.storage.local import create_file

MAX_SMALL_BYTES = 64 << 20
"""A part of at most this size comes before it is used. A larger one comes in the background."""

RANGE_BYTES = 8 << 20
"""Ranges of a part. Up to 8 of them come side by side."""

MAX_PART_OF_DISK = 0.01
"""A part that takes more of the free space is not kept: columns are read when they are needed."""

MAX_FETCHES = 4
"""Fetches of a part whose bytes came wrong."""

MAX_UNUSED_S = 30 * 24 * 3600.0


def map_cached(part: IndexPart) -> mmap | None:
    """Return the bytes of a part as a map of its file, if this machine has it."""
    folder = _folder()
    if folder is None:
        return None
    try:
        descriptor = os.open(folder / part.sha256, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with suppress(OSError), os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size == part.num_bytes:
            with suppress(OSError):  # the disk may be read-only
                os.utime(descriptor)  # it is in use
            return mmap(file.fileno(), 0, access=ACCESS_READ)
    return None


def remove_cached(part: IndexPart) -> None:
    """Remove the file of a part: its bytes are damaged. Processes that have mapped it keep it."""
    folder = _folder()
    if folder is not None:
        with suppress(OSError):
            (folder / part.sha256).unlink()


def has_room(part: IndexPart) -> bool:
    """Tell whether this machine keeps a part."""
    folder = _folder()
    if folder is None:
        return False
    disk = os.statvfs(folder)
    return part.num_bytes <= MAX_PART_OF_DISK * disk.f_bavail * disk.f_frsize


def part_ranges(part: IndexPart) -> list[tuple[str, int, int]]:
    """Return the ranges in which a part is fetched."""
    starts = range(0, part.num_bytes, RANGE_BYTES)
    return [(part.name, start, min(start + RANGE_BYTES, part.num_bytes)) for start in starts]


def fetch_part(store: Store, part: IndexPart) -> bool:
    """Fetch a part into its file. Return False if another process fetches it at this moment.

    At most 64 MiB of it are in memory.

    Raises:
        FileNotFoundError: There is no such part.
        ShardError: Its bytes are not those of its checksum.
        StorageError: The storage failed after retries.
        OSError: The disk failed, or is full.
    """
    folder = _folder()
    if folder is None:
        raise OSError("no folder for parts of an index")
    with _locked(folder / f"{part.sha256}.lock") as is_locked:
        if not is_locked:
            return False
        path = folder / part.sha256
        if _is_whole(path, part):  # another process was quicker
            return True
        for _ in range(MAX_FETCHES - 1):
            with suppress(ShardError):
                _fetch(store, part, path)
                break
        else:
            _fetch(store, part, path)
        _remove_unused(folder)
    return True


def _is_whole(path: Path, part: IndexPart) -> bool:
    """Tell whether a file has the size of a part. A machine that lost its power may cut files."""
    with suppress(OSError):
        status = path.lstat()
        return stat.S_ISREG(status.st_mode) and status.st_size == part.num_bytes
    return False


def _fetch(store: Store, part: IndexPart, path: Path) -> None:
    ranges = part_ranges(part)
    num_at_once = MAX_SMALL_BYTES // (ranges[0][2] - ranges[0][1])
    digest = hashlib.sha256()
    with create_file(path) as file:
        for first in range(0, len(ranges), num_at_once):
            known = {part.name: ObjectStat(part.num_bytes, None)}
            for data in store.read_ranges(ranges[first : first + num_at_once], known):
                if isinstance(data, OSError):
                    raise data
                digest.update(data)
                file.write(data)
        if digest.hexdigest() != part.sha256:
            raise ShardError(f"{store.url_of(part.name)}: its bytes are not those of its sha256")


def _folder() -> Path | None:
    return cache_folder("index")


def cache_folder(*names: str) -> Path | None:
    """Return a folder below ``~/.cache/mmstream``, or below $XDG_CACHE_HOME; make it if need be.

    None: there is none that only this user may change.

    Args:
        *names: Of the folders on the way: ``"plans", "3f"`` is ``~/.cache/mmstream/plans/3f``.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = root if root.is_absolute() else Path("~/.cache").expanduser()
        for name in ("mmstream", *names):
            folder /= name
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            link, status = folder.lstat(), folder.stat()  # a link, such as to a scratch disk
            if {link.st_uid, status.st_uid} != {os.geteuid()} or status.st_mode & 0o022:
                return None
    except (OSError, RuntimeError):  # not writable, or no home
        return None
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a lock between processes, if no other one holds it. It ends with the process.

    A lock of `fcntl` belongs to the process: a worker that is forked meanwhile does not hold it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _remove_unused(folder: Path) -> None:
    """Remove what no process has opened for a long time."""
    oldest = time.time() - MAX_UNUSED_S
    for path in folder.iterdir():
        with suppress(OSError):
            if path.lstat().st_mtime < oldest:
                path.unlink()
