"""Notices a batch that does not come: warns, and after a time limit ends the workers.

Place in the flow: beside the loader, while it waits for the next batch. It is a thread, because the
main thread may wait inside the system, for the rest of a message that a dead worker began to send.

A worker that hangs or dies cannot say so itself. `WorkerGroup` says which one it is, what it works
on and how it ended, in words. `ThisProcess` does so where there are no workers.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.pipeline import Pipeline
from mmstream.processes.machine import process_state, words_of_exit
from mmstream.processes.workers import END_S, end_fork_server, is_running
from mmstream.progress import Progress, Stage, Work
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
        self,
        watched: WorkerGroup | ThisProcess,
        limits: StallLimits,
        reader: ReaderProcess | None = None,
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
            limits = self._limits
            poll_s = min(POLL_S, limits.warning_s / 2, (limits.timeout_s or POLL_S) / 2)
            arguments = weakref.ref(self), self._closed, poll_s
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


# -- what a worker works on, and how it ended ------------------------------------------------------

NUM_SHARDS = 3
"""Most shards that a message names."""

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a network file system",
    "T": "stopped by a signal; SIGCONT lets it go on",
    "t": "stopped by a debugger",
    "Z": "ended",
    "": "ended",
}
"""Process states of ``/proc/PID/stat``, in words."""

NO_START = (
    "workers ended before their first batch; their own messages are printed above. For a missing "
    "import, or an error about this script itself: put what the script runs under "
    '`if __name__ == "__main__":`'
)


class WorkerGroup:
    """The workers of one loader, from their start on.

    Args:
        pipeline: what they run.
        progress: shared memory that they write to.
        reader: the reader process of the rank, if there is one.

    Attributes:
        label: "rank 1: " where there are other ranks, else "".
    """

    def __init__(
        self,
        pipeline: Pipeline,
        progress: Any,
        num_workers: int,
        reader: ReaderProcess | None = None,
    ) -> None:
        self.label = ""
        self._pipeline = pipeline
        self._reader = reader
        self._notes = [Progress(progress, number) for number in range(num_workers)]
        self._processes: Sequence[BaseProcess] = ()
        self._starts: Sequence[tuple[int, str]] = ()
        self._results: Connection | None = None
        self._first = Job(0, 0, 0, 0)
        self._ended: list[int] = []

    def attach(
        self, processes: Sequence[BaseProcess], results: Connection | None, first: Job
    ) -> None:
        """Take the processes that have been started.

        Args:
            processes: workers by number.
            results: this process' own end of the pipe through which batches come. While it is open,
                the pipe does not end with the workers. None: nobody waits at that pipe itself.
            first: the job of worker 0. The next step is worker 1's, and so on, over all epochs.
        """
        self._processes, self._results, self._first = processes, results, first
        pids = [process.pid for process in processes if process.pid is not None]
        self._starts = [(pid, process_state(pid)[1]) for pid in pids]

    def describe(self, job: Job) -> str:
        """Say which worker owes the batch of a job, and what it works on."""
        if not self._processes:
            return f"{self.label}the workers have not started: their fork server imports modules"
        number = self._late_worker(job)
        pid = self._processes[number].pid
        work = self._notes[number].last()
        return (
            f"{self.label}worker {number} ({_process(pid)}) has not answered: "
            f"{_described(work, self._pipeline, job)}{_reader_words(work, self._reader)}"
        )

    def _late_worker(self, job: Job) -> int:
        """Return the worker that owes a batch; if that one is idle, one that is not.

        All workers are waited for where an epoch begins before the last one was finished.
        """
        count = len(self._processes)
        epochs, steps = job.epoch - self._first.epoch, job.step - self._first.step
        owing = (epochs * self._pipeline.order.steps_per_epoch + steps) % count
        workers = [(owing + turn) % count for turn in range(count)]
        return next((worker for worker in workers if self._is_busy(worker)), owing)

    def _is_busy(self, number: int) -> bool:
        state, _ = process_state(self._processes[number].pid or 0)
        return state in "DTt" or self._notes[number].last().stage is not Stage.IDLE

    def have_ended(self) -> bool:
        """Tell whether a worker has ended."""
        return bool(self._numbers_of_ended())

    def end(self) -> None:
        """End all workers at once, also stopped ones; or what they have to come from."""
        if not self._processes:
            end_fork_server()
        self._ended = self._numbers_of_ended()
        self.kill()
        running = [process.sentinel for process in self._processes]
        deadline = time.monotonic() + END_S
        while running and time.monotonic() < deadline:
            ended = wait(running, END_S)
            running = [sentinel for sentinel in running if sentinel not in ended]
        if self._results is not None:
            self._results.close()  # the main thread sees the end of the pipe

    def kill(self) -> None:
        """Kill the workers that run, also stopped ones.

        Sentinels do not tell which ones run: they all end with the fork server.
        """
        for pid, start in self._starts:
            if is_running(pid, start):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def error(self, job: Job) -> MMStreamError | None:
        """Return what to raise for the first worker that ended by itself; None: all run.

        Call it in the thread that uses the transport.
        """
        ended = self._ended or self._numbers_of_ended()
        if not ended:
            return None
        # A killed worker explains why others ended, but not the other way round.
        number = min(ended, key=lambda worker: (self._exit_code(worker) > 0, worker))
        exit_code, work = self._exit_code(number), self._notes[number].last()
        if exit_code == 1 and work.stage is Stage.START:
            return ConfigError(self.label + NO_START)
        sample = work.sample(self._pipeline.dataset.name_of)
        moment = "before its first step"
        if work.stage is not Stage.START:
            moment = f"at step {work.step}"
            moment += f", last sample {sample}" if sample else ""
        others = f" (so were {len(ended) - 1} more)" if len(ended) > 1 else ""
        return MMStreamError(
            f"{self.label}worker {number} (pid {self._processes[number].pid}) "
            f"{words_of_exit(exit_code)} {moment}{others}; {_advice(exit_code)}; "
            f"{resume_hint(job.step)}"
        )

    def wait_for_end(self, seconds: float) -> None:
        """Wait until a worker has ended, at most so long."""
        wait([process.sentinel for process in self._processes], seconds)

    def _numbers_of_ended(self) -> list[int]:
        # `is_alive` would take the exit code away from the main thread, which also asks for it.
        ended = wait([process.sentinel for process in self._processes], 0)
        return [
            number for number, process in enumerate(self._processes) if process.sentinel in ended
        ]

    def _exit_code(self, number: int) -> int:
        process = self._processes[number]
        process.join(END_S)
        return process.exitcode or 0


@dataclass(frozen=True)
class ThisProcess:
    """A loader without workers, whose watchdog can warn only."""

    pipeline: Pipeline
    progress: Progress
    label: str
    reader: ReaderProcess | None = None

    def describe(self, job: Job) -> str:
        """Say what this process works on."""
        last = self.progress.last()
        work = _described(last, self.pipeline, job) + _reader_words(last, self.reader)
        return f"{self.label}this process (pid {os.getpid()}) has not finished: {work}"

    def have_ended(self) -> bool:
        """Return False: it runs this."""
        return False

    def end(self) -> None:
        """Do nothing: nothing can end the main thread alone."""


def _process(pid: int | None) -> str:
    state, _ = process_state(pid or 0)
    description = STATES.get(state)
    return f"pid {pid}, state {state or 'none'}: {description}" if description else f"pid {pid}"


def _described(work: Work, pipeline: Pipeline, job: Job) -> str:
    """Say what a process works on, and for how long."""
    if work.stage is Stage.START:
        return f"step {job.step} of epoch {job.epoch}, it still imports modules or the main script"
    seconds = max(0.0, time.monotonic() - work.since)
    sample = work.sample(pipeline.dataset.name_of)
    activities = {
        Stage.READ: lambda: f"reading samples of {_shards(pipeline, work, job)}",
        Stage.TEXT: lambda: "tokenizing its texts",
        Stage.READ_AGAIN: lambda: f"reading {sample} on its own",
        Stage.DECODE: lambda: f"decoding {sample}",
        Stage.BATCH: lambda: "collating it",
        Stage.IDLE: lambda: "made and on its way",
    }
    doing: Callable[[], str] = activities[work.stage]
    return f"step {work.step} of epoch {work.epoch}, {doing()} for {seconds:.0f} s"


def _reader_words(work: Work, reader: ReaderProcess | None) -> str:
    """Say what the reader process waits for, where samples of it are waited for."""
    return f"; {reader.describe()}" if reader and work.stage is Stage.READ else ""


def _shards(pipeline: Pipeline, work: Work, job: Job) -> str:
    """Name the shards that a step reads from."""
    rows = pipeline.order.rows_of(work.epoch, work.step, (job.start, job.stop))
    shards, _, _ = pipeline.order.refs(work.epoch, work.step, rows)
    numbers = list(dict.fromkeys(shards.tolist()))
    names = [escaped(pipeline.dataset.name_of(number)) for number in numbers[:NUM_SHARDS]]
    more = len(numbers) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _advice(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return (
            "SIGKILL without your doing mostly means that memory ran out: fewer workers, a smaller "
            "window or a smaller prefetch_factor need less"
        )
    if exit_code < 0:
        return (
            "compiled code crashed, mostly on that sample: a decoder's, or that of a library that "
            "a transform uses"
        )
    return "a transform, a library or a signal to the whole job has ended the process"


def in_one_line(error: MMStreamError) -> MMStreamError:
    """Return a worker's error with the worker's traceback as its cause.

    torch puts it into the message. It tells where a function of the user failed.
    """
    text = str(error.args[0]) if error.args else ""  # `str(error)` would be one line already
    _, space, reason = text.rstrip().rpartition("\n")[2].partition(": ")
    if not space or "Original Traceback" not in text:
        return error
    line = type(error)(reason)
    line.__cause__ = RuntimeError(text)
    return line
