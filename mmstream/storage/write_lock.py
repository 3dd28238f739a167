"""One writer at a time: a lock on the folder or prefix that a command writes into.

`write_lock` puts ``.mmstream.lock`` into the folder, or a lock of another name, where several
writers share a folder and each has its own files. It names its holder, for the message to
others, and it is removed at the end. How the lock of a killed process is noticed depends on the
storage:

- In a folder, the holder has the file locked (``flock``). The kernel ends that with the process, so
  the next writer on the same machine takes over at once. A file system that several machines share
  may tell only one machine of such a lock. So a holder on another machine is watched, too.
- In an object store, the lock is an object that is written on conditions: only if there is none, or
  only if it is still the one that was read. A holder on the same machine is looked up by its
  process. One on another machine is watched.

"Watched" means: the holder changes the lock every `HEARTBEAT_S`. A lock that changes is held. One
that does not change for `SILENCE_S` is taken over, with a warning. No clocks are compared.

Example: A converts on machine 1 and is killed. B starts on machine 1: it takes over at once. C
starts on machine 2: it waits for 60 s, then takes over.

A holder that was suspended may lose its lock that way. So it asks `WriteLock.require` before it
commits anything. An object store that ignores conditions leaves a gap of one request, in which two
holders may both believe that they have the lock; `require` tells the first one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import msgspec

from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.storage.store import Store

__all__ = ["LOCK_NAME", "LockedError", "WriteLock", "require_unlocked", "write_lock"]

logger = logging.getLogger(__name__)

LOCK_NAME = ".mmstream.lock"
"""Lies in the folder while somebody writes there. No list shows it, because of its dot."""

HEARTBEAT_S = 10.0
SILENCE_S = 60.0
"""After so long without a sign of life, a holder on another machine counts as dead."""

MAX_LOCK_BYTES = 64 << 10
"""A larger file is no lock. It is not read."""

_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_NO_RIGHTS = (errno.EACCES, errno.EPERM, errno.EROFS)


class Holder(msgspec.Struct, frozen=True):
    """The process that has a lock: the content of the lock."""

    token: str
    """Drawn at random. It tells this lock from all others."""
    command: str
    host: str
    boot: str
    """One start of one machine."""
    namespace: str
    """Of process numbers: a container has its own."""
    pid: int
    pid_started: int
    """Start of the process in the kernel's ticks: another process may get the same number."""
    since: str
    beat: int = 0
    """Counts signs of life, where a lock is an object."""

    def __str__(self) -> str:
        name = f"another {escaped(self.command, 60)}"
        return f"{name} (pid {self.pid} on host {escaped(self.host, 60)}, since {self.since})"


class LockedError(ConfigError):
    """Another process, which lives, has the lock."""


@dataclass(frozen=True)
class WriteLock:
    """The right to write into a folder. It can be sent to worker processes."""

    store: Store
    token: str
    name: str = LOCK_NAME
    """Of the lock, in the folder."""

    def require(self) -> None:
        """Raise an MMStreamError if the lock was lost: another process writes now, or will."""
        holder = _decode(_read_object(self.store, self.name))
        if holder is None or holder.token != self.token:
            raise MMStreamError(
                f"{self.store.url}: this process had the lock and lost it"
                f"{f' to {holder}' if holder else ''}, after a pause of {SILENCE_S:.0f} s or more, "
                f"or because {self.name} was removed. What it wrote so far is whole; to continue, "
                "run the same command again"
            )


class _ConditionalStore(Store, Protocol):
    def write_if(self, name: str, data: bytes, version: str | None) -> bool:
        """Write an object only if it still has this version. None: only if there is none."""


@contextmanager
def write_lock(store: Store, command: str, name: str = LOCK_NAME) -> Iterator[WriteLock]:
    """Hold the lock on a folder or prefix for the block. Makes a folder that does not exist.

    Args:
        store: The folder or prefix.
        command: Who writes there, for the message to others: "convert".
        name: Of the lock. Locks of different names do not exclude each other.

    Raises:
        LockedError: Another process has the lock. Nothing was written.
    """
    holder = Holder(
        token=secrets.token_hex(16),
        command=command,
        host=socket.gethostname(),
        boot=_boot(),
        namespace=_namespace(),
        pid=os.getpid(),
        pid_started=_start_of(os.getpid()),
        since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    )
    folder = store.local_path("")
    if folder is None:
        lock = _locked_object(cast(_ConditionalStore, store), name, holder)
    else:
        lock = _locked_file(Path(folder, name), store.url, holder)
    with lock:
        yield WriteLock(store, holder.token, name)


def require_unlocked(store: Store, name: str = LOCK_NAME) -> None:
    """Raise an error if a process that lives has a lock. The lock of a dead one stays.

    Args:
        store: The folder or prefix.
        name: Of the lock.

    Raises:
        LockedError: Another process has the lock.
    """
    folder = store.local_path("")
    if folder is not None:
        _require_unlocked_file(Path(folder, name), store.url)
    elif data := _read_object(store, name):
        signs = partial(_read_object, store, name)
        _require_dead(store.url, _decode(data), is_locked=False, signs=signs)


# In a folder


class _Descriptor:
    """An open lock file. A forked process closes it, so that the lock ends with its holder."""

    def __init__(self, number: int) -> None:
        self.number: int | None = number
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_copy(reference()))

    def close(self) -> None:
        number, self.number = self.number, None
        if number is not None:
            os.close(number)


def _close_copy(descriptor: _Descriptor | None) -> None:
    if descriptor is not None:
        descriptor.close()


@contextmanager
def _locked_file(path: Path, url: str, holder: Holder) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = None
    try:
        descriptor = _acquire_file(path, url, holder)
    except OSError as error:
        if error.errno not in _NO_RIGHTS or os.access(path.parent, os.W_OK):
            raise
    if descriptor is None:
        yield  # whoever may not put a lock there cannot write anything else either
        return
    try:
        with _heartbeat(lambda: _touch(descriptor)):
            yield
    finally:
        with suppress(FileNotFoundError):
            if _is_at(path, descriptor.number):
                path.unlink()  # still locked: whoever opens the name now makes a new file
        descriptor.close()


def _acquire_file(path: Path, url: str, holder: Holder) -> _Descriptor:
    while True:
        descriptor = _Descriptor(_open(path))
        try:
            if _lock(descriptor, path, url, holder):
                return descriptor
        except BaseException:
            descriptor.close()
            raise
        descriptor.close()


def _lock(descriptor: _Descriptor, path: Path, url: str, holder: Holder) -> bool:
    """Lock an open file and write the holder's name. False: it was removed meanwhile."""
    fd = cast(int, descriptor.number)
    is_locked = _flock(fd)
    if is_locked is None:
        raise _held(url, _decode(_read_file_patiently(fd)))
    if not _is_at(path, fd):
        return False
    old = _decode(_read_file(fd))
    if old is not None:
        _require_dead(url, old, is_locked=is_locked, signs=lambda: _last_change(path))
    os.ftruncate(fd, 0)
    os.pwrite(fd, msgspec.json.encode(holder), 0)
    os.fsync(fd)
    return True


def _require_unlocked_file(path: Path, url: str) -> None:
    try:
        fd = _open(path, create=0)
    except FileNotFoundError:
        return
    try:
        is_locked = _flock(fd, fcntl.LOCK_SH)
        if is_locked is None:
            raise _held(url, _decode(_read_file_patiently(fd)))
        old = _decode(_read_file(fd))
    finally:
        os.close(fd)
    if old is not None:
        with suppress(FileNotFoundError):  # removed meanwhile
            _require_dead(url, old, is_locked=is_locked, signs=lambda: _last_change(path))


def _open(path: Path, create: int = os.O_CREAT) -> int:
    flags = os.O_RDWR | create | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise ConfigError(
                f"{path}: is no file; remove it, mmstream locks the folder there"
            ) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError(f"{path}: is no file; remove it, mmstream locks the folder there")
    return fd


def _flock(fd: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Lock a file. Return None if another process has it locked, and False without such locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return False
    return True


def _is_at(path: Path, fd: int | None) -> bool:
    """Tell whether a path still leads to an open file."""
    try:
        return fd is not None and os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _read_file(fd: int) -> bytes:
    return os.pread(fd, MAX_LOCK_BYTES, 0)


def _read_file_patiently(fd: int) -> bytes:
    """Return the content of a lock that another process may have got just now."""
    for _ in range(20):
        if data := _read_file(fd):
            return data
        time.sleep(0.05)
    return b""


def _last_change(path: Path) -> int:
    # NFS asks its server for the time of a file that is opened, and trusts its cache otherwise.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)


def _touch(descriptor: _Descriptor) -> None:
    if descriptor.number is not None:
        os.utime(descriptor.number)


# In an object store, or in memory


@contextmanager
def _locked_object(store: _ConditionalStore, name: str, holder: Holder) -> Iterator[None]:
    _acquire_object(store, name, holder)
    num_beats = 0

    def beat() -> None:
        nonlocal num_beats
        version = store.stat(name).version
        current = _decode(_read_object(store, name))
        if current is not None and current.token == holder.token:
            num_beats += 1
            changed = msgspec.structs.replace(holder, beat=num_beats)
            store.write_if(name, msgspec.json.encode(changed), version)

    try:
        with _heartbeat(beat):
            yield
    finally:
        try:
            current = _decode(_read_object(store, name))
            if current is not None and current.token == holder.token:
                store.remove(name)
        except OSError as error:
            logger.warning("%s: the lock stays, because %s", store.url, error)


def _acquire_object(store: _ConditionalStore, name: str, holder: Holder) -> None:
    for _ in range(5):  # each time, another process was quicker
        version = None
        with suppress(FileNotFoundError):
            version = store.stat(name).version
        # The version is older than what is read here. If it changes between, nothing is written.
        data = _read_object(store, name)
        old = _decode(data)
        if data and (old is None or old.token != holder.token):
            _require_dead(store.url, old, is_locked=False, signs=lambda: _read_object(store, name))
        is_written = store.write_if(name, msgspec.json.encode(holder), version)
        current = _decode(_read_object(store, name))
        if current is not None and current.token == holder.token:
            return  # also when the answer to the first attempt was lost
        if is_written or current is not None:
            raise _held(store.url, current)
    raise _held(store.url, None)


def _read_object(store: Store, name: str) -> bytes:
    """Return the content of a lock, or nothing if there is none."""
    try:
        return store.read(name, MAX_LOCK_BYTES)
    except FileNotFoundError:
        return b""


# Holders


def _require_dead(
    url: str, old: Holder | None, *, is_locked: bool, signs: Callable[[], object]
) -> None:
    """Raise a ConfigError if the holder of a lock lives, which may take `SILENCE_S` to tell.

    Args:
        url: Of the folder.
        old: The holder, or None where the lock cannot be read.
        is_locked: This process has locked the file. No live process of this machine has, then.
        signs: Its value changes when the holder gives a sign of life.
    """
    if old is not None and old.boot == _boot():
        if old.namespace == _namespace() and old.pid != os.getpid():
            if _start_of(old.pid) == old.pid_started:
                raise _held(url, old)
            is_locked = True
        if is_locked:
            logger.info("%s: took over the lock of %s, which has ended", url, old)
            return
    name = "another process" if old is None else str(old)
    logger.warning("%s: waits up to %.0f s, to see whether %s is alive", url, SILENCE_S, name)
    before, deadline = signs(), time.monotonic() + SILENCE_S
    while time.monotonic() < deadline:
        time.sleep(min(1.0, HEARTBEAT_S / 2))
        if signs() != before:
            raise _held(url, old)
    logger.warning(
        "%s: took over the lock of %s, which gave no sign of life for %.0f s", url, name, SILENCE_S
    )


def _held(url: str, holder: Holder | None) -> LockedError:
    name = "another process" if holder is None else str(holder)
    return LockedError(f"{url}: {name} is writing here; wait for it, or end it")


def _decode(data: bytes) -> Holder | None:
    """Return the holder of a lock, or None if nobody wrote his name yet or it is no lock."""
    try:
        return msgspec.json.decode(data, type=Holder)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _boot() -> str:
    """Return what names one start of one machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no Linux
        return socket.gethostname()


def _namespace() -> str:
    """Return what processes have in common that see each other's numbers."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _start_of(pid: int) -> int:
    """Return when a process started, in the kernel's ticks. -1: there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


@contextmanager
def _heartbeat(beat: Callable[[], None]) -> Iterator[None]:
    """Call a function every `HEARTBEAT_S` from another thread, until the block ends."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(HEARTBEAT_S):
            try:
                beat()
            except (OSError, MMStreamError) as error:
                logger.warning("lock: %s", error)

    thread = threading.Thread(target=run, name="mmstream-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
