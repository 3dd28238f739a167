"""Runs a pipeline in this rank's processes, and counts what it hands over."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from mmstream.batching.collate import plain_tensors
from mmstream.batching.flat import Flat, Pack
from mmstream.dataset.mixture import Mixture
from mmstream.decoding.bad_samples import Stats, count_samples
from mmstream.errors import ConfigError
from mmstream.loader.batch_makers import (
    BatchMakers,
    MultiprocessingContext,
    maker_settings,
)
from mmstream.loader.settings import described, rank_settings
from mmstream.loader.sharing import BatchChannel, Share, group_of_mesh
from mmstream.loader.watchdog import StallLimits
from mmstream.order import BucketOrder
from mmstream.order.mixture.order import MixtureOrder
from mmstream.packing.cost import Cost, deal, imbalance
from mmstream.packing.order import PackOrder
from mmstream.pipeline import Pipeline
from mmstream.processes.machine import cpu_seconds, pss_bytes
from mmstream.ranks import RowsPerRank, World, check_consistency, resolve_world, rows_of_rank
from mmstream.reading.process import needs_reader_process
from mmstream.reading.step import BatchLineage, Job
from mmstream.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    checked,
)
from mmstream.state import OnChange, make_state, position_after, resume, resume_hint
from mmstream.types import Batch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

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
    "world": "pass mm.World(rank=, world_size=)",
    "data": "give the names of the dimensions of mesh= that split rows",
    "rows_per_rank": "give 'balanced', or a list with the rows of each rank, from 1 up",
}
"""What to write in place of wrong arguments, and of those of other libraries."""

_READING = (
    "num_bytes",
    "num_requests",
    "num_wrong_reads",
    "transfers",
    "read_s",
    "decode_s",
    "collate_s",
)
"""What a `BatchLineage` says of how its batch was made. `Stats` have the sums by the same names."""


@checked(_ADVICE, own=("pipeline", "mesh"))
class Loader(IterableDataset[Batch]):
    """Batches of this rank, in step order, with a small JSON state.

    Each ``for`` is one epoch. The first batches of the next one are made while its last ones are
    used. A step counts as delivered when it is handed over, never when it is prefetched.

    Breaking out of a loop ends the epoch, as with a DataLoader. The next ``for`` begins the next
    epoch where the pipeline shuffles, and the same one again where it does not. To go on where the
    loop was left, call ``loader.load_state_dict(loader.state_dict())``: the first ``for`` after
    `load_state_dict` yields the rest of the epoch.

    It follows torch's Stateful protocol. It is an IterableDataset for frameworks that insist on a
    DataLoader around it (``batch_size=None, num_workers=0``). Memory: `prefetch_factor` finished
    batches per worker, and a few undecoded steps. Without workers, threads decode the pictures of
    one batch ahead. With object storage, the reader process also holds the windows (shuffle
    buffers).

    Args:
        pipeline: what to run.
        num_workers: worker processes of this rank. 0 decodes in threads of this process.
        rows_per_rank: None: equal rows on every rank. "balanced": rows that differ by one at most.
            Or a list with the rows of each rank.
        world: this rank. None: torch.distributed's or the environment's, asked at each ``iter()``.
            If its world_size is not that of torch.distributed, ranks do not compare settings.
        mesh: a device mesh of all ranks, in place of `world`, where several ranks need the same
            rows. All ranks make the loader, in the same order.
        data: names of the dimensions of `mesh` that split rows, such as ("dp_replicate",
            "dp_shard"). Ranks that differ in other dimensions get the same rows.
        share: "read": each rank reads and decodes its rows by itself. "broadcast": the first of
            those that need the same rows does, and the others get its batches over gloo, one batch
            ahead. Batches hold tensors on the CPU, arrays, numbers, texts and bytes.
        num_threads: decode threads of each process. Default: 1 in workers, else one per core up
            to 4. Baked fields, numbers, texts and arrays alone have 1: threads make them slower.
        prefetch_factor: batches that each worker makes ahead.
        multiprocessing_context: how workers start. "fork" also takes functions of a notebook.
        stall_warning_s: seconds to wait for a batch before a warning. It names the worker with its
            process state, and the step, the shard and the sample that it works on. Further warnings
            come after twice the time, four times, and so on.
        stall_timeout_s: seconds to wait for a batch before the workers are ended and MMStreamError
            is raised. For the first batch, they include the start of the workers. None: never. It
            needs workers, because nothing can end a stalled main process.
        on_change: what `load_state_dict` does with a mid-epoch state that does not fit the
            pipeline's order. "refuse": raise StateError. "finish_epoch": finish the epoch as it was
            planned, and apply the present settings from the next one. This works after a change of
            batch size, seed, grid or window, and after a first bad list was added. A dataset that
            only grew at its end needs no setting: the epoch is finished as planned, and the next
            one has the new shards.

    Attributes:
        stats: what was delivered so far (`decoding.bad_samples.Stats`).

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
        num_workers: NonNegativeInt = 0,
        rows_per_rank: RowsPerRank = None,
        world: World | None = None,
        mesh: DeviceMesh | None = None,
        data: str | Sequence[str] | None = None,
        share: Share = "read",
        num_threads: PositiveInt | None = None,
        prefetch_factor: PositiveInt = 2,
        multiprocessing_context: MultiprocessingContext = "forkserver",
        on_change: OnChange = "refuse",
        stall_warning_s: PositiveFloat = 60,
        stall_timeout_s: PositiveFloat | None = None,
    ) -> None:
        _check_pipeline(pipeline)
        _ = pipeline.order  # a plan that is missing or does not fit is refused here
        settings = maker_settings(
            pipeline,
            num_workers=num_workers,
            num_threads=num_threads,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=multiprocessing_context,
            stall_limits=StallLimits(stall_warning_s, stall_timeout_s),
        )
        self._policy, self._num_same = pipeline.bad_samples, 1
        self._channel: BatchChannel | None = None
        if mesh is not None and data is not None and world is None:
            group = group_of_mesh(mesh, data, share)
            world, self._num_same = group.world, len(group.ranks)
            if not group.is_first:  # which writes for all of them
                self._policy = replace(self._policy, quarantine=None)
            if share == "broadcast" and self._num_same > 1:
                self._channel = BatchChannel(group, stall_timeout_s)
        elif mesh is not None or data is not None or share != "read":
            raise ConfigError(
                'mesh=, data= and share="broadcast" go together, and without world=: mm.Loader('
                'pipeline, mesh=mesh, data=("dp",)), or world=mm.World(rank=, world_size=)'
            )
        if world is not None:
            _rows_of(pipeline, world, rows_per_rank)
        self.pipeline = pipeline
        self.num_workers = num_workers
        self.stats = Stats()
        self._world = world
        self._rows_per_rank = rows_per_rank
        self._on_change = on_change
        self._current = pipeline  # another one while an epoch is finished as it was planned
        self._position = (0, 0)
        self._handed_out = (0, 0)  # the step after the last batch, which may not be delivered yet
        self._is_midway = False  # after the first batch of a pass and before its last one
        self._has_left = False
        self._delivered = DeliveredCounts(self.stats, pipeline)
        self._makers = BatchMakers(settings)
        self._iteration = 0
        self._rank_settings: dict[Pipeline, dict[str, str]] = {}
        self._balance: tuple[tuple[Pipeline, World, bool], Balance] | None = None
        if self._channel is None or self._channel.is_reader:
            self._makers.start_early(pipeline)

    def __len__(self) -> int:
        """Steps of this epoch: the same on every rank, known before the first read."""
        return self._current.order.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """Yield an epoch; each batch counts as delivered when it is handed over.

        After `load_state_dict` it is the rest of the epoch.

        Under ``torch.distributed``, all ranks compare their settings first (docs: launching).

        Raises:
            ConfigError: a rank differs from the others, or has not begun. Or a DataLoader would
                make batches of these batches, or deal them to the ranks again.
            BadSampleLimitError: too many bad samples.
            ShardError, StorageError: data or storage that stops a run.
            MMStreamError: a worker has died, or a batch took longer than `stall_timeout_s`. The
                state is at its step: ``load_state_dict(state_dict())`` and a new ``for`` resume
                from it, with new workers.
        """
        _refuse_regrouping(sys._getframe(1))
        for batch in self.iter_undelivered():
            self.mark_delivered(batch)
            yield batch

    def iter_undelivered(self) -> Iterator[Batch]:
        """Yield what `__iter__` does without counting, for a stage that looks ahead.

        Such a stage calls `mark_delivered` with each batch when it hands it over.
        """
        if get_worker_info() is not None:  # each worker would yield the whole epoch
            raise ConfigError(
                "a Loader has worker processes of its own: mm.Loader(..., num_workers=n), and "
                "batch_size=None, num_workers=0 for a DataLoader around it"
            )
        world = resolve_world(self._world)
        if self._is_midway:
            self._leave_epoch(world)
        # A list of rows fits the present batch size; an old epoch is finished with equal shares.
        rows_of_step = {(p.global_batch_size, p.repeat) for p in (self._current, self.pipeline)}
        shares = self._rows_per_rank if len(rows_of_step) == 1 else "balanced"
        balance = self._balanced(world, shares)
        self._check_consistency(world, balance.settings)
        rows = _rows_of(self._current, world, shares)
        self._iteration += 1
        iteration = self._iteration
        self._handed_out = epoch, step = self._position
        first, pipeline, stop = Job(epoch, step, *rows), self._current, len(self)
        batches = self._makers.batches(balance.pipeline, first, stop, world)
        if self._channel is not None:
            batches = self._channel.shared(batches)
        while (batch := self._next(batches)) is not None:
            step += 1
            self._handed_out = epoch, step
            yield batch
            if iteration != self._iteration:
                raise ConfigError(
                    "this loop is over: the loader was iterated again, loaded a state or was closed"
                )
            if self._current is not pipeline and step < stop:  # other weights from here on
                pipeline = self._current
                batches = self._makers.batches(pipeline, first._replace(step=step), stop, world)

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        """Return the next batch, or None at the end. After an error, nothing runs any more."""
        started = time.perf_counter()
        try:
            with plain_tensors():
                batch = next(batches, None)
        except BaseException as error:
            explanation = self._makers.explained(error, resume_hint(self._position[1]))
            self.close()  # workers may hold half a step: the next iteration starts new ones
            if explanation is None:
                raise
            raise explanation from explanation.__cause__
        self.stats.count_wait(time.perf_counter() - started)
        return batch

    @checked(late=True)
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
                f"batch of epoch {lineage.epoch} step {lineage.step}, but the state is at "
                f"epoch {self._position[0]} step {self._position[1]}"
            )
        for name in _READING:
            setattr(self.stats, name, getattr(self.stats, name) + getattr(lineage, name))
        source = self.pipeline.dataset
        count_samples(
            self.stats,
            self._policy,
            lineage.bad,
            batch["__valid__"][:: lineage.repeat].tolist()
            if lineage.planned_rows is None
            else [True] * len(lineage.planned),
            [source.locate(shard).source for shard, _ in lineage.planned],
            start=lineage.start,
            rank=resolve_world(self._world).rank,
            numbers=lineage.bad_numbers(),
            urls=[source.locate(shard).dataset.store.url for shard, _ in lineage.planned]
            if lineage.bad
            else (),
        )
        self._delivered.count(batch)
        self._count_imbalance(lineage)
        self._position = position_after(self._current.order, lineage.epoch, lineage.step + 1)
        self._is_midway = lineage.epoch == self._position[0]
        self.stats.num_steps += 1
        if not self._is_midway:
            self._end_epoch()

    def _leave_epoch(self, world: World) -> None:
        """Go to the next beginning, because the loop over this epoch was left before its end."""
        epoch, step = self._position
        if self._current.shuffle and world.rank == 0 and not self._has_left:
            self._has_left = True
            logger.warning(
                "left epoch %d at step %s of %s, the rest of it is not shown; to go on there: "
                "loader.load_state_dict(loader.state_dict()); for short epochs that go on: "
                "mm.Mixture({'all': (dataset, 1)}, epoch_steps=%d)",
                epoch,
                f"{step:,}",
                f"{len(self):,}",
                step,
            )
        self._position = self._next_beginning()
        self._is_midway = False
        self._end_epoch()

    def _next_beginning(self) -> tuple[int, int]:
        """Return where the next loop begins if this one is left now."""
        epoch, step = self._position
        return (epoch + self._current.shuffle, 0) if self._is_midway else (epoch, step)

    def _next_pipeline(self) -> Pipeline:
        """Return what runs after this epoch. A mixture keeps the settings of its state."""
        return self.pipeline if self.pipeline.dataset.can_finish_epoch else self._current

    def _end_epoch(self) -> None:
        self._delivered.warn_of_filters()  # also where the epoch had few samples
        self._current = self._next_pipeline()

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

        It has less than 1 KB, and about 230 bytes more per source of a mixture. Each `set_weights`
        adds about 100.
        """
        return make_state(self._current.order, *self._position)

    def next_epoch_state(self) -> dict[str, Any]:
        """Return the state of the next ``for``, as if the loop over this epoch were left now.

        For trainers that end an epoch early and save after it.
        """
        pipeline = self._next_pipeline() if self._is_midway else self._current
        return make_state(pipeline.order, *self._next_beginning())

    @checked(late=True)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved, on whatever ranks and workers there are now.

        Raises:
            StateError: the state cannot be applied exactly.
        """
        pipeline = self.pipeline
        epoch, step, order = resume(pipeline.dataset, pipeline.order, state, self._on_change)
        self._position = self._handed_out = epoch, step
        self._current = pipeline if order is pipeline.order else pipeline.with_order(order)
        self._is_midway = False
        self._iteration += 1

    @checked(late=True)
    def set_weights(self, weights: Mapping[str, NonNegativeFloat]) -> None:
        """Draw from the sources of a mixture by other weights, from the next batch on.

        They replace those that the mixture declares from there on, are in the state, and hold until
        the next call. All ranks call it after the same batch, with the same weights, and compare
        both. A batch that `mm.to_device` has fetched ahead comes first. Workers and windows begin
        again, as after a resume (docs: mixtures).

        Args:
            weights: The weight of each source, relative to their sum. They are rounded to
                thousandths of it, at least one. 0: nothing more of the source.

        Raises:
            ConfigError: On every rank, where a rank differs or does not come. Or the weights are
                impossible, there were 1,000 changes before, or there is no mixture with
                ``epoch_steps``. Then nothing changes.

        Examples:
            >>> mixture = mm.Mixture(
            ...     {"a": (mm.open_dataset("captions/"), 1), "b": (mm.open_dataset("chats/"), 1)},
            ...     epoch_steps=20,
            ... )
            >>> loader = mm.Loader(mm.Pipeline(mixture, global_batch_size=8))
            >>> loader.set_weights({"a": 0.25, "b": 0.75})
            >>> next(iter(loader))["__source__"].count("b")
            6
        """
        source, order, steps = self.pipeline.dataset, self._current.order, len(self)
        if not (isinstance(source, Mixture) and isinstance(order, MixtureOrder)):
            raise ConfigError("set_weights: is for single samples of an mm.Mixture")
        if not isinstance(source.epoch_steps, int):
            raise ConfigError("set_weights: give the mixture epoch_steps=n in place of stop=")
        if self._channel is not None:
            raise ConfigError(
                'set_weights: its ranks read by themselves; leave out share="broadcast"'
            )
        run_step = max(epoch * steps + step for epoch, step in (self._handed_out, self._position))
        check_consistency(
            {"step of the run": str(run_step), "weights": described(weights)},
            resolve_world(self._world),
            beginning="set_weights",
            advice="every rank must call it after the same batch; for one rank alone pass "
            "mm.Loader(world=mm.World(0, 1))",
            num_same=self._num_same,
        )
        if weights.keys() != source.datasets.keys():
            raise ConfigError(
                f"set_weights: got weights of {sorted(map(str, weights))}, and the sources are "
                f"{sorted(source.datasets)}: give each of them one, 0 for none"
            )
        try:
            self._current = self._current.with_order(order.with_weights(run_step, weights))
        except ConfigError as error:
            raise ConfigError(f"set_weights: {error}") from None
        if resolve_world(self._world).rank == 0:
            logger.info("weights from step %d of the run: %s", run_step, dict(weights))

    def close(self) -> None:
        """End the workers. It may be called again; iterating again starts new workers."""
        self._iteration += 1  # a loop that is still open gets an error, and does not end quietly
        if self._channel is not None:
            self._channel.leave()
        self._makers.close()

    def __repr__(self) -> str:
        epoch, step = self._position
        return f"<Loader: epoch {epoch} step {step} of {len(self)}, {self.num_workers} workers>"

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

    def _check_consistency(self, world: World, dealt: Mapping[str, str]) -> None:
        """Compare with all other ranks what this one is about to deliver."""
        pipeline = self._current
        if world.world_size * self._num_same > 1 and pipeline not in self._rank_settings:
            settings = rank_settings(pipeline, self._rows_per_rank, self._on_change)
            self._rank_settings = {pipeline: settings}
        epoch, step = self._position
        channel = "none" if self._channel is None else str(self._channel.tag)
        check_consistency(
            {
                "epoch": str(epoch),
                "step": str(step),
                "number of the loader on its mesh": channel,
                **self._rank_settings.get(pipeline, {}),
                **dealt,
            },
            world,
            beginning="this iteration",
            advice="every rank must iterate its Loader; for one rank alone pass "
            "world=mm.World(0, 1)",
            num_same=self._num_same,
        )


def _rows_of(pipeline: Pipeline, world: World, shares: RowsPerRank) -> tuple[int, int]:
    """Return [start, stop), the rows of the order that a rank delivers."""
    order = pipeline.order
    if isinstance(order, BucketOrder):
        order.require_equal_shares(world.world_size, shares)
    return rows_of_rank(order.global_batch_size, world, shares, order.repeat)


def _check_pipeline(pipeline: object) -> None:
    """Refuse what is not a pipeline, and say how to make one."""
    if not isinstance(pipeline, Pipeline):
        advice = "pass mm.Loader(pipeline)"
        if hasattr(pipeline, "plan_order"):
            advice = "pass mm.Loader(mm.Pipeline(dataset, global_batch_size=...))"
        raise ConfigError(f"Loader: got {type(pipeline).__name__}: {advice}")


def _refuse_regrouping(caller: FrameType) -> None:
    """Refuse what torch and Hugging Face put between a loader and its user by default.

    Args:
        caller: the frame that asks for the first batch. A DataLoader with a batch_size would stack
            finished batches, and a shard of a Trainer would drop those of other ranks. The local
            variables of other callers are not touched: Python 3.11 would keep them alive.

    Raises:
        ConfigError: the caller is one of them.
    """
    name = caller.f_code.co_qualname
    is_fetcher = name == "_IterableDatasetFetcher.fetch" and caller.f_locals["self"].auto_collation
    if is_fetcher or name == "IterableDatasetShard.__iter__":
        raise ConfigError(
            "a Loader yields finished batches of this rank: DataLoader(loader, batch_size=None, "
            "num_workers=0); in the Trainer of transformers, "
            "mmstream.train.LoaderTrainer(model, args, train_dataset=loader)"
        )


# -- what delivered batches hold -------------------------------------------------------------------
#
# Bad samples and their limits are counted in ``decoding/bad_samples.py``. The samples here are
# good: they never reach a limit. A warning for each of them would flood the log. So the first one
# of a kind is a warning.

MIN_SAMPLES = 1000
"""Delivered samples from which on filters are judged."""

MIN_LEFT_OUT = 0.05
"""A filter that leaves out this share of the samples is worth a warning."""


class DeliveredCounts:
    """The counts of one loader, and which warnings it has logged.

    Args:
        stats: of the loader; changed in place.
        pipeline: what makes the batches.
    """

    def __init__(self, stats: Stats, pipeline: Pipeline) -> None:
        self._stats = stats
        self._batching = pipeline.flat
        self._action = pipeline.bad_samples.action
        self._has_warned_of_filters = False

    def count(self, batch: Batch) -> None:
        """Count a delivered batch, whose bad samples are counted already."""
        stats, lineage = self._stats, batch["__lineage__"]
        is_first = not (stats.num_longer or stats.num_shorter)
        if is_first and (lineage.num_longer or lineage.num_shorter):
            logger.warning(
                "%s: decoders, templates or draws are not those of the measure, so packs are "
                "emptier than planned, or samples do not fit: measure and plan again; others are "
                "only counted, see loader.stats",
                lineage.unlike_measured,
            )
        stats.num_longer += lineage.num_longer
        stats.num_shorter += lineage.num_shorter
        if self._batching is not None:
            self._count_tokens(batch, self._batching)
        if stats.num_samples >= MIN_SAMPLES:
            self.warn_of_filters()
        is_new = (lineage.num_cut_texts and not stats.num_cut_texts) or (
            lineage.num_dropped_parts and not stats.num_dropped_parts
        )
        for example in lineage.text_losses if is_new else ():
            logger.warning("%s; others are only counted, see loader.stats", example)
        stats.num_cut_texts += lineage.num_cut_texts
        stats.num_dropped_parts += lineage.num_dropped_parts

    def _count_tokens(self, batch: Batch, batching: Flat) -> None:
        """Count documents and tokens of rows without padding."""
        stats = self._stats
        stats.num_documents += len(batch["__key__"])
        stats.num_tokens += batch["num_tokens"]
        stats.num_label_tokens += batch.get("num_label_tokens", 0)
        if not isinstance(batching, Pack):
            stats.num_token_slots += batch["input_ids"].numel()
            return
        stats.num_token_slots += batching.max_tokens * int(batch["__valid__"].sum())
        stats.num_planned_tokens += batch["__lineage__"].num_planned_tokens

    def warn_of_filters(self) -> None:
        """Warn once where filters leave out so much that an epoch is not what it seems."""
        stats = self._stats
        num_skipped, num_samples = stats.num_skipped, stats.num_samples
        is_little = num_skipped < max(1, MIN_LEFT_OUT * num_samples)
        if self._has_warned_of_filters or is_little:
            return
        self._has_warned_of_filters = True
        repeats = num_samples / max(1, num_samples - num_skipped)
        is_repeated = self._action == "substitute" and not isinstance(self._batching, Pack)
        logger.warning(
            "filters (mm.SkipSample) left out %s of %s samples that were read%s; leave them out "
            "before training: with `mmstream select --where`, at conversion, or of packs with "
            "`mmstream plan --where` (docs/pipeline.md#filters)",
            f"{num_skipped:,}",
            f"{num_samples:,}",
            f": the others come {repeats:.1f} times in an epoch, on average" * is_repeated,
        )


# -- rows of packs dealt to the ranks by their cost: among which ranks -----------------------------
#
#     iter_undelivered -> `balanced` -> PackOrder.with_ranks -> workers and the reader process
#
# The order of the steps and its state know nothing of it, so a run may resume on other ranks, with
# another cost, or without one.


@dataclass(frozen=True)
class Balance:
    """The rows of a run, dealt or not."""

    pipeline: Pipeline
    """What the ranks run: the pipeline, with an order whose rows are dealt."""
    settings: dict[str, str]
    """What all ranks must have in common, by name."""
    cost: Cost | None = None
    """What packs cost, where several equal ranks wait for each other."""
    world_size: int = 1

    def imbalance(self, epoch: int, step: int) -> float | None:
        """Return the largest modelled cost of a rank over the mean of all, from 1.

        None: nothing says what packs cost, there is one rank, or the step has padding rows.
        """
        order = self.pipeline.order
        if self.cost is None or not isinstance(order, PackOrder):
            return None
        costs = self.cost.modelled(order.unit_sums(epoch, step))
        return imbalance(costs, self.world_size) if costs.size == order.global_batch_size else None


def balanced(pipeline: Pipeline, world_size: int, shares: RowsPerRank, *, logs: bool) -> Balance:
    """Return a pipeline whose rows are dealt to the ranks by cost, where one is given.

    Args:
        pipeline: what the loader runs.
        world_size: W.
        shares: how the rows are shared out, as the Loader has it. Rows are dealt in equal shares.
        logs: whether this rank says in the log what was decided.
    """
    order, batching = pipeline.order, pipeline.batching
    if not (isinstance(order, PackOrder) and isinstance(batching, Pack)) or world_size == 1:
        return Balance(pipeline, {})
    undealt = Balance(pipeline, {"rows dealt": "no"})
    if batching.cost is None:
        return undealt
    if shares is None or shares == "balanced":
        is_equal = order.global_batch_size % world_size == 0
    else:
        is_equal = len(set(shares)) == 1
    if not is_equal:
        if logs:
            logger.info(
                "without effect: mm.Pack(cost=), because rows are dealt in equal shares only: "
                "global_batch_size %d over %d ranks, rows_per_rank=%s",
                order.global_batch_size,
                world_size,
                shares,
            )
        return undealt
    undealt = replace(undealt, cost=batching.cost, world_size=world_size)
    if batching.deal == "off":
        return undealt
    among = _ranks_that_deal(pipeline, batching, order, world_size)
    if logs:
        logger.info("packs are dealt by cost, among %d of %d ranks", among, world_size)
    dealt_order = order.with_ranks(world_size, partial(deal, among=among), batching.cost.modelled)
    settings = {"rows dealt": f"among {among} of {world_size} ranks"}
    return replace(undealt, pipeline=pipeline.with_order(dealt_order), settings=settings)


def _ranks_that_deal(pipeline: Pipeline, batching: Pack, order: PackOrder, world_size: int) -> int:
    """Return how many neighbouring ranks share out their rows between them.

    1: each rank has its own rows, by falling cost. That costs no request to storage.
    """
    if batching.deal == "all" or not needs_reader_process(pipeline.dataset):
        return world_size
    num_lanes = order.grid[1]
    return max(1, world_size // num_lanes) if world_size % num_lanes == 0 else 1
