"""What the ranks of a run ask of object storage, said from its plan before anything is read.

    order, rows of the ranks, sizes of samples  ->  `forecast_reads`  ->  `ReadForecast`

The figures come from the code that reads: the order names the windows, and `RankPlan` cuts the
ranges of each rank. Where an epoch has few windows, all of them are planned, and the figures are
those of the run. Else some are drawn. A *share* is what one rank reads of one window. It is drawn
by its rows, so its reads stand for as many rows as were drawn of it.

Example: an epoch has 1,000,000 rows. A row is drawn; its share has 400 rows and 10 requests. It
alone would say that an epoch takes 1,000,000 x 10 / 400 = 25,000 requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from mmstream.dataset.checksums import checksums_size
from mmstream.dataset.dataset import Dataset, SampleBounds
from mmstream.dataset.index import index_size
from mmstream.dataset.index_cache import MAX_SMALL_BYTES, map_cached, part_ranges
from mmstream.dataset.source import ShardSource, datasets_of
from mmstream.lazy_bytes import MAX_FETCH_BYTES
from mmstream.order import AnyOrder
from mmstream.reading.plan import MAX_HEAD_STEPS, PlannedWindow, RankPlan
from mmstream.reading.window_memory import window_bytes
from mmstream.storage import Access, is_remote
from mmstream.storage.remote import RemoteStore
from mmstream.storage.transfer_limits import MAX_PREFIX_RATE
from mmstream.tar.header import BLOCK
from mmstream.types import IntArray

__all__ = [
    "LargeReads",
    "MeasuredReads",
    "ReadForecast",
    "Reads",
    "forecast_reads",
    "some",
]

T = TypeVar("T")

MAX_SHARES = 1024
"""Shares that are planned. They take about a millisecond each."""

MAX_ROWS = 1 << 21
"""Rows of an epoch whose shares are counted, to plan all of them where they are few."""

DRAWN_STEPS = 128
"""Steps from which rows are drawn, at least. The first windows of lanes, and the last ones, are
short and need more requests a row. They come in few steps."""

GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Multiples of it, without their whole part, fill the space from 0 to 1 evenly."""

MAX_INDEX_FILES = 256
"""Index files of single shards that are fetched for a forecast."""

ShareKey = tuple[int, int]
"""(window, rank)."""


@dataclass(frozen=True)
class Reads:
    """Requests, and the bytes that they bring. Means are no whole numbers."""

    num_requests: float = 0.0
    num_bytes: float = 0.0

    def __add__(self, other: Reads) -> Reads:
        return Reads(self.num_requests + other.num_requests, self.num_bytes + other.num_bytes)

    def times(self, factor: float) -> Reads:
        """Return so many times these reads."""
        return Reads(self.num_requests * factor, self.num_bytes * factor)


@dataclass(frozen=True)
class LargeReads:
    """Which samples a decoder reads by ranges, and what it reads of each.

    Their first bytes come with their step in any case; they are not among these reads.
    """

    least_bytes: int
    """Smaller samples are read whole."""
    reads: Reads | None = None
    """Of one sample. None: it is read whole, in ranges of 8 MiB."""


class MeasuredReads(NamedTuple):
    """What is read of large samples, and how many of them were decoded to know it."""

    large: LargeReads | None
    """None: all samples are views, and nothing is read by ranges."""
    num_samples: int


@dataclass(frozen=True)
class ReadForecast:
    """What a run asks of storage. Reads are those of all ranks together, if nothing else is said.

    Failed requests, hedges, substitutes of bad samples, and checkpoints are not in it.
    """

    num_ranks: int
    num_steps: int
    """Steps of an epoch."""
    num_samples: float
    """Samples that an epoch delivers."""
    num_sample_bytes: float
    """Their bytes in the tars, headers included."""
    epoch: Reads
    """What an epoch reads of the shards."""
    start: Reads
    """What each start or resume reads more: its first samples are read one by one."""
    index: Reads
    """What each machine reads of the index, once."""
    index_of_rank: Reads
    """What each rank reads of it, where the index has no parts."""
    num_prefixes: int
    """Folders of shards. Limits of S3 are those of a prefix."""
    busiest_prefix: float
    """Share of the requests that go to the busiest of them, 0 to 1."""
    window_bytes: float
    """Memory of the windows of the largest rank, when they are full."""
    step_bytes: float
    """Bytes of a step of the largest rank, in the mean."""
    is_exact: bool
    """All windows of the epoch were planned, with the sizes in the index."""

    @property
    def requests_per_gb(self) -> float:
        """Requests for 1e9 bytes that are read."""
        return 1e9 * self.epoch.num_requests / max(1.0, self.epoch.num_bytes)

    def rate(self, samples_per_s: float) -> Reads:
        """Return the reads of a second, at a speed of all ranks together."""
        return self.epoch.times(samples_per_s / max(1.0, self.num_samples))

    @property
    def max_samples_per_s(self) -> float:
        """Samples/s of all ranks at which the busiest prefix reaches `MAX_PREFIX_RATE`."""
        of_sample = self.rate(1.0).num_requests * self.busiest_prefix
        return MAX_PREFIX_RATE / of_sample if of_sample else float("inf")


def forecast_reads(
    source: ShardSource,
    order: AnyOrder,
    row_bounds: Sequence[int],
    *,
    large: LargeReads | None = None,
    single_samples: bool = False,
    uses_index: bool = True,
    max_shares: int = MAX_SHARES,
    has_start: bool = True,
    epoch: int = 0,
) -> ReadForecast:
    """Say what the ranks of a run read from object storage.

    A local folder counts as if it lay there. Where the index of a dataset is on this machine, or is
    small, samples have their true sizes, else the mean size of their shard.

    Args:
        source: what is read.
        order: which samples, and when.
        row_bounds: where the rows of each rank begin, and G at the end.
        large: samples that are read by ranges. None: none.
        single_samples: ranks read each sample alone, because their windows are too large.
        uses_index: True: a small index is fetched. False: nothing is read, and sizes are means.
        max_shares: shares of windows that are planned. More are more exact.
        has_start: also say what a start reads more.
        epoch: the epoch that is planned.

    Examples:
        >>> dataset = mm.open_dataset("shards/")
        >>> order = dataset.plan_order(global_batch_size=32)
        >>> forecast = forecast_reads(dataset, order, [0, 16, 32])  # two ranks
        >>> forecast.num_samples, forecast.is_exact
        (480.0, True)
    """
    sizes = _Sizes(source, uses_index=uses_index)
    plans = _Plans(order, row_bounds, sizes, large, single_samples)
    shares, has_all = _shares_of_epoch(order, row_bounds, epoch, max_shares)
    total, prefixes = _SharesReads(), defaultdict[str, float](float)
    for (number, rank), weight in shares.items():
        reads = plans.reads(epoch, number, rank)
        factor = 1.0 if has_all else weight / max(1, reads.num_rows)
        total = total.plus(reads, factor)
        for prefix, count in reads.prefixes.items():
            prefixes[prefix] += count * factor
    num_largest = int(np.diff(row_bounds).max())
    least_large_bytes = None if large is None else large.least_bytes
    num_requests = sum(prefixes.values())
    return ReadForecast(
        num_ranks=len(row_bounds) - 1,
        num_steps=order.steps_per_epoch,
        num_samples=total.num_samples,
        num_sample_bytes=total.num_sample_bytes,
        epoch=total.reads,
        start=plans.more_at_start(epoch, max_shares // 2) if has_start else Reads(),
        index=_index_parts_reads(source),
        index_of_rank=_index_files_reads(source),
        num_prefixes=sizes.num_prefixes,
        busiest_prefix=max(prefixes.values(), default=0.0) / num_requests if num_requests else 1.0,
        window_bytes=0.0
        if single_samples
        else window_bytes(source, order, num_largest, least_large_bytes=least_large_bytes),
        step_bytes=total.num_sample_bytes
        / max(1, order.steps_per_epoch)
        * num_largest
        / order.global_batch_size,
        is_exact=has_all and sizes.are_known,
    )


@dataclass(frozen=True)
class _SharesReads:
    """What some shares read."""

    reads: Reads = Reads()
    num_samples: float = 0.0
    num_sample_bytes: float = 0.0

    def plus(self, share: _ShareReads, factor: float) -> _SharesReads:
        return _SharesReads(
            self.reads + share.reads.times(factor),
            self.num_samples + share.num_samples * factor,
            self.num_sample_bytes + share.num_sample_bytes * factor,
        )


class _ShareReads(NamedTuple):
    """What one rank reads of one window."""

    reads: Reads
    num_rows: int
    num_samples: int
    num_sample_bytes: int
    prefixes: dict[str, float]
    """Requests by prefix."""


class _Plans:
    """Plans shares of windows, as the reader process of each rank would."""

    def __init__(
        self,
        order: AnyOrder,
        row_bounds: Sequence[int],
        sizes: _Sizes,
        large: LargeReads | None,
        single_samples: bool,
    ) -> None:
        self._order, self._row_bounds, self._sizes = order, row_bounds, sizes
        self._large, self._single_samples = large, single_samples
        self._plan_of: dict[tuple[int, int | None], RankPlan] = {}

    def reads(self, epoch: int, number: int, rank: int, *, start: int | None = None) -> _ShareReads:
        """Return the reads of a share.

        Args:
            epoch: epoch of the window.
            number: the window.
            rank: the rank.
            start: clock at which the run starts. None: long before.
        """
        window = self._plan(rank, start).plan_window(epoch, number)
        prefixes = defaultdict[str, float](float)
        num_bytes = 0.0
        for planned in window.ranges:
            prefixes[self._sizes.prefix(planned.samples.shard)] += 1.0
            num_bytes += planned.samples.num_bytes
        reads = Reads(len(window.ranges), num_bytes)
        num_sample_bytes = int((window.stop - window.start).sum())
        for position, sample in window.large.items():
            more = self._reads_of_large(sample.stop - int(window.stop[position]))
            reads += more
            prefixes[self._sizes.prefix(int(window.shard[position]))] += more.num_requests
            num_sample_bytes += sample.stop - int(window.stop[position])
        num_rows = _num_rows(window) if self._order.is_packed else window.clock.size
        return _ShareReads(reads, num_rows, window.clock.size, num_sample_bytes, dict(prefixes))

    def more_at_start(self, epoch: int, max_shares: int) -> Reads:
        """Return what a start at an epoch's first step reads more than an epoch that goes on."""
        order, bounds = self._order, self._row_bounds
        keys = set[ShareKey]()
        for step in range(min(MAX_HEAD_STEPS, order.steps_per_epoch)):
            keys.update(_keys_of_step(order, bounds, epoch, step))
        drawn = some(sorted(keys), max_shares)
        start_clock = epoch * order.steps_per_epoch
        more = Reads()
        for number, rank in drawn:
            more += self.reads(epoch, number, rank, start=start_clock).reads
            more += self.reads(epoch, number, rank).reads.times(-1.0)
        return more.times(len(keys) / max(1, len(drawn)))

    def _reads_of_large(self, num_rest: int) -> Reads:
        assert self._large is not None
        if self._large.reads is not None:
            return self._large.reads
        return Reads(-(-num_rest // MAX_FETCH_BYTES), num_rest)

    def _plan(self, rank: int, start: int | None) -> RankPlan:
        plan = self._plan_of.get((rank, start))
        if plan is None:
            rows = self._row_bounds[rank], self._row_bounds[rank + 1]
            plan = self._plan_of[rank, start] = RankPlan(
                self._order,
                rows,
                start or 0,
                bounds=self._sizes.bounds,
                access=self._sizes.access,
                single_samples=self._single_samples,
                least_large_bytes=None if self._large is None else self._large.least_bytes,
                has_heads=start is not None,
            )
        return plan


class _Sizes:
    """Where samples lie, as exactly as this machine knows it."""

    def __init__(self, source: ShardSource, *, uses_index: bool) -> None:
        self._source = source
        datasets = datasets_of(source)
        self._is_known = {id(dataset): uses_index and _has_index(dataset) for dataset in datasets}
        self.are_known = all(self._is_known.values())
        self.num_prefixes = len(
            {
                _folder(dataset, shard.name)
                for dataset in datasets
                for shard in dataset.manifest.shards
            }
        )

    def bounds(self, shard: int, index: IntArray) -> SampleBounds:
        """Return where samples of a shard lie; raises what `Dataset.bounds` raises."""
        _, dataset, local_shard = self._source.locate(shard)
        if self._is_known[id(dataset)]:
            return dataset.bounds(local_shard, index)
        info = dataset.manifest.shards[local_shard]
        mean_bytes = info.num_bytes / max(1, info.num_samples)
        start, stop = (
            (number * mean_bytes).astype(np.int64) // BLOCK * BLOCK for number in (index, index + 1)
        )
        return SampleBounds(start, stop, None)

    def access(self, shard: int) -> Access:
        """Return how ranges of a shard are cut."""
        access = self._source.locate(shard).dataset.store.access
        return access if access.concurrent else RemoteStore.access

    def prefix(self, shard: int) -> str:
        """Return the folder of a shard."""
        _, dataset, local_shard = self._source.locate(shard)
        return _folder(dataset, dataset.name_of(local_shard))


def _folder(dataset: Dataset, name: str) -> str:
    return f"{dataset.store.url}/{name.rpartition('/')[0]}"


def _has_index(dataset: Dataset) -> bool:
    """Tell whether the sizes of samples are on this machine, or come with few requests."""
    if not is_remote(dataset.index_store.url):
        return True
    parts = dataset.manifest.index_parts
    num_shards = sum(part.last_shard - part.first_shard + 1 for part in parts)
    are_at_hand = all(
        part.num_bytes <= MAX_SMALL_BYTES or map_cached(part) is not None for part in parts
    )
    return are_at_hand and dataset.num_shards - num_shards <= MAX_INDEX_FILES


def _index_parts_reads(source: ShardSource) -> Reads:
    """Return the reads of all parts of the indexes."""
    total = Reads()
    for dataset in datasets_of(source):
        for part in dataset.manifest.index_parts:
            total += Reads(len(part_ranges(part)), part.num_bytes)
    return total


def _index_files_reads(source: ShardSource) -> Reads:
    """Return the reads of the indexes and checksums of the shards that no part describes."""
    total = Reads()
    for dataset in datasets_of(source):
        is_described = np.zeros(dataset.num_shards, dtype=np.bool_)
        for part in dataset.manifest.index_parts:
            is_described[part.first_shard : part.last_shard + 1] = True
        num_files = 1 + dataset.has_checksums
        for count in dataset.counts[~is_described].tolist():
            num_bytes = index_size(count) + dataset.has_checksums * checksums_size(count)
            total += Reads(num_files, num_bytes)
    return total


def _num_rows(window: PlannedWindow) -> int:
    """Return the rows of a share whose rows are packs."""
    return int(np.unique(np.stack((window.clock, window.row)), axis=1).shape[1])


def _shares_of_epoch(
    order: AnyOrder, row_bounds: Sequence[int], epoch: int, max_shares: int
) -> tuple[dict[ShareKey, float], bool]:
    """Return shares of an epoch, how many of its rows each stands for, and whether these are all.

    Rows are drawn from steps that are spread over the epoch. Those of a step are drawn in the order
    of their sources and then of their lanes, so that each source and each rank has its part.
    """
    num_rows, num_steps = order.global_batch_size, order.steps_per_epoch
    if num_rows * num_steps <= MAX_ROWS:
        keys = dict[ShareKey, float]()
        for step in range(num_steps):
            keys |= dict.fromkeys(_keys_of_step(order, row_bounds, epoch, step), 1.0)
            if len(keys) > max_shares:
                break
        else:
            return keys, True
    num_shares = len(set(_keys_of_step(order, row_bounds, epoch, num_steps // 2)))
    num_drawn_steps = min(num_steps, max(min(DRAWN_STEPS, max_shares), max_shares // num_shares))
    draws_all = num_drawn_steps * num_shares <= max_shares
    num_drawn = num_rows if draws_all else max(1, max_shares // num_drawn_steps)
    num_sources = order.stride // (order.grid[0] * order.grid[1])
    shares = defaultdict[ShareKey, float](float)
    for number in range(num_drawn_steps):
        step = int((number + 0.5) * num_steps / num_drawn_steps)
        keys_of_step = _keys_of_step(order, row_bounds, epoch, step)
        # Windows of a mixture have numbers of which the remainder is their source.
        keys_of_step.sort(key=lambda key: key[0] % num_sources)
        first = number * GOLDEN_RATIO % 1.0  # so that each step draws between the rows of others
        for drawn in range(num_drawn):
            key = keys_of_step[int((drawn + first) * num_rows / num_drawn)]
            shares[key] += num_rows * num_steps / (num_drawn_steps * num_drawn)
    return shares, False


def _keys_of_step(
    order: AnyOrder, row_bounds: Sequence[int], epoch: int, step: int
) -> list[ShareKey]:
    """Return the share that each row of a step belongs to."""
    numbers = order.windows(epoch, step)
    ranks = np.searchsorted(row_bounds, np.arange(numbers.size), side="right") - 1
    return list(zip(numbers.tolist(), ranks.tolist(), strict=True))


def some(items: Sequence[T], most: int) -> Sequence[T]:
    """Return at most so many items, spread over all of them."""
    return items if len(items) <= most else [items[len(items) * i // most] for i in range(most)]
