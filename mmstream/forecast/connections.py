"""How fast storage is without anything behind it: ranges of shards at 1 to 64 connections.

    order -> `planned_ranges` -> `measure_connections` -> speed.py

The ranges are those that a run reads in mid-epoch, and the client is the one of a reader process.
So what is measured here is what storage and network allow a run. Local files are read by threads,
and a thread counts as a connection.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmstream.dataset.source import ShardSource, datasets_of, load_indexes
from mmstream.errors import ShardError, StorageError
from mmstream.order import AnyOrder
from mmstream.reading.held import SampleRange
from mmstream.reading.large_samples import NO_CHECKSUM
from mmstream.reading.plan import MAX_RUN_BYTES, by_shard, merge
from mmstream.reading.process import needs_reader_process
from mmstream.storage.range_client import RangeClient, range_client
from mmstream.storage.store import RequestError

__all__ = [
    "CONNECTIONS",
    "ConnectionSpeed",
    "ReadRange",
    "cached_share",
    "drop_caches",
    "measure_connections",
    "planned_ranges",
]

CONNECTIONS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of connections that are measured."""

MAX_RANGES = 16_384
"""Ranges that are drawn at most."""

MAX_BYTES = 8 << 30
"""Bytes that they have at most, all together: a second at each number of connections, at 1 GB/s."""

MAX_WINDOWS = 512
"""Windows of which they are drawn at most."""

WARM_UP_SHARE = 0.25
"""Share of a measurement that does not count: connections are opened meanwhile."""

PAUSE_S = 0.2
"""Seconds that a connection pauses after a failed request, if the answer names none."""

PATIENCE_S = 30.0
"""Seconds that the first answer is waited for after the time of a measurement."""

NUM_PROBES = 256
"""Pages whose presence in memory is asked for."""


class ReadRange(NamedTuple):
    """Bytes [start, stop) of an object."""

    dataset: int
    """Number of its dataset in the source."""
    name: str
    start: int
    stop: int
    num_samples: int


@dataclass(frozen=True)
class ConnectionSpeed:
    """What so many connections bring."""

    num_connections: int
    mb_per_s: float
    """10^6 bytes a second."""
    first_byte_p50_s: float
    """Seconds from a request to the first byte of its answer, for half of the requests. Where a
    store does not stream, as a local disk: to the last byte."""
    first_byte_p95_s: float
    first_byte_p99_s: float
    num_requests: int
    """Requests that were answered."""
    num_throttled: int
    """Answers that asked for fewer requests (429, 503)."""
    num_failed: int
    """Requests that failed otherwise, for a passing reason."""


def planned_ranges(source: ShardSource, order: AnyOrder, rows: tuple[int, int]) -> list[ReadRange]:
    """Return ranges that a run reads in mid-epoch, in a random order.

    A reader process reads neighbours of a window together. Where workers read local files, each
    sample is a range.

    Args:
        source: what is read.
        order: which samples, and when.
        rows: the rows [start, stop) of the rank.

    Raises:
        ShardError: no index can be used.
        StorageError: the indexes could not be read.
    """
    rng = random.Random(0)
    number_of = {id(dataset): number for number, dataset in enumerate(datasets_of(source))}
    reads_runs = needs_reader_process(source)
    ranges: list[ReadRange] = []
    num_bytes, problem = 0, None
    for number in _windows(order, rows, rng):
        window = order.window(0, number)
        is_wanted = (window.row >= rows[0]) & (window.row < rows[1])
        shards, indexes = window.shard[is_wanted], window.index[is_wanted]
        load_indexes(source, np.unique(shards).tolist())
        for positions in by_shard(shards, indexes):
            location = source.locate(int(shards[positions[0]]))
            access = location.dataset.store.access
            try:
                bounds = location.dataset.bounds(location.shard, indexes[positions])
            except ShardError as error:
                problem = error  # a loader decides whether it goes on without this shard
                continue
            samples = SampleRange(
                int(shards[positions[0]]),
                indexes[positions],
                bounds.start,
                bounds.stop,
                positions,
                np.full(positions.size, NO_CHECKSUM, dtype=np.int64),
            )
            if reads_runs:
                longest = min(MAX_RUN_BYTES, access.max_range_bytes)
                runs = merge(samples, access.max_gap_bytes, longest)
            else:
                runs = merge(samples, 0, 1)
            ranges += [
                ReadRange(
                    number_of[id(location.dataset)],
                    location.dataset.name_of(location.shard),
                    int(run.start[0]),
                    int(run.stop[-1]),
                    run.position.size,
                )
                for run in runs
            ]
            num_bytes += sum(run.num_bytes for run in runs)
        if len(ranges) >= MAX_RANGES or num_bytes >= MAX_BYTES:
            break
    if not ranges and problem is not None:
        raise problem
    rng.shuffle(ranges)
    return ranges[:MAX_RANGES]


def _windows(order: AnyOrder, rows: tuple[int, int], rng: random.Random) -> Iterator[int]:
    """Yield numbers of windows of epoch 0, drawn from all of its steps."""
    seen: set[int] = set()
    for _ in range(MAX_WINDOWS):
        numbers = order.windows(0, rng.randrange(order.steps_per_epoch), rows)
        fresh = [number for number in np.unique(numbers).tolist() if number not in seen]
        fresh = [number for number in fresh if number >= 0]  # padding has none
        rng.shuffle(fresh)
        for number in fresh[:4]:
            seen.add(number)
            yield number


def measure_connections(
    source: ShardSource,
    ranges: Sequence[ReadRange],
    *,
    seconds: float,
    connections: Sequence[int] = CONNECTIONS,
    goes_round: bool = True,
    before_each: Callable[[int], None] = lambda _: None,
) -> list[ConnectionSpeed]:
    """Read ranges with one number of connections after another.

    Each number gets ranges of its own, so that none of them reads what another has left in a cache.
    After a number at which a store asked for fewer requests, no larger one is tried.

    Args:
        source: what the ranges are of.
        ranges: what is read.
        seconds: of each number.
        connections: numbers of connections.
        goes_round: where the ranges are over before the time, they are read again. False: the
            measurement ends then, because a disk would not be read again.
        before_each: called with each number.

    Raises:
        StorageError: no range could be read.
        FileNotFoundError: a shard is missing.
    """
    speeds: list[ConnectionSpeed] = []
    for position, number in enumerate(connections):
        before_each(number)
        own = list(ranges[position :: len(connections)]) or list(ranges)
        speed = _Measurement(source, own, number, seconds, goes_round=goes_round).run()
        speeds.append(speed)
        if speed.num_throttled > speed.num_requests / 10:
            break
    return speeds


class _Measurement:
    """Reads ranges with so many connections, for some seconds."""

    def __init__(
        self,
        source: ShardSource,
        ranges: Sequence[ReadRange],
        num_connections: int,
        seconds: float,
        *,
        goes_round: bool,
    ) -> None:
        self._source, self._num_connections = source, num_connections
        self._ranges = cycle(ranges) if goes_round else iter(ranges)
        self._most_bytes = min(
            MAX_RUN_BYTES, max(one_range.stop - one_range.start for one_range in ranges)
        )
        self._seconds = seconds
        self._warm_up_s = WARM_UP_SHARE * seconds if goes_round else 0.0
        self._begin = 0.0
        self._last = 0.0
        self._num_warm_up_bytes = 0
        self._num_bytes = self._num_throttled = self._num_failed = 0
        self._first_bytes: list[float] = []
        self._reason = "no answer came"
        self._answered = asyncio.Event()

    def run(self) -> ConnectionSpeed:
        """Read for the time, and return what came."""
        if needs_reader_process(self._source):
            # A thread, because the caller may have an event loop of its own, as notebooks do.
            with ThreadPoolExecutor(1, thread_name_prefix="mmstream-bench") as thread:
                thread.submit(lambda: asyncio.run(self._read_in_tasks())).result()
        else:
            self._read_in_threads()
        return self._speed()

    def _read_in_threads(self) -> None:
        """Read local files, as many at a time as there are connections."""
        stores = [dataset.store for dataset in datasets_of(self._source)]
        self._begin = self._last = time.monotonic() + self._warm_up_s
        end = self._begin + self._seconds
        lock = threading.Lock()
        errors: list[OSError] = []

        def read() -> None:
            now = 0.0
            while now < end and not errors:  # each thread reads once, however late it starts
                with lock:
                    wanted = next(self._ranges, None)
                if wanted is None:
                    return
                sent = time.monotonic()
                try:
                    data = stores[wanted.dataset].read_range(wanted.name, wanted.start, wanted.stop)
                except OSError as error:
                    errors.append(error)
                    return
                now = time.monotonic()
                with lock:
                    self._first_bytes.append(now - sent)
                    self._take(len(data), now)

        with ThreadPoolExecutor(self._num_connections, "mmstream-bench") as threads:
            for _ in range(self._num_connections):
                threads.submit(read)
        if errors:
            raise errors[0]

    async def _read_in_tasks(self) -> None:
        """Read through the client of a reader process."""
        clients = [range_client(dataset.store) for dataset in datasets_of(self._source)]
        loop = asyncio.get_running_loop()
        self._begin = self._last = loop.time() + self._warm_up_s
        tasks: list[asyncio.Task[Any]] = [
            loop.create_task(self._read(clients)) for _ in range(self._num_connections)
        ]
        try:
            await asyncio.wait(
                tasks, timeout=self._seconds + self._warm_up_s, return_when="FIRST_EXCEPTION"
            )
            if not self._answered.is_set():  # a slow link: the first answer is waited for
                tasks.append(loop.create_task(self._answered.wait()))
                await asyncio.wait(tasks, timeout=PATIENCE_S, return_when="FIRST_COMPLETED")
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for client in clients:
                await client.close()

    def _speed(self) -> ConnectionSpeed:
        if not self._first_bytes:
            raise StorageError(
                f"{datasets_of(self._source)[0].store.url}: not one range came with "
                f"{self._num_connections} connections in {self._seconds + PATIENCE_S:.0f} s: "
                f"{self._reason}"
            )
        num_bytes, seconds = self._num_bytes, self._last - self._begin
        if num_bytes == 0:  # nothing came after the warm-up
            num_bytes, seconds = self._num_warm_up_bytes, self._warm_up_s
        p50, p95, p99 = np.quantile(self._first_bytes, (0.5, 0.95, 0.99)).tolist()
        return ConnectionSpeed(
            self._num_connections,
            num_bytes / 1e6 / max(seconds, 1e-6),
            p50,
            p95,
            p99,
            len(self._first_bytes),
            self._num_throttled,
            self._num_failed,
        )

    async def _read(self, clients: Sequence[RangeClient]) -> None:
        """Read ranges one after the other, as one connection does."""
        loop = asyncio.get_running_loop()
        memory = memoryview(bytearray(self._most_bytes))
        for wanted in self._ranges:
            stop = min(wanted.stop, wanted.start + self._most_bytes)  # a video is longer
            sent = loop.time()
            try:
                stream = await clients[wanted.dataset].open(
                    wanted.name, wanted.start, stop, memory[: stop - wanted.start]
                )
                opened = loop.time()
                try:
                    async for piece in stream:
                        self._take(len(piece), loop.time())
                finally:
                    await stream.close()
            except RequestError as error:
                self._num_throttled += error.is_throttled
                self._num_failed += not error.is_throttled
                self._reason = str(error)
                await asyncio.sleep(error.retry_after_s or PAUSE_S)
                continue
            self._first_bytes.append(opened - sent)
            self._answered.set()

    def _take(self, num_bytes: int, now: float) -> None:
        if now < self._begin:
            self._num_warm_up_bytes += num_bytes
            return
        self._num_bytes += num_bytes
        self._last = now


def drop_caches(source: ShardSource) -> None:
    """Have the disk read again for all shards of local datasets, as far as the system does it."""
    for dataset in datasets_of(source):
        for shard, info in enumerate(dataset.manifest.shards):
            dataset.store.drop_cache(dataset.name_of(shard), 0, info.num_bytes)


def cached_share(source: ShardSource, ranges: Sequence[ReadRange]) -> float | None:
    """Return which share of some pages of local shards is in memory now.

    A page that is absent may be read by the system, but none of its neighbours.

    Args:
        source: what the ranges are of.
        ranges: where the pages lie.

    Returns:
        None where the files are not of this machine, or the system does not say.
    """
    datasets = datasets_of(source)
    num_asked = num_cached = 0
    rng = random.Random(0)
    for one_range in rng.sample(list(ranges), min(NUM_PROBES, len(ranges))):
        path = datasets[one_range.dataset].store.local_path(one_range.name)
        if path is None or not hasattr(os, "RWF_NOWAIT"):
            return None
        with suppress(FileNotFoundError):
            is_cached = _is_cached(path, rng.randrange(one_range.start, one_range.stop))
            if is_cached is None:
                return None
            num_asked += 1
            num_cached += is_cached
    return num_cached / num_asked if num_asked else None


def _is_cached(path: str, position: int) -> bool | None:
    """Tell whether a byte of a file is in memory. None: the file system does not say."""
    with Path(path).open("rb", buffering=0) as file:
        start = position // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            # Without it, asking for a page that is absent brings its neighbours.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            return bool(os.preadv(file.fileno(), [bytearray(1)], start, os.RWF_NOWAIT))
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                return None
            raise
