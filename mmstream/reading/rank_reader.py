"""Reads what the steps of a rank need, ahead of their use: order -> plan -> TRANSFERS -> steps.

The second half of a reader process. It lives in one event loop and knows nothing of sockets. Ranges
are handed to the transfers by their first use, until the bytes ahead fill the horizon. Ranges that
have arrived are compared with their checksums once, and held until their last sample is taken.

In memory are at most: the runs of all open windows of this rank, the horizon, one step, and those
that were asked for ahead: one, or as many as fit in 16 MiB. What the next step needs is always
asked for, so a step that is larger than the horizon comes, too.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.dataset.dataset import Dataset, ShardSource, load_indexes
from mmstream.dataset.index import SampleBounds, wrong_samples
from mmstream.errors import SampleError, ShardError
from mmstream.order import AnyOrder
from mmstream.reading.fetcher import NO_CHECKSUM, OF_THE_WHOLE_SHARD, LargeSample, SampleRange
from mmstream.reading.plan import NO_RANGE, PlannedRange, RankPlan, StepPlan, merge
from mmstream.reading.range_cache import RangeCache
from mmstream.reading.step import PackedRows, seats_of
from mmstream.storage import Access, ObjectStat, ReplacedError
from mmstream.storage.node_cache import CacheLocation
from mmstream.storage.range_client import retrieve_error
from mmstream.storage.transfers import (
    RangeRequest,
    SharedCounts,
    TransferCounts,
    Transfers,
    own_memory,
)
from mmstream.types import IntArray

# -- what came of ranges and steps -----------------------------------------------------------------


@dataclass(eq=False)
class Arrived:
    """A range on its way, then its bytes, or what is wrong with them."""

    planned: PlannedRange
    ready: asyncio.Task[None] | None = None
    transfers: list[asyncio.Future[memoryview]] = field(default_factory=list)
    data: memoryview = field(default_factory=lambda: memoryview(b""))
    errors: dict[int, ShardError | SampleError] = field(default_factory=dict)
    """By position in the window."""
    first: int = 0
    """Its first byte in the shard."""
    num_left: int = 0
    """Samples that were not taken yet."""
    cached: dict[int, CacheLocation] = field(default_factory=dict)
    """By position: samples that were not taken yet and lie in the node cache, not in `data`."""

    @property
    def is_ready(self) -> bool:
        """Whether its samples may be taken."""
        return self.ready is not None and self.ready.done()

    async def wait(self) -> None:
        """Wait until its samples may be taken.

        Raises:
            StorageError: storage failed for good.
        """
        assert self.ready is not None
        if self.ready.done():
            self.ready.result()
        else:
            await asyncio.shield(self.ready)

    def put(self, samples: SampleRange, data: memoryview, first: int) -> None:
        """Copy samples into its bytes, and nothing of what lies between them.

        Args:
            samples: some of the range.
            data: their bytes, which were compared with their checksums.
            first: the byte of the shard that comes first in `data`.
        """
        for start, stop in zip(samples.start.tolist(), samples.stop.tolist(), strict=True):
            self.data[start - self.first : stop - self.first] = data[start - first : stop - first]


class CachedSample(NamedTuple):
    """A sample of a step that is read from the node cache once its step is asked for."""

    location: CacheLocation
    arrived: Arrived
    position: int
    """In its window."""


@dataclass(frozen=True)
class StepSamples:
    """The samples of a step on this rank, in the order of rows."""

    shard: IntArray
    index: IntArray
    valid: npt.NDArray[np.bool_]
    """Of each row."""
    sizes: IntArray
    """Bytes of each sample in its tar, headers included; 0 where there is an error."""
    data: list[memoryview]
    """These bytes; empty where there is an error."""
    errors: dict[int, ShardError | SampleError]
    """By seat."""
    large: dict[int, LargeSample]
    """By seat: the samples of which `data` has the first bytes only."""
    packed: PackedRows | None = None
    """How samples make rows, where rows are packs. None: seats are rows."""


# -- the reader of a rank --------------------------------------------------------------------------

HORIZON_BYTES = 512 << 20
"""Bytes of a rank that are read before their first step: 0.5 s at 1 GB/s, and 128 ranges of 4 MiB
in flight. With 1 GiB, runs without latency took a tenth more CPU time while windows filled. In a
simulation at 800 MB/s it was as fast at 50 ms, and 6 % faster at 200 ms and 10 MB/s a connection.
"""

MAX_PLANNED_STEPS = 16
"""Steps that are planned together. Their indexes are loaded side by side."""

MAX_RANGE_READS = 2
"""Reads of a range here, if samples of it do not fit their checksums."""

MEMORY_RETRY_S = 0.05
"""Seconds between two tries to take memory where there was none."""

MAX_REPLACEMENTS = 8
"""How often a shard with checksums may be replaced while one range of it is read."""


class RankReader:
    """Reads the steps of a rank. `begin` says from which step on; `step` waits for one of them.

    Args:
        source: what to read.
        order: which samples, and when.
        transfers: where ranges are requested. The clients are numbered like `datasets`.
        datasets: the datasets of `source`.
        horizon_bytes: most bytes that are read before their first step.
        least_large_bytes: of samples of this size, the first bytes are read. None: all are read
            whole.
        cache: has samples of earlier epochs. None: all come from storage.
        new_memory: length -> memory for ranges of which a part comes at a time.

    Attributes:
        read_shards: each shard as it was when its first range came, and again if it was replaced.
    """

    def __init__(
        self,
        source: ShardSource,
        order: AnyOrder,
        transfers: Transfers,
        datasets: Sequence[Dataset],
        *,
        horizon_bytes: int = HORIZON_BYTES,
        least_large_bytes: int | None = None,
        cache: RangeCache | None = None,
        new_memory: Callable[[int], memoryview] = own_memory,
    ) -> None:
        self._source, self._order, self._transfers = source, order, transfers
        self._datasets = datasets
        self._client_of = {id(dataset): number for number, dataset in enumerate(datasets)}
        self._horizon_bytes = horizon_bytes
        self._least_large_bytes = least_large_bytes
        self._cache = cache
        self._new_memory = new_memory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mmstream-plan")
        self._rows: tuple[int, int] | None = None
        self._clock = -1
        self._counts = SharedCounts()
        self._stats: dict[int, ObjectStat] = {}
        self.read_shards: list[tuple[int, ObjectStat]] = []
        self._planner: asyncio.Task[None] | None = None
        self._arrived: dict[PlannedRange, Arrived] = {}
        self._forget()

    def _forget(self) -> None:
        """Drop everything that was planned and read."""
        if self._planner is not None:
            self._planner.cancel()
        for arrived in self._arrived.values():
            if arrived.ready is not None:
                arrived.ready.cancel()
            self._transfers.cancel(arrived.transfers)
        self._plan: RankPlan | None = None
        self._arrived = {}
        self._waiting: list[tuple[int, int, PlannedRange]] = []  # a heap by first use
        self._serial = count()
        self._bytes_ahead: defaultdict[int, int] = defaultdict(int)  # by first use
        self._total_ahead = 0
        self._taken: set[int] = set()
        self._error: Exception | None = None
        self._progress = asyncio.Event()

    async def warm_up(self) -> None:
        """Load an index before it is asked for: its client is imported and connected then."""
        loop, first = asyncio.get_running_loop(), self._datasets[0]
        num_requests = await loop.run_in_executor(self._thread, first.shards.indexes.load, [0])
        self._counts.add(num_index_requests=num_requests)

    def begin(
        self, epoch: int, step: int, rows: tuple[int, int], *, single_samples: bool = False
    ) -> None:
        """Go on with a step. What was read for the steps from there on is kept, if it is next.

        Args:
            epoch: epoch of the step.
            step: the next step of this rank.
            rows: the rows [start, stop) of this rank.
            single_samples: read each sample alone, and hold no windows.
        """
        clock = epoch * self._order.steps_per_epoch + step
        is_next = rows == self._rows and clock == self._clock and not self._taken
        if is_next and self._error is None:
            return
        self._forget()
        self._rows, self._clock = rows, clock
        self._plan = RankPlan(
            self._order,
            rows,
            clock,
            bounds=self._bounds_of,
            access=self._access,
            single_samples=single_samples,
            least_large_bytes=self._least_large_bytes,
        )
        self._planner = asyncio.get_running_loop().create_task(self._plan_ahead(self._plan))

    async def step(self, epoch: int, step: int) -> StepSamples:
        """Return the samples of a step. Each step is asked for once, in about rising order.

        Raises:
            StorageError: storage failed for good.
        """
        clock = epoch * self._order.steps_per_epoch + step
        with self._transfers.needed(clock):
            return await self._step(clock)

    async def _step(self, clock: int) -> StepSamples:
        plan = self._plan
        assert plan is not None, "begin comes first"
        while plan.next_clock <= clock:
            if self._error is not None:
                raise self._error
            await self._progress.wait()
        step_plan = plan.steps[clock]
        ranges = sorted(step_plan.ranges(), key=lambda planned: planned.first_use)
        is_ready = False
        while not is_ready:
            is_ready = True
            for planned in ranges:
                while planned not in self._arrived:  # the horizon is full of earlier steps
                    is_ready = False
                    await self._progress.wait()
                arrived = self._arrived[planned]
                # Step A waits for range 2, and range 1 is ready. Step B finds that the node cache
                # has a wrong sample of range 1, and has it fetched again, also what A needs of it.
                # So A looks at all ranges again after it has waited. Where all are ready, nothing
                # waits before `_take`.
                is_ready &= arrived.is_ready
                await arrived.wait()
        samples, cached = self._take(step_plan)  # it is taken whole: here nothing waits
        del plan.steps[clock]
        self._advance(clock)
        if cached:
            await self._read_cached(samples, cached, clock)
        return samples

    def pop_counts(self) -> tuple[TransferCounts, int]:
        """Return the counts since the previous call, and how many reads came wrong."""
        counts = self._counts.pop()
        num_wrong = counts.pop("num_wrong_reads", 0)
        if self._cache is not None:
            counts.update(self._cache.node_cache.counts.pop())
        return TransferCounts(**counts) + self._transfers.pop_counts(), num_wrong

    def describe(self) -> str:
        """Say what the next step waits for."""
        if self._plan is None:
            return "it has not begun"
        if self._plan.next_clock <= self._clock:
            return "it waits for indexes"
        missing = [
            arrived
            for arrived in self._arrived.values()
            if arrived.planned.first_use <= self._clock and not arrived.is_ready
        ]
        if not missing:
            return f"its next step is there, {self._total_ahead / 1e6:.0f} MB are ahead"
        shard, start, stop = missing[0].planned.samples.bounds
        name = self._source.name_of(shard)
        return f"it waits for {len(missing)} ranges, such as {name} bytes {start}-{stop}"

    async def close(self) -> None:
        """Drop everything."""
        self._forget()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._cache is not None:
            self._cache.close()

    # -- planning ------------------------------------------------------------------------------

    async def _plan_ahead(self, plan: RankPlan) -> None:
        """Plan steps while there is room for their bytes, at most to the end of the next epoch."""
        num_steps = 1  # the first step need not wait for the indexes of others
        loop = asyncio.get_running_loop()
        while True:
            limit = (self._clock // self._order.steps_per_epoch + 2) * self._order.steps_per_epoch
            num_steps = min(num_steps, limit - plan.next_clock)
            if num_steps <= 0 or not self._needs_plan(plan):
                await self._progress.wait()
                num_steps = max(1, num_steps)
                continue
            try:
                ranges = await loop.run_in_executor(self._thread, self._plan_steps, plan, num_steps)
            except Exception as error:
                self._error = error
                self._notify()
                return
            for planned in ranges:
                heapq.heappush(self._waiting, (planned.first_use, next(self._serial), planned))
            self._admit()
            self._notify()
            num_steps = min(2 * num_steps, MAX_PLANNED_STEPS)

    def _needs_plan(self, plan: RankPlan) -> bool:
        """Tell whether the next range to read may be one that is not planned yet."""
        if self._waiting and self._waiting[0][0] < plan.next_clock:
            return False
        return plan.next_clock <= self._clock or self._total_ahead < self._horizon_bytes

    def _plan_steps(self, plan: RankPlan, num_steps: int) -> list[PlannedRange]:
        """Plan steps, and return the new ranges.

        It runs in the only thread that plans, because indexes come from storage.
        """
        num_requests = load_indexes(self._source, plan.shards_ahead(num_steps))
        self._counts.add(num_index_requests=num_requests)
        return [planned for _ in range(num_steps) for planned in plan.plan_step()]

    def _bounds_of(self, shard: int, index: IntArray) -> SampleBounds:
        location = self._source.locate(shard)
        return location.dataset.shards.bounds(location.shard, index, self._count_wrong)

    def _access(self, shard: int) -> Access:
        return self._source.locate(shard).dataset.access

    def _count_wrong(self, number: int) -> None:
        self._counts.add(num_wrong_reads=number)

    # -- reading -------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Request the next ranges, as far as the horizon has room."""
        assert self._plan is not None
        while self._waiting:
            first_use, _, planned = self._waiting[0]
            num_bytes = planned.samples.num_bytes
            if first_use > self._clock:
                is_full = self._total_ahead + num_bytes > self._horizon_bytes
                if is_full or first_use >= self._plan.next_clock:
                    return
                self._bytes_ahead[first_use] += num_bytes
                self._total_ahead += num_bytes
            heapq.heappop(self._waiting)
            samples = planned.samples
            arrived = Arrived(planned, first=int(samples.start[0]), num_left=samples.position.size)
            self._arrived[planned] = arrived
            self._begin_fetch(arrived, self._fetch(arrived))

    def _begin_fetch(self, arrived: Arrived, fetch: Coroutine[Any, Any, None]) -> None:
        arrived.ready = asyncio.get_running_loop().create_task(fetch)
        arrived.ready.add_done_callback(retrieve_error)  # its step may never be asked for

    async def _fetch(self, arrived: Arrived) -> None:
        """Read a range, but for what the node cache has; errors of data become values.

        Raises:
            StorageError: storage failed for good.
        """
        samples = arrived.planned.samples
        if self._cache is not None:
            arrived.cached = await self._cache.find(samples)
        if not arrived.cached:
            await self._fetch_from_storage(arrived)
            return
        is_cached = np.isin(samples.position, list(arrived.cached))
        missing = samples.select(~is_cached)
        if missing.position.size:
            await self._take_memory(arrived)
            await self._fetch_missing(arrived, missing)

    async def _fetch_again(
        self, arrived: Arrived, wrong: list[int], before: asyncio.Task[None] | None
    ) -> None:
        """Read samples of a range from storage that were not right in the node cache.

        Those of later steps come with them: what damaged or removed one mostly did so to all.

        Args:
            arrived: the range.
            wrong: positions of these samples.
            before: what is read of the range already.
        """
        assert before is not None
        await before
        wrong, arrived.cached = [*wrong, *arrived.cached], {}
        if not arrived.data:
            await self._take_memory(arrived)
        samples = arrived.planned.samples
        await self._fetch_missing(arrived, samples.select(np.isin(samples.position, wrong)))

    async def _fetch_missing(self, arrived: Arrived, missing: SampleRange) -> None:
        """Read samples of a range from storage, beside those that are there."""
        access = self._access(missing.shard)
        pieces = merge(missing, access.max_gap_bytes, access.max_range_bytes)
        await self._fetch_pieces(arrived, pieces)

    async def _fetch_pieces(self, arrived: Arrived, pieces: Sequence[SampleRange]) -> None:
        """Read pieces of a range from storage, and put their samples into its bytes."""
        singles = [
            Arrived(
                replace(arrived.planned, samples=piece),
                transfers=arrived.transfers,
                first=int(piece.start[0]),
            )
            for piece in pieces
        ]
        await asyncio.gather(*map(self._fetch_from_storage, singles))
        for single in singles:
            arrived.errors |= single.errors
            if single.data:
                arrived.put(single.planned.samples, single.data, single.first)

    async def _fetch_from_storage(self, arrived: Arrived) -> None:
        """Read a range from storage; errors of data become values.

        Raises:
            StorageError: storage failed for good.
        """
        samples = arrived.planned.samples
        location = self._source.locate(samples.shard)
        for _ in range(MAX_RANGE_READS):
            try:
                data = await self._read(arrived, samples)
            except OSError as error:
                await self._explain(arrived, samples, error)
                return
            arrived.data = data
            starts, stops = samples.start - arrived.first, samples.stop - arrived.first
            wrong = wrong_samples(data, starts, stops, samples.checksum)
            if not wrong:
                if self._cache is not None:
                    self._cache.write(samples, data)
                return
            self._count_wrong(len(wrong))
        for number in wrong:
            index, position = int(samples.index[number]), int(samples.position[number])
            arrived.errors[position] = location.dataset.shards.checksum_error(location.shard, index)

    async def _read(self, arrived: Arrived, samples: SampleRange) -> memoryview:
        """Return the bytes of a range. A replaced shard is read if its samples have checksums."""
        shard, start, stop = samples.bounds
        _, dataset, local_shard = self._source.locate(shard)
        name = dataset.name_of(local_shard)
        request = RangeRequest(
            self._client_of[id(dataset)], name, start, stop, arrived.planned.first_use
        )
        for attempt in count(1):
            future = self._transfers.submit(request)
            arrived.transfers.append(future)
            try:
                data = await future
            except ReplacedError as error:
                is_checked = bool((samples.checksum != NO_CHECKSUM).all())
                if not is_checked or attempt == MAX_REPLACEMENTS:
                    raise
                dataset.shards.accept(name, error)
            else:
                self._note_version(shard, dataset.shards.known.get(name))
                return data
            finally:
                arrived.transfers.remove(future)
        raise AssertionError("never reached")

    def _note_version(self, shard: int, stat: ObjectStat | None) -> None:
        if stat is not None and stat.version is not None and self._stats.get(shard) != stat:
            self._stats[shard] = stat
            self.read_shards.append((shard, stat))

    async def _explain(self, arrived: Arrived, samples: SampleRange, error: OSError) -> None:
        """Hold why samples cannot be had. Those before the end of a cut shard are still good.

        Raises:
            StorageError: the shard is well; storage failed.
        """
        location = self._source.locate(samples.shard)
        cause = await asyncio.get_running_loop().run_in_executor(
            None, location.dataset.shards.explain, error, location.shard, samples.bounds[2]
        )
        if not isinstance(cause, ShardError):
            raise cause
        num_samples = samples.position.size
        if num_samples == 1 or isinstance(error, OF_THE_WHOLE_SHARD):
            arrived.errors |= dict.fromkeys(samples.position.tolist(), cause)
            return
        singles = [samples.select(slice(number, number + 1)) for number in range(num_samples)]
        await self._take_memory(arrived)
        await self._fetch_pieces(arrived, singles)

    async def _take_memory(self, arrived: Arrived) -> None:
        """Take memory for a range that comes in pieces."""
        planned = arrived.planned
        arrived.data = await self._memory(planned.samples.num_bytes, planned.first_use)

    async def _memory(self, num_bytes: int, deadline: int) -> memoryview:
        """Return memory. Where there is none, wait for it as long as transfers do."""
        lacks_since = None
        while True:
            try:
                return self._new_memory(num_bytes)
            except MemoryError:
                lacks_since = self._transfers.lacks_since(deadline, lacks_since)
                if self._transfers.lacks_memory(deadline, lacks_since):
                    raise
            await asyncio.sleep(MEMORY_RETRY_S)

    async def _read_cached(
        self, samples: StepSamples, cached: dict[int, CachedSample], clock: int
    ) -> None:
        """Read samples of a step from the node cache, and from storage what is not right there.

        Args:
            samples: Of the step. Their bytes and errors are put there.
            cached: The samples, by seat.
            clock: Of the step, which is waited for.
        """
        assert self._cache is not None
        stops = np.cumsum(samples.sizes[list(cached)]).tolist()
        memory = await self._memory(stops[-1], clock)
        for seat, start, stop in zip(cached, [0, *stops], stops, strict=False):
            samples.data[seat] = memory[start:stop]
        places = [(sample.location, samples.data[seat]) for seat, sample in cached.items()]
        are_right = await self._cache.read_samples(places)
        wrong = [seat for seat, is_right in zip(cached, are_right, strict=True) if not is_right]
        positions = defaultdict[Arrived, list[int]](list)
        for seat in wrong:
            positions[cached[seat].arrived].append(cached[seat].position)
        for arrived, wrong_positions in positions.items():
            self._begin_fetch(arrived, self._fetch_again(arrived, wrong_positions, arrived.ready))
        for arrived in positions:
            await arrived.wait()
        for seat in wrong:
            _, arrived, position = cached[seat]
            if position in arrived.errors:
                samples.errors[seat] = arrived.errors[position]
                samples.data[seat], samples.sizes[seat] = memoryview(b""), 0
            else:
                of_range = arrived.planned.samples
                _, start, stop = of_range.select(of_range.position == position).bounds
                samples.data[seat] = arrived.data[start - arrived.first : stop - arrived.first]

    # -- delivering ----------------------------------------------------------------------------

    def _take(self, step_plan: StepPlan) -> tuple[StepSamples, dict[int, CachedSample]]:
        """Take the samples of a step out of what has arrived. Return the cached ones apart."""
        size, packed = step_plan.num_samples, step_plan.packed
        shards, indexes, sizes = [0] * size, [0] * size, [0] * size
        data = [memoryview(b"")] * size
        errors: dict[int, ShardError | SampleError] = {}
        large: dict[int, LargeSample] = {}
        cached: dict[int, CachedSample] = {}
        num_taken = 0
        for window, span in step_plan.spans:
            samples = window.samples[span].tolist()
            seats = [sample[0] for sample in samples]
            if packed is not None:
                seats = seats_of(window.row[span], packed.first_seats).tolist()
            num_taken += len(seats)
            for seat, position, (_, shard, index, start, stop, number) in zip(
                seats, range(span.start, span.stop), samples, strict=True
            ):
                shards[seat], indexes[seat], sizes[seat] = shard, index, stop - start
                if number == NO_RANGE:
                    errors[seat] = window.errors[shard]
                    continue
                planned = window.ranges[number]
                arrived = self._arrived[planned]
                location = arrived.cached.pop(position, None)
                error = arrived.errors.get(position)
                if location is not None:
                    cached[seat] = CachedSample(location, arrived, position)
                elif error is not None:
                    errors[seat] = error
                else:
                    data[seat] = arrived.data[start - arrived.first : stop - arrived.first]
                    if position in window.large:
                        large[seat] = window.large[position]
                arrived.num_left -= 1
                if not arrived.num_left:
                    del self._arrived[planned]
        assert num_taken == size, "each seat is filled once"
        for seat in errors:
            sizes[seat] = 0
        samples_of_step = StepSamples(
            np.array(shards, dtype=np.int64),
            np.array(indexes, dtype=np.int64),
            step_plan.valid,
            np.array(sizes, dtype=np.int64),
            data,
            errors,
            large,
            packed,
        )
        return samples_of_step, cached

    def _advance(self, clock: int) -> None:
        """Move the clock past the steps that were taken."""
        self._taken.add(clock)
        while self._clock in self._taken:
            self._taken.remove(self._clock)
            self._clock += 1
            if self._cache is not None and self._clock % self._order.steps_per_epoch == 0:
                self._cache.node_cache.begin_epoch()
            self._total_ahead -= self._bytes_ahead.pop(self._clock, 0)
        self._admit()
        self._notify()

    def _notify(self) -> None:
        """Let everything that waits look again."""
        progress, self._progress = self._progress, asyncio.Event()
        progress.set()
