"""What this machine has: cores, memory, ranks, and limits of control groups (containers, Slurm)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
