"""A folder mounted through FUSE, whose reads fail as those of a network file system do.

    with faulty_mount(folder, point) as mount:
        mount.set(fail_every=5, error=errno.ESTALE)

A process of its own shows the folder at the mount point, read-only. It speaks the kernel's protocol
(``/dev/fuse``, version 7.31), so no library is needed. Nothing is kept in the page cache: each read
is a request. A process with the right to mount is needed: `why_not` says what is missing.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import select
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH, INIT = 1, 2, 3, 14, 15, 17, 18, 25, 26
OPENDIR, READDIR, RELEASEDIR, INTERRUPT, DESTROY, BATCH_FORGET = 27, 28, 29, 36, 38, 42
"""Opcodes of ``linux/fuse.h``."""

UNANSWERED = {FORGET, BATCH_FORGET, INTERRUPT}

HEADER = struct.Struct("=IIQQIIIHH")
"""Length, opcode, number of the request, node, user, group, process, two of no use."""

ROOT = 1
MAX_PAGES = 256
DIRECT_IO = 1
FLAGS = 1 | 1 << 22
"""Reads may be under way side by side; they have up to `MAX_PAGES`."""

MS_RDONLY, MS_NOSUID, MS_NODEV, MNT_DETACH = 1, 2, 4, 2
CAP_SYS_ADMIN = 21


@dataclass(frozen=True)
class MountFaults:
    """What the server of a mount does."""

    fail_every: int = 0
    """Every n-th read fails; 0: none."""
    error: int = errno.EIO
    is_away: bool = False
    """Nothing is answered. What was asked is answered when the server is back."""


def why_not() -> str:
    """Say why this process cannot mount. "": it can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse"
    status = Path("/proc/self/status").read_text()
    (rights,) = re.findall(r"^CapEff:\s*(\w+)$", status, re.M)
    return "" if int(rights, 16) >> CAP_SYS_ADMIN & 1 else "this user may not mount"


class FaultyMount:
    """A mount that is there. `set` changes what its server does."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._faults = MountFaults()

    def set(self, **changes: Any) -> dict[str, int]:
        """Change faults; the server knows them when this returns.

        Returns:
            `num_faults`, how many reads have failed, and `num_waiting`, how many requests wait
            for a server that is away.
        """
        self._faults = replace(self._faults, **changes)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(self._faults)) + "\n")
        self._process.stdin.flush()
        counts: dict[str, int] = json.loads(self._process.stdout.readline())
        return counts


@contextmanager
def faulty_mount(folder: Path, point: Path) -> Iterator[FaultyMount]:
    """Show a folder at an empty folder, as long as the context lasts."""
    words = [sys.executable, __file__, str(folder), str(point)]
    pipe = subprocess.PIPE
    # The server unmounts and ends when its stdin does, at the end of the context.
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        mount = FaultyMount(process)
        mount.set()  # it is mounted
        yield mount


class _Server:
    def __init__(self, folder: str) -> None:
        self._paths = {ROOT: folder}
        self._nodes = {folder: ROOT}
        self._files: dict[int, int] = {}
        self._waiting: list[bytes] = []
        self.faults = MountFaults()
        self.num_reads = self.num_faults = 0

    def serve(self, device: int) -> None:
        """Answer requests of the kernel and lines of stdin, until stdin ends."""
        while True:
            ready, _, _ = select.select([device, sys.stdin.fileno()], [], [])
            if device in ready:
                with suppress(BlockingIOError):  # the caller was interrupted and waits no more
                    self._waiting.append(os.read(device, (MAX_PAGES + 1) << 12))
            if sys.stdin.fileno() in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                self.faults = MountFaults(**json.loads(line))
                counts = {"num_faults": self.num_faults, "num_waiting": len(self._waiting)}
                sys.stdout.write(json.dumps(counts) + "\n")
                sys.stdout.flush()
            while self._waiting and not self.faults.is_away:
                answer = self._answer(self._waiting.pop(0))
                if answer is not None:
                    with suppress(FileNotFoundError):  # as above
                        os.write(device, answer)

    def _answer(self, request: bytes) -> bytes | None:
        _, opcode, number, node, *_ = HEADER.unpack_from(request)
        if opcode in UNANSWERED:
            return None
        try:
            body = self._body(opcode, node, request[HEADER.size :])
        except OSError as error:
            return struct.pack("=IiQ", 16, -(error.errno or errno.EIO), number)
        return struct.pack("=IiQ", 16 + len(body), 0, number) + body

    def _body(self, opcode: int, node: int, words: bytes) -> bytes:
        """Return the answer to a request."""
        if opcode == INIT:
            _, _, readahead, flags = struct.unpack_from("=4I", words)
            return struct.pack(
                "=4I2H2I2H8I", 7, 31, readahead, flags & FLAGS, 64, 64, 4096, 1, MAX_PAGES, *[0] * 9
            )
        path = self._paths[node]
        if opcode == LOOKUP:
            path = f"{path}/{os.fsdecode(words.rstrip(bytes(1)))}"
            attributes = _attributes(path)
            node = self._nodes.setdefault(path, len(self._nodes) + 1)
            self._paths[node] = path
            return struct.pack("=4Q2I", node, 0, 0, 0, 0, 0) + attributes
        if opcode == GETATTR:
            return struct.pack("=Q2I", 0, 0, 0) + _attributes(path)
        if opcode == OPEN:
            file = os.open(path, os.O_RDONLY)
            return struct.pack("=Q2I", file, DIRECT_IO, 0)
        if opcode == OPENDIR:
            return bytes(16)
        if opcode == READDIR:
            _, first, most = struct.unpack_from("=2QI", words)
            return _entries(path, first, most)
        if opcode == READ:
            file, start, num_bytes = struct.unpack_from("=2QI", words)
            return self._read(file, start, num_bytes)
        if opcode == STATFS:
            return struct.pack("=5Q10I", 0, 0, 0, 0, 0, 4096, 255, 4096, *[0] * 7)
        if opcode == RELEASE:
            os.close(struct.unpack_from("=Q", words)[0])
        elif opcode not in (FLUSH, RELEASEDIR, DESTROY):
            raise OSError(errno.ENOSYS, "")
        return b""

    def _read(self, file: int, start: int, num_bytes: int) -> bytes:
        self.num_reads += 1
        if self.faults.fail_every and self.num_reads % self.faults.fail_every == 0:
            self.num_faults += 1
            raise OSError(self.faults.error, "")
        return os.pread(file, num_bytes, start)


def _attributes(path: str) -> bytes:
    status = os.lstat(path)
    seconds, nanoseconds = divmod(status.st_mtime_ns, 10**9)
    return struct.pack(
        "=6Q10I",
        status.st_ino,
        status.st_size,
        status.st_blocks,
        seconds,
        seconds,
        seconds,
        nanoseconds,
        nanoseconds,
        nanoseconds,
        status.st_mode,
        1,
        status.st_uid,
        status.st_gid,
        0,
        4096,
        0,
    )


def _entries(folder: str, first: int, most: int) -> bytes:
    """Return the entries of a folder from number `first` on, as far as there is room."""
    entries = b""
    for number, path in enumerate(sorted(Path(folder).iterdir())[first:], first + 1):
        kind = stat.S_IFMT(path.lstat().st_mode) >> 12
        data = os.fsencode(path.name)
        entry = struct.pack("=2Q2I", number, number, len(data), kind) + data
        entry += bytes(-len(entry) % 8)
        if len(entries) + len(entry) > most:
            break
        entries += entry
    return entries


def main(folder: str, point: str) -> None:
    """Mount, serve, and unmount when stdin ends, whatever signals a test run gets."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV
    if libc.mount(b"faulty", os.fsencode(point), b"fuse.faulty", flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount: {os.strerror(ctypes.get_errno())}")
    try:
        _Server(os.path.realpath(folder)).serve(device)
    finally:
        libc.umount2(os.fsencode(point), MNT_DETACH)


if __name__ == "__main__":
    main(*sys.argv[1:])
