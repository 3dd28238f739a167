"""A rank that reads a large corpus in virtual time: order, plan, reader and transfers are real.

Only the store, the indexes and the consumer are simulated. No byte is copied or held, so a run that
reads gigabytes takes a second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from mmap import mmap
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np

from mmstream.dataset.dataset import ShardLocation
from mmstream.dataset.index import SampleBounds
from mmstream.order import Order
from mmstream.reading.plan import RankPlan
from mmstream.reading.rank_reader import HORIZON_BYTES, RankReader
from mmstream.reading.server import SampleMemory
from mmstream.storage import Access, transfers
from mmstream.storage.transfers import TransferLimits, Transfers, own_memory
from tests.helpers.fake_ranges import Answer, FakeClient, Sent
from tests.helpers.held_bytes import HELD_STEPS

SAMPLE_BYTES = 110_000
COUNTS = [500] * 1000


def corpus_order(global_batch_size: int = 64, num_shards: int = 1000, **settings: Any) -> Order:
    """Return an order of 55 GB in 1,000 shards, or of some of them; by default the default one."""
    counts = COUNTS[:num_shards]
    return Order.from_counts(
        counts,
        global_batch_size=global_batch_size,
        num_bytes=sum(counts) * SAMPLE_BYTES,
        **settings,
    )


def corpus_plan(order: Order, rows: tuple[int, int]) -> RankPlan:
    """Return the plan of a rank, from the start on."""
    dataset = _Dataset()
    return RankPlan(
        order,
        rows,
        0,
        bounds=lambda shard, index: dataset.shards.bounds(shard, index),
        access=lambda shard: dataset.store.access,
    )


@dataclass
class SimulatedRun:
    """What happened. Times are in virtual seconds from the start."""

    client: FakeClient
    arrivals: list[float] = field(default_factory=list)
    """When each batch came."""
    waits: list[float] = field(default_factory=list)
    """How long the consumer waited for each batch."""
    counts: Any = None
    limit: int = 0
    """Requests in flight at the end."""

    def rate(self, first: int, last: int) -> float:
        """Return the batches a second between two of them."""
        return (last - first) / (self.arrivals[last] - self.arrivals[first])


class _Dataset:
    """As much of a dataset as a rank asks for."""

    access = Access(64 << 10, 8 << 20, 1, 1, concurrent=True)
    store = mock.Mock(access=access)
    num_shards = len(COUNTS)
    known = MappingProxyType[str, Any]({})
    has_checksums = False

    def locate(self, shard: int) -> ShardLocation:
        return ShardLocation(0, self, shard)  # type: ignore[arg-type]

    @property
    def shards(self) -> _Dataset:
        return self

    @property
    def indexes(self) -> _Dataset:
        return self

    def name_of(self, shard: int) -> str:
        return str(shard)

    def load(self, shards: list[int]) -> int:
        return 0

    def bounds(self, shard: int, index: np.ndarray, count: Any = None) -> SampleBounds:
        return SampleBounds(index * SAMPLE_BYTES, (index + 1) * SAMPLE_BYTES, None)


@cache
def _buffer(num_bytes: int = 0) -> mmap | bytearray:
    """Stand for `bytearray`: memory that all ranges of a size share."""
    return mmap(-1, num_bytes) if num_bytes else bytearray()


async def simulate_rank(
    order: Order,
    *,
    num_steps: int,
    answer: Callable[[Sent], Answer] = lambda sent: Answer(),
    link_rate: float = 800e6,
    rows: tuple[int, int] | None = None,
    step_s: float = 0.0,
    work_s: float = 0.012,
    num_workers: int = 2,
    limits: TransferLimits | None = None,
    memory: SampleMemory | None = None,
    horizon_bytes: int = HORIZON_BYTES,
) -> SimulatedRun:
    """Take batches as a loader does.

    Args:
        order: which samples.
        num_steps: batches to take.
        answer: how the store answers; by default after 50 ms, with 40 MB/s a connection.
        link_rate: bytes/s of all connections together.
        rows: of the rank; by default all.
        step_s: seconds between two batches of the consumer, at least.
        work_s: seconds that a worker takes for a batch.
        num_workers: worker processes, each of which is two batches ahead.
        limits: of the transfers.
        memory: where ranges arrive. None: nothing counts them.
        horizon_bytes: most bytes that are read before their first step.
    """
    objects = dict.fromkeys(map(str, range(len(COUNTS))), mmap(-1, COUNTS[0] * SAMPLE_BYTES))
    client = FakeClient(objects, answer, link_rate=link_rate, is_blank=True)  # type: ignore[arg-type]
    run = SimulatedRun(client)
    dataset: Any = _Dataset()
    loop = asyncio.get_running_loop()
    started = loop.time()
    with mock.patch.object(transfers, "bytearray", _buffer, create=True):
        ranges = Transfers([client], [{}], limits, memory.take if memory else own_memory)
        reader = RankReader(dataset, order, ranges, [dataset], horizon_bytes=horizon_bytes)
        reader.begin(0, 0, rows or (0, order.global_batch_size))

        async def work(worker: int) -> AsyncIterator[None]:
            held = deque[Any](maxlen=HELD_STEPS)
            for clock in count(worker, num_workers):
                held.append(await reader.step(*divmod(clock, order.steps_per_epoch)))
                await asyncio.sleep(work_s)
                yield None

        queues = [asyncio.Queue[None](1) for _ in range(num_workers)]

        async def fill(worker: int) -> None:
            async for _ in work(worker):
                await queues[worker].put(None)

        workers = [loop.create_task(fill(worker)) for worker in range(num_workers)]
        for step in range(num_steps):
            asked = loop.time()
            await queues[step % num_workers].get()
            run.arrivals.append(loop.time() - started)
            run.waits.append(loop.time() - asked)
            await asyncio.sleep(run.arrivals[0] + (step + 1) * step_s - run.arrivals[-1])
        run.limit, run.counts = ranges._in_flight.limit, ranges.pop_counts()
        for task in workers:
            task.cancel()
        await asyncio.wait(workers)
        await reader.close()
        await ranges.close()
    return run
