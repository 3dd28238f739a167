"""One writer at a time: a lock on the folder or prefix that a command writes into.

`write_lock` puts ``.mmstream.lock`` into the folder, or a lock of another name, where several
writers share a folder and each has its own files. It names its holder, for the message to
others, and it is removed at the end.

The lock is written on conditions: only if there is none, or only if it is still the one that was
read (`Store.write_if`). A holder on the same machine is looked up by its process: one that was
killed holds up nobody. One on another machine, or in another container, is watched.

"Watched" means: the holder changes the lock every `HEARTBEAT_S`. A lock that changes is held. One
that does not change for `SILENCE_S` is taken over, with a warning. No clocks are compared.

Example: A converts on machine 1 and is killed. B starts on machine 1: it takes over at once. C
starts on machine 2: it waits for 60 s, then takes over.

A holder that was suspended may lose its lock that way. So it asks `WriteLock.require` before it
commits anything.

Some object stores ignore or refuse conditions. A writer notices: it may write its lock "only if
there is none" although it is there. Then a warning says that this store cannot keep two writers
apart, and the writer looks again after `SETTLE_S` whether the lock is still its own. So of two that
begin at the same moment one gives up, unless a request takes longer than that.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.processes.machine import process_state
from mmstream.storage.store import Store

logger = logging.getLogger(__name__)

LOCK_NAME = ".mmstream.lock"
"""Lies in the folder while somebody writes there. No list shows it, because of its dot."""

HEARTBEAT_S = 10.0
SETTLE_S = 2.0
"""Pause before a lock counts, in a store without conditional writes."""

SILENCE_S = 60.0
"""After so long without a sign of life, a holder on another machine counts as dead."""

MAX_LOCK_BYTES = 64 << 10
"""A larger file is not a lock. It is not read."""

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
    """Counts signs of life."""

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
        holder = _decode(_read(self.store, self.name))
        if holder is None or holder.token != self.token:
            raise MMStreamError(
                f"{self.store.url}: this process had the lock and lost it"
                f"{f' to {holder}' if holder else ''}, after a pause of {SILENCE_S:.0f} s or more, "
                f"or because {self.name} was removed. What it wrote so far is whole; to continue, "
                "run the same command again"
            )


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
    try:
        _acquire(store, name, holder)
    except OSError as error:
        folder = store.local_path("")
        if error.errno not in _NO_RIGHTS or folder is None or os.access(folder, os.W_OK):
            raise
        # Whoever may not put a lock there cannot write anything else either.
        yield WriteLock(store, holder.token, name)
        return
    ended = threading.Event()

    def beat() -> None:
        """Change the lock every `HEARTBEAT_S`, until the block ends."""
        num_beats = 0
        while not ended.wait(HEARTBEAT_S):
            num_beats += 1
            try:
                version = store.stat(name).version
                if _is_held_by(store, name, holder):
                    changed = msgspec.structs.replace(holder, beat=num_beats)
                    store.write_if(name, msgspec.json.encode(changed), version)
            except (OSError, MMStreamError) as error:
                logger.warning("lock: %s", error)

    thread = threading.Thread(target=beat, name="mmstream-lock", daemon=True)
    thread.start()
    try:
        yield WriteLock(store, holder.token, name)
    finally:
        ended.set()
        thread.join()
        try:
            if _is_held_by(store, name, holder):
                store.remove(name)
        except OSError as error:
            logger.warning("%s: the lock stays, because %s", store.url, error)


def require_unlocked(store: Store, name: str = LOCK_NAME) -> None:
    """Raise an error if a process that lives has a lock. The lock of a dead one stays.

    Args:
        store: The folder or prefix.
        name: Of the lock.

    Raises:
        LockedError: Another process has the lock.
    """
    if data := _read(store, name):
        _require_dead(store, name, _decode(data))


def _acquire(store: Store, name: str, holder: Holder) -> None:
    content = msgspec.json.encode(holder)
    for _ in range(5):  # each time, another process was quicker
        version = None
        with suppress(FileNotFoundError):
            version = store.stat(name).version
        # The version is older than what is read here. If it changes between, nothing is written.
        data = _read(store, name)
        old = _decode(data)
        if data and (old is None or old.token != holder.token):
            _require_dead(store, name, old)
        is_written = store.write_if(name, content, version)
        current = _decode(_read(store, name))
        if _is(current, holder) and store.write_if(name, content, None):  # it knows no conditions
            logger.warning(
                "%s: this storage has no conditional writes (If-None-Match), so it cannot keep two "
                "commands apart that begin at the same moment; start one after the other",
                store.url,
            )
            time.sleep(SETTLE_S)
            current = _decode(_read(store, name))
        if _is(current, holder):
            return  # also when the response to the first attempt was lost
        if is_written or current is not None:
            raise _held(store.url, current)
    raise _held(store.url, None)


def _is_held_by(store: Store, name: str, holder: Holder) -> bool:
    return _is(_decode(_read(store, name)), holder)


def _is(current: Holder | None, holder: Holder) -> bool:
    return current is not None and current.token == holder.token


def _read(store: Store, name: str) -> bytes:
    """Return the content of a lock, or nothing if there is none."""
    try:
        return store.read(name, MAX_LOCK_BYTES)
    except FileNotFoundError:
        return b""


# Holders


def _require_dead(store: Store, name: str, old: Holder | None) -> None:
    """Raise a ConfigError if the holder of a lock lives, which may take `SILENCE_S` to tell.

    Args:
        store: The folder.
        name: Of the lock. Its content changes when the holder gives a sign of life.
        old: The holder, or None where the lock cannot be read.
    """
    url = store.url
    is_near = old is not None and (old.boot, old.namespace) == (_boot(), _namespace())
    if old is not None and is_near and old.pid != os.getpid():
        if _start_of(old.pid) == old.pid_started:
            raise _held(url, old)
        logger.info("%s: took over the lock of %s, which has ended", url, old)
        return
    process = "another process" if old is None else str(old)
    logger.warning("%s: waits up to %.0f s, to see whether %s is alive", url, SILENCE_S, process)
    before, deadline = _read(store, name), time.monotonic() + SILENCE_S
    while time.monotonic() < deadline:
        time.sleep(min(1.0, HEARTBEAT_S / 2))
        if _read(store, name) != before:
            raise _held(url, old)
    logger.warning(
        "%s: took over the lock of %s, which gave no sign of life for %.0f s",
        url,
        process,
        SILENCE_S,
    )


def _held(url: str, holder: Holder | None) -> LockedError:
    name = "another process" if holder is None else str(holder)
    return LockedError(f"{url}: {name} is writing here; wait for it, or end it")


def _decode(data: bytes) -> Holder | None:
    """Return the holder of a lock, or None if nobody wrote his name yet or it is not a lock."""
    try:
        return msgspec.json.decode(data, type=Holder)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _boot() -> str:
    """Return what names one start of one machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # some sandboxes hide parts of /proc
        return socket.gethostname()


def _namespace() -> str:
    """Return what processes have in common that see each other's numbers."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _start_of(pid: int) -> int:
    """Return when a process started, in the kernel's ticks. -1: there is no such process."""
    state, start = process_state(pid)
    return -1 if state in ("", "Z", "X") else int(start)
