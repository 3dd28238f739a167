"""A start of the run that `tools.prove.resume` kills, its kill, and what it leaves behind.

A variable in the environment marks the processes of a start, so that they are recognised after
their parent has ended. This needs Linux.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mmstream.train.demo import free_port

MARK = "MMSTREAM_PROVE_RESUME"
SHARED_MEMORY = Path("/dev/shm")


class Attempt:
    """The running ranks of a start.

    Attributes:
        ranks: the main processes, in the order of ranks.
        known_pids: all process ids of this start so far.
    """

    def __init__(self, command: list[str], world_size: int, logs: Path) -> None:
        self._logs = logs
        self._mark = f"{os.getpid()}-{logs.resolve()}"
        self._segments: set[Path] = set()
        self._has_tracker = True
        self.known_pids: set[int] = set()
        port = free_port()
        self.ranks = [self._start(command, rank, world_size, port) for rank in range(world_size)]

    def _start(
        self, command: list[str], rank: int, world_size: int, port: int
    ) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            MARK: self._mark,
        }
        with (self._logs / f"rank{rank}.err").open("wb") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def processes(self) -> list[int]:
        """Return the ids of the running processes, and remember their shared memory."""
        mark = f"{MARK}={self._mark}".encode()
        pids = [pid for pid in _all_pids() if mark in _read(pid, "environ").split(b"\0")]
        self.known_pids.update(pids)
        for pid in pids:
            for line in _read(pid, "maps").decode(errors="replace").splitlines():
                path = line[line.find("/") :]
                if path.startswith(f"{SHARED_MEMORY}/") and not path.endswith(" (deleted)"):
                    self._segments.add(Path(path))
        return pids

    def workers(self) -> list[int]:
        """Return the ids of the loader's workers, which are children of the ranks' fork servers."""
        parents = {pid: _parent(pid) for pid in self.processes()}
        ranks = {rank.pid for rank in self.ranks}
        return [pid for pid, parent in parents.items() if parents.get(parent) in ranks]

    def num_steps(self) -> int:
        """Return the number of steps that rank 0 has logged since it resumed."""
        path = self._logs / "rank0.jsonl"
        return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0

    def kill(self, pids: list[int]) -> None:
        """Send SIGKILL."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """Send SIGKILL until no process runs, also to processes that start meanwhile.

        Python's resource trackers die too. They alone know the names of semaphores to remove.
        """
        self._has_tracker = False
        for rank in self.ranks:  # before the search for the other processes
            rank.kill()
        while pids := self.processes():
            self.kill(pids)
            self.num_ended()

    def num_ended(self) -> int:
        """Return the number of ranks that have ended, and reap them."""
        return sum(rank.poll() is not None for rank in self.ranks)

    def all_ended(self) -> bool:
        """Return whether all ranks have ended."""
        return self.num_ended() == len(self.ranks)

    def any_ended(self) -> bool:
        """Return whether a rank has ended."""
        return self.num_ended() > 0

    def terminate(self) -> None:
        """Send SIGTERM to the remaining ranks, as a launcher does after the end of a rank."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.terminate()

    def remains(self) -> list[str]:
        """Return the processes and the segments of shared memory that still exist.

        Semaphores are not among them if their tracker was killed; see `num_semaphores`.
        """
        running = [f"process {pid}: {_read(pid, 'cmdline')[:150]!r}" for pid in self.processes()]
        prefixes = tuple(f"torch_{pid}_" for pid in self.known_pids)
        named = [path for path in SHARED_MEMORY.glob("torch_*") if path.name.startswith(prefixes)]
        paths = {
            str(path)
            for path in self._existing_segments() + named
            if self._has_tracker or not _is_semaphore(path)
        }
        return running + sorted(paths)

    def num_semaphores(self) -> int:
        """Return the number of named semaphores (32 bytes each) whose tracker was killed."""
        return 0 if self._has_tracker else sum(map(_is_semaphore, self._existing_segments()))

    def clean(self) -> None:
        """Remove what remains, so that the next start is not blamed for it."""
        self.kill_all()
        for path in self._existing_segments():
            path.unlink(missing_ok=True)

    def _existing_segments(self) -> list[Path]:
        return [path for path in self._segments if path.exists()]


def _is_semaphore(path: Path) -> bool:
    return path.name.startswith("sem.")


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Return True as soon as the condition holds, or False after this time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _all_pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # the process has just ended, or belongs to another user
        return b""


def _parent(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


# -- one kill: its victim, its moment, and the end of the other processes --------------------------

VICTIMS = ("rank", "worker", "everything")
MOMENTS = ("start-up", "workers start", "checkpoint", "after steps", "any time")

SIGTERM_DELAY_S = 3
"""After the end of a rank, the others may run so long; then they get SIGTERM."""

STOP_S = 120
"""Longest time from SIGTERM to the end of a rank. More is a fault, as with the next two."""
NOTICE_S = 60
"""Longest time from the death of a worker to the end of its rank."""
GRACE_S = 60
"""Longest time from the end of a rank to the end of its workers and shared memory."""

MAX_MISSED_STEPS = 40
"""After so many steps it no longer waits for a checkpoint that is being written."""


@dataclass(frozen=True)
class Limits:
    """The limits of random topologies and times."""

    max_ranks: int
    max_workers: int
    step_s: float
    start_up_s: float
    """From the start of a single rank to its first step."""


@dataclass(frozen=True)
class Kill:
    """The kill of one start."""

    victim: str
    moment: str
    world_size: int
    num_workers: int
    num_steps: int
    """The kill happens after these delivered steps at the latest."""
    delay_s: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of one start."""

    kill: Kill
    num_steps: int
    """Steps delivered before the kill."""
    end_of_others: str
    """How the ranks that were not killed ended."""
    remains: list[str]
    """Processes and shared memory that still existed after the grace time."""
    num_semaphores: int
    """Named semaphores that only Python's resource tracker, which was killed, would remove."""
    torn: bool
    """Whether a checkpoint was being written at the kill."""
    failed: bool
    """Whether it ended before the kill, or did not end after it."""


def draw_kinds(draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (victim, moment): all of them in random order, again and again."""
    kinds = list(itertools.product(VICTIMS, MOMENTS))
    while True:
        draw.shuffle(kinds)
        yield from kinds


def draw_kill(draw: random.Random, kind: tuple[str, str], limits: Limits, most_steps: int) -> Kill:
    """Return a kill of this (victim, moment) on a random topology at a random time."""
    victim, moment = kind
    needs_worker = victim == "worker" or moment == "workers start"
    world_size = draw.randint(1, limits.max_ranks)
    start_up_s = limits.start_up_s * (1 + world_size) / 2  # ranks share the cores
    longest = {"start-up": start_up_s, "any time": 2 * start_up_s, "workers start": 0.5}
    return Kill(
        victim,
        moment,
        world_size,
        draw.randint(int(needs_worker), limits.max_workers),
        draw.randint(1, most_steps),
        draw.uniform(0, longest.get(moment, limits.step_s)),
    )


def kill_and_watch(attempt: Attempt, kill: Kill, checkpoints: Path, draw: random.Random) -> Outcome:
    """Wait for the moment, kill the victim, and observe the end of the other processes."""
    before = _incomplete(checkpoints)
    failed = not _wait_for_moment(attempt, kill, lambda: bool(_incomplete(checkpoints) - before))
    num_steps = attempt.num_steps()
    if kill.victim == "everything":
        attempt.kill_all()
        end_of_others = ""
    else:
        ranks = [rank.pid for rank in attempt.ranks]
        victims = attempt.workers() if kill.victim == "worker" else ranks
        attempt.kill(victims and [draw.choice(victims)])
        # A rank ends at once, or as soon as it notices the death of its worker.
        failed |= not wait_until(attempt.any_ended, NOTICE_S)
        end_of_others = _wait_for_others(attempt)
    failed |= not wait_until(attempt.all_ended, STOP_S)
    wait_until(lambda: not attempt.remains(), GRACE_S)
    return Outcome(
        kill,
        num_steps,
        end_of_others,
        attempt.remains(),
        attempt.num_semaphores(),
        torn=bool(_incomplete(checkpoints) - before),
        failed=failed,
    )


def _incomplete(checkpoints: Path) -> set[tuple[str, int]]:
    """Return (name, time of the last write) of incomplete checkpoints."""
    files = set()
    for path in checkpoints.glob(".step-*"):
        with suppress(FileNotFoundError):  # it has just become complete
            files.add((path.name, path.stat().st_mtime_ns))
    return files


def _wait_for_moment(attempt: Attempt, kill: Kill, is_writing: Callable[[], bool]) -> bool:
    """Wait for the moment of the kill; return False if the run ends before."""
    started = time.monotonic()

    def due() -> bool:
        if kill.moment in ("start-up", "any time") and time.monotonic() - started >= kill.delay_s:
            return True
        if kill.moment == "workers start" and attempt.workers():
            return True
        return attempt.num_steps() >= kill.num_steps

    def possible() -> bool:
        return kill.victim != "worker" or bool(attempt.workers())

    def writing() -> bool:
        missed = attempt.num_steps() > kill.num_steps + MAX_MISSED_STEPS
        return kill.moment != "checkpoint" or missed or is_writing()

    for condition, every_s in ((due, 0.005), (possible, 0.02), (writing, 0.0005)):
        while not condition():
            if attempt.any_ended():
                return False
            time.sleep(every_s)
    if kill.moment in ("workers start", "after steps"):
        time.sleep(kill.delay_s)
    return not attempt.any_ended()


def _wait_for_others(attempt: Attempt) -> str:
    """Wait for the end of the remaining ranks, and return how they ended."""
    if len(attempt.ranks) == 1:
        return ""
    if wait_until(attempt.all_ended, SIGTERM_DELAY_S):
        return "by themselves"
    attempt.terminate()
    return "at SIGTERM"
