"""The raw samples of steps, read by this process.

In: jobs, the steps that this process delivers. Out: the raw samples of each step. Local files are
read step by step (``blocks.py``). Object stores are read window by window (``windows.py``), where
no reader process does it.
"""

from __future__ import annotations

from collections.abc import Callable

from mmstream.dataset.source import ShardSource, datasets_of
from mmstream.order import AnyOrder
from mmstream.reading.blocks import BlockReads
from mmstream.reading.fetcher import Fetcher
from mmstream.reading.large_samples import LargeFiles
from mmstream.reading.lookup import SampleLookup
from mmstream.reading.packed_rows import PackedRows
from mmstream.reading.step import BatchLineage, Job, RawStep
from mmstream.reading.windows import WindowReads


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
