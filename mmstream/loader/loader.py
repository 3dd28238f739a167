"""The fifth stage: order -> read -> decode -> batch -> LOADER -> device.

Runs a pipeline in this rank's processes (`workers`) and counts what it hands over.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from torch.utils.data import IterableDataset, get_worker_info

from mmstream.bad_samples.policy import Stats, count_bad
from mmstream.batching.collate import Batch, BatchLineage
from mmstream.dataset.bad_list import stamps_of
from mmstream.dataset.mixture import Mixture
from mmstream.errors import ConfigError, MMStreamError
from mmstream.loader.resume import OnChange, load_state_into
from mmstream.loader.worker_process import in_one_line, preload_server
from mmstream.loader.workers import MultiprocessingContext, Workers
from mmstream.order.defaults import better_grid
from mmstream.pipeline import Pipeline
from mmstream.processes import default_threads, num_cores, pss_bytes
from mmstream.reading.reader import Job
from mmstream.state import make_state
from mmstream.world import RowsPerRank, World, resolve_world, rows_of_rank

__all__ = ["Loader"]

logger = logging.getLogger(__name__)


class Loader(IterableDataset[Batch]):
    """Batches of this rank, in step order, with a state that is one number.

    Iterating yields the rest of the epoch from where the state stands; the next ``for`` is the next
    epoch. A step counts as delivered when it is handed over, never when it is prefetched. Follows
    torch's Stateful protocol, and is an IterableDataset for what insists on a DataLoader around it
    (``batch_size=None, num_workers=0``). Memory: `prefetch` finished batches a worker, and the
    windows.

    Args:
        pipeline: what to run.
        num_workers: processes of this rank; 0 decodes in threads of this process.
        rows_per_rank: None: equal rows on every rank; "balanced"; or a list of rows.
        world: this rank; None: torch.distributed's or the environment's, asked at each ``iter()``.
        num_threads: decode threads of each process; None: 1 in workers, else one a core up to 4.
        prefetch_factor: batches that each worker makes ahead.
        multiprocessing_context: how workers start. "fork" also takes functions of a notebook.
        on_change: what `load_state_dict` does where the state is of mid-epoch and not of this
            pipeline's order. "refuse": StateError. "finish_epoch": the epoch that the state stands
            in is finished as it was planned, and the present settings begin with the next one: for
            a corpus that has grown by shards at its end, a first bad list, another batch size,
            seed, grid or window.

    Attributes:
        stats: what was delivered so far.

    Raises:
        ConfigError: impossible settings, or a pipeline that cannot be sent to workers.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        num_workers: int = 0,
        rows_per_rank: RowsPerRank = None,
        world: World | None = None,
        num_threads: int | None = None,
        prefetch_factor: int = 2,
        multiprocessing_context: MultiprocessingContext = "forkserver",
        on_change: OnChange = "refuse",
    ) -> None:
        if num_workers < 0 or prefetch_factor < 1 or (num_threads is not None and num_threads < 1):
            raise ConfigError("num_workers counts from 0, prefetch_factor and num_threads from 1")
        if on_change not in get_args(OnChange):
            raise ConfigError(f"on_change {on_change!r}: refuse or finish_epoch")
        if world is not None:
            rows_of_rank(pipeline.global_batch_size, world, rows_per_rank)
        self.pipeline, self.num_workers = pipeline, num_workers
        self.stats = Stats()
        self._world, self._rows_per_rank = world, rows_per_rank
        self._num_threads = num_threads or (1 if num_workers else default_threads())
        self._prefetch_factor, self._multiprocessing_context = (
            prefetch_factor,
            multiprocessing_context,
        )
        self._on_change = on_change
        self._current = pipeline  # another one while an epoch is finished as it was planned
        self._position = (0, 0)
        self._workers: Workers | None = None
        self._iteration = 0
        if num_workers and multiprocessing_context == "forkserver":
            preload_server(pipeline)

    def __len__(self) -> int:
        """Steps of this epoch: the same on every rank, known before the first read."""
        return self._current.order.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch; each batch counts as delivered when it is handed over.

        Raises:
            BadSampleLimitError: too many bad samples.
            ShardError, StorageError: data or storage that stops a run.
        """
        for made in self.iter_undelivered():
            self.mark_delivered(made)
            yield made

    def iter_undelivered(self) -> Iterator[Batch]:
        """Yield the rest of the epoch without counting: for a stage that looks ahead.

        Such a stage calls `mark_delivered` with each batch as it hands it over.
        """
        if get_worker_info() is not None:  # each of them would yield the whole epoch
            raise ConfigError(
                "a Loader has worker processes of its own: mm.Loader(..., num_workers=n), and "
                "batch_size=None, num_workers=0 for a DataLoader around it"
            )
        world = resolve_world(self._world)
        # A list of rows is for the present batch size: an old epoch is finished in balance.
        shares = self._rows_per_rank if self._current is self.pipeline else "balanced"
        rows = rows_of_rank(self._current.global_batch_size, world, shares)
        self._advise(world)
        epoch, step = self._position
        self._iteration += 1
        iteration = self._iteration
        stride = max(1, self.num_workers)
        first = Job(epoch, step, *rows, stride)
        batches: Iterator[Batch] | None = None
        while True:
            started = time.perf_counter()
            try:
                batches = self._run(first, len(self)) if batches is None else batches
                made = next(batches, None)
            except BaseException as error:
                self.close()  # workers may hold half a step: the next iteration starts new ones
                if isinstance(error, MMStreamError) and self.num_workers:
                    raise in_one_line(error) from error
                raise
            self.stats.wait_s += time.perf_counter() - started
            if made is None:
                return
            yield made
            if iteration != self._iteration:
                raise ConfigError("this loader began anew or was closed: drop the old loop")

    def mark_delivered(self, made: Batch) -> None:
        """Count a batch as delivered: limits are applied, and the state moves past it.

        Raises:
            BadSampleLimitError: too many bad samples. The state stays before this batch, which is
                not handed over: a run with other limits goes on with it.
            ConfigError: not the next batch of this loader.
        """
        lineage: BatchLineage = made["__lineage__"]
        if (lineage.epoch, lineage.step) != self._position:
            raise ConfigError(
                f"batch of epoch {lineage.epoch} step {lineage.step}, but the state stands at "
                f"epoch {self._position[0]} step {self._position[1]}"
            )
        self.stats.num_bytes += lineage.num_bytes
        self.stats.num_requests += lineage.num_requests
        count_bad(
            self.stats,
            self.pipeline.bad_samples,
            lineage.bad,
            made["__valid__"].tolist(),
            start=lineage.start,
            rank=resolve_world(self._world).rank,
            sources=self._planned_sources(lineage),
            stamps=stamps_of(
                self.pipeline.dataset,
                (lineage.planned[record.row - lineage.start][0] for record in lineage.bad),
            ),
        )
        following = make_state(self._current.order, lineage.epoch, lineage.step + 1)
        self._position = following["epoch"], following["step"]
        self.stats.num_steps += 1
        if lineage.epoch != following["epoch"]:
            self._current = self.pipeline

    def _planned_sources(self, lineage: BatchLineage) -> list[str] | None:
        dataset = self.pipeline.dataset
        if not isinstance(dataset, Mixture):
            return None
        return [dataset.locate(shard)[0] for shard, _ in lineage.planned]

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last delivered batch: plain JSON types.

        Under 1 KB; of a mixture some 200 bytes a source more.
        """
        return make_state(self._current.order, *self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was saved, on whatever ranks and workers there are now.

        Raises:
            StateError: the state cannot be applied exactly.
        """
        self._position, self._current = load_state_into(self.pipeline, state, self._on_change)
        self._iteration += 1

    def close(self) -> None:
        """End the workers. Idempotent; iterating again starts new ones."""
        self._iteration += 1  # a loop that is still open is told, and does not end quietly
        self._end_workers()

    def _end_workers(self) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def __repr__(self) -> str:
        epoch, step = self._position
        return f"<Loader: epoch {epoch} step {step} of {len(self)}, {self.num_workers} workers>"

    def _repr_html_(self) -> str:
        from mmstream.display import loader_html

        return loader_html(self)

    def memory_bytes(self) -> int:
        """Return the memory of this process and its workers; what they share counts once (PSS)."""
        workers = [] if self._workers is None else self._workers.pids
        return pss_bytes([os.getpid(), *workers])

    def _advise(self, world: World) -> None:
        """Say once when there are too many threads, or when another grid would read whole lanes."""
        cores, num_threads = num_cores(), max(1, self.num_workers) * self._num_threads
        if num_threads > cores and self._iteration == 0:
            logger.info(
                "%d workers with %d decode threads on %d cores: more than one thread a core is "
                "no faster, and each worker holds windows and batches of its own",
                self.num_workers, self._num_threads, cores,
            )  # fmt: skip
        order = self._current.order
        better = better_grid(
            order.num_samples, order.global_batch_size, order.grid,
            world.world_size, self.num_workers,
        )  # fmt: skip
        if better and self._iteration == 0 and world.rank == 0:
            logger.info(
                "%d ranks with %d workers share lanes of grid %s: grid=%s would give each its own, "
                "and longer reads (another grid is another order)",
                world.world_size, self.num_workers, order.grid, better,
            )  # fmt: skip

    def _run(self, first: Job, stop: int) -> Iterator[Batch]:
        if self.num_workers == 0:
            jobs = (first._replace(step=step) for step in range(first.step, stop))
            return self._current.batches(jobs, self._num_threads)
        if self._workers is None or self._workers.pipeline is not self._current:
            self._end_workers()
            self._workers = Workers(
                self._current,
                num_workers=self.num_workers,
                num_threads=self._num_threads,
                prefetch_factor=self._prefetch_factor,
                multiprocessing_context=self._multiprocessing_context,
            )
        return self._workers.batches(first, stop)
