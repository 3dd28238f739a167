"""What happens inside a worker process, and how a pipeline gets there.

A batch leaves the worker as a `SentBatch`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_ubyte
from multiprocessing import RawArray
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from mmstream.decoding.batch_memory import BatchMemory
from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.loader.batch_transport import SentBatch
from mmstream.pipeline import Pipeline, PipelineRunner
from mmstream.processes.machine import process_state, words_of_exit
from mmstream.processes.workers import (
    END_S,
    end_fork_server,
    is_running,
    join_parent,
    keep_freed_memory,
    start_fork_server,
)
from mmstream.progress import Progress, Stage, Work
from mmstream.reading.messages import StepConnection
from mmstream.reading.process import ReaderProcess
from mmstream.reading.step import Job
from mmstream.state import resume_hint
from mmstream.types import Batch

logger = logging.getLogger(__name__)


class StepDataset(Dataset[Batch]):
    """A map-style dataset of steps: ``dataset[job]`` is the batch of a job, as a `SentBatch`.

    The runner is made at the first job and lives on from one job to the next.

    Args:
        pipeline: what to run.
        num_threads: decode threads.
        progress: memory in which each worker writes down what it works on (`shared_progress`).
        receiver: number of the `BatchReceiver` of their batches.
        is_forked: whether workers inherit the pipeline; else it is pickled for them.
        connections: to the reader process of the rank, one for each worker; empty without one.

    Raises:
        ConfigError: the pipeline cannot be sent to workers.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        num_threads: int,
        progress: Any,
        receiver: int,
        *,
        is_forked: bool,
        connections: Sequence[StepConnection] = (),
    ) -> None:
        if pipeline.zero_copy:
            raise ConfigError("zero_copy=True: views stay in their process; num_workers=0")
        self._pipeline = pipeline
        self._num_threads = num_threads
        self._progress = progress
        self._receiver = receiver
        self._connections = list(connections)
        self._pickled = None if is_forked else _pickled(pipeline)
        self._memory: BatchMemory | None = None
        self._runner: PipelineRunner | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        settings = self._num_threads, self._progress, self._receiver
        return _load, (dict(os.environ), self._pickled, *settings, self._connections)

    def __getitem__(self, job: Job) -> Any:
        if self._memory is None:  # made here, in the worker
            self._memory = BatchMemory(shared=True)
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        progress = Progress(self._progress, number)
        if self._runner is None:
            self._runner = PipelineRunner(
                self._pipeline,
                num_threads=self._num_threads,
                memory=self._memory,
                progress=progress,
                connection=self._connections[number] if self._connections else None,
            )
        try:
            sent = SentBatch(self._runner.batch(job), self._memory, self._receiver)
        except BaseException:
            self._runner.close()
            self._runner = None
            raise
        progress.begin_stage(Stage.IDLE, job.epoch, job.step)
        return sent


def _load(
    environment: dict[str, str],
    pickled: bytes,
    num_threads: int,
    progress: Any,
    receiver: int,
    connections: list[StepConnection],
) -> StepDataset:
    """Return the dataset in a worker, before `start_worker` is called there.

    A plan of packs opens its files again here. In object storage they need credentials, which may
    have been set since the fork server began.
    """
    os.environ.clear()
    os.environ.update(environment)
    return StepDataset(
        pickle.loads(pickled),
        num_threads,
        progress,
        receiver,
        is_forked=True,
        connections=connections,
    )


def preload_server(pipeline: Pipeline) -> None:
    """Start the process that workers are forked from, without waiting for it.

    It imports the slow modules once, while this process goes on: torch, the library of the
    tokenizer, and FFmpeg where videos or recordings are decoded.
    """
    _check_main_guard()
    modules = ["mmstream.loader.loader"]
    if pipeline.decode is not None and pipeline.decode.text is not None:
        modules.append(type(pipeline.decode.text.tokenizer).__module__)
    if pipeline.decode is not None and pipeline.decode.table.decoders("video"):
        modules.append("mmstream.media.video")
    if pipeline.decode is not None and pipeline.decode.table.sounds:
        modules.append("mmstream.decoding.audio")
    start_fork_server(modules)


def start_worker(environment: dict[str, str], num_threads: int, _worker: int) -> None:
    """Set up a worker: its environment, its signals and its number of threads.

    SIGTERM goes to all processes of a job at once. The main process decides what to do. A worker
    that ended by itself would fail the last step of a run that is about to be saved.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before any thread, so for all
    join_parent(environment)
    keep_freed_memory()
    # A tokenizer would start one thread per core in every worker.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if num_threads > 1 else "false")
    os.environ.setdefault("RAYON_NUM_THREADS", str(num_threads))
    threading.Thread(target=_obey_parent, name="mmstream-obey", daemon=True).start()


def _obey_parent() -> None:
    """End this process at a SIGTERM that the main process itself has sent."""
    parent = multiprocessing.parent_process()
    while parent is not None and signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        logger.info("a worker leaves SIGTERM to the main process")
    os._exit(128 + signal.SIGTERM)


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


def _pickled(pipeline: Pipeline) -> bytes:
    """Return a pipeline as it is sent to workers; refuse what they could not load."""
    _check_main_guard()
    advice = 'or pass multiprocessing_context="fork" or num_workers=0'
    try:
        data = pickle.dumps(pipeline)
    except Exception as error:
        raise ConfigError(
            f"the pipeline cannot be sent to worker processes ({error}): define transforms and "
            f"collate at the top of a module, {advice}"
        ) from error
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    is_interactive = main_file is None and b"__main__" in data
    if is_interactive or (main_file and not Path(main_file).is_file()):
        raise ConfigError(
            "workers cannot import what a notebook, a prompt or standard input defines: "
            f"put transforms and collate into a module, {advice}"
        )
    return data


def _check_main_guard() -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "this script would start its workers again in each worker: put what it runs under "
            '`if __name__ == "__main__":`'
        )


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
        return OUT_OF_MEMORY
    return ENDED_ITSELF if exit_code >= 0 else CRASHED
