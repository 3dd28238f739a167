"""The second stage: order -> READ -> decode -> batch -> loader -> device.

In: jobs, the steps that this process shall deliver. Out: each step's raw samples. Bytes are read a
window at a time, ahead of use, in ranges that are merged where samples lie close: a worker that
owns whole lanes reads megabytes at once and no byte twice. Only raw bytes are held, and only until
their step; windows of different lanes end one after another, so memory stays near half of all
windows (`Order`'s default: 2 GiB over all ranks and workers).

The first step of a run, or after a resume, reads just its own samples; the rest of its windows
follow in the background.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

import numpy as np

from mmstream.dataset import Dataset
from mmstream.errors import SampleError, ShardError
from mmstream.mixing import Mixture
from mmstream.order import AnyOrder, Window
from mmstream.sample import Sample
from mmstream.storage import LocalStore, RemoteStore

__all__ = ["Job", "RawStep", "Reader", "read"]

MAX_GAP_BYTES = {LocalStore: 4 * 1024, RemoteStore: 256 * 1024}
"""Samples closer than this come in one range: at 100 MB/s, 256 KiB cost 3 ms, a request 20."""

MAX_RANGE_BYTES = 8 * 1024 * 1024
"""Longest merged range: long enough for full bandwidth, short enough to run several at once."""

NUM_THREADS = 4
STEPS_AHEAD = 2

Outcome: TypeAlias = Sample | SampleError | ShardError
"""A raw sample, or why there is none."""

Ref: TypeAlias = tuple[int, int]
"""(shard, index)."""


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
    refs: list[Ref]
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
    """

    def __init__(self, dataset: Dataset | Mixture, order: AnyOrder) -> None:
        self.dataset, self.order = dataset, order
        self._held: dict[tuple[int, int], list[Future[dict[tuple[int, int], Outcome]]]] = {}
        self._whole: set[tuple[int, int]] = set()
        self._following: Job | None = None
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="mmstream-read")
        self._num_bytes = self._num_requests = 0
        self._counting = threading.Lock()

    def step(self, job: Job) -> RawStep:
        """Return the raw samples of one job; errors as `read`."""
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
        refs = self.order.refs(job.epoch, job.step)
        windows = self.order.windows(job.epoch, job.step)[job.start : job.stop]
        rows = range(job.start, job.stop)
        planned = [(int(refs.shard[row]), int(refs.index[row])) for row in rows]
        samples = [
            self._take(job, int(number), row, ref)
            for row, ref, number in zip(rows, planned, windows, strict=True)
        ]
        with self._counting:
            num_bytes, num_requests = self._num_bytes, self._num_requests
            self._num_bytes = self._num_requests = 0
        valid = refs.valid[job.start : job.stop].tolist()
        return RawStep(job, planned, valid, samples, num_bytes, num_requests)

    def one(self, ref: Ref) -> Outcome:
        """Read one sample from storage, now: a second look, or a substitute."""
        return self._read_all([ref])[0]

    def close(self) -> None:
        """Stop reading ahead."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _numbers(self, job: Job) -> list[int]:
        numbers = self.order.windows(job.epoch, job.step)[job.start : job.stop]
        return [int(number) for number in np.unique(numbers)]

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

    def _piece(self, window: Window, mine: np.ndarray) -> dict[tuple[int, int], Outcome]:
        steps, rows, shards, indexes = (column[mine].tolist() for column in window)
        outcomes = self._read_all(list(zip(shards, indexes, strict=True)))
        return dict(zip(zip(steps, rows, strict=True), outcomes, strict=True))

    def _take(self, job: Job, number: int, row: int, ref: Ref) -> Outcome:
        for future in self._held.get((job.epoch, number), ()):
            found = future.result().pop((job.step, row), None)
            if found is not None:
                return found
        return self.one(ref)  # a step asked for twice

    def _forget(self, job: Job) -> None:
        """Forget windows that deliver nothing more here: after a jump, what was held for others."""
        jumped = job != self._following
        self._following = job._replace(step=job.step + job.stride)
        for key in list(self._held):
            if jumped or self.order.window(*key).step[-1] < job.step:
                for future in self._held.pop(key):
                    future.cancel()
                self._whole.discard(key)

    def _read_all(self, refs: Sequence[Ref]) -> list[Outcome]:
        """Read samples in merged ranges. The one place where errors of data become values."""
        outcomes: dict[Ref, Outcome] = {}
        spans: list[tuple[int, int, int, Ref]] = []
        for shard, index in refs:
            try:
                offsets = self.dataset.offsets(shard)
            except ShardError as error:
                outcomes[shard, index] = error
            else:
                start, stop = int(offsets[index]), int(offsets[index + 1])
                spans.append((shard, start, stop, (shard, index)))
        merged = _merge(sorted(set(spans)), self._max_gap_bytes)
        ranges = [(group[0][0], group[0][1], group[-1][2]) for group in merged]
        for group, data in zip(merged, self.dataset.read_ranges(ranges), strict=True):
            outcomes |= self._split(group, data)
        with self._counting:
            self._num_bytes += sum(stop - start for _, start, stop in ranges)
            self._num_requests += len(ranges)
        return [outcomes[ref] for ref in refs]

    def _split(
        self, group: Sequence[tuple[int, int, int, Ref]], data: bytes | OSError
    ) -> dict[Ref, Outcome]:
        shard, begin, end = group[0][0], group[0][1], group[-1][2]
        if isinstance(data, OSError):
            error = self.dataset.explain(data, shard, end)
            if not isinstance(error, ShardError):
                raise error
            if len(group) == 1:
                return {group[0][3]: error}
            return {  # samples before the cut are still good
                item[3]: found
                for item in group
                for found in self._split([item], self._range_again(item)).values()
            }
        view = memoryview(data)
        outcomes: dict[Ref, Outcome] = {}
        for _, start, stop, ref in group:
            try:
                outcomes[ref] = self.dataset.parse(view[start - begin : stop - begin], *ref)
            except SampleError as error:
                outcomes[ref] = error
        return outcomes

    def _range_again(self, item: tuple[int, int, int, Ref]) -> bytes | OSError:
        return self.dataset.read_ranges([item[:3]])[0]

    def _max_gap_bytes(self, shard: int) -> int:
        return MAX_GAP_BYTES[type(self.dataset.store_of(shard))]


def _merge(
    spans: Sequence[tuple[int, int, int, Ref]], max_gap_bytes: Callable[[int], int]
) -> list[list[tuple[int, int, int, Ref]]]:
    """Group sorted (shard, start, stop, ref) spans that one range shall fetch."""
    groups: list[list[tuple[int, int, int, Ref]]] = []
    for span in spans:
        shard, start, stop, _ = span
        if groups:
            last = groups[-1]
            near = shard == last[-1][0] and start - last[-1][2] <= max_gap_bytes(shard)
            if near and stop - last[0][1] <= MAX_RANGE_BYTES:
                last.append(span)
                continue
        groups.append([span])
    return groups
