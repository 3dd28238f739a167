"""Imported by the fork server alone, before it forks any worker.

A scheduler's SIGTERM or SIGUSR1 reaches every process of a job. If it ended the fork server, torch
would take all workers for dead, and a run that is about to save itself would fail.
`start_fork_server` starts the server with `JOB_SIGNALS` blocked. Here they begin to be ignored.
SIGINT stays blocked until the server itself ignores it. Workers get SIGINT and SIGTERM back and
decide in `start_worker`. They go on ignoring the others, unless the main script sets a handler.
Importing this module changes signal handling. That is its purpose, so nothing else imports it.

The server and its workers end with the main process. Each worker looks for itself, in a thread that
starts before it imports the main script: a script without a main guard may hang in that import. The
server has no thread, because it forks. A timer lets it look, also while it imports slow modules.

Before a fork, all objects are moved out of the garbage collector's sight. Its walks would write to
pages that the workers share (20-30 MB each).

The server starts without the current folder in ``sys.path``. Here it gets that of its parent, so
that the modules named after this one are found.
"""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

from mmstream.processes.workers import (
    JOB_SIGNALS,
    POLL_INTERVAL_S,
    follow_main_process,
    is_main_process_alive,
    take_over_from_parent,
)


def _look_after_main_process(*_: Any) -> None:
    if not is_main_process_alive():
        os._exit(1)


def _begin_worker() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the timer itself is not inherited
    follow_main_process()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


take_over_from_parent()
for _number in JOB_SIGNALS - {signal.SIGINT}:
    signal.signal(_number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS - {signal.SIGINT})
signal.signal(signal.SIGALRM, _look_after_main_process)
signal.setitimer(signal.ITIMER_REAL, POLL_INTERVAL_S, POLL_INTERVAL_S)
os.register_at_fork(before=gc.freeze, after_in_child=_begin_worker)
