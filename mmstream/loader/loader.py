"""Runs a pipeline in this rank's processes, and counts what it hands over."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, get_args

from torch.utils.data import IterableDataset, get_worker_info

from mmstream._plain_tensors import plain_tensors
from mmstream.agreement import agree
from mmstream.bad_samples.limits import count_samples
from mmstream.bad_samples.stats import Stats
from mmstream.errors import ConfigError
from mmstream.loader.advice import log_advice
from mmstream.loader.balance import Balance, balanced
from mmstream.loader.batch_makers import BatchMakers
from mmstream.loader.delivered import DeliveredCounts
from mmstream.loader.maker_settings import MultiprocessingContext, maker_settings
from mmstream.loader.settings import rank_settings
from mmstream.loader.unused_settings import log_unused_settings
from mmstream.loader.watchdog import StallLimits
from mmstream.pipeline import Pipeline
from mmstream.processes import cpu_seconds, pss_bytes
from mmstream.reading.step import BatchLineage, Job
from mmstream.state import OnChange, make_state, position_after, resume
from mmstream.types import Batch
from mmstream.world import RowsPerRank, World, resolve_world, rows_of_rank
from mmstream.wrong_arguments import advise, refuse_bools, require_numbers

__all__ = ["Loader"]

logger = logging.getLogger(__name__)

DEFAULT_PREFETCH_FACTOR = 2
"""Batches that each worker makes ahead."""


_ADVICE = {
    "batch_size": "write mm.Pipeline(dataset, global_batch_size=...)",
    "global_batch_size": "write mm.Pipeline(dataset, global_batch_size=...)",
    "shuffle": "write mm.Pipeline(..., shuffle=...); it shuffles by default",
    "seed": "write mm.Pipeline(..., seed=...)",
    "drop_last": "write mm.Pipeline(..., drop_last=...)",
    "collate_fn": "write mm.Pipeline(..., collate=function)",
    "sampler": "the order is the pipeline's own; leave it out",
    "pin_memory": "mm.to_device(loader, 'cuda') pins what it copies; leave it out",
    "persistent_workers": "workers live until loader.close(); leave it out",
    "prefetch": "write prefetch_factor=",
}
"""Arguments of other libraries."""


@advise(_ADVICE)
class Loader(IterableDataset[Batch]):
    """Batches of this rank, in step order, with a small JSON state.

    Each ``for`` yields the rest of the epoch from where the state stands; the next ``for`` is the
    next epoch. Its first batches are made while the last ones of this epoch are used. A step counts
    as delivered when it is handed over, never when it is prefetched.

    It follows torch's Stateful protocol. It is an IterableDataset for frameworks that insist on a
    DataLoader around it (``batch_size=None, num_workers=0``). Memory: `prefetch_factor` finished
    batches per worker, and a few undecoded steps. Threads without workers decode the pictures of
    one batch ahead. From object storage also the windows (shuffle buffers), in the reader process.

    Args:
        pipeline: what to run.
        num_workers: worker processes of this rank. 0 decodes in threads of this process. None
            start for raw samples of object storage, which nothing decodes, transforms or collates:
            the reader process hands them to this one. With `stall_timeout_s` they do.
        rows_per_rank: None: equal rows on every rank. "balanced": rows that differ by one at most.
            Or a list with the rows of each rank.
        world: this rank. None: torch.distributed's or the environment's, asked at each ``iter()``.
            With a world_size other than that of torch.distributed, ranks are not compared.
        num_threads: decode threads of each process. Default: 1 in workers, else one per core up
            to 4. Baked fields, numbers, texts and arrays alone have 1: threads make them slower.
        prefetch_factor: batches that each worker makes ahead.
        multiprocessing_context: how workers start. "fork" also takes functions of a notebook.
        stall_warning_s: seconds after which a batch that has not come is a warning. It names the
            worker with its process state, and the step, the shard and the sample that it works on.
            Further warnings come after twice the time, four times, and so on.
        stall_timeout_s: seconds after which it is an MMStreamError, and the workers are ended. The
            time counts for each batch, and for the first one it includes the start of the workers.
            None: never. It needs workers: nothing can end the main process alone.
        on_change: what `load_state_dict` does with a state of mid-epoch that does not fit the
            pipeline's order. "refuse": StateError. "finish_epoch": the epoch is finished as it was
            planned, and the present settings begin with the next one. This works after a change of
            batch size, seed, grid or window, and after shards were appended at the end. It also
            works where an epoch that began without a bad list has one now.

    Attributes:
        stats: what was delivered so far (`bad_samples.stats.Stats`).

    Raises:
        ConfigError: impossible settings, or a pipeline that cannot be sent to workers.

    Examples:
        >>> dataset = mm.open_dataset("shards/")
        >>> loader = mm.Loader(mm.Pipeline(dataset, global_batch_size=32))
        >>> for batch in loader:
        ...     state = loader.state_dict()
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        num_workers: int = 0,
        rows_per_rank: RowsPerRank = None,
        world: World | None = None,
        num_threads: int | None = None,
        prefetch_factor: int = DEFAULT_PREFETCH_FACTOR,
        multiprocessing_context: MultiprocessingContext = "forkserver",
        on_change: OnChange = "refuse",
        stall_warning_s: float = 60,
        stall_timeout_s: float | None = None,
    ) -> None:
        _check_pipeline(pipeline)
        refuse_bools(rows_per_rank=rows_per_rank)  # "balanced" is a word
        require_numbers(
            num_workers=num_workers,
            num_threads=num_threads,
            prefetch_factor=prefetch_factor,
            stall_warning_s=stall_warning_s,
            stall_timeout_s=stall_timeout_s,
        )
        if on_change not in get_args(OnChange):
            raise ConfigError(f"on_change {on_change!r}: refuse or finish_epoch")
        settings = maker_settings(
            pipeline,
            num_workers=num_workers,
            num_threads=num_threads,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=multiprocessing_context,
            stall_limits=StallLimits(stall_warning_s, stall_timeout_s),
        )
        if world is not None:
            rows_of_rank(pipeline.global_batch_size, world, rows_per_rank)
        self.pipeline = pipeline
        self.num_workers = num_workers
        self.stats = Stats()
        self._world = world
        self._rows_per_rank = rows_per_rank
        self._on_change = on_change
        self._current = pipeline  # another one while an epoch is finished as it was planned
        self._position = (0, 0)
        self._delivered = DeliveredCounts(self.stats)
        self._makers = BatchMakers(settings)
        self._iteration = 0
        self._has_advised = False
        self._rank_settings: dict[Pipeline, dict[str, str]] = {}
        self._balance: tuple[tuple[Pipeline, World, bool], Balance] | None = None
        self._makers.start_early(pipeline)

    def __len__(self) -> int:
        """Steps of this epoch: the same on every rank, known before the first read."""
        return self._current.order.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch; each batch counts as delivered when it is handed over.

        Under ``torch.distributed``, all ranks compare their settings first (docs: launching).

        Raises:
            ConfigError: a rank differs from the others, or has not begun. Or a DataLoader would
                make batches of these batches, or deal them to the ranks again.
            BadSampleLimitError: too many bad samples.
            ShardError, StorageError: data or storage that stops a run.
            MMStreamError: a worker has died, or a batch took longer than `stall_timeout_s`. The
                state stands before its step. Iterating again starts new workers.
        """
        _refuse_regrouping(sys._getframe(1).f_locals.get("self"))
        for batch in self.iter_undelivered():
            self.mark_delivered(batch)
            yield batch

    def iter_undelivered(self) -> Iterator[Batch]:
        """Yield the rest of the epoch without counting, for a stage that looks ahead.

        Such a stage calls `mark_delivered` with each batch when it hands it over.
        """
        if get_worker_info() is not None:  # each worker would yield the whole epoch
            raise ConfigError(
                "a Loader has worker processes of its own: mm.Loader(..., num_workers=n), and "
                "batch_size=None, num_workers=0 for a DataLoader around it"
            )
        world = resolve_world(self._world)
        # A list of rows fits the present batch size; an old epoch is finished with equal shares.
        is_present = self._current.global_batch_size == self.pipeline.global_batch_size
        shares = self._rows_per_rank if is_present else "balanced"
        balance = self._balanced(world, shares)
        self._agree(world, balance.settings)
        rows = rows_of_rank(self._current.global_batch_size, world, shares)
        if not self._has_advised:
            self._has_advised = True
            if world.rank == 0:
                log_unused_settings(self.pipeline, self._unused_by_workers())
            makers = self._makers.settings
            log_advice(self._current, world, shares, makers.num_workers, makers.num_threads)
        self._iteration += 1
        iteration = self._iteration
        epoch, step = self._position
        first = Job(epoch, step, *rows)
        batches = self._makers.batches(balance.pipeline, first, len(self), world)
        while True:
            started = time.perf_counter()
            try:
                with plain_tensors():
                    batch = next(batches, None)
            except BaseException as error:
                state = f"the state stands before step {self._position[1]}"
                explanation = self._makers.explained(error, state)
                self.close()  # workers may hold half a step: the next iteration starts new ones
                if explanation is None:
                    raise
                raise explanation from None
            self.stats.count_wait(time.perf_counter() - started)
            if batch is None:
                return
            yield batch
            if iteration != self._iteration:
                raise ConfigError("this loader began anew or was closed: drop the old loop")

    def mark_delivered(self, batch: Batch) -> None:
        """Count a batch as delivered: apply the limits, and move the state past it.

        Raises:
            BadSampleLimitError: too many bad samples. The state stays before this batch, which is
                not handed over: a run with other limits goes on with it.
            ConfigError: not the next batch of this loader.
        """
        lineage: BatchLineage | None = batch.get("__lineage__")
        if lineage is None:
            raise ConfigError(
                "mark_delivered: the batch has no __lineage__: pass the batch that "
                "iter_undelivered yielded"
            )
        if (lineage.epoch, lineage.step) != self._position:
            raise ConfigError(
                f"batch of epoch {lineage.epoch} step {lineage.step}, but the state stands at "
                f"epoch {self._position[0]} step {self._position[1]}"
            )
        self.stats.num_bytes += lineage.num_bytes
        self.stats.num_requests += lineage.num_requests
        self.stats.transfers += lineage.transfers
        self.stats.num_wrong_reads += lineage.num_wrong_reads
        source = self.pipeline.dataset
        count_samples(
            self.stats,
            self.pipeline.bad_samples,
            lineage.bad,
            batch["__valid__"].tolist()
            if lineage.planned_rows is None
            else [True] * len(lineage.planned),
            [source.locate(shard).source for shard, _ in lineage.planned],
            start=lineage.start,
            rank=resolve_world(self._world).rank,
            numbers=lineage.bad_numbers(),
        )
        self._delivered.count(batch, self.pipeline.batching)
        self._count_imbalance(lineage)
        self._position = position_after(self._current.order, lineage.epoch, lineage.step + 1)
        self.stats.num_steps += 1
        if lineage.epoch != self._position[0]:
            self._delivered.end_epoch(lineage.epoch)
            if self.pipeline.dataset.can_finish_epoch:  # a mixture keeps the settings of its state
                self._current = self.pipeline

    def _count_imbalance(self, lineage: BatchLineage) -> None:
        """Count how unequal the ranks' packs of a step are, where something says what they cost."""
        if self._balance is None:
            return
        value = self._balance[1].imbalance(lineage.epoch, lineage.step)
        if value is not None:
            self.stats.num_modelled_steps += 1
            self.stats.total_imbalance += value

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last delivered batch, in plain JSON types.

        It has less than 1 KB, and about 230 bytes more per source of a mixture.
        """
        return make_state(self._current.order, *self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved, on whatever ranks and workers there are now.

        Raises:
            StateError: the state cannot be applied exactly.
        """
        pipeline = self.pipeline
        epoch, step, order = resume(pipeline.dataset, pipeline.order, state, self._on_change)
        self._position = epoch, step
        self._current = pipeline if order is pipeline.order else pipeline.with_order(order)
        self._iteration += 1

    def close(self) -> None:
        """End the workers. It may be called again; iterating again starts new workers."""
        self._iteration += 1  # a loop that is still open gets an error, and does not end quietly
        self._makers.close()

    def __repr__(self) -> str:
        epoch, step = self._position
        return f"<Loader: epoch {epoch} step {step} of {len(self)}, {self.num_workers} workers>"

    def _repr_html_(self) -> str:
        from mmstream.display import loader_html

        return loader_html(self)

    def memory_bytes(self) -> int:
        """Return the memory of this process, its workers and its reader process.

        Pages that several of them share count once (PSS).
        """
        return pss_bytes([os.getpid(), *chain.from_iterable(self._makers.pids().values())])

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds of this process, of its workers and of its reader process.

        They count from the start of each process. 0 for processes that do not run, and on a system
        without ``/proc``.

        Returns:
            "main", "workers" and "reader".
        """
        pids = {"main": [os.getpid()], **self._makers.pids()}
        return {name: cpu_seconds(pids[name]) for name in pids}

    def _balanced(self, world: World, shares: RowsPerRank) -> Balance:
        """Return what the ranks run now: where rows are packs, they may be dealt by cost."""
        key = self._current, world, shares is None
        if self._balance is None or self._balance[0] != key:
            logs = world.rank == 0
            self._balance = key, balanced(self._current, world.world_size, shares, logs=logs)
        return self._balance[1]

    def _agree(self, world: World, dealt: Mapping[str, str]) -> None:
        """Compare with all other ranks what this one is about to deliver."""
        pipeline = self._current
        if world.world_size > 1 and pipeline not in self._rank_settings:
            settings = rank_settings(pipeline, self._rows_per_rank, self._on_change)
            self._rank_settings = {pipeline: settings}
        epoch, step = self._position
        agree(
            {
                "epoch": str(epoch),
                "step": str(step),
                **self._rank_settings.get(pipeline, {}),
                **dealt,
            },
            world,
            beginning="this iteration",
            advice="every rank must iterate its Loader; for one rank alone pass "
            "world=mm.World(0, 1)",
        )

    def _unused_by_workers(self) -> tuple[str, ...]:
        """Return the names of settings of workers that were given, where there are none."""
        settings = self._makers.settings
        is_given = {
            "prefetch_factor": settings.prefetch_factor != DEFAULT_PREFETCH_FACTOR,
            "multiprocessing_context": settings.multiprocessing_context != "forkserver",
        }
        return () if self.num_workers else tuple(name for name in is_given if is_given[name])


def _check_pipeline(pipeline: object) -> None:
    """Refuse what is no pipeline, and say how to make one."""
    if not isinstance(pipeline, Pipeline):
        advice = "pass mm.Loader(pipeline)"
        if hasattr(pipeline, "plan_order"):
            advice = "pass mm.Loader(mm.Pipeline(dataset, global_batch_size=...))"
        raise ConfigError(f"Loader: got {type(pipeline).__name__}: {advice}")


def _refuse_regrouping(caller: object) -> None:
    """Refuse what torch and Hugging Face put between a loader and its user by default.

    Args:
        caller: the object that asks for the first batch. A DataLoader with a batch_size would
            stack finished batches, and a shard of a Trainer would drop those of other ranks.

    Raises:
        ConfigError: the caller is one of them.
    """
    is_fetcher = getattr(caller, "auto_collation", False) is True
    if is_fetcher or type(caller).__name__ == "IterableDatasetShard":
        raise ConfigError(
            "a Loader yields finished batches of this rank: DataLoader(loader, batch_size=None, "
            "num_workers=0); in the Trainer of transformers, "
            "mmstream.integrations.LoaderTrainer(model, args, train_dataset=loader)"
        )
