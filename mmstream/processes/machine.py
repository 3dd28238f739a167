"""Cores and memory of this machine, and what processes use of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


def process_state(pid: int) -> tuple[str, str]:
    """Return the state of a process, and a text that says when it started.

    The state is the letter of ``/proc/PID/stat``: R runs, S sleeps, D waits for a disk, T is
    stopped, Z has ended. It is "" where there is no such process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def words_of_exit(exit_code: int) -> str:
    """Return how a process ended, in words, from its exit code.

    Examples:
        >>> words_of_exit(-9)
        'was killed by SIGKILL (exit code -9)'
        >>> words_of_exit(3)
        'ended itself with exit code 3'
    """
    if exit_code >= 0:
        return f"ended itself with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"was killed by {name} (exit code {exit_code})"


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds that processes have used since they started, all together.

    Processes that ended count as 0.
    """
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2]
            ticks += sum(map(int, fields.split()[11:13]))  # of user and of system
    return ticks / os.sysconf("SC_CLK_TCK")


def pss_bytes(pids: Iterable[int]) -> int:
    """Return the memory that processes take together, in bytes.

    A page that several processes share counts as one page (proportional set size, PSS). Processes
    that ended count as 0.
    """
    total_kb = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total_kb += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total_kb * 1024


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def default_threads() -> int:
    """Return the default number of threads that decode in the main process."""
    return min(4, num_cores())


def num_local_ranks() -> int:
    """Return how many ranks run on this machine, as launchers such as torchrun say."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory of this machine, or what a control group leaves of it to this process.

    Args:
        root: Where ``proc`` and ``sys`` lie.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder, is_version_1 in _control_groups(root, "memory"):
        name = "memory.limit_in_bytes" if is_version_1 else "memory.max"
        with suppress(OSError, ValueError):
            memory = min(memory, int((folder / name).read_text()))
    return memory


def cpu_limit(root: Path = Path("/")) -> float:
    """Return the cores that this process may use at most, in CPU seconds a second.

    A container may have a share of its cores only: 1.5 of 8. `num_cores` does not know that.

    Args:
        root: Where ``proc`` and ``sys`` lie.
    """
    cores = float(num_cores())
    for folder, is_version_1 in _control_groups(root, "cpu"):
        with suppress(OSError, ValueError):
            if is_version_1:
                quota = int((folder / "cpu.cfs_quota_us").read_text())
                period = int((folder / "cpu.cfs_period_us").read_text())
            else:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            if quota > 0 and period > 0:
                cores = min(cores, quota / period)
    return cores


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the control groups of this process, and whether they are of version 1.

    Every group above may have a limit of its own. In a container, only the top is there.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:  # such as 0::/slurm/job_7 (version 2) or 9:memory:/slurm/job_7 (version 1)
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder = root / "sys/fs/cgroup" / (controller if controllers else "") / group.lstrip("/")
        for above in (folder, *folder.parents):
            yield above, bool(controllers)
