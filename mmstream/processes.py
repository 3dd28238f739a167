"""Ground floor: how a process that a fork server made belongs to the one that asked for it.

For the workers of the converter and of the loader alike; and what processes have and take.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

__all__ = ["default_threads", "join_parent", "num_cores", "pss_bytes"]


def join_parent(environment: dict[str, str]) -> None:
    """Take over the main process' environment, leave Ctrl-C to it, and end when it is gone.

    A fork server has the environment of its own start: credentials set since would be missing. And
    it waits for its workers, so after a kill -9 of the main process both would stay for ever.
    """
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, name="mmstream-follow", daemon=True).start()


def _follow() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """Return how many threads decode in the main process, where nobody says it."""
    return min(4, num_cores())


def pss_bytes(pids: Iterable[int]) -> int:
    """Return the memory of processes, pages that several share divided among them.

    Those that are gone, or that cannot be asked on this system, count as nothing.
    """
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024
