"""Part of the loader: a rank's worker processes, and the steps that are made until they are up.

The transport is a torch DataLoader over a map-style "dataset of steps": its sampler yields jobs, so
torch's own round-robin is "worker k takes every w-th step", batches come back in step order, and
persistent workers, the next epoch and a resume need no messages.

A fork server imports torch before it forks, which takes a second or two. A step is a function of
its number, so this process makes the first ones meanwhile: the first batch is there as early as
without workers, and nobody can tell who made it: they have a copy of the pipeline, and global
random generators, of their own.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from mmstream.batching.collate import Batch
from mmstream.errors import ConfigError, MMStreamError
from mmstream.loader.worker_process import Steps, pickle_pipeline, start_worker
from mmstream.pipeline import Pipeline
from mmstream.reading.reader import Job

__all__ = ["MultiprocessingContext", "Workers"]

logger = logging.getLogger(__name__)

MultiprocessingContext = Literal["forkserver", "spawn", "fork"]

START_S = 60
"""How long the end of a run waits for workers that are just starting."""


class Workers:
    """The workers that run one pipeline, started when they are first needed.

    Args:
        pipeline: what they run.
        num_workers: processes.
        num_threads: decode threads of each.
        prefetch_factor: batches that each makes ahead.
        multiprocessing_context: "forkserver" alone is bridged by steps made here.

    Raises:
        ConfigError: the pipeline cannot be sent to workers, or this process is itself a worker that
            imports an unguarded script.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        num_workers: int,
        num_threads: int,
        prefetch_factor: int,
        multiprocessing_context: MultiprocessingContext,
    ) -> None:
        pickled = None if multiprocessing_context == "fork" else pickle_pipeline(pipeline)
        self.pipeline, self._num_threads, self._pickled = pipeline, num_threads, pickled
        self._bridged = multiprocessing_context == "forkserver"
        # As many greetings as torch asks for ahead: the first real job is then asked for when the
        # first worker has answered, and not before.
        self._num_greetings = prefetch_factor * num_workers if self._bridged else 0
        self._jobs = _Jobs(num_workers)
        self._transport: DataLoader[Batch] = DataLoader(
            Steps(pipeline, num_threads, pickled),
            sampler=self._jobs,
            batch_size=None,
            collate_fn=_as_it_is,  # torch's own would turn tuples into lists, arrays into tensors
            num_workers=num_workers,
            multiprocessing_context=multiprocessing.get_context(multiprocessing_context),
            persistent_workers=True,
            prefetch_factor=prefetch_factor,
            worker_init_fn=partial(start_worker, dict(os.environ), num_threads),
            pin_memory=torch.cuda.is_available(),
            generator=_generator(),  # else a seed is drawn from the one that a model draws from
        )
        self._started: Future[Iterator[Batch]] | None = None

    def batches(self, first: Job, stop: int) -> Iterator[Batch]:
        """Yield the batches of an iteration's jobs, in step order: errors as `Pipeline.batches`.

        Args:
            first: the first job.
            stop: the step behind the last one.
        """
        if self._started is not None:
            self._started.result()  # an epoch may have ended before they were up
        elif self._bridged:
            self._jobs.begin(first, stop, self._num_greetings)
            return self._bridge()
        self._jobs.begin(first, stop)
        return iter(self._transport)

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        iterator = getattr(self._transport, "_iterator", None)
        return [worker.pid for worker in getattr(iterator, "_workers", ())]

    def close(self) -> None:
        """End the processes."""
        if self._started is not None:
            try:
                self._started.exception(START_S)  # no way to stop that half way
            except TimeoutError:
                logger.warning("workers have not started for %d s: left to themselves", START_S)
                return
        iterator = getattr(self._transport, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()

    def _bridge(self) -> Iterator[Batch]:
        self._started = Future()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        start = partial(self._start, self._started, device)
        threading.Thread(target=start, name="mmstream-start", daemon=True).start()
        assert self._pickled is not None
        # A copy, as each worker has one: what transforms keep, such as open files, stays out of
        # the pipeline that is sent.
        pipeline: Pipeline = pickle.loads(self._pickled)
        jobs = self._jobs.here(until=self._started)
        yield from _apart(pipeline.batches(jobs, self._num_threads, ahead=False))
        if not self._jobs.all_made:
            yield from self._started.result()

    def _start(self, started: Future[Iterator[Batch]], device: int | None) -> None:
        num_up = 0
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a thread begins with the first one
            batches = iter(self._transport)
            for _ in range(self._num_greetings):
                next(batches)
                num_up += 1
        except BaseException as error:
            started.set_exception(_explained(error, num_up))
        else:
            started.set_result(batches)


class _Jobs(Sampler[Job | None]):
    """The jobs of the iteration that starts now: some for this process, all others for workers."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._lock = threading.Lock()
        self.begin(Job(0, 0, 0, 0), 0)

    def begin(self, first: Job, stop: int, num_greetings: int = 0) -> None:
        """Set the jobs of the next iteration."""
        self._first, self._stop, self._num_greetings = first, stop, num_greetings
        self._next = first.step
        self._stop_here = stop if num_greetings else first.step

    def here(self, until: Future[Any]) -> Iterator[Job]:
        """Yield the jobs of this process, up to those that workers have begun with."""
        while True:
            with self._lock:
                if self._next >= self._stop_here or (until.done() and until.exception()):
                    return
                self._next += 1
                job = self._first._replace(step=self._next - 1, stride=1)
            yield job

    @property
    def all_made(self) -> bool:
        """Whether this process has made the last step."""
        return self._next >= self._stop

    def __iter__(self) -> Iterator[Job | None]:
        first, stop, num_greetings = self._first, self._stop, self._num_greetings
        yield from [None] * num_greetings
        with self._lock:
            # This process makes a step for each worker while these make their first.
            ahead = self._num_workers if num_greetings else 0
            self._stop_here = begin = min(stop, self._next + ahead)
        for step in range(begin, stop):
            yield first._replace(step=step, stride=self._num_workers)

    def __len__(self) -> int:
        return self._num_greetings + self._stop - self._first.step


def _as_it_is(batch: Any) -> Any:
    return batch


def _explained(error: BaseException, num_up: int) -> BaseException:
    """Return what to raise where workers could not be started."""
    if isinstance(error, EOFError | ConnectionError):
        made: Exception = MMStreamError(
            "the process that workers are forked from has ended; what it said stands above. "
            'Start again, or with multiprocessing_context="spawn"'
        )
    elif num_up == 0 and "exited unexpectedly" in str(error):
        made = ConfigError(
            "workers ended while they started; what they said stands above. If it is of a "
            "missing import, or of this script itself: put what the script runs under "
            '`if __name__ == "__main__":`'
        )
    else:
        return error
    made.__cause__ = error
    return made


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(torch.initial_seed())


def _apart(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield batches with global random generators of their own.

    How many are made here depends on the clock; what a model draws must not.
    """
    seed = torch.initial_seed() % 2**32
    own: tuple[Any, ...] = (
        random.Random(seed).getstate(), np.random.RandomState(seed).get_state(),
        _generator().get_state(),
    )  # fmt: skip
    while True:
        theirs = _swap_random(own)
        try:
            made = next(batches, None)
        finally:
            own = _swap_random(theirs)
        if made is None:
            return
        yield made


def _swap_random(states: tuple[Any, ...]) -> tuple[Any, ...]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return before
