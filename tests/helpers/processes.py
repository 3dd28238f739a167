"""Child processes that do not outlive the tests, even where pytest itself is killed."""

from __future__ import annotations

import ctypes
import signal

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends: for ``preexec_fn=``."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
