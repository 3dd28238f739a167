"""The worker processes of a loader as their main process sees them: alive, late or dead.

Place in the flow: beside the transport. It says in words what a worker works on, and how it ended.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_ubyte
from multiprocessing import RawArray
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.pipeline import Pipeline
from mmstream.processes import end_fork_server, is_running, process_state, words_of_exit
from mmstream.progress import Progress, Stage, Work
from mmstream.reading.process import ReaderProcess
from mmstream.reading.step import Job
from mmstream.state import stands_before

END_S = 5.0
"""Seconds in which processes end after SIGKILL."""

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

OUT_OF_MEMORY = (
    "SIGKILL without your doing mostly means that memory ran out: fewer workers, a smaller window "
    "or a smaller prefetch_factor need less"
)
CRASHED = (
    "compiled code crashed, mostly on that sample: a decoder's, or that of a library that a "
    "transform uses"
)
ENDED_ITSELF = "a transform, a library or a signal to the whole job has ended the process"
NO_START = (
    "workers ended before their first batch; their own messages are printed above. For a missing "
    "import, or an error about this script itself: put what the script runs under "
    '`if __name__ == "__main__":`'
)


def shared_progress(num_workers: int) -> Any:
    """Return memory for the notes of workers, which can be sent to them while they start."""
    return RawArray(c_ubyte, Progress.num_bytes(num_workers))


class WorkerGroup:
    """The workers of one loader, from their start on. The `Watched` of a watchdog.

    Args:
        pipeline: what they run.
        progress: `shared_progress`, which they write to.
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
            f"{stands_before(job.step)}"
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


class ThisProcess:
    """A loader without workers. The `Watched` of a watchdog that can warn only."""

    def __init__(
        self,
        pipeline: Pipeline,
        progress: Progress,
        label: str,
        reader: ReaderProcess | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._progress = progress
        self._label = label
        self._reader = reader

    def describe(self, job: Job) -> str:
        """Say what this process works on."""
        last = self._progress.last()
        work = _described(last, self._pipeline, job) + _reader_words(last, self._reader)
        return f"{self._label}this process (pid {os.getpid()}) has not finished: {work}"

    def have_ended(self) -> bool:
        """Return False: it runs this."""
        return False

    def end(self) -> None:
        """Do nothing: nothing can end the main thread alone."""


def _process(pid: int | None) -> str:
    state, _ = process_state(pid or 0)
    words = STATES.get(state)
    return f"pid {pid}, state {state or 'none'}: {words}" if words else f"pid {pid}"


def _described(work: Work, pipeline: Pipeline, job: Job) -> str:
    """Say what a process works on, and for how long."""
    if work.stage is Stage.START:
        return f"step {job.step} of epoch {job.epoch}, it still imports modules or the main script"
    seconds = max(0.0, time.monotonic() - work.since)
    sample = work.sample(pipeline.dataset.name_of)
    words = {
        Stage.READ: lambda: f"reading samples of {_shards(pipeline, work, job)}",
        Stage.TEXT: lambda: "tokenizing its texts",
        Stage.READ_AGAIN: lambda: f"reading {sample} on its own",
        Stage.DECODE: lambda: f"decoding {sample}",
        Stage.BATCH: lambda: "collating it",
        Stage.IDLE: lambda: "made and on its way",
    }
    doing: Callable[[], str] = words[work.stage]
    return f"step {work.step} of epoch {work.epoch}, {doing()} for {seconds:.0f} s"


def _reader_words(work: Work, reader: ReaderProcess | None) -> str:
    """Say what the reader process waits for, where samples of it are waited for."""
    return f"; {reader.describe()}" if reader and work.stage is Stage.READ else ""


def _shards(pipeline: Pipeline, work: Work, job: Job) -> str:
    """Name the shards that a step reads from."""
    shards, _, _ = pipeline.order.refs(work.epoch, work.step, (job.start, job.stop))
    numbers = list(dict.fromkeys(shards.tolist()))
    names = [escaped(pipeline.dataset.name_of(number)) for number in numbers[:NUM_SHARDS]]
    more = len(numbers) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _advice(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return OUT_OF_MEMORY
    return ENDED_ITSELF if exit_code >= 0 else CRASHED
