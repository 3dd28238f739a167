"""Notices a batch that does not come: warns, and after a time limit ends the workers.

Place in the flow: beside the loader, while it waits for the next batch. It is a thread, because the
main thread may wait inside the system, for the rest of a message that a dead worker began to send.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from mmstream.errors import MMStreamError
from mmstream.reading.process import ReaderProcess
from mmstream.reading.step import Job
from mmstream.state import resume_hint

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two looks."""


class StallLimits(NamedTuple):
    """How long a batch may take."""

    warning_s: float
    """Seconds until a warning; the next warnings come after twice the time, four times and so on.
    """
    timeout_s: float | None
    """Seconds until the workers are ended and the loader raises MMStreamError; None: never."""


class Watched(Protocol):
    """The processes that make batches."""

    def describe(self, job: Job) -> str:
        """Say which process owes the batch of a job, and what it works on."""

    def have_ended(self) -> bool:
        """Tell whether a process has ended, so that its batches will not come."""

    def end(self) -> None:
        """End all processes, and let a main thread that waits for them go on."""


class Watchdog:
    """Looks twice a second at a loader that waits. Holds a thread; close it at the end.

    Args:
        watched: who makes the batches.
        limits: how long a batch may take.
        reader: the reader process of the rank, if there is one: what it has logged is logged here.

    Attributes:
        error: what to raise, once the processes were ended for a batch that took too long.
    """

    def __init__(
        self, watched: Watched, limits: StallLimits, reader: ReaderProcess | None = None
    ) -> None:
        self.error: MMStreamError | None = None
        self._watched = watched
        self._limits = limits
        self._reader = reader
        self._awaited: tuple[Job, float] | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, _close, self._closed, os.getpid())

    def start(self) -> None:
        """Start the thread, if it does not run yet."""
        if self._thread is None:
            # The thread does not keep a loader alive that was dropped without `close`.
            arguments = weakref.ref(self), self._closed, self._poll_s()
            self._thread = threading.Thread(
                target=_poll_until_closed, args=arguments, name="mmstream-watchdog", daemon=True
            )
            self._thread.start()

    @contextmanager
    def waiting_for(self, job: Job) -> Iterator[None]:
        """Mark the time in which the main thread waits for the batch of a job."""
        self._awaited = job, time.monotonic()
        try:
            yield
        finally:
            self._awaited = None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def poll_once(self, warned: tuple[Job, float, float] | None) -> tuple[Job, float, float] | None:
        """See whether the awaited batch is late, or can never come.

        Args:
            warned: what the call before has returned.

        Returns:
            The awaited job, since when, and after how many seconds the next warning is due.
        """
        awaited = self._awaited
        if awaited is None or self.error is not None:
            return None
        job, since = awaited
        if self._reader is not None:
            self._reader.pass_on_log()
        if self._watched.have_ended():
            self._watched.end()
            return None
        due = warned[2] if warned and warned[:2] == awaited else self._limits.warning_s
        waited = time.monotonic() - since
        timeout_s = self._limits.timeout_s
        if timeout_s is not None and waited >= timeout_s:
            self.error = MMStreamError(
                f"{self._watched.describe(job)} (stall_timeout_s={timeout_s:g}); "
                f"{resume_hint(job.step)}"
            )
            self._watched.end()
        elif waited >= due:
            logger.warning("waiting for %.0f s: %s", waited, self._watched.describe(job))
            due = max(2 * due, waited)
        return job, since, due

    def _poll_s(self) -> float:
        return min(POLL_S, self._limits.warning_s / 2, (self._limits.timeout_s or POLL_S) / 2)


def _close(closed: threading.Event, pid: int) -> None:
    """End the thread of a watchdog that was dropped. A forked child has no such thread.

    There the event must not be touched: the thread may have held its lock when the child was
    forked, and nobody would release it.
    """
    if os.getpid() == pid:
        closed.set()


def _poll_until_closed(
    reference: weakref.ref[Watchdog], closed: threading.Event, poll_s: float
) -> None:
    warned = None
    while not closed.wait(poll_s):
        watchdog = reference()
        if watchdog is None:
            return
        warned = watchdog.poll_once(warned)
        del watchdog
