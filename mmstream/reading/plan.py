"""Which ranges of shards a rank reads, and when it needs them first.

The first half of a reader process: order -> PLAN -> transfers -> steps. It knows rows, windows and
byte offsets, and does no IO. Time is a clock that counts steps over all epochs: step 3 of epoch 2
is 23 where an epoch has 10 steps.

A window (shuffle buffer) is planned as a whole when its first step comes near. Its samples that lie
together become one range, a *run*. Only the rows of this rank count.

The first steps after a start are an exception. Nothing is there yet, and whole runs would take
long. So their samples, the *heads*, are ranges of their own, and the runs follow without them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.dataset.dataset import Dataset, ShardSource, datasets_of
from mmstream.dataset.index import SampleBounds
from mmstream.errors import ConfigError, ShardError
from mmstream.order import AnyOrder, BucketOrder, Order
from mmstream.order.lanes import request_factor
from mmstream.packing.order import PackOrder
from mmstream.packing.plan import MixturePlan
from mmstream.processes.machine import memory_bytes, num_local_ranks
from mmstream.reading.fetcher import LargeSample, SampleRange, first_bytes, starts_of_ranges
from mmstream.reading.step import PackedRows
from mmstream.storage import Access
from mmstream.types import IntArray

logger = logging.getLogger(__name__)

MAX_RUN_BYTES = 8 << 20
"""Longest run. Orders plan runs of 4 MiB on average; samples differ, so half are longer than that.

Cut at 4 MiB, samples of 110 kB on average cost 384 requests a GB where they now cost 294.
"""

MAX_HEAD_BYTES = 256 << 10
"""Heads that lie together are read at once up to this size: small samples need fewer requests."""

MAX_HEAD_STEPS = 12
"""Steps after a start whose samples are heads. Meanwhile, the first runs arrive. More heads make
these steps quicker and all others slower, because the runs wait for them. At 50 ms and 800 MB/s,
100 batches of 64 rows took 3.0 s after heads of 24 steps, and 2.6 s after those of 12."""

MAX_RANK_HEADS = 768
"""Heads of a rank: 12 requests on each of 64 connections. They take about 0.6 s at 50 ms."""

MAX_HEADS = 8192
"""Heads of all ranks together. Each is a request, and a prefix of S3 answers 5,500 a second."""

NO_RANGE = -1


@dataclass(frozen=True, eq=False)
class PlannedRange:
    """Samples that are read in one range."""

    samples: SampleRange
    """`position` counts within their window."""
    first_use: int
    """Clock of the first step that needs one of them."""


@dataclass(frozen=True, eq=False)
class PlannedWindow:
    """The samples that a window has for this rank, in the order of delivery. Arrays are [n]."""

    clock: IntArray
    """When each of them is delivered; it never falls."""
    row: IntArray
    """Row of the rank, from 0."""
    shard: IntArray
    index: IntArray
    start: IntArray
    """The sample is bytes [start, stop) of its shard."""
    stop: IntArray
    range_number: IntArray
    """Which of `ranges` has the sample; `NO_RANGE` where its shard has an error."""
    ranges: list[PlannedRange]
    errors: dict[int, ShardError]
    """By shard: why its samples cannot be had."""
    large: dict[int, LargeSample]
    """By position: samples of which only the first bytes are read."""

    @cached_property
    def spans(self) -> dict[int, slice]:
        """By clock: the positions of the samples that it delivers."""
        clocks, firsts = np.unique(self.clock, return_index=True)
        bounds = pairwise([*firsts.tolist(), self.clock.size])
        return {clock: slice(*of) for clock, of in zip(clocks.tolist(), bounds, strict=True)}

    @cached_property
    def samples(self) -> IntArray:
        """Row, shard, index, start, stop and number of the range of each sample, int64 [n, 6].

        A step takes one or two samples of each of many windows, and so cuts one array, not six.
        """
        columns = (self.row, self.shard, self.index, self.start, self.stop, self.range_number)
        return np.stack(columns, axis=1)


class StepPlan(NamedTuple):
    """Where the samples of a step are: in windows, and which rows are valid."""

    clock: int
    spans: list[tuple[PlannedWindow, slice]]
    """Each window with the positions of its samples that this step delivers."""
    valid: npt.NDArray[np.bool_]
    packed: PackedRows | None = None
    """How samples make rows, where rows are packs."""

    @property
    def num_samples(self) -> int:
        """Samples of the step, on this rank."""
        return self.valid.size if self.packed is None else self.packed.num_samples

    def ranges(self) -> list[PlannedRange]:
        """Return the ranges that the step needs, each once."""
        return [
            window.ranges[number]
            for window, span in self.spans
            for number in set(window.range_number[span].tolist())
            if number != NO_RANGE
        ]


class RankPlan:
    """The ranges of a rank from a step on, in the order of their first use.

    Args:
        order: which samples, and when.
        rows: the rows [start, stop) of this rank.
        first_clock: where the run starts or resumes.
        bounds: returns where samples of a shard lie. It may raise a ShardError.
        access: returns how ranges of a shard are best cut.
        single_samples: read each sample alone, and hold no windows.
        least_large_bytes: of samples of this size, the first bytes are read. None: all are read
            whole.

    Attributes:
        next_clock: the first step that is not planned yet.
        steps: by clock, those that are planned. Whoever takes their samples removes them.
    """

    def __init__(
        self,
        order: AnyOrder,
        rows: tuple[int, int],
        first_clock: int,
        *,
        bounds: Callable[[int, IntArray], SampleBounds],
        access: Callable[[int], Access],
        single_samples: bool = False,
        least_large_bytes: int | None = None,
    ) -> None:
        self.next_clock = first_clock
        self._order, self._rows = order, rows
        self._bounds, self._access = bounds, access
        self._first_clock = first_clock
        self._end_of_heads = first_clock + self._num_head_steps()
        self._single_samples = single_samples
        self._least_large_bytes = least_large_bytes
        self._windows: dict[tuple[int, int], PlannedWindow] = {}
        self.steps: dict[int, StepPlan] = {}

    def shards_ahead(self, num_steps: int) -> list[int]:
        """Return the shards whose bounds the next steps need."""
        shards = set[int]()
        for clock in range(self.next_clock, self.next_clock + num_steps):
            epoch, _ = divmod(clock, self._order.steps_per_epoch)
            for number in set(self._numbers(clock).tolist()):
                if (epoch, number) not in self._windows:
                    shards.update(self._order.window(epoch, number).shard.tolist())
        return sorted(shards)

    def plan_step(self) -> list[PlannedRange]:
        """Plan the next step: return the ranges of the windows that begin with it."""
        clock = self.next_clock
        epoch, step = divmod(clock, self._order.steps_per_epoch)
        self._windows = {
            key: window
            for key, window in self._windows.items()
            if window.clock.size and window.clock[-1] >= clock
        }
        numbers = self._numbers(clock)
        ranges: list[PlannedRange] = []
        spans: list[tuple[PlannedWindow, slice]] = []
        for number in np.unique(numbers).tolist():
            window = self._windows.get((epoch, number))
            if window is None:
                window = self._windows[epoch, number] = self.plan_window(epoch, number)
                ranges += window.ranges
            spans.append((window, window.spans.get(clock, slice(0, 0))))
        valid = np.ones(numbers.size, dtype=np.bool_)
        rows = self._order.rows_of(epoch, step, self._rows)
        packed = PackedRows.of_step(self._order, epoch, step, rows)
        if packed is not None:
            valid = packed.counts > 0
        elif numbers.size and numbers[0] < 0:  # only a partial step has padding
            valid = self._order.refs(epoch, step, rows).valid
        self.steps[clock] = StepPlan(clock, spans, valid, packed)
        self.next_clock = clock + 1
        return ranges

    def plan_window(self, epoch: int, number: int) -> PlannedWindow:
        """Return what this rank reads of a window, from the first clock on."""
        window = self._order.window(epoch, number)
        first_row, end_of_rows = self._rows
        if window.step.size:  # all steps of a window have as many rows
            first_row, end_of_rows = self._order.rows_of(epoch, int(window.step[0]), self._rows)
        clock = window.step + epoch * self._order.steps_per_epoch
        is_wanted = (window.row >= first_row) & (window.row < end_of_rows)
        is_wanted &= clock >= self._first_clock
        clock, row, shard, index = (
            column[is_wanted] for column in (clock, window.row, window.shard, window.index)
        )
        start, stop = np.zeros_like(clock), np.zeros_like(clock)
        range_number = np.full_like(clock, NO_RANGE)
        planned = PlannedWindow(
            clock, row - first_row, shard, index, start, stop, range_number, [], {}, {}
        )
        for positions in by_shard(shard, index):
            self._plan_shard(planned, int(shard[positions[0]]), positions)
        for one_number, planned_range in enumerate(planned.ranges):
            range_number[planned_range.samples.position] = one_number
        return planned

    def _num_head_steps(self) -> int:
        """Return how many steps after the start have heads."""
        start, stop = self._rows
        epoch, step = divmod(self._first_clock, self._order.steps_per_epoch)
        packed = PackedRows.of_step(self._order, epoch, step, self._rows)
        num_rows, rows_of_all = stop - start, self._order.global_batch_size
        if packed is None or not packed.num_samples:
            return num_head_steps(rows_of_all, num_rows)
        return num_head_steps(rows_of_all * packed.num_samples // num_rows, packed.num_samples)

    def _numbers(self, clock: int) -> IntArray:
        """Return the number of the window of each row of this rank."""
        epoch, step = divmod(clock, self._order.steps_per_epoch)
        return self._order.windows(epoch, step, self._order.rows_of(epoch, step, self._rows))

    def _plan_shard(self, window: PlannedWindow, shard: int, positions: IntArray) -> None:
        """Plan the samples of a shard, which come by rising index."""
        try:
            bounds = self._bounds(shard, window.index[positions])
        except ShardError as error:
            window.errors[shard] = error
            return
        start, stop, checksum, large = first_bytes(bounds, self._least_large_bytes)
        window.start[positions], window.stop[positions] = start, stop
        window.large.update((int(positions[number]), sample) for number, sample in large.items())
        samples = SampleRange(shard, window.index[positions], start, stop, positions, checksum)
        access = self._access(shard)
        max_run_bytes = min(MAX_RUN_BYTES, access.max_range_bytes)
        is_head = window.clock[positions] < self._end_of_heads
        if self._single_samples:
            ranges = merge(samples, max_gap_bytes=0, max_range_bytes=1)
        elif is_head.any():
            ranges = merge(samples.select(is_head), access.max_gap_bytes, MAX_HEAD_BYTES)
            ranges += runs_beside_heads(samples, is_head, access.max_gap_bytes, max_run_bytes)
        else:
            ranges = merge(samples, access.max_gap_bytes, max_run_bytes)
        window.ranges.extend(
            PlannedRange(one_range, int(window.clock[one_range.position].min()))
            for one_range in ranges
        )


def num_head_steps(global_batch_size: int, num_rows: int) -> int:
    """Return how many steps after a start have heads.

    Args:
        global_batch_size: rows of a step over all ranks; where rows are packs, their samples.
        num_rows: rows of a step on this rank, or their samples.

    Examples:
        >>> num_head_steps(64, 64), num_head_steps(256, 256), num_head_steps(256, 32)
        (12, 3, 12)
    """
    of_rank = max(1, MAX_RANK_HEADS // max(1, num_rows))
    return min(MAX_HEAD_STEPS, of_rank, MAX_HEADS // global_batch_size)


def by_shard(shards: IntArray, indexes: IntArray) -> list[IntArray]:
    """Return the positions of each shard's samples, by rising index."""
    if not shards.size:
        return []
    positions = np.lexsort((indexes, shards))
    return np.split(positions, np.flatnonzero(np.diff(shards[positions])) + 1)


def merge(samples: SampleRange, max_gap_bytes: int, max_range_bytes: int) -> list[SampleRange]:
    """Cut the samples of a shard into ranges to read.

    A gap starts a new range if it has more than `max_gap_bytes`, or more than the sample after it:
    so less than half of what is read is dropped. A sample that would make the range longer than
    `max_range_bytes` starts a new one, too. A longer sample is a range of its own.

    Example: samples at bytes [0, 10), [10, 20), [25, 35), [50, 60) and ranges of at most 100 bytes:
    two ranges, [0, 35) and [50, 60).
    """
    size = samples.start.size
    num_bytes = samples.num_bytes
    if num_bytes <= max_range_bytes and num_bytes == (samples.stop - samples.start).sum():
        return [samples]  # the samples follow one another; thousands of small shards may do so
    firsts = starts_of_ranges(
        np.full(size, samples.shard),
        samples.start,
        samples.stop,
        np.minimum(max_gap_bytes, samples.stop - samples.start),
        np.full(size, max_range_bytes),
    ).tolist()
    return [samples.select(slice(first, end)) for first, end in pairwise([*firsts, size])]


def runs_beside_heads(
    samples: SampleRange,
    is_head: npt.NDArray[np.bool_],
    max_gap_bytes: int,
    max_range_bytes: int,
) -> list[SampleRange]:
    """Return the ranges of samples that are not heads.

    A run goes on over heads, which are then read twice, where that is less than half of the run.
    """
    heads = samples.position[is_head]
    runs: list[SampleRange] = []
    for run in merge(samples, max_gap_bytes, max_range_bytes):
        wanted = run.select(~np.isin(run.position, heads))
        if not wanted.position.size:
            continue
        num_wanted = int((wanted.stop - wanted.start).sum())
        if 2 * num_wanted >= wanted.num_bytes:
            runs.append(wanted)
        else:
            runs += merge(wanted, max_gap_bytes, max_range_bytes)
    return runs


class EpochReads(NamedTuple):
    """What all ranks read of object storage in an epoch, about."""

    num_samples: int
    mean_bytes: float
    """Of a sample in its tar."""
    num_requests: float

    @property
    def num_bytes(self) -> float:
        """Bytes of the samples."""
        return self.num_samples * self.mean_bytes

    @property
    def requests_per_gb(self) -> float:
        """Requests for 1e9 bytes."""
        return 1e9 * self.num_requests / self.num_bytes


def epoch_reads(source: Dataset, order: AnyOrder, row_bounds: Sequence[int]) -> EpochReads | None:
    """Estimate what an epoch reads, from means alone.

    A window reads from K places of its lane, so it has K ranges, and one more for each chunk that
    ends in one of them. A lane of L samples has L / C chunks and about L / M + 1 windows of M
    samples, because its first and its last one are short. In a view, a range also ends where
    samples are not chosen.

    Args:
        source: what is read.
        order: which samples, and when.
        row_bounds: where the rows of each rank begin, and G at the end.

    Returns:
        The reads. None: the rows are packs or not shuffled, or the dataset has no samples.
    """
    if isinstance(order, BucketOrder):
        of_buckets = [
            epoch_reads(source.with_selection(bucket.selection), bucket.order, row_bounds)
            for bucket in order.buckets
        ]
        reads = [of_bucket for of_bucket in of_buckets if of_bucket is not None]
        num_samples = sum(of_bucket.num_samples for of_bucket in reads)
        num_bytes = sum(of_bucket.num_bytes for of_bucket in reads)
        num_requests = sum(of_bucket.num_requests for of_bucket in reads)
        return EpochReads(num_samples, num_bytes / num_samples, num_requests) if reads else None
    identity = order.identity()
    if not (isinstance(order, Order) and identity["shuffle"] and source.num_bytes):
        return None
    num_samples = order.steps_per_epoch * order.global_batch_size
    mean_bytes = source.num_bytes / len(source)
    lane_samples = num_samples / order.stride
    num_windows = lane_samples / identity["window"] + 1
    num_ranges = lane_samples / identity["chunk"] + num_windows * identity["interleave"]
    num_of_range = max(1.0, min(lane_samples / num_ranges, MAX_RUN_BYTES / mean_bytes))
    least_gap = None
    if source.selection is not None:
        least_gap = 2 if mean_bytes <= source.access.max_gap_bytes else 1
    factor = request_factor(
        num_of_range,
        order.grid[1],
        row_bounds,
        0.0 if source.selection is None else source.selection.gap_share,
        least_gap,
    )
    return EpochReads(num_samples, mean_bytes, num_samples / num_of_range * factor)


# -- what the windows take -------------------------------------------------------------------------
#
# Runs are held whole until their last sample, so a rank holds its part of all windows. That part is
# large where a run that was planned for many ranks goes on with few.

MEMORY_SHARE = 0.25
"""Part of a machine's memory that the windows of its ranks may take together."""

MIN_SINGLE_BYTES = 64_000
"""Mean size of samples that are read one by one where windows are too large. Smaller ones would be
too many requests."""


def window_bytes(
    source: ShardSource,
    order: AnyOrder,
    num_rows: int,
    *,
    least_large_bytes: int | None = None,
) -> float:
    """Return the bytes of all windows of a rank when they are full.

    Args:
        source: the datasets that `order` plans.
        order: which samples, and when.
        num_rows: rows of the rank.
        least_large_bytes: no sample takes more, because the first bytes of a larger one are read.
    """
    identity = order.identity()
    datasets = datasets_of(source)
    settings: list[Mapping[str, Any]] = identity.get("sources", [identity])
    num_lanes = int(np.prod(identity["grid"]))
    total = 0.0
    samples_of_rows = _samples_of_rows(order, len(datasets))
    for dataset, setting, row_samples in zip(datasets, settings, samples_of_rows, strict=False):
        num_samples = max(1, len(dataset))
        held = min(num_samples, num_lanes * setting["window"] * row_samples)
        sample_bytes = dataset.num_bytes / num_samples
        if least_large_bytes is not None:
            sample_bytes = min(sample_bytes, least_large_bytes)
        total += held * sample_bytes
    return total * num_rows / order.global_batch_size


def _samples_of_rows(order: AnyOrder, num_sources: int) -> list[float]:
    """Return how many samples a row of each source has, on average."""
    if not isinstance(order, PackOrder):
        return [1] * num_sources
    plan = order.plan
    plans = plan.plans.values() if isinstance(plan, MixturePlan) else [plan]
    return [of_source.mean_samples for of_source in plans]


def needs_single_samples(
    source: ShardSource,
    order: AnyOrder,
    num_rows: int,
    memory: int | None = None,
    *,
    least_large_bytes: int | None = None,
) -> bool:
    """Tell whether a rank must read its samples one by one, because its windows are too large.

    Args:
        source: what it reads.
        order: which samples, and when.
        num_rows: rows of the rank.
        memory: bytes of memory for all ranks of the machine. None: `memory_bytes`.
        least_large_bytes: as `window_bytes`.

    Raises:
        ConfigError: the windows are too large, and the samples too small for that.
    """
    wanted = window_bytes(source, order, num_rows, least_large_bytes=least_large_bytes)
    memory = memory_bytes() if memory is None else memory
    limit = MEMORY_SHARE * memory / num_local_ranks()
    if wanted <= limit:
        return False
    datasets = datasets_of(source)
    mean_bytes = sum(dataset.num_bytes for dataset in datasets) / max(1, len(source))
    message = (
        f"the windows (shuffle buffers) of this rank take {wanted / 1e9:.1f} GB for {num_rows} of "
        f"{order.global_batch_size} rows, and a quarter of the memory is {limit / 1e9:.1f} GB"
    )
    if mean_bytes < MIN_SINGLE_BYTES:
        raise ConfigError(
            f"{message}: run it on more ranks, or begin a new run with a smaller window_bytes="
        )
    logger.warning("%s: samples are read one by one, which are many requests", message)
    return True
