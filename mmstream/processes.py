"""What the worker processes of the converter and of the loader have in common.

It lies below both: how a worker follows its main process, how many cores there are, and how much
memory processes take.
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
    """Set up a worker process that a fork server started.

    The worker takes over the main process' environment, leaves Ctrl-C to it, and ends with it:

    - A fork server keeps the environment of its own start. Credentials set since would be missing.
    - A fork server waits for its workers. After a ``kill -9`` of the main process, both would stay
      for ever.

    Args:
        environment: ``dict(os.environ)`` of the main process.
    """
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name="mmstream-follow", daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """Return the default number of threads that decode in the main process."""
    return min(4, num_cores())


def pss_bytes(pids: Iterable[int]) -> int:
    """Return the memory that processes take together, in bytes.

    A page that several processes share counts as one page (proportional set size, PSS). Processes
    that ended count as 0, and so do all processes on a system without ``/proc``.
    """
    total_kb = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total_kb += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total_kb * 1024
