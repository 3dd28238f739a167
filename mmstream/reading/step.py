"""A step on its way: what is asked for, and the record that travels from read to the logs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mmstream.errors import SampleError, ShardError
from mmstream.order import AnyOrder
from mmstream.storage.transfers import TransferCounts
from mmstream.types import BadSample, IntArray, Sample, SampleRef

Outcome: TypeAlias = Sample | SampleError | ShardError
"""A raw sample, or why there is none."""


class Job(NamedTuple):
    """One step for one process: rows [start, stop) of G."""

    epoch: int
    step: int
    start: int
    stop: int
    stride: int = 1
    """The next job of this process is `stride` steps later."""
    iteration: int = 0
    """Number of the iteration in the reader process of the rank, where there is one."""


def later_job(job: Job, turns: int, steps_per_epoch: int) -> Job:
    """Return the job of the same process some turns later. Epochs follow one another.

    Examples:
        >>> job = Job(epoch=0, step=7, start=0, stop=4, stride=2)
        >>> later_job(job, turns=1, steps_per_epoch=8)[:2]  # epoch and step
        (1, 1)
    """
    epochs, step = divmod(job.step + turns * job.stride, steps_per_epoch)
    return job._replace(epoch=job.epoch + epochs, step=step)


def rows_of_job(order: AnyOrder, job: Job) -> tuple[int, int]:
    """Return the rows of its step that a job delivers. Steps of some orders have fewer than G."""
    return order.rows_of(job.epoch, job.step, (job.start, job.stop))


@dataclass(frozen=True)
class BatchLineage:
    """Where the rows of a batch come from: ``batch["__lineage__"]``.

    `read` makes it from the plan. `decode` adds what is shown instead of bad samples. The loader
    counts by it, and the training log writes it down.

    A row is one sample, or a pack of several. Where a pipeline repeats samples, all
    here counts samples, and the batch has `repeat` rows of each. With packs, `planned` and `shown`
    have one entry per sample, and `planned_rows` and `rows` say the row of each.

    Example: a rank has two packs, of samples a, b and c, d, e. Sample d is bad::

        planned       a b c d e        shown   a b c e
        planned_rows  0 0 1 1 1        rows    0 0 1 1        valid  True True
    """

    epoch: int
    step: int
    start: int
    """First row of this rank in the global batch."""
    planned: list[SampleRef]
    """(shard, index) of each sample, as the order says."""
    valid: list[bool]
    """One entry per row. False for padding, for masked rows, and for rows whose bad samples nothing
    replaces."""
    shown: list[SampleRef]
    """(shard, index) of each sample as delivered: a substitute's where the planned one was bad."""
    bad: tuple[BadSample, ...] = ()
    planned_rows: list[int] | None = None
    """Row of this batch, from 0, of each of `planned`; it never falls. None: entry i is row i."""
    rows: list[int] | None = None
    """Row of this batch, from 0, of each of `shown`; it never falls. None: entry i is row i."""
    order_rows: list[int] | None = None
    """Row of the global batch of each row of this batch: packs are dealt to ranks by their cost.
    None: row i is row `start` + i of the global batch."""
    num_cut_texts: int = 0
    """Texts of valid rows that `max_length` has cut."""
    num_dropped_parts: int = 0
    """Parts of conversations in valid rows that nothing decodes, and that were dropped."""
    text_losses: tuple[str, ...] = ()
    """One of these texts, and one that has lost parts: ``shard[index] key.field: `` and what."""
    num_planned_tokens: int = 0
    """Tokens of all planned samples of packs, as measured."""
    num_longer: int = 0
    """Samples of packs that have more tokens than were measured."""
    num_shorter: int = 0
    """Samples of packs that have fewer."""
    unlike_measured: str = ""
    """``shard[index] key: `` and the tokens of one of them, and as many as were measured."""
    repeat: int = 1
    """Rows of the batch for each sample, side by side: row r shows ``shown[r // repeat]``."""
    num_bytes: int = 0
    """Bytes read from storage since the step before."""
    num_requests: int = 0
    """Ranges read from storage since the step before."""
    transfers: TransferCounts = field(default_factory=TransferCounts)
    """All that the reader process of the rank has counted since the step before."""
    num_wrong_reads: int = 0
    """Samples and indexes that came with bytes unlike their checksums since the step before. Each
    was read again."""
    read_s: float = field(default=0.0, compare=False)
    """Seconds that the process which made the batch waited for its samples."""
    decode_s: float = field(default=0.0, compare=False)
    """Seconds that it decoded and transformed them. Substitutes are read in this time, too."""
    collate_s: float = field(default=0.0, compare=False)
    """Seconds that it made the batch of them."""

    @property
    def num_rows(self) -> int:
        """Rows of this rank, padding included."""
        return len(self.valid)

    def order_row(self, row: int) -> int:
        """Return the row of the global batch of a row of this batch."""
        return self.start + row if self.order_rows is None else self.order_rows[row]

    def planned_row(self, number: int) -> int:
        """Return the row of this batch that a planned sample belongs to."""
        return number if self.planned_rows is None else self.planned_rows[number]

    def bad_numbers(self) -> list[int]:
        """Return the number among `planned` of each of `bad`."""
        if self.planned_rows is None:
            return [record.row - self.start for record in self.bad]
        first_of_row: dict[int, int] = {}
        for number, row in enumerate(self.planned_rows):
            first_of_row.setdefault(self.order_row(row), number)
        return [first_of_row[record.row] + (record.document or 0) for record in self.bad]

    def to(self, *_: Any, **__: Any) -> BatchLineage:
        """Return itself. Code that moves batches to a device calls this on each value."""
        return self


class RawStep(NamedTuple):
    """The raw samples of a job: one entry per planned sample."""

    lineage: BatchLineage
    outcomes: list[Outcome]
    num_tokens: list[int] | None = None
    """Measured tokens of each planned sample, where rows are packs."""


# -- rows of several samples -----------------------------------------------------------------------
#
# A step of packs holds its samples in the order of rows, those of a row side by side. A sample's
# *seat* is its number among the samples of the step that this process reads. Without packs the seat
# is the row.


class PackedRows(NamedTuple):
    """The rows of a step of this rank."""

    counts: IntArray
    """[rows] samples of each row. 0: padding."""
    order_rows: IntArray
    """[rows] row of the global batch."""
    num_tokens: IntArray
    """[N] measured tokens of each sample."""

    @classmethod
    def of_step(
        cls, order: AnyOrder, epoch: int, step: int, rows: tuple[int, int]
    ) -> PackedRows | None:
        """Return the rows [start, stop) of a step. None: each row is one sample."""
        if not order.is_packed:
            return None
        return cls(
            order.document_counts(epoch, step, rows),
            order.order_rows(epoch, step, rows),
            order.document_tokens(epoch, step, rows),
        )

    @property
    def num_samples(self) -> int:
        """Samples of all rows."""
        return int(self.counts.sum())

    @property
    def first_seats(self) -> IntArray:
        """[rows] the seat of the first sample of each row."""
        return np.cumsum(self.counts) - self.counts

    def lineage_fields(self) -> dict[str, Any]:
        """Return what the `BatchLineage` of the step has beside its samples."""
        rows = np.arange(self.counts.size)
        return {
            "valid": (self.counts > 0).tolist(),
            "planned_rows": np.repeat(rows, self.counts).tolist(),
            "order_rows": self.order_rows.tolist(),
            "num_planned_tokens": int(self.num_tokens.sum()),
        }


def seats_of(rows: IntArray, first_seats: IntArray) -> IntArray:
    """Return the seat of each sample of one window and step.

    Args:
        rows: [n] row of each sample. Samples of a row are side by side, and all of them are there.
        first_seats: [rows] as `PackedRows` has them.

    Examples:
        >>> seats_of(np.array([2, 2, 0]), first_seats=np.array([0, 1, 3]))  # 1, 2 and 2 samples
        array([3, 4, 0])
    """
    numbers = np.arange(rows.size)
    is_first = np.diff(rows, prepend=-1) != 0
    return first_seats[rows] + numbers - np.maximum.accumulate(np.where(is_first, numbers, 0))
