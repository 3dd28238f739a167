"""What a process and all its descendants take, from /proc: CPU time, and memory counted once.

Both sides of a benchmark use it: a runner asks for its own tree's CPU time, and the tool that
started the runner watches the tree's memory from outside, where looking does not slow the runner.
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
    """Return the process and all its descendants that there are now."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:  # grows as it goes
        found += children.get(pid, [])
    return found


def cpu_seconds(root: int) -> float:
    """Return the CPU time that a tree has used, also by processes that ended and were waited for.

    It never falls: what a process has used moves to its parent when that waits for it.
    """
    used = [_stat(pid)[11:15] for pid in tree(root)]  # own and waited for, user and system
    return sum(int(ticks) for four in used for ticks in four) / TICKS_PER_S


def pss_bytes(root: int) -> int:
    """Return the memory of a tree, a page that n processes share counted as 1/n in each."""
    return sum(_pss(pid) for pid in tree(root))


class PeakMemory:
    """Watches a tree's memory while the ``with`` block runs.

    A look makes the kernel walk all pages of the tree, some 10 ms a process, so looks keep to a
    share of the time.

    Attributes:
        num_bytes: The most that was seen.
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
        at: TracebackType | None,
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
    """Return a process's fields from its state on, or none when it has gone."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()  # a name before it may hold anything


def _pss(pid: int) -> int:
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    lines = (line.split() for line in text.splitlines())
    return next((int(line[1]) * 1024 for line in lines if line[0] == "Pss:"), 0)
