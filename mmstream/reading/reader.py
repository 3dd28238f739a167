"""The second stage: order -> READ -> decode -> batch -> loader -> device.

In: jobs, the steps that this process shall deliver. Out: each step's raw samples. Bytes are read a
window at a time, ahead of use, in ranges that are merged where samples lie close: a worker that
owns whole lanes reads megabytes at once and no byte twice from storage. Only raw bytes are held,
and only until their step; windows of different lanes end one after another, so memory stays near
half of all windows (`Order`'s default: 2 GiB over all ranks and workers). Of local shards the
system's page cache holds them, where it does: that memory is shared, and can be taken back.

The first step of a run, or after a resume, reads just its own samples; the rest of its windows
follow in the background.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

import numpy as np

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.mixture import Mixture
from mmstream.order import AnyOrder, Window
from mmstream.order.checks import keep
from mmstream.reading.fetcher import Fetched, Fetcher, Outcome
from mmstream.types import SampleRef

__all__ = ["Job", "Outcome", "RawStep", "Reader", "read"]

NUM_THREADS = 4
STEPS_AHEAD = 2


Piece: TypeAlias = tuple[np.ndarray, Fetched]
"""Samples of a window by place, and the slot of each place: step * G + row, rising."""


class Job(NamedTuple):
    """One step for one process: rows [start, stop) of it."""

    epoch: int
    step: int
    start: int
    stop: int
    stride: int = 1
    """This process's next job is `stride` steps later."""


class RawStep(NamedTuple):
    """The raw samples of a job, a row each."""

    job: Job
    refs: list[SampleRef]
    valid: list[bool]
    samples: list[Outcome]
    num_bytes: int
    """Read from storage since the step before."""
    num_requests: int


def read(jobs: Iterable[Job], reader: Reader) -> Iterator[RawStep]:
    """Yield the raw samples of each job.

    Raises:
        StorageError: storage failed after retries; never turned into a bad sample.
    """
    for job in jobs:
        yield reader.step(job)


class Reader:
    """Reads the windows of a run ahead of their use. Belongs to one process; holds threads.

    A window is held in pieces: usually one, loaded whole before its first step; two where its
    first step could not be foreseen (a start, a resume), so that this step need not wait.

    Args:
        dataset: what to read.
        order: which samples, and when.
        zero_copy: fields are memoryviews of the range that was read instead of bytes of their own:
            nothing is copied, and a range stays in memory until the last view of it is dropped.
        ahead: whether windows are read; False: the samples of each step alone, when it is asked
            for: for the few steps of a process that others take over from.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture,
        order: AnyOrder,
        *,
        zero_copy: bool = False,
        ahead: bool = True,
    ) -> None:
        self.dataset, self.order, self._ahead = dataset, order, ahead
        self._fetcher = Fetcher(dataset, zero_copy=zero_copy)
        self._held: dict[tuple[int, int], list[Future[Piece]]] = {}
        self._whole: set[tuple[int, int]] = set()
        self._windows: dict[Job, list[int]] = {}
        self._following: Job | None = None
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="mmstream-read")

    def step(self, job: Job) -> RawStep:
        """Return the raw samples of one job; errors as `read`."""
        if self._ahead:
            self._look_ahead(job)
        shards, indexes, valid = (
            column[job.start : job.stop].tolist() for column in self.order.refs(job.epoch, job.step)
        )
        planned = list(zip(shards, indexes, strict=True))
        if self._ahead:
            samples = self._take(job, planned)
        else:
            fetched = self._fetcher.fetch(planned)
            samples = fetched.take_all(0, len(planned))
        return RawStep(job, planned, valid, samples, *self._fetcher.pop_counts())

    def _look_ahead(self, job: Job) -> None:
        """Start loading what this step and those behind it need, and forget what none needs."""
        self._forget(job)
        numbers = self._numbers(job)
        for number in numbers:  # unforeseen windows: this step's samples first
            if (job.epoch, number) not in self._held:
                self._load(job, number, head=True)
        for turn in range(1, STEPS_AHEAD + 1):
            ahead = job._replace(step=job.step + turn * job.stride)
            if ahead.step < self.order.steps_per_epoch:
                self._foresee(ahead)
        for number in numbers:
            if (job.epoch, number) not in self._whole:
                self._load(job._replace(step=job.step + job.stride), number, head=False)

    def one(self, ref: SampleRef) -> Outcome:
        """Read one sample from storage, now: a second look, or a substitute."""
        return self._fetcher.fetch([ref]).take(0)

    def close(self) -> None:
        """Stop reading ahead."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _numbers(self, job: Job) -> list[int]:
        """Return the windows that a job's rows are drawn from."""
        found = self._windows.get(job)
        if found is None:
            windows = self.order.windows(job.epoch, job.step)[job.start : job.stop]
            found = sorted(set(windows.tolist()))
            keep(self._windows, job, found, most=2 * STEPS_AHEAD)
        return found

    def _foresee(self, job: Job) -> None:
        """Start loading what a later step needs: whole windows once their lane is running."""
        running = {number % self.order.stride for _, number in self._held}  # lanes
        for number in self._numbers(job):
            if (job.epoch, number) not in self._held:
                self._load(job, number, head=number % self.order.stride not in running)

    def _load(self, job: Job, number: int, *, head: bool) -> None:
        """Start loading what a window delivers to this process: at one step, or from it on."""
        key = (job.epoch, number)
        window = self.order.window(job.epoch, number)
        mine = (window.row >= job.start) & (window.row < job.stop)
        later = window.step - job.step
        mine &= (later == 0) if head else (later >= 0) & (later % job.stride == 0)
        if mine.any():
            self._held.setdefault(key, []).append(self._pool.submit(self._piece, window, mine))
        if not head:
            self._whole.add(key)

    def _piece(self, window: Window, mine: np.ndarray) -> Piece:
        steps, rows, shards, indexes = (column[mine] for column in window)
        slots = steps * self.order.global_batch_size + rows
        rising = np.argsort(slots, kind="stable")
        refs = np.column_stack((shards, indexes))[rising]
        return slots[rising], self._fetcher.fetch(refs, later=True)

    def _take(self, job: Job, planned: Sequence[SampleRef]) -> list[Outcome]:
        """Take a step's samples out of the windows; wait for those that are being loaded."""
        first = job.step * self.order.global_batch_size + job.start
        samples: list[Outcome | None] = [None] * len(planned)
        for number in self._numbers(job):
            for future in self._held.get((job.epoch, number), ()):
                slots, fetched = future.result()
                begin, end = slots.searchsorted((first, first + len(planned))).tolist()
                if begin < end:
                    found = fetched.take_all(begin, end)
                    for slot, sample in zip(slots[begin:end].tolist(), found, strict=True):
                        samples[slot - first] = sample
        return [
            self.one(ref) if sample is None else sample
            for sample, ref in zip(samples, planned, strict=True)
        ]

    def _forget(self, job: Job) -> None:
        """Forget windows that deliver nothing more here: after a jump, what was held for others."""
        jumped = job != self._following
        self._following = job._replace(step=job.step + job.stride)
        for key in list(self._held):
            if jumped or self.order.window(*key).step[-1] < job.step:
                for future in self._held.pop(key):
                    future.cancel()
                self._whole.discard(key)
