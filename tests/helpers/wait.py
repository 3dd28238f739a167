"""Waiting in tests: for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from mmstream.processes.machine import process_state

LIMIT_S = 500
"""Against a hang; a slow machine does not take that long."""

T = TypeVar("T")


def wait_until(condition: Callable[[], T], message: Callable[[], object] = str) -> T:
    """Wait until a condition holds, and return its value.

    Args:
        condition: asked 100 times a second.
        message: what to say where it never holds.
    """
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, message()
        time.sleep(0.01)
    return value


def has_ended(pid: int) -> bool:
    """Tell whether a process has ended; its parent may not have noticed it yet."""
    return process_state(pid)[0] in ("", "Z", "X")
