"""Measures a pipeline on this machine, from storage to the batch, and predicts a run's speed.

    connections.py -> stages.py -> BENCH: the loader with a few settings -> speed.py

The prediction is a measurement: a loader with the recommended setting, in mid-epoch. The rest of
the report says where its time goes.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from mmstream.batching.collate import collate
from mmstream.dataset.source import datasets_of
from mmstream.errors import ConfigError
from mmstream.forecast.connections import (
    CONNECTIONS,
    ConnectionSpeed,
    cached_share,
    drop_caches,
    measure_connections,
    planned_ranges,
)
from mmstream.forecast.speed import (
    LoaderSpeed,
    SpeedForecast,
    recommended,
    settings_to_try,
    with_limit,
)
from mmstream.forecast.stages import measure_stages
from mmstream.loader.loader import Loader
from mmstream.machine import cpu_limit, machine_cpu_seconds, memory_bytes, num_local_ranks
from mmstream.pipeline import Pipeline, needs_no_worker, needs_one_thread
from mmstream.reading.process import needs_reader_process
from mmstream.reading.window_memory import MEMORY_SHARE, window_bytes
from mmstream.state import make_state
from mmstream.storage import is_remote
from mmstream.types import Batch
from mmstream.world import World, rows_of_rank
from mmstream.wrong_arguments import require_numbers

__all__ = ["bench", "measure_loader"]

SHARES = {"connections": 0.2, "stages": 0.1, "raw": 0.1, "settings": 0.3, "chosen": 0.3}
"""What each part gets of the seconds of a measurement."""

ROUNDS = 10
"""Rounds of one measurement of a loader."""

LEAST_ROUND_S = 0.2
"""Seconds of a round, at least: a batch of pictures takes some tens of milliseconds."""

MEASURED_WINDOW_BYTES = 128 << 20
"""Most bytes of the windows of a measurement: 32 ranges. A run begins with windows that are half
full, and 1 GB would take most of the time to fill. The ranges are as long as in large windows."""

SETTLED_GROWTH = 0.1
"""Bytes that are read ahead, or fewer than before, as a share of those that are delivered, below
which a loader is as in mid-epoch."""

LEAST_SETTLE_S = 3.0
"""Seconds that are taken for that, where it needs so many."""

MOST_FILL_S = 5.0
"""Seconds in which a reader process fills its horizon of 256 MiB, at 50 MB/s."""

RESTING_CORES = 0.15
"""CPU seconds a second below which a reader process counts as idle: it takes 0.5 for 1 GB/s. The
system counts in hundredths of a second."""

WARM_SHARE = 0.9
"""Share of pages in memory from which a disk is not what is measured."""

AWAY = 0.618
"""Of an epoch, between the first steps of two measurements: no two of them read the same samples,
which would be in memory then."""


def bench(
    pipeline: Pipeline,
    *,
    seconds: float = 30.0,
    num_ranks: int = 1,
    cold: bool = False,
    progress: bool = False,
) -> SpeedForecast:
    """Measure storage, the stages and the loader of a pipeline here, and predict a run's speed.

    It reads as the first epoch of a run does, and writes nothing: quarantine file and node cache
    are left alone. The consumer does nothing with the batches. Loaders with a few numbers of
    workers and threads are tried. The recommended one is measured once more, and its speed is the
    prediction.

    Args:
        pipeline: what is measured. Windows are smaller meanwhile, where they would not fill in
            time.
        seconds: of all measurements together. The starts of processes come on top.
        num_ranks: ranks of the run. This process measures the rows of rank 0, alone: on one
            machine, several ranks share cores and network.
        cold: have a local disk read everything again, in place of the page cache.
        progress: show a progress bar (on a terminal only).

    Returns:
        The prediction, and all that was measured.

    Raises:
        ConfigError: settings that cannot be, or a pipeline that cannot be sent to workers.
        ShardError, StorageError, BadSampleLimitError: as a run would raise.
    """
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(f"bench: got {type(pipeline).__name__}; pass an mm.Pipeline")
    require_numbers(seconds=seconds, num_ranks=num_ranks)
    if not seconds > 0:
        raise ConfigError(f"seconds is {seconds}; it must be more than 0")
    if num_ranks < 1:
        raise ConfigError(f"num_ranks is {num_ranks}; it must be 1 or more")
    if cold and any(is_remote(dataset.store.url) for dataset in datasets_of(pipeline.dataset)):
        raise ConfigError("cold=True is for folders: no page cache holds objects of a server")
    pipeline = replace(
        pipeline,
        bad_samples=replace(pipeline.bad_samples, quarantine=None),
        cache_dir=None,
        max_cache_bytes=None,
    )
    is_alone = pipeline.zero_copy or needs_no_worker(pipeline)
    settings = [(0, 1)] if is_alone else settings_to_try(cpu_limit())
    if needs_one_thread(pipeline):
        settings = list(dict.fromkeys((num_workers, 1) for num_workers, _ in settings))
    parts = {name: share * seconds for name, share in SHARES.items()}
    total = len(CONNECTIONS) + len(settings) + 3
    with tqdm(total=total, desc="bench", disable=None if progress else True) as bar:
        measuring = _Measuring(pipeline, World(0, num_ranks), cold, bar)
        connections = measuring.connections(parts["connections"])
        small = measuring.with_small_windows(pipeline)
        stage_s = measuring.stages(small, parts["stages"])
        tried = [
            measuring.loader(small, setting, parts["settings"] / len(settings))
            for setting in settings
        ]
        best = recommended(tried)
        setting = best.num_workers, best.num_threads
        raw = measuring.loader(_without_decoding(small), setting, parts["raw"])
        chosen = measuring.loader(small, setting, parts["chosen"])
    of_loader = (chosen.main_cores + chosen.worker_cores) / chosen.samples_per_s
    stage_s["transport"] = max(0.0, of_loader - sum(stage_s.values()))
    stage_s["reader process"] = chosen.reader_cores / chosen.samples_per_s
    return SpeedForecast(
        url=", ".join(dataset.store.url for dataset in datasets_of(pipeline.dataset)),
        num_samples=_samples_of_epoch(pipeline),
        num_steps=pipeline.order.steps_per_epoch,
        batch_size=measuring.num_rows,
        num_ranks=num_ranks,
        cpu_limit=cpu_limit(),
        cached_share=measuring.cached_share,
        mean_range_bytes=measuring.mean_range_bytes,
        mean_sample_bytes=measuring.mean_sample_bytes,
        connections=tuple(connections),
        stage_s=stage_s,
        raw=raw,
        settings=tuple(tried),
        chosen=chosen,
        full_window_bytes=measuring.full_window_bytes(pipeline),
        window_bytes=measuring.window_bytes_that_fit(pipeline),
    )


class _Measuring:
    """What the measurements of a pipeline share.

    Attributes:
        cached_share: of the local shards that is in the page cache.
        mean_range_bytes: of the ranges that are read.
        mean_sample_bytes: of a sample in its tar.
    """

    def __init__(self, pipeline: Pipeline, world: World, cold: bool, bar: Any) -> None:
        self._source, self._world, self._cold, self._bar = pipeline.dataset, world, cold, bar
        self._rows = rows_of_rank(pipeline.global_batch_size, world, "balanced")
        self._steps = _first_steps(pipeline.order.steps_per_epoch)
        self._speeds: list[ConnectionSpeed] = []
        self._ranges = planned_ranges(self._source, pipeline.order, self._rows)
        sizes = [one_range.stop - one_range.start for one_range in self._ranges]
        self.mean_range_bytes = statistics.mean(sizes)
        self.mean_sample_bytes = sum(sizes) / sum(r.num_samples for r in self._ranges)
        if cold:
            drop_caches(self._source)
        self.cached_share = cached_share(self._source, self._ranges)

    @property
    def _is_in_memory(self) -> bool:
        """Whether the page cache has the shards, so that storage does not count."""
        return not self._cold and (self.cached_share or 0.0) > WARM_SHARE

    @property
    def num_rows(self) -> int:
        """Rows of a batch."""
        return self._rows[1] - self._rows[0]

    def _begin(self, text: str) -> None:
        """Show what is measured next. Empty the page cache where that is wanted."""
        self._bar.set_postfix_str(text)
        if self._cold:
            drop_caches(self._source)

    def connections(self, seconds: float) -> list[ConnectionSpeed]:
        """Measure storage alone."""

        def begin(number: int) -> None:
            self._begin(f"{number} connections")
            self._bar.update()

        speeds = measure_connections(
            self._source,
            self._ranges,
            seconds=seconds / len(CONNECTIONS),
            goes_round=self._is_in_memory or needs_reader_process(self._source),
            before_each=begin,
        )
        self._speeds = speeds
        return speeds

    def stages(self, pipeline: Pipeline, seconds: float) -> dict[str, float]:
        """Measure the stages in one thread."""
        self._begin("stages")
        stage_s = measure_stages(pipeline, self._rows, next(self._steps), seconds=seconds)
        self._bar.update()
        return stage_s

    def loader(self, pipeline: Pipeline, setting: tuple[int, int], seconds: float) -> LoaderSpeed:
        """Measure a loader with (num_workers, num_threads)."""
        self._begin("{} workers x {} threads".format(*setting))
        speed = measure_loader(
            pipeline,
            *setting,
            world=self._world,
            first_step=next(self._steps),
            seconds=seconds,
            sample_bytes=self.mean_sample_bytes,
        )
        self._bar.update()
        free_cores = min(cpu_limit(), (os.cpu_count() or 1) - speed.other_cores)
        return with_limit(speed, free_cores, self._storage_mb_per_s(setting[0]))

    def _storage_mb_per_s(self, num_workers: int) -> float | None:
        """Return what storage gives at most to a loader. None: the shards are in memory."""
        if self._is_in_memory:
            return None
        most = math.inf if needs_reader_process(self._source) else max(1, num_workers)
        # Each process reads local files one after the other.
        return max(s.mb_per_s for s in self._speeds if s.num_connections <= most)

    def with_small_windows(self, pipeline: Pipeline) -> Pipeline:
        """Return the pipeline with windows that fill in time.

        It stays as it is where its windows do, and where they were chosen.
        """
        if pipeline.window or pipeline.grid:
            return pipeline
        if self.full_window_bytes(pipeline) <= MEASURED_WINDOW_BYTES:
            return pipeline
        num_bytes = MEASURED_WINDOW_BYTES * pipeline.global_batch_size // self.num_rows
        return replace(pipeline, window_bytes=num_bytes)

    def full_window_bytes(self, pipeline: Pipeline) -> float:
        """Return the bytes of all windows of this rank. Local files are read without windows."""
        if not needs_reader_process(self._source):
            return 0.0
        return window_bytes(self._source, pipeline.order, self.num_rows)

    def window_bytes_that_fit(self, pipeline: Pipeline) -> int | None:
        """Return bytes of windows that fit in memory, over all ranks. None: its own do."""
        limit = MEMORY_SHARE * memory_bytes() / num_local_ranks()
        if self.full_window_bytes(pipeline) <= limit:
            return None
        return int(limit * pipeline.global_batch_size / self.num_rows)


def measure_loader(
    pipeline: Pipeline,
    num_workers: int,
    num_threads: int,
    *,
    world: World,
    first_step: int,
    seconds: float,
    sample_bytes: float,
) -> LoaderSpeed:
    """Return the speed of a loader from the moment on when it runs as in mid-epoch.

    Args:
        pipeline: what it runs.
        num_workers: its worker processes.
        num_threads: decode threads of each process.
        world: the rank that it is.
        first_step: where it begins in epoch 0.
        seconds: of its rounds together. Its start comes on top.
        sample_bytes: mean bytes of a sample.
    """
    started = time.perf_counter()
    loader = Loader(pipeline, num_workers=num_workers, num_threads=num_threads, world=world)
    loader.load_state_dict(make_state(pipeline.order, 0, first_step))
    rounds: list[tuple[float, float]] = []  # samples, seconds
    try:
        with closing(_endless(loader)) as batches:
            next(batches)
            start_s = time.perf_counter() - started
            _settle(loader, batches, seconds, sample_bytes)
            cpu, machine_s = loader.cpu_seconds(), machine_cpu_seconds()
            stats = loader.stats
            num_bytes = stats.num_bytes
            began = last = time.perf_counter()
            while last - began < seconds:
                num_samples = stats.num_samples
                for number, _ in enumerate(batches, start=1):
                    now = time.perf_counter()
                    is_long = now - last >= max(LEAST_ROUND_S, seconds / ROUNDS)
                    # Workers hand in their batches one after the other, so together.
                    if is_long and number % max(1, num_workers) == 0:
                        break
                rounds.append((stats.num_samples - num_samples, now - last))
                last = now
            own = {name: total - cpu[name] for name, total in loader.cpu_seconds().items()}
            others_s = machine_cpu_seconds() - machine_s - sum(own.values())
            memory = loader.memory_bytes()
    finally:
        loader.close()
    transfers = stats.transfers
    rates = [samples / round_s for samples, round_s in rounds]
    low, high = _deciles(rates)
    took_s = last - began
    return LoaderSpeed(
        num_workers,
        num_threads,
        samples_per_s=statistics.median(rates),
        low_samples_per_s=low,
        high_samples_per_s=high,
        mb_per_s=(stats.num_bytes - num_bytes) / 1e6 / took_s,
        main_cores=own["main"] / took_s,
        worker_cores=own["workers"] / took_s,
        reader_cores=own["reader"] / took_s,
        other_cores=max(0.0, others_s / took_s),
        mean_in_flight=transfers.request_s / transfers.busy_s if transfers.busy_s else 0.0,
        num_throttled=transfers.num_throttled,
        start_s=start_s,
        memory_bytes=memory,
    )


def _endless(loader: Loader) -> Generator[Batch, None, None]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from loader


def _settle(loader: Loader, batches: Iterator[Batch], seconds: float, sample_bytes: float) -> None:
    """Take batches until the loader runs as in mid-epoch, or for some seconds.

    Workers have made some batches before the first one was asked for. A reader process reads ahead
    until its horizon is full, and takes cores from the workers meanwhile. So it gets them for
    itself first. Where storage is slower than the workers, that horizon is used up again.
    """
    stats = loader.stats
    has_reader = needs_reader_process(loader.pipeline.dataset)
    if has_reader:
        _wait_for_reader(loader)
    end = time.perf_counter() + max(seconds, LEAST_SETTLE_S)
    for _ in range(3 * loader.num_workers):
        if time.perf_counter() > end:
            return
        next(batches)
    num_calm = 0
    while has_reader and num_calm < 2 and time.perf_counter() < end:
        mark, num_read, num_samples = time.perf_counter(), stats.num_bytes, stats.num_samples
        while time.perf_counter() - mark < LEAST_ROUND_S:
            next(batches)
        delivered = (stats.num_samples - num_samples) * sample_bytes
        growth = stats.num_bytes - num_read - delivered
        num_calm = num_calm + 1 if abs(growth) < SETTLED_GROWTH * delivered else 0


def _wait_for_reader(loader: Loader) -> None:
    """Wait until the reader process has nothing to do, or for some seconds."""
    num_calm, end = 0, time.perf_counter() + MOST_FILL_S
    while num_calm < 2 and time.perf_counter() < end:
        used = loader.cpu_seconds()["reader"]
        time.sleep(LEAST_ROUND_S)
        used = loader.cpu_seconds()["reader"] - used
        num_calm = num_calm + 1 if used < RESTING_CORES * LEAST_ROUND_S else 0


def _deciles(rates: list[float]) -> tuple[float, float]:
    if len(rates) < 2:
        return rates[0], rates[0]
    deciles = statistics.quantiles(rates, n=10, method="inclusive")
    return deciles[0], deciles[-1]


def _first_steps(steps_per_epoch: int) -> Iterator[int]:
    """Yield steps that lie far apart."""
    share = 0.0
    while True:
        yield int(share * steps_per_epoch)
        share = (share + AWAY) % 1


def _without_decoding(pipeline: Pipeline) -> Pipeline:
    return replace(pipeline, decode=None, before=(), transforms=(), batching=None, collate=collate)


def _samples_of_epoch(pipeline: Pipeline) -> int:
    """Return the samples of an epoch, over all ranks."""
    order = pipeline.order
    num_rows = order.steps_per_epoch * order.global_batch_size
    if not order.is_packed:
        return num_rows
    counts = [len(order.refs(0, step).shard) for step in range(min(16, order.steps_per_epoch))]
    return round(statistics.mean(counts) * order.steps_per_epoch)
