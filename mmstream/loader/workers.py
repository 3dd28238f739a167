"""The parent's side of worker processes.

The transport is a torch DataLoader over a map-style dataset of steps. Its sampler yields jobs, so
torch's own round-robin means "worker k takes every w-th step". Batches come back in step order.
Persistent workers and a resume need no messages.

The jobs do not end with an epoch. So the first batches of the next epoch are made while the last
ones are used, and while the user's code does other things between epochs. An idle worker holds
`prefetch_factor` batches, as always.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader, Sampler, _utils

from mmstream.errors import MMStreamError
from mmstream.loader.batch_transport import BatchReceiver
from mmstream.loader.maker_settings import MakerSettings
from mmstream.loader.watchdog import Watchdog
from mmstream.loader.worker_group import WorkerGroup, shared_progress
from mmstream.loader.worker_process import StepDataset, start_worker
from mmstream.pipeline import Pipeline
from mmstream.processes import marked_as_main_process, without_current_folder
from mmstream.reading.process import ReaderProcess
from mmstream.reading.step import Job
from mmstream.types import Batch

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
        progress = shared_progress(settings.num_workers)
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

    def batches(self, first: Job, stop: int, label: str = "", *, goes_on: bool) -> Iterator[Batch]:
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
        """Start the workers, or let those that run begin anew."""
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
