"""Steps from the reader process of the rank: the read stage of a worker on remote storage."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mmstream.dataset.source import ShardSource
from mmstream.order import AnyOrder
from mmstream.reading.fetcher import Fetcher
from mmstream.reading.held import SampleTable
from mmstream.reading.large_samples import NO_CHECKSUM, LargeFiles
from mmstream.reading.lookup import SampleLookup
from mmstream.reading.messages import MAX_AHEAD, StepConnection, StepHeader, StepRequest
from mmstream.reading.step import BatchLineage, Job, Outcome, RawStep, later_job

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
        zero_copy: fields are memoryviews, not bytes of their own.
        is_viewed: tells which fields are views without `zero_copy`. They hold until the next step.
            None: none.
        large_files: which files are read by ranges: this process reads them itself, when they are
            decoded. None: all come with their step.
        asks_ahead: ask for the next steps before the samples of one are made, so that the reader
            process takes their samples meanwhile. They are in memory, too, then.

    Attributes:
        lookup: reads single samples.
    """

    def __init__(
        self,
        source: ShardSource,
        order: AnyOrder,
        connection: StepConnection,
        *,
        zero_copy: bool = False,
        is_viewed: Callable[[str], bool] | None = None,
        large_files: LargeFiles | None = None,
        asks_ahead: bool = False,
    ) -> None:
        self._source, self._order, self._zero_copy = source, order, zero_copy
        self._fetcher = Fetcher(
            source, zero_copy=zero_copy, is_viewed=is_viewed, large_files=large_files
        )
        self.lookup = SampleLookup(source, order, self._fetcher)
        self._connection = connection
        self._asks_ahead = asks_ahead
        self._num_wrong_reads = 0

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
            self._ask_ahead(job, int((header.stops - header.starts).sum()))
        for shard, stat in header.read_shards:
            location = self._source.locate(shard)
            location.dataset.shards.expect(location.shard, stat)
        outcomes = self._samples(header, data)
        planned = list(zip(header.shard.tolist(), header.index.tolist(), strict=True))
        self._num_wrong_reads += header.num_wrong_reads
        num_bytes, num_requests = self._fetcher.pop_counts()
        packed = header.packed
        of_rows = {"valid": header.valid.tolist()} if packed is None else packed.lineage_fields()
        lineage = BatchLineage(
            job.epoch,
            job.step,
            job.start,
            planned,
            shown=planned,
            num_bytes=header.counts.num_bytes + num_bytes,
            num_requests=header.counts.num_requests + num_requests,
            transfers=header.counts,
            **of_rows,
        )
        return RawStep(lineage, outcomes, None if packed is None else packed.num_tokens.tolist())

    def pop_counts(self) -> tuple[int, int]:
        """Return how many bytes and ranges this process has read since the previous call."""
        return self._fetcher.pop_counts()

    def pop_wrong_reads(self) -> int:
        """Return how many samples and indexes came with wrong bytes since the previous call."""
        count, self._num_wrong_reads = self._num_wrong_reads, 0
        return count + self._fetcher.pop_wrong_reads()

    def close(self) -> None:
        """Do nothing: the connection is used again, and its owner closes it."""

    def _ask_ahead(self, job: Job, num_bytes: int) -> None:
        """Ask for the steps after a job, as many as `AHEAD_BYTES` says if all have `num_bytes`."""
        num_ahead = min(MAX_AHEAD, max(1, AHEAD_BYTES // max(1, num_bytes)))
        for turns in range(self._connection.num_ahead + 1, num_ahead + 1):
            later = later_job(job, turns, self._order.steps_per_epoch)
            self._connection.ask_ahead(StepRequest(later.iteration, later.epoch, later.step))

    def _samples(self, header: StepHeader, data: memoryview) -> list[Outcome]:
        """Make samples of the bytes of a step. They have been compared."""
        num_seats = header.shard.size
        held = self._fetcher.new_held(num_seats)
        held.large.update(header.large)
        for seat, error in header.errors.items():
            held.put_error(np.array([seat]), error)
        starts, stops = header.starts, header.stops
        if self._zero_copy:  # views outlive the step
            bounds = zip(starts.tolist(), stops.tolist(), strict=True)
            data = memoryview(b"".join([data[start:stop] for start, stop in bounds]))
            sizes = stops - starts
            stops = np.cumsum(sizes)
            starts = stops - sizes
        seats = np.setdiff1d(np.arange(num_seats), list(header.errors))
        samples = SampleTable(
            header.shard[seats],
            header.index[seats],
            starts[seats],
            stops[seats],
            seats,
            np.full(seats.size, NO_CHECKSUM, dtype=np.int64),
        )
        held.put(samples, [data], np.zeros(1, dtype=np.int64), np.zeros_like(seats))
        return held.take_all(0, num_seats)
