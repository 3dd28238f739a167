"""CPU time and memory of a process and all its descendants, from /proc.

A runner of a benchmark asks for the CPU time of its own tree. The tool that started the runner
watches the memory of the tree from outside, so that this does not slow down the runner.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree(root: int) -> list[int]:
    """Return the ids of a process and of all its descendants that run now."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    pids = [root]
    for pid in pids:  # the list grows during the loop
        pids += children.get(pid, [])
    return pids


def cpu_seconds(root: int) -> float:
    """Return the CPU time of a tree, with processes that have ended and were waited for.

    The value never falls: the time of an ended process moves to its parent.
    """
    # utime, stime, and cutime, cstime of children that were waited for.
    times = [_stat(pid)[11:15] for pid in tree(root)]
    return sum(int(ticks) for four in times for ticks in four) / TICKS_PER_S


def pss_bytes(root: int) -> int:
    """Return the memory of a tree in bytes; a page shared by n processes counts 1/n in each."""
    return sum(map(own_pss_bytes, tree(root)))


def own_pss_bytes(pid: int) -> int:
    """Return the memory of a process without its descendants, or 0 if it has ended."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    lines = (line.split() for line in text.splitlines())
    return next((int(line[1]) * 1024 for line in lines if line[0] == "Pss:"), 0)


class PeakMemory:
    """Measures the memory of a tree again and again while the ``with`` block runs.

    For each measurement the kernel walks all pages of the tree, about 10 ms per process. So
    measurements take a limited share of the time.

    Attributes:
        num_bytes: The largest value so far.
    """

    def __init__(self, root: int, share: float = 0.03) -> None:
        self.num_bytes = 0
        self._root, self._share = root, share
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        pause_s = 0.0
        while not self._ended.wait(pause_s):
            started = time.perf_counter()
            self.num_bytes = max(self.num_bytes, pss_bytes(self._root))
            pause_s = (time.perf_counter() - started) / self._share


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, or none if the process has ended."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()  # the name before it may contain spaces and brackets
