"""One start of the run that `tools.prove.resume` kills: its processes, and what they leave behind.

A mark in the environment names the processes of a start, also those whose parent is gone. Linux.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["Attempt", "wait_until"]

MARK = "MMSTREAM_PROVE_RESUME"
SHARED_MEMORY = Path("/dev/shm")  # where Linux keeps it


class Attempt:
    """Starts the ranks of a run and follows them.

    Attributes:
        ranks: the main processes, in the order of ranks.
        seen: every process id of this start, known so far.
    """

    def __init__(self, command: list[str], world_size: int, logs: Path) -> None:
        self._logs, self._mark = logs, f"{os.getpid()}-{logs.resolve()}"
        self._segments: set[Path] = set()
        self._tracked = True
        self.seen: set[int] = set()
        port = _free_port()
        self.ranks = [self._start(command, rank, world_size, port) for rank in range(world_size)]

    def _start(
        self, command: list[str], rank: int, world_size: int, port: int
    ) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1", MARK: self._mark,
        }  # fmt: skip
        with (self._logs / f"rank{rank}.err").open("wb") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def processes(self) -> list[int]:
        """Return the living processes, and note the shared memory that they have open."""
        mark = f"{MARK}={self._mark}".encode()
        own = [pid for pid in _all_processes() if mark in _read(pid, "environ").split(b"\0")]
        self.seen.update(own)
        for pid in own:
            for line in _read(pid, "maps").decode(errors="replace").splitlines():
                path = line[line.find("/") :]
                if path.startswith(f"{SHARED_MEMORY}/") and not path.endswith(" (deleted)"):
                    self._segments.add(Path(path))
        return own

    def workers(self) -> list[int]:
        """Return the loader workers: children of the ranks' fork servers."""
        parents = {pid: _parent(pid) for pid in self.processes()}
        ranks = {rank.pid for rank in self.ranks}
        return [pid for pid, parent in parents.items() if parents.get(parent) in ranks]

    def num_steps(self) -> int:
        """Return how many steps rank 0 has logged since it resumed."""
        path = self._logs / "rank0.jsonl"
        return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0

    def kill(self, pids: list[int]) -> None:
        """Send SIGKILL."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """Send SIGKILL until nothing is left, also to what is born meanwhile.

        Python's resource trackers die too, and with them who knows the names of semaphores.
        """
        self._tracked = False
        for rank in self.ranks:  # at once, before the others are looked for
            rank.kill()
        while own := self.processes():
            self.kill(own)
            self.num_ended()

    def num_ended(self) -> int:
        """Return how many ranks are gone; each is asked, and reaped."""
        return sum(rank.poll() is not None for rank in self.ranks)

    def ended(self) -> bool:
        """Tell whether all ranks are gone."""
        return self.num_ended() == len(self.ranks)

    def lost_a_rank(self) -> bool:
        """Tell whether a rank is gone."""
        return self.num_ended() > 0

    def terminate(self) -> None:
        """Tell the remaining ranks to stop, as a launcher does when one of them is gone."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.terminate()

    def left(self) -> list[str]:
        """Return what is left of this start: processes and segments of shared memory.

        Semaphores are told apart where nobody was left to remove them, see `num_semaphores`.
        """
        running = [f"process {pid}: {_read(pid, 'cmdline')[:150]!r}" for pid in self.processes()]
        named = {f"torch_{pid}_" for pid in self.seen}
        found = self._existing() + [
            path for path in SHARED_MEMORY.glob("torch_*") if path.name.startswith(tuple(named))
        ]
        return running + sorted(
            {str(path) for path in found if self._tracked or not _is_semaphore(path)}
        )

    def num_semaphores(self) -> int:
        """Return how many named semaphores (32 bytes each) died with their tracker."""
        return 0 if self._tracked else sum(map(_is_semaphore, self._existing()))

    def clean(self) -> None:
        """Remove what is left, so that it is not laid at the next start's door."""
        self.kill_all()
        for path in self._existing():
            path.unlink(missing_ok=True)

    def _existing(self) -> list[Path]:
        return [path for path in self._segments if path.exists()]


def _is_semaphore(path: Path) -> bool:
    return path.name.startswith("sem.")


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Return True as soon as the condition holds, False when it does not within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _all_processes() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _read(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:  # it has just ended, or belongs to somebody else
        return b""


def _parent(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
