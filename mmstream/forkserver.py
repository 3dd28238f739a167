"""Preloaded by the fork server alone, before any worker: it must outlive a SIGTERM to the group.

A scheduler's SIGTERM reaches every process of a job. When it ends the fork server, all workers look
dead to torch, and a run that is about to save itself fails. Workers get the default action back;
what they do with it is `worker.start_worker`'s business. Importing this changes signal handling,
which is its whole purpose, so nothing else may import it.
"""

from __future__ import annotations

import os
import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
