"""The raw samples of steps, read by this process.

In: jobs, the steps that this process delivers. Out: the raw samples of each step. Local files are
read step by step. Object stores are read window by window, where no reader process does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mmstream.dataset.source import ShardSource, datasets_of
from mmstream.order import AnyOrder, Window
from mmstream.order.cache import keep
from mmstream.reading.fetcher import Fetcher
from mmstream.reading.held import HeldSamples
from mmstream.reading.large_samples import LargeFiles
from mmstream.reading.lookup import SampleLookup
from mmstream.reading.step import (
    BatchLineage,
    Job,
    Outcome,
    PackedRows,
    RawStep,
    later_job,
    seats_of,
)
from mmstream.types import IntArray

# -- local files: a few steps at once, as late as possible -----------------------------------------
#
# The system's page cache is the shuffle buffer here. So no window is held in this process, and it
# makes no difference that the workers of a rank share windows. Some steps are read together, a
# *block*: samples that lie close together share a read, and files are opened once for several
# steps.

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


# -- object stores that this process reads itself --------------------------------------------------
#
# A window (shuffle buffer) is read as a whole, in merged ranges, because each range is a request. A
# process that owns whole lanes reads megabytes at once and no byte twice. Only raw bytes are held,
# and only until their step. By default all windows hold at most 2 to 8 GiB over all ranks. Windows
# of different lanes end one after another, so about half of that is filled at a time.
#
# The first step of a run, or after a resume, reads only its own samples. The rest of its windows
# follows in the background.

NUM_THREADS = 4
"""Windows that are read side by side."""

STEPS_AHEAD = 2
"""Steps of this process whose windows are read before they are asked for."""

WindowKey: TypeAlias = tuple[int, int]
"""(epoch, number of the window)."""

Delivery: TypeAlias = tuple[IntArray, HeldSamples]
"""Slots of a window's samples, rising, and the samples in that order. Slot = step * G + row. The
samples of a pack have one slot and follow one another."""


class WindowReads:
    """Reads whole windows in threads, some steps before they are needed.

    A window is usually held whole: it is read before its first step. At a start or a resume it is
    held in two deliveries, so that the first step need not wait for the whole window.
    """

    def __init__(self, order: AnyOrder, fetcher: Fetcher) -> None:
        self._order = order
        self._fetcher = fetcher
        self._deliveries: dict[WindowKey, list[Future[Delivery]]] = {}
        self._whole_windows: set[WindowKey] = set()
        self._windows_of_job: dict[Job, list[int]] = {}
        self._expected_job: Job | None = None
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="mmstream-read")

    def take(self, job: Job) -> list[Outcome | None]:
        """Return the samples of a job, in the order of rows; None: it was not read.

        Raises:
            StorageError: storage failed after retries.
        """
        self._read_ahead(job)
        return self._take(job)

    def close(self) -> None:
        """Stop reading ahead."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read_ahead(self, job: Job) -> None:
        """Start reading what this step and the next ones need; drop what no step needs any more."""
        self._drop_finished(job)
        numbers = self._windows(job)
        for number in numbers:  # not foreseen: the samples of this step come first
            if (job.epoch, number) not in self._deliveries:
                self._start_reading(job, number, this_step_only=True)
        for turn in range(1, STEPS_AHEAD + 1):
            self._foresee(later_job(job, turn, self._order.steps_per_epoch))
        for number in numbers:
            if (job.epoch, number) not in self._whole_windows:
                next_job = job._replace(step=job.step + job.stride)
                self._start_reading(next_job, number, this_step_only=False)

    def _windows(self, job: Job) -> list[int]:
        """Return the numbers of the windows that the rows of a job are drawn from."""
        numbers = self._windows_of_job.get(job)
        if numbers is None:
            window_of_row = self._order.windows(job.epoch, job.step, (job.start, job.stop))
            numbers = sorted(set(window_of_row.tolist()))
            keep(self._windows_of_job, job, numbers, most=2 * STEPS_AHEAD)
        return numbers

    def _foresee(self, job: Job) -> None:
        """Start reading what a later step needs.

        In a lane with a window in memory that is the whole next window, in other lanes this step's
        samples only.
        """
        running_lanes = {
            number % self._order.stride for epoch, number in self._deliveries if epoch == job.epoch
        }
        for number in self._windows(job):
            if (job.epoch, number) not in self._deliveries:
                is_new_lane = number % self._order.stride not in running_lanes
                self._start_reading(job, number, this_step_only=is_new_lane)

    def _start_reading(self, job: Job, number: int, *, this_step_only: bool) -> None:
        """Start reading what a window delivers to this process: at one step, or from it on."""
        key = (job.epoch, number)
        window = self._order.window(job.epoch, number)
        is_wanted = (window.row >= job.start) & (window.row < job.stop)
        steps_later = window.step - job.step
        if this_step_only:
            is_wanted &= steps_later == 0
        else:
            is_wanted &= (steps_later >= 0) & (steps_later % job.stride == 0)
            self._whole_windows.add(key)
        if is_wanted.any():
            delivery = self._pool.submit(self._deliver, window, is_wanted)
            self._deliveries.setdefault(key, []).append(delivery)

    def _deliver(self, window: Window, is_wanted: npt.NDArray[np.bool_]) -> Delivery:
        steps, rows, shards, indexes = (column[is_wanted] for column in window)
        slots = steps * self._order.global_batch_size + rows
        by_slot = np.argsort(slots, kind="stable")
        refs = np.column_stack((shards, indexes))[by_slot]
        return slots[by_slot], self._fetcher.fetch(refs)

    def _take(self, job: Job) -> list[Outcome | None]:
        """Take the samples of a step out of its windows; waits for those that are being read."""
        first_slot = job.step * self._order.global_batch_size + job.start
        num_rows = job.stop - job.start
        packed = PackedRows.of_step(self._order, job.epoch, job.step, (job.start, job.stop))
        num_samples = num_rows if packed is None else packed.num_samples
        outcomes: list[Outcome | None] = [None] * num_samples
        for number in self._windows(job):
            for delivery in self._deliveries.get((job.epoch, number), ()):
                slots, held = delivery.result()
                bounds = slots.searchsorted((first_slot, first_slot + num_rows))
                begin, end = bounds.tolist()
                if begin < end:
                    rows = slots[begin:end] - first_slot
                    seats = rows if packed is None else seats_of(rows, packed.first_seats)
                    for seat, outcome in zip(
                        seats.tolist(), held.take_all(begin, end), strict=True
                    ):
                        outcomes[seat] = outcome
        return outcomes

    def _drop_finished(self, job: Job) -> None:
        """Drop windows that deliver nothing more here. After a jump, drop all of them."""
        has_jumped = job != self._expected_job
        self._expected_job = later_job(job, 1, self._order.steps_per_epoch)
        for key in list(self._deliveries):
            is_over = (key[0], int(self._order.window(*key).step[-1])) < (job.epoch, job.step)
            if has_jumped or is_over:
                for delivery in self._deliveries.pop(key):
                    delivery.cancel()
                self._whole_windows.discard(key)


# -- the reader of this process --------------------------------------------------------------------


class Reader:
    """Reads steps. Belongs to one process; may hold threads.

    Args:
        source: what to read.
        order: which samples, and when.
        zero_copy: fields are memoryviews, not bytes of their own. Local shards are mapped; other
            ranges stay in memory until their last view is gone.
        is_viewed: tells which fields of local shards are views of what was read, without
            `zero_copy`. None: none.
        in_background: read local files in a thread, while the caller does other things. Object
            stores are always read in threads.
        large_files: which files are read by ranges, when they are decoded. None: all samples are
            read whole.

    Attributes:
        lookup: reads single samples, with the same connections.
    """

    def __init__(
        self,
        source: ShardSource,
        order: AnyOrder,
        *,
        zero_copy: bool = False,
        is_viewed: Callable[[str], bool] | None = None,
        in_background: bool = False,
        large_files: LargeFiles | None = None,
    ) -> None:
        self._order = order
        is_concurrent = any(dataset.store.access.concurrent for dataset in datasets_of(source))
        self._fetcher = Fetcher(
            source,
            zero_copy=zero_copy,
            # Views hold whole ranges in memory, and a window is held for many steps.
            is_viewed=None if is_concurrent else is_viewed,
            large_files=large_files,
        )
        self.lookup = SampleLookup(source, order, self._fetcher)
        self._reads: BlockReads | WindowReads
        if is_concurrent:
            self._reads = WindowReads(order, self._fetcher)
        else:
            self._reads = BlockReads(
                order, self._fetcher, zero_copy=zero_copy, in_background=in_background
            )

    def step(self, job: Job) -> RawStep:
        """Return the raw samples of a job, in the order of rows.

        Raises:
            StorageError: storage failed after retries; this is never turned into a bad sample.
        """
        outcomes = self._reads.take(job)
        rows = job.start, job.stop
        shards, indexes, valid = (
            column.tolist() for column in self._order.refs(job.epoch, job.step, rows)
        )
        planned = list(zip(shards, indexes, strict=True))
        samples = [
            self.lookup.read(ref) if outcome is None else outcome
            for outcome, ref in zip(outcomes, planned, strict=True)
        ]
        num_bytes, num_requests = self._fetcher.pop_counts()
        packed = PackedRows.of_step(self._order, job.epoch, job.step, rows)
        of_rows = {"valid": valid} if packed is None else packed.lineage_fields()
        lineage = BatchLineage(
            job.epoch,
            job.step,
            job.start,
            planned,
            shown=planned,
            num_bytes=num_bytes,
            num_requests=num_requests,
            **of_rows,
        )
        return RawStep(lineage, samples, None if packed is None else packed.num_tokens.tolist())

    def pop_counts(self) -> tuple[int, int]:
        """Return how many bytes and ranges were read since the previous call."""
        return self._fetcher.pop_counts()

    def pop_wrong_reads(self) -> int:
        """Return how many samples and indexes came with wrong bytes since the previous call."""
        return self._fetcher.pop_wrong_reads()

    def close(self) -> None:
        """Stop reading ahead."""
        self._reads.close()
