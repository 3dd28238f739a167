"""Imported by the fork server alone, before it forks any worker.

A scheduler's SIGTERM reaches every process of a job. If it ended the fork server, torch would take
all workers for dead, and a run that is about to save itself would fail. `preload_server` starts the
server with SIGINT and SIGTERM blocked. Here SIGTERM begins to be ignored; SIGINT stays blocked
until the server itself ignores it. Workers get both signals back and decide in `start_worker`.
Importing this module changes signal handling. That is its purpose, so nothing else imports it.

Before a fork, all objects are moved out of the garbage collector's sight. Its walks would write to
pages that the workers share (20-30 MB each).
"""

from __future__ import annotations

import gc
import os
import signal


def _restore_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
os.register_at_fork(before=gc.freeze, after_in_child=_restore_signals)
