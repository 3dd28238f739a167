"""Ground floor: how a process that a fork server made belongs to the one that asked for it.

For the workers of the converter and of the loader alike.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

__all__ = ["join_parent"]


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
