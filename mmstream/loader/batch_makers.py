"""The processes that make a rank's batches: this one or workers, and the reader process.

    Loader.iter_undelivered -> `BatchMakers.batches` -> Workers or PipelineRunner

They start when they are first needed, and go on from one epoch to the next. After a jump or a
change of the pipeline they start over. They know jobs and pipelines, but nothing of states and
counts. They belong to the process that started them; a forked child starts its own.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from ctypes import c_ubyte
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing import RawArray
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler, _utils, get_worker_info

from mmstream.decoding.batch_memory import BatchMemory
from mmstream.errors import ConfigError, MMStreamError, StorageError
from mmstream.loader.batch_transport import BatchReceiver, SentBatch
from mmstream.loader.watchdog import (
    StallLimits,
    ThisProcess,
    Watchdog,
    WorkerGroup,
    in_one_line,
)
from mmstream.pipeline import Pipeline, PipelineRunner, large_files_of, needs_one_thread
from mmstream.processes.machine import default_threads, num_cores
from mmstream.processes.workers import (
    end_fork_server,
    join_parent,
    keep_freed_memory,
    marked_as_main_process,
    start_fork_server,
    without_current_folder,
)
from mmstream.progress import Progress, Stage
from mmstream.ranks import World, group_limit_s
from mmstream.reading.process import (
    ReaderEnded,
    ReaderProcess,
    StepConnection,
    needs_reader_process,
    node_cache_settings,
)
from mmstream.reading.step import Job, later_job
from mmstream.storage.retry import patience_limit_s
from mmstream.types import Batch

logger = logging.getLogger(__name__)

# -- how many processes make batches, and how ------------------------------------------------------

MultiprocessingContext: TypeAlias = Literal["forkserver", "spawn", "fork"]
"""How worker processes start."""

MIN_MOST_WORKERS = 64
"""A rank may have so many workers, or four per core where that is more."""


@dataclass(frozen=True)
class MakerSettings:
    """How many processes make batches, and how.

    Attributes:
        num_workers: worker processes; 0: this process makes batches itself.
        num_threads: decode threads of each process.
        prefetch_factor: batches that each worker makes ahead.
        multiprocessing_context: how workers start.
        stall_limits: when a batch that does not come is a warning, and when an error.
    """

    num_workers: int
    num_threads: int
    prefetch_factor: int
    multiprocessing_context: MultiprocessingContext
    stall_limits: StallLimits


def maker_settings(
    pipeline: Pipeline,
    *,
    num_workers: int,
    num_threads: int | None,
    prefetch_factor: int,
    multiprocessing_context: MultiprocessingContext,
    stall_limits: StallLimits,
) -> MakerSettings:
    """Check the settings of a user, and give `num_threads` its default for a pipeline.

    Raises:
        ConfigError: impossible settings.
    """
    most = max(MIN_MOST_WORKERS, 4 * num_cores())
    if num_workers > most:  # a slip of the hand: so many starting processes stop a machine
        raise ConfigError(
            f"num_workers is {num_workers}, for each rank: at most {most} with {num_cores()} cores"
        )
    if stall_limits.timeout_s is not None and num_workers == 0:
        raise ConfigError(
            "stall_timeout_s needs worker processes, which it can end: num_workers=1 or more"
        )
    is_one_enough = num_workers > 0 or needs_one_thread(pipeline)
    num_threads = num_threads or (1 if is_one_enough else default_threads())
    return MakerSettings(
        num_workers, num_threads, prefetch_factor, multiprocessing_context, stall_limits
    )


# -- the processes of a loader ---------------------------------------------------------------------


class BatchMakers:
    """The processes of one loader.

    Args:
        settings: how many processes make batches, and how.

    Attributes:
        settings: the same.
        workers: the worker processes; None while there are none.
        reader: the reader process; None while there is none.
    """

    def __init__(self, settings: MakerSettings) -> None:
        self.settings = settings
        self.workers: Workers | None = None
        self.reader: ReaderProcess | None = None
        self._reader_pipeline: Pipeline | None = None
        self._runner: PipelineRunner | None = None  # without workers
        self._progress = Progress()
        self._due_job: Job | None = None  # the next one of those who make batches
        self._pid = os.getpid()  # of the process that they belong to

    def start_early(self, pipeline: Pipeline) -> None:
        """Start what takes long and needs no position. It imports while the script goes on."""
        if self.settings.num_workers and self.settings.multiprocessing_context == "forkserver":
            preload_server(pipeline)
        # A node cache depends on the number of ranks, which `batches` is told.
        if pipeline.cache_dir is None and needs_reader_process(pipeline.dataset):
            self._start_reader(pipeline)

    def batches(self, pipeline: Pipeline, first: Job, stop: int, world: World) -> Iterator[Batch]:
        """Yield the batches from the first job to the step before `stop`.

        Args:
            pipeline: what the ranks run.
            first: the first job.
            stop: the step after the last one.
            world: this rank.

        Raises:
            ConfigError: this process was forked since the first batch.
        """
        keep_freed_memory()
        self._leave_to_parent()
        is_outdated = self.reader is not None and self.reader.lacks_variables
        if self._reader_pipeline is not pipeline or is_outdated:
            self.close()
        if self.reader is None and needs_reader_process(pipeline.dataset):
            self._start_reader(pipeline, world.world_size)
        self._reader_pipeline = pipeline
        due = self._due_job
        goes_on = due is not None and first._replace(iteration=due.iteration) == due
        if due is not None and goes_on:
            first = due
        elif self.reader is not None:
            iteration = self.reader.begin(first.epoch, first.step, (first.start, first.stop))
            first = first._replace(iteration=iteration)
        label = f"rank {world.rank}: " if world.world_size > 1 else ""
        if self.settings.num_workers == 0:
            batches = self._own_batches(pipeline, first, stop, label)
        else:
            if self.workers is None:
                if self.settings.multiprocessing_context == "forkserver":
                    preload_server(pipeline)  # it may have ended, or be that of the parent
                self.workers = Workers(pipeline, self.settings, self.reader)
            batches = self.workers.batches(first, stop, label, goes_on=goes_on)
        with closing(batches):
            for step, batch in enumerate(batches, start=first.step):
                self._due_job = later_job(first._replace(step=step), 1, stop)
                yield batch
                if self._pid != os.getpid():
                    raise ConfigError(
                        "this loop began before this process was forked: begin another loop over "
                        "the loader here"
                    )

    def _leave_to_parent(self) -> None:
        """In a forked child, forget the processes and threads of the parent, which uses them."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self.reader = self.workers = self._runner = self._due_job = None

    def _start_reader(self, pipeline: Pipeline, world_size: int = 1) -> None:
        """Start the reader process of a pipeline; does not wait for it.

        Args:
            pipeline: what the ranks run.
            world_size: number of ranks. It must be known where there is a node cache.
        """
        _warn_of_patience()
        large_files = large_files_of(pipeline)
        cache = node_cache_settings(
            pipeline.dataset, pipeline.cache_dir, pipeline.max_cache_bytes, world_size
        )
        self.reader = ReaderProcess(
            pipeline.dataset,
            pipeline.order,
            max(1, self.settings.num_workers),
            None if large_files is None else large_files.least_bytes,
            cache,
        )
        self._reader_pipeline = pipeline

    def _own_batches(
        self, pipeline: Pipeline, first: Job, stop: int, label: str
    ) -> Generator[Batch, None, None]:
        """Yield batches that this process makes itself."""
        if self._runner is None:
            self._runner = PipelineRunner(
                pipeline,
                num_threads=self.settings.num_threads,
                progress=self._progress,
                connection=None if self.reader is None else self.reader.connections[0],
            )
        runner = self._runner
        process = ThisProcess(pipeline, self._progress, label, self.reader)
        with closing(Watchdog(process, self.settings.stall_limits, self.reader)) as watchdog:
            watchdog.start()
            for step in range(first.step, stop):
                job = first._replace(step=step)
                with watchdog.waiting_for(job):
                    batch = runner.batch(job)
                yield batch

    def explained(self, error: BaseException, state: str) -> MMStreamError | None:
        """Return a better error for an error of `batches`. None: it says enough.

        Args:
            error: what `batches` raised.
            state: where the state stands, in words.
        """
        if not isinstance(error, MMStreamError):
            return None
        if isinstance(error, ReaderEnded) and self.reader is not None:
            return MMStreamError(f"{self.reader.words_of_end()}; {state}")
        line = in_one_line(error) if self.settings.num_workers else error
        if isinstance(error, StorageError):
            return StorageError(f"{line}; {state}")
        return None if line is error else line

    def pids(self) -> dict[str, list[int]]:
        """Return the processes that run now: "workers" and "reader"."""
        self._leave_to_parent()
        return {
            "workers": [] if self.workers is None else self.workers.pids,
            "reader": [] if self.reader is None else [self.reader.pid],
        }

    def close(self) -> None:
        """End all of them. `batches` starts new ones."""
        self._leave_to_parent()
        self._due_job = None
        workers, self.workers = self.workers, None
        if workers is not None:
            workers.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the processes behind: a copy starts its own."""
        return self.__dict__ | {"workers": None, "reader": None, "_runner": None, "_due_job": None}


def _warn_of_patience() -> None:
    """Warn where a rank that waits for storage could end the others by their time-out."""
    if dist.is_available() and dist.is_initialized() and patience_limit_s() > group_limit_s() / 2:
        logger.warning(
            "a rank waits up to %g s for storage, and torch.distributed gives up after %g s: "
            "set MMSTREAM_STORAGE_PATIENCE_S to less than half of that, or raise the time-out of "
            "init_process_group",
            patience_limit_s(),
            group_limit_s(),
        )


# -- the side of the parent ------------------------------------------------------------------------
#
# The transport is a torch DataLoader over a map-style dataset of steps. Its sampler yields jobs, so
# torch's own round-robin means "worker k takes every w-th step". Batches come back in step order.
# Persistent workers and a resume need no messages.
#
# The jobs do not end with an epoch. So the first batches of the next epoch are made while the last
# ones are used, and while the user's code does other things between epochs. An idle worker holds
# `prefetch_factor` batches, as always.

DYING_S = 2.0
"""Seconds from a connection that broke to the end of the worker behind it."""


class Workers:
    """The worker processes that run one pipeline. They start at the first batch.

    Args:
        pipeline: what they run.
        settings: how many there are, and how they work.
        reader: the reader process of the rank. None: workers read by themselves.

    Raises:
        ConfigError: the pipeline cannot be sent to workers, or this process is itself a worker that
            imports an unguarded script.
    """

    def __init__(
        self, pipeline: Pipeline, settings: MakerSettings, reader: ReaderProcess | None = None
    ) -> None:
        self.pipeline = pipeline
        self._num_workers = settings.num_workers
        self._jobs = _JobSampler(pipeline.order.steps_per_epoch)
        self._batches: Iterator[Batch] | None = None
        progress = RawArray(c_ubyte, Progress.num_bytes(settings.num_workers))
        self._receiver = BatchReceiver()  # it lives as long as the workers
        self._is_forked = settings.multiprocessing_context == "fork"
        self._transport: DataLoader[Batch] = DataLoader(
            StepDataset(
                pipeline,
                settings.num_threads,
                progress,
                self._receiver.number,
                is_forked=self._is_forked,
                connections=() if reader is None else reader.connections,
            ),
            sampler=self._jobs,
            batch_size=None,
            collate_fn=_unchanged,  # torch's own would turn tuples into lists, arrays into tensors
            num_workers=settings.num_workers,
            multiprocessing_context=multiprocessing.get_context(settings.multiprocessing_context),
            persistent_workers=True,
            prefetch_factor=settings.prefetch_factor,
            worker_init_fn=partial(start_worker, dict(os.environ), settings.num_threads),
            pin_memory=torch.cuda.is_available(),
            # Without one, torch draws a seed from the generator that a model draws from.
            generator=torch.Generator().manual_seed(torch.initial_seed()),
        )
        self._group = WorkerGroup(pipeline, progress, settings.num_workers, reader)
        self._watchdog = Watchdog(self._group, settings.stall_limits, reader)
        _of_this_process.add(self)

    def batches(
        self, first: Job, stop: int, label: str = "", *, goes_on: bool
    ) -> Generator[Batch, None, None]:
        """Yield the batches of steps `first.step` to `stop` - 1, in order.

        Args:
            first: the first job.
            stop: the step after the last one.
            label: how messages begin, such as "rank 1: ".
            goes_on: whether `first` is the job after the last one that was yielded. Its batch, and
                some after it, may have been made since. False: what was made is dropped.

        Raises:
            ConfigError: workers could not start, because of the script.
            MMStreamError: a worker has died, or a batch took longer than the limits say.
            Exception: what `PipelineRunner.batch` raises.
        """
        self._group.label = label
        if not goes_on:
            self._batches = None
            self._jobs.first = first._replace(stride=self._num_workers)
        for step in range(first.step, stop):
            job = first._replace(step=step)
            try:
                with self._watchdog.waiting_for(job):
                    if self._batches is None:
                        self._batches = self._start(first)
                    self._watchdog.start()
                    batch = next(self._batches)
            except Exception as error:
                explanation = self._explained(error, job, has_started=self._batches is not None)
                if explanation is None:
                    raise
                raise explanation from None
            yield batch

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run."""
        iterator = getattr(self._transport, "_iterator", None)
        return [worker.pid for worker in getattr(iterator, "_workers", ())]

    def close(self) -> None:
        """End the processes."""
        self._watchdog.close()
        iterator = getattr(self._transport, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
        self._group.kill()  # torch ends no stopped workers, and none whose fork server has ended

    def _start(self, first: Job) -> Iterator[Batch]:
        """Start the workers, or let those that run start over."""
        if not self._is_forked:  # a process without threads is better to fork
            self._watchdog.start()
        with marked_as_main_process(), without_current_folder():
            batches = iter(self._transport)
        processes, results = _taken_from_torch(batches)
        self._group.attach(processes, results, first)
        if self._watchdog.error is not None:  # it took longer than the limit
            self._group.end()
            raise self._watchdog.error
        return batches

    def _explained(self, error: Exception, job: Job, *, has_started: bool) -> Exception | None:
        """Return what to raise for an error of the transport. None: `error` says it."""
        if self._watchdog.error is not None:
            if not has_started:
                end_fork_server()  # the thread of the watchdog kills it, too, and is not waited for
            return self._watchdog.error
        if isinstance(error, MMStreamError):
            return None
        if isinstance(error, EOFError | OSError):  # the end of a worker is noticed after its pipe's
            self._group.wait_for_end(DYING_S)
        explanation = self._group.error(job)
        if explanation is None and not has_started and isinstance(error, EOFError | OSError):
            return MMStreamError(
                "the fork server of the workers has ended; its own message is printed above. "
                'Start again, or with multiprocessing_context="spawn"'
            )
        return explanation


_of_this_process: WeakSet[Workers] = WeakSet()
_of_parents: list[Workers] = []


def _keep_those_of_parent() -> None:
    """Keep the workers of the parent for ever, in a forked child.

    If they were dropped here, torch would end the processes, which serve the parent.
    """
    _of_parents.extend(_of_this_process)
    _of_this_process.clear()


os.register_at_fork(after_in_child=_keep_those_of_parent)


def _taken_from_torch(iterator: Any) -> tuple[list[BaseProcess], Connection | None]:
    """Return the workers of a DataLoader's iterator, and the end of their pipe that is ours.

    torch looks after its workers in its own words, every 5 s, and on SIGCHLD by an error in the
    middle of the user's code. It offers no public way to them. So these names are its private ones,
    gathered in one place; ``test_watchdog.py`` fails where an installed torch has others.
    """
    if iterator._worker_pids_set:  # from here on, SIGCHLD raises nothing
        _utils.signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False
    # With pinned memory, a thread of torch waits at the pipe, and the main thread looks every 5 s.
    is_pinned = hasattr(iterator, "_pin_memory_thread")
    return iterator._workers, None if is_pinned else iterator._worker_result_queue._writer


class _JobSampler(Sampler[Job]):
    """Yields the jobs from `first` on, over all epochs."""

    def __init__(self, steps_per_epoch: int) -> None:
        self.first = Job(0, 0, 0, 0)
        self._steps_per_epoch = steps_per_epoch

    def __iter__(self) -> Iterator[Job]:
        first = self.first
        for number in count(first.epoch * self._steps_per_epoch + first.step):
            epoch, step = divmod(number, self._steps_per_epoch)
            yield first._replace(epoch=epoch, step=step)


def _unchanged(batch: Any) -> Any:
    return batch


# -- the side of the child -------------------------------------------------------------------------
#
# How a pipeline gets into a worker process, and what happens there. A batch leaves the worker as a
# `SentBatch`.


class StepDataset(Dataset[Batch]):
    """A map-style dataset of steps: ``dataset[job]`` is the batch of a job, as a `SentBatch`.

    The runner is made at the first job and lives on from one job to the next.

    Args:
        pipeline: what to run.
        num_threads: decode threads.
        progress: shared memory in which each worker writes down what it works on.
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
        self._memory = BatchMemory(shared=True)  # it is of the worker that takes some of it
        self._runner: PipelineRunner | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        settings = self._num_threads, self._progress, self._receiver
        return _load, (dict(os.environ), self._pickled, *settings, self._connections)

    def __getitem__(self, job: Job) -> Any:
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
