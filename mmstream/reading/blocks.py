"""Steps of local files: a few of them at once, as late as possible.

The system's page cache is the shuffle buffer here. So no window is held in this process, and it
makes no difference that the workers of a rank share windows. Some steps are read together, a
*block*: samples that lie close together share a read, and files are opened once for several steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from mmstream.order import AnyOrder
from mmstream.reading.fetcher import Fetcher
from mmstream.reading.held import HeldSamples
from mmstream.reading.step import Job, Outcome, later_job
from mmstream.types import IntArray

READ_BYTES = 32 << 20
"""Bytes of a block that is read into memory. It has at least one step, however large that is."""

MAPPED_BYTES = 128 << 20
"""Bytes of a block whose samples are views of mapped files: these take no memory of their own."""

READ_STEPS = 4
"""Steps of such a block, at most: files are watched for changes once a block."""

MAPPED_STEPS = 64
"""Steps of a block of such views, at most. Their files are compared again at each step. With 4
steps, samples of 20 kB in batches of 64 cost twice as much as with 24."""

MAX_STEPS_OF_NEXT_EPOCH = 4
"""Steps of a block that begins an epoch, at most: it is read ahead, and the run may end before."""


class _Block(NamedTuple):
    """Steps that are read together."""

    jobs: list[Job]
    starts: list[int]
    """Number of the first sample of each job, and of all samples."""
    held: HeldSamples


class BlockReads:
    """Reads the steps of local files, a block of them at once.

    Args:
        order: which samples, and when.
        fetcher: reads them.
        zero_copy: samples are views of mapped files.
        in_background: read the next block in a thread. It helps where decoding leaves the
            interpreter free; else it only disturbs.
    """

    def __init__(
        self, order: AnyOrder, fetcher: Fetcher, *, zero_copy: bool, in_background: bool
    ) -> None:
        self._order = order
        self._max_bytes = MAPPED_BYTES if zero_copy else READ_BYTES
        self._max_steps = MAPPED_STEPS if zero_copy else READ_STEPS
        self._fetcher = fetcher
        self._block = _Block([], [0], fetcher.fetch([]))
        self._untaken: set[Job] = set()
        self._next: tuple[Job, Future[_Block]] | None = None
        self._pool = (
            ThreadPoolExecutor(1, thread_name_prefix="mmstream-read") if in_background else None
        )

    def take(self, job: Job) -> list[Outcome | None]:
        """Return the samples of a job, in the order of rows.

        Raises:
            StorageError: storage failed after retries.
        """
        if job not in self._untaken:  # samples can be taken once; after a jump back, read again
            self._begin_block(job)
        self._untaken.remove(job)
        number = self._block.jobs.index(job)
        first, stop = self._block.starts[number : number + 2]
        return list(self._block.held.take_all(first, stop))

    def close(self) -> None:
        """Stop reading ahead."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin_block(self, job: Job) -> None:
        """Read the block of a job, or take it where it was read ahead."""
        follows = bool(self._block.jobs) and job == self._later(self._block.jobs[-1])
        reads, self._next = self._next, None
        if reads is not None and reads[0] == job:
            self._block = reads[1].result()
        else:
            num_steps = self._num_steps() if follows else 1
            self._block = self._read(self._jobs(job, num_steps))
        self._untaken = set(self._block.jobs)
        next_job = self._later(self._block.jobs[-1])
        if self._pool is not None:
            next_jobs = self._jobs(next_job, self._num_steps())
            self._next = next_job, self._pool.submit(self._read, next_jobs)

    def _num_steps(self) -> int:
        """Return how many steps a block has, by the bytes of the present one."""
        bytes_per_step = max(1, self._block.held.num_bytes // len(self._block.jobs))
        return max(1, min(self._max_steps, self._max_bytes // bytes_per_step))

    def _later(self, job: Job, turns: int = 1) -> Job:
        return later_job(job, turns, self._order.steps_per_epoch)

    def _jobs(self, first: Job, num_steps: int) -> list[Job]:
        if self._later(first, -1).epoch < first.epoch:
            num_steps = min(num_steps, MAX_STEPS_OF_NEXT_EPOCH)
        jobs = (self._later(first, turns) for turns in range(num_steps))
        return [job for job in jobs if job.epoch == first.epoch]

    def _read(self, jobs: Sequence[Job]) -> _Block:
        """Read the samples of some steps."""
        refs = [self._refs(job) for job in jobs]
        starts = [0, *accumulate(map(len, refs))]
        return _Block(list(jobs), starts, self._fetcher.fetch(np.concatenate(refs)))

    def _refs(self, job: Job) -> IntArray:
        shards, indexes, _ = self._order.refs(job.epoch, job.step, (job.start, job.stop))
        return np.column_stack((shards, indexes))
