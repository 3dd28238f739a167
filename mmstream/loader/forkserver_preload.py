"""Preloaded by the fork server alone, before any worker: it must outlive a SIGTERM to the group.

A scheduler's SIGTERM reaches every process of a job. When it ends the fork server, all workers look
dead to torch, and a run that is about to save itself fails. `worker.preload_server` starts it with
SIGINT and SIGTERM blocked; here SIGTERM begins to be ignored, while SIGINT stays blocked until the
fork server itself ignores it. Workers get both back; what they do with them is
`worker.start_worker`'s business. Importing this changes signal handling, which is its whole
purpose, so nothing else may import it.

Before a fork, all objects leave the garbage collector's sight: its walks would write to pages that
the workers share (20-30 MB each).
"""

from __future__ import annotations

import gc
import os
import signal


def _give_back() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
os.register_at_fork(before=gc.freeze, after_in_child=_give_back)
