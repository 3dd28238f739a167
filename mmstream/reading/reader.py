"""The raw samples of steps, read by this process or by the reader process of its rank.

In: jobs, the steps that this process delivers. Out: the raw samples of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from mmstream.dataset.dataset import ShardSource
from mmstream.order import AnyOrder
from mmstream.reading.fetcher import (
    NO_CHECKSUM,
    Fetcher,
    HeldSamples,
    LargeFiles,
    SampleLookup,
    SampleTable,
)
from mmstream.reading.process import MAX_AHEAD, StepConnection, StepHeader, StepRequest
from mmstream.reading.step import (
    BatchLineage,
    Job,
    Outcome,
    PackedRows,
    RawStep,
    later_job,
    rows_of_job,
)
from mmstream.storage.transfers import TransferCounts
from mmstream.types import SampleRef


def raw_step(
    job: Job,
    start: int,
    planned: list[SampleRef],
    samples: list[Outcome],
    valid: list[bool],
    packed: PackedRows | None,
    fetcher: Fetcher,
    transfers: TransferCounts | None = None,
) -> RawStep:
    """Return the samples of a job with the record of what was read.

    Args:
        job: the step.
        start: its first row of this rank.
        planned: (shard, index) of each sample, as the order says.
        samples: one for each of them.
        valid: of each row; not used for packs, which know it themselves.
        packed: how samples make rows, where rows are packs.
        fetcher: what this process has read since the step before.
        transfers: what the reader process has.
    """
    transfers = transfers or TransferCounts()
    counts = fetcher.counts.pop()
    of_rows = {"valid": valid} if packed is None else packed.lineage_fields()
    lineage = BatchLineage(
        job.epoch,
        job.step,
        start,
        planned,
        shown=planned,
        num_bytes=transfers.num_bytes + counts["num_bytes"],
        num_requests=transfers.num_requests + counts["num_requests"],
        num_wrong_reads=counts["num_wrong_reads"],
        transfers=transfers,
        **of_rows,
    )
    samples = fetcher.without_removed(planned, samples)
    return RawStep(lineage, samples, None if packed is None else packed.num_tokens.tolist())


# -- steps that this process reads itself ----------------------------------------------------------
#
# The system's page cache is the shuffle buffer here. So no window is held in this process, and it
# makes no difference that the workers of a rank share windows. Some steps are read together, a
# *block*: samples that lie close together share a read, and files are opened once for several
# steps.

BLOCK_BYTES = 32 << 20
"""Bytes of a block. It has at least one step, however large that is."""

BLOCK_STEPS = 4
"""Steps of a block, at most: files are watched for changes once a block."""


class _Block(NamedTuple):
    """Steps that are read together."""

    jobs: list[Job]
    starts: list[int]
    """Number of the first sample of each job, and of all samples."""
    held: HeldSamples


class Reader:
    """Reads steps. Belongs to one process; may hold a thread.

    Args:
        source: what to read.
        order: which samples, and when.
        is_viewed: tells which fields are views of what was read, not bytes of their own. None:
            none.
        in_background: read the next block in a thread. It helps where decoding leaves the
            interpreter free, and where reads are requests; else it only disturbs.
        large_files: which files are read by ranges, when they are decoded. None: all samples are
            read whole.

    Attributes:
        lookup: reads single samples, with the same connections. Its fetcher counts all reads.
    """

    def __init__(
        self,
        source: ShardSource,
        order: AnyOrder,
        *,
        is_viewed: Callable[[str], bool] | None = None,
        in_background: bool = False,
        large_files: LargeFiles | None = None,
    ) -> None:
        self._order = order
        self._fetcher = Fetcher(source, is_viewed=is_viewed, large_files=large_files)
        self.lookup = SampleLookup(source, order, self._fetcher)
        self._block = _Block([], [0], self._fetcher.fetch([]))
        self._untaken: set[Job] = set()
        self._next: tuple[Job, Future[_Block]] | None = None
        self._pool = (
            ThreadPoolExecutor(1, thread_name_prefix="mmstream-read") if in_background else None
        )

    def step(self, job: Job) -> RawStep:
        """Return the raw samples of a job, in the order of rows.

        Raises:
            StorageError: storage failed after retries; this is never turned into a bad sample.
        """
        samples = self._take(job)
        rows = rows_of_job(self._order, job)
        shards, indexes, valid = (
            column.tolist() for column in self._order.refs(job.epoch, job.step, rows)
        )
        planned = list(zip(shards, indexes, strict=True))
        packed = PackedRows.of_step(self._order, job.epoch, job.step, rows)
        return raw_step(job, rows[0], planned, samples, valid, packed, self._fetcher)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _take(self, job: Job) -> list[Outcome]:
        """Return the samples of a job, in the order of rows."""
        if job not in self._untaken:  # samples can be taken once; after a jump back, read again
            self._begin_block(job)
        self._untaken.remove(job)
        number = self._block.jobs.index(job)
        first, stop = self._block.starts[number : number + 2]
        return self._block.held.take_all(first, stop)

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
        return max(1, min(BLOCK_STEPS, BLOCK_BYTES // bytes_per_step))

    def _later(self, job: Job, turns: int = 1) -> Job:
        return later_job(job, turns, self._order.steps_per_epoch)

    def _jobs(self, first: Job, num_steps: int) -> list[Job]:
        jobs = (self._later(first, turns) for turns in range(num_steps))
        return [job for job in jobs if job.epoch == first.epoch]

    def _read(self, jobs: Sequence[Job]) -> _Block:
        """Read the samples of some steps."""
        order = self._order
        planned = [order.refs(job.epoch, job.step, rows_of_job(order, job)) for job in jobs]
        refs = [np.column_stack((shards, indexes)) for shards, indexes, _ in planned]
        starts = [0, *accumulate(map(len, refs))]
        return _Block(list(jobs), starts, self._fetcher.fetch(np.concatenate(refs)))


# -- steps from the reader process -----------------------------------------------------------------

AHEAD_BYTES = 16 << 20
"""As many steps as fit in this are asked for ahead, and one in any case. While ranges arrive, the
reader process is busy for some milliseconds at a time, and answers late. With two steps of 8 MB
ahead in place of one, a loop that only reads took a tenth more samples a second."""


class StepReader:
    """Asks the reader process for steps, and makes samples of their bytes.

    It takes the place of a `Reader`. Single samples, such as substitutes of bad ones, are read by
    this process itself.

    Args:
        source: what is read.
        order: which samples, and when.
        connection: to the reader process.
        is_viewed: tells which fields are views of what was read, not bytes of their own. None:
            none.
        keeps_views: views stay valid; else they hold until the next step.
        large_files: which files are read by ranges: this process reads them itself, when they are
            decoded. None: all come with their step.
        asks_ahead: ask for the next steps before the samples of one are made, so that the reader
            process takes their samples meanwhile. They are in memory, too, then.

    Attributes:
        lookup: reads single samples. Its fetcher counts what this process has read.
    """

    def __init__(
        self,
        source: ShardSource,
        order: AnyOrder,
        connection: StepConnection,
        *,
        is_viewed: Callable[[str], bool] | None = None,
        keeps_views: bool = False,
        large_files: LargeFiles | None = None,
        asks_ahead: bool = False,
    ) -> None:
        self._source, self._order, self._keeps_views = source, order, keeps_views
        self._fetcher = Fetcher(source, is_viewed=is_viewed, large_files=large_files)
        self.lookup = SampleLookup(source, order, self._fetcher)
        self._connection = connection
        self._asks_ahead = asks_ahead

    def step(self, job: Job) -> RawStep:
        """Return the raw samples of a job, in the order of rows.

        Raises:
            ShardError: the reader process has read another version of a shard than this process,
                and there are no checksums.
            StorageError: storage failed for good.
            MMStreamError: the reader process has ended.
        """
        header, data = self._connection.ask(StepRequest(job.iteration, job.epoch, job.step))
        if self._asks_ahead:
            self._ask_ahead(job, int(header.samples.sizes.sum()))
        for shard, stat in header.read_shards:
            location = self._source.locate(shard)
            location.dataset.shards.expect(location.shard, stat)
        samples = header.samples
        outcomes = self._outcomes(header, data)
        self._fetcher.counts.add(num_wrong_reads=header.num_wrong_reads)
        return raw_step(
            job,
            rows_of_job(self._order, job)[0],
            list(zip(samples.shard.tolist(), samples.index.tolist(), strict=True)),
            outcomes,
            samples.valid.tolist(),
            samples.packed,
            self._fetcher,
            header.counts,
        )

    def close(self) -> None:
        """Do nothing: the connection is used again, and its owner closes it."""

    def _ask_ahead(self, job: Job, num_bytes: int) -> None:
        """Ask for the steps after a job, as many as `AHEAD_BYTES` says if all have `num_bytes`."""
        num_ahead = min(MAX_AHEAD, max(1, AHEAD_BYTES // max(1, num_bytes)))
        for turns in range(self._connection.num_ahead + 1, num_ahead + 1):
            later = later_job(job, turns, self._order.steps_per_epoch)
            self._connection.ask_ahead(StepRequest(later.iteration, later.epoch, later.step))

    def _outcomes(self, header: StepHeader, data: memoryview) -> list[Outcome]:
        """Make samples of the bytes of a step. They have been compared."""
        samples, starts = header.samples, header.starts
        num_seats, stops = samples.shard.size, starts + samples.sizes
        held = HeldSamples(self._fetcher, num_seats)
        held.large.update(samples.large)
        for seat, error in samples.errors.items():
            held.put_error(np.array([seat]), error)
        if self._keeps_views:
            bounds = zip(starts.tolist(), stops.tolist(), strict=True)
            data = memoryview(b"".join([data[start:stop] for start, stop in bounds]))
            stops = np.cumsum(samples.sizes)
            starts = stops - samples.sizes
        seats = np.setdiff1d(np.arange(num_seats), list(samples.errors))
        table = SampleTable(
            samples.shard[seats],
            samples.index[seats],
            starts[seats],
            stops[seats],
            seats,
            np.full(seats.size, NO_CHECKSUM, dtype=np.int64),
        )
        held.put(table, [data], np.zeros(1, dtype=np.int64), np.zeros_like(seats))
        return held.take_all(0, num_seats)
