"""The whole path on one page: order -> read -> decode -> batch.

`Pipeline` describes what a batch is. It is one frozen value that pickles, and knows nothing of
ranks, workers or positions. It does no IO: the plan of `mm.Pack` is opened when a `Loader`, or
whatever else, first asks for `Pipeline.order`. `PipelineRunner` runs it in one process, a step at a
time. A `Loader` has one runner per worker.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, nullcontext
from copy import copy
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from itertools import compress, islice
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Literal, NoReturn

from torch.utils.data import IterableDataset, get_worker_info

from mmstream.batching.collate import Collate, collate, plain_tensors
from mmstream.batching.flat import Flat, Pack, reserved_batch_fields
from mmstream.batching.kinds import batches_of, check_batching, collator_of, order_of
from mmstream.batching.processor import ProcessorCollate
from mmstream.dataset.dataset import Dataset, SampleDict, ShardSource
from mmstream.dataset.mixture import Mixture
from mmstream.decoding.bad_samples import BadSamplePolicy
from mmstream.decoding.batch_memory import BatchMemory
from mmstream.decoding.decode import Decode
from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.decoding.rows import Transform
from mmstream.decoding.sample_rng import is_user_function, kept_generators, seed_draws
from mmstream.decoding.step import DecodedStep, DecodeStage, PlannedStep
from mmstream.decoding.text.decoder import TextDecoder
from mmstream.errors import (
    ChecksumError,
    ConfigError,
    SampleError,
    ShardError,
    StateError,
    TakenDownError,
)
from mmstream.order import AnyOrder, BucketOrder, Buckets
from mmstream.order.buckets import Edge
from mmstream.order.corpus import SavedOrder
from mmstream.packing.order import PackOrder
from mmstream.progress import Progress, Stage
from mmstream.ranks import World, resolve_world, rows_of_rank
from mmstream.reading.fetcher import HUGE_SAMPLE_BYTES, LargeFiles
from mmstream.reading.process import StepConnection, needs_reader_process
from mmstream.reading.reader import Reader, StepReader
from mmstream.reading.step import Job, RawStep
from mmstream.settings import (
    AnyInt,
    NonEmptyStr,
    NonNegativeInt,
    PositiveInt,
    checked,
    refuse_broken,
)
from mmstream.types import Batch, Sample

logger = logging.getLogger(__name__)

_ADVICE = {
    "batch_size": "write global_batch_size=, the samples of a step over all ranks together: "
    "8 ranks of 32 samples are 256",
    "num_generations": "write repeat=",
    "num_workers": "write mm.Loader(pipeline, num_workers=...)",
    "collate_fn": "write collate=",
    "transform": "write transforms=(function,)",
    "image": "write decode=mm.Decode(image=...)",
    "text": "write decode=mm.Decode(text=...)",
    "sampler": "the order is the pipeline's own; leave it out",
    "dataset": "pass mm.open_dataset(...), or an mm.Mixture",
    "before": "pass a tuple of functions, (fn,)",
    "transforms": "pass a tuple of functions, (fn,)",
    "grid": "give (P, Q), two whole numbers from 1 up, or None",
    "cache_dir": "give the path of a local folder",
    "batching": "pass mm.Flat(), mm.Pack(max_tokens), mm.Buckets(column, edges=...), or None",
    "collate": "pass a function, or leave it out",
    "bad_samples": "pass mm.BadSamplePolicy(action=...)",
}
"""Advice for wrong arguments, and for those of other libraries."""


@checked(_ADVICE, own=("decode",))
@dataclass(frozen=True, eq=False)
class Pipeline:
    """Describes the batches of a training run: the same on any number of ranks and workers.

    Attributes:
        dataset: What `mm.open_dataset` returns, or an `mm.Mixture`.
        global_batch_size: G, samples of a step over all ranks. With `repeat`, their rows.
        repeat: Number of consecutive rows that each sample gets, as the prompts of GRPO need. The
            sample is read, decoded and transformed once. ``__repeat__`` numbers its rows from 0
            (docs: batches).
        seed: Any integer. Each epoch of a seed has another permutation.
        grid: Lane grid (P, Q): the epoch is cut into P x Q lanes, and each batch draws from Q of
            them (docs: order). The default follows from the size of the dataset, the mean size of a
            sample and `global_batch_size`. So do the windows.
        window: M, the shuffle buffer of a lane in samples. Default: from `window_bytes`.
        window_bytes: Undecoded bytes that all shuffle buffers hold together, over all ranks. More
            bytes mix better. Default: 2 MiB for each row of a batch, within 2 to 8 GiB. Give this
            or `window`.
        reshuffle: Where the next epoch may put a sample. "global": anywhere. "lanes": in the same
            lane in all epochs of a seed, so that a node reads the same samples again. Default:
            "lanes" with `cache_dir` and a dataset on object storage, else "global".
        cache_dir: Local folder in which this node keeps the samples that it reads from object
            storage, for the next epochs. Nodes may have different folders.
        max_cache_bytes: What `cache_dir` may hold, of all runs of this user. Default: 80 % of what
            would be free without the cache, while 15 % of the disk stays free.
        decode: Decoders for images, videos, sounds and text, or by field. None: fields stay bytes,
            and ``json`` is parsed.
        before: Functions from raw sample to raw sample, run before decoding and tokenizing:
            filters, prompts, choices, other names. Fields are bytes, and ``json`` is parsed. A
            filter here costs no decoding. Random draws: of torch, numpy and random, or from
            `mm.sample_rng` (docs: augmentations).
        zero_copy: True: fields are memoryviews of what was read, which stays in memory as long as
            any of them does. Nothing is copied and ``json`` is not parsed. It cannot be combined
            with decoders or workers.
        transforms: Functions from sample to sample, run after decoding, in the thread that asks for
            a batch or the main thread of a worker, in the order of rows. Random draws as above.
        collate: Function from the samples of a rank to a batch, such as `mm.processor_collate`
            returns.
        batching: `mm.Flat`: documents one after the other, without padding. `mm.Pack`: rows of
            several samples, from a plan. None: batches as `collate` makes them. `mm.Buckets`: the
            same, but the samples of a step have about the same length or shape.
        shuffle: False: the samples come in the order of the shards.
        drop_last: False: one more step holds the left-over samples. ``__valid__`` is False for its
            padding.
        bad_samples: What happens to the row of a bad sample, and how many a run tolerates.

    Raises:
        ConfigError: impossible settings, before any shard is opened. With `mm.Pack`, settings of
            the order, and a plan that is missing or does not fit, when a `Loader` is made.

    Examples:
        >>> pipeline = mm.Pipeline(
        ...     mm.open_dataset("shards/"),
        ...     global_batch_size=256,
        ...     decode=mm.Decode(image=mm.ImageDecoder(size=224)),
        ... )
        >>> samples = pipeline.take(8)
    """

    dataset: Dataset | Mixture
    _: KW_ONLY
    global_batch_size: PositiveInt
    repeat: PositiveInt = 1
    seed: AnyInt = 0
    grid: tuple[PositiveInt, PositiveInt] | None = None
    window: PositiveInt | None = None
    window_bytes: PositiveInt | None = None
    reshuffle: Literal["global", "lanes"] | None = None
    cache_dir: NonEmptyStr | None = None
    max_cache_bytes: PositiveInt | None = None
    decode: Decode | None = None
    before: tuple[Transform, ...] = ()
    zero_copy: bool = False
    transforms: tuple[Transform, ...] = ()
    collate: Collate = collate
    batching: Flat | Buckets | None = None
    shuffle: bool = True
    drop_last: bool = True
    bad_samples: BadSamplePolicy = field(default_factory=BadSamplePolicy)

    def __post_init__(self) -> None:
        _check_decode(self.decode)
        if isinstance(self.collate, ProcessorCollate):
            object.__setattr__(self, "decode", self.collate.decode(self.decode))
        if self.decode is not None:
            # `collate` copies what it joins; a function of the user may write to what it gets.
            views = self.collate is collate and not self.transforms
            decode = self.decode.of_source(self.dataset, views=views)
            object.__setattr__(self, "decode", decode)
        refuse_broken(
            (
                self.zero_copy and self.decode is not None,
                "zero_copy=True: decoders take bytes; leave out one of the two",
            ),
            (
                self.max_cache_bytes is not None and self.cache_dir is None,
                "max_cache_bytes without cache_dir: say where to keep them",
            ),
            (
                self.repeat > 1 and self.batching is not None,
                f"repeat={self.repeat} with batching=: repeated rows are padded ones; leave out "
                "one of the two",
            ),
        )
        check_batching(
            self.batching,
            self.dataset,
            self.decode,
            self.transforms,
            is_own=self.collate is not collate,
        )
        # The plan of packs may be made by `mm.plan(self)`; buckets read columns.
        if not isinstance(self.batching, Pack | Buckets):
            _ = self.order  # refuses impossible settings here, not in a worker

    @cached_property
    def order(self) -> AnyOrder:
        """The order of all epochs: which sample or pack comes in which step and row."""
        return order_of(
            self.batching,
            self.dataset,
            self.decode,
            self.before,
            global_batch_size=self.global_batch_size,
            repeat=self.repeat,
            seed=self.seed,
            grid=self.grid,
            window=self.window,
            window_bytes=self.window_bytes,
            reshuffle=self.reshuffle,
            has_cache=self.cache_dir is not None and needs_reader_process(self.dataset),
            shuffle=self.shuffle,
            drop_last=self.drop_last,
        )

    @property
    def flat(self) -> Flat | None:
        """How batches without padding are made. None: they are padded."""
        return self.batching if isinstance(self.batching, Flat) else None

    def with_order(self, order: AnyOrder) -> Pipeline:
        """Return this pipeline with another order of the same dataset, such as a saved state's.

        Raises:
            StateError: The order repeats samples, and batches without padding cannot.
        """
        if order.repeat > 1 and self.flat is not None:
            raise StateError(
                f"the rest of this epoch was planned with repeat={order.repeat}, and batching= has "
                "no repeated rows: leave it out until the epoch has ended"
            )
        saved = SavedOrder.parse(order.identity()).keys
        names = ("global_batch_size", "seed", "window", "shuffle", "drop_last", "reshuffle")
        settings = {name: saved[name] for name in names if name in saved}
        settings |= {"repeat": order.repeat, "grid": order.grid, "window_bytes": None}
        # `dataclasses.replace` would forget the order, and check settings that were checked.
        pipeline = copy(self)
        pipeline.__dict__.update(settings, order=order)  # where cached_property keeps the order
        return pipeline

    def __iter__(self) -> NoReturn:
        raise ConfigError(
            "a Pipeline only describes the batches: write `for batch in mm.Loader(pipeline)`"
        )

    def __repr__(self) -> str:
        if "order" not in self.__dict__:  # nothing is opened
            of = self.batching
            batches = f"packs of {of.max_tokens:,} tokens" if isinstance(of, Pack) else f"{of!r}"
            return f"<Pipeline: {batches}, of {self.dataset!r}>"
        rows = f"{self.global_batch_size}{' packs' if self.order.is_packed else ''}"
        rows += f" rows, {self.repeat} of each sample," if self.repeat > 1 else ""
        steps = f"{self.order.steps_per_epoch:,} steps of {rows} per epoch"
        return f"<Pipeline: {steps}, seed {self.seed}, of {self.dataset!r}>"

    @checked()
    def take(self, num_samples: NonNegativeInt) -> list[Sample]:
        """Return the first samples of epoch 0 as they would enter a batch, without a Loader.

        Padding and other rows that are not valid are left out. `repeat` has no effect.

        Raises:
            ConfigError: `num_samples` is negative.
        """

        def samples() -> Iterator[Sample]:
            all_rows = self.order.global_batch_size
            with closing(PipelineRunner(self)) as runner:
                for step in range(self.order.steps_per_epoch):
                    # Parts of a bucket's step of fewer rows would overlap.
                    is_full = self.order.rows_of(0, step, (0, all_rows))[1] == all_rows
                    part = num_samples if is_full else all_rows
                    for start in range(0, all_rows, part):
                        job = Job(0, step, start, min(start + part, all_rows))
                        lineage, decoded = runner.decoded(job)
                        is_shown = lineage.valid if lineage.rows is None else [True] * len(decoded)
                        yield from compress(decoded, is_shown)

        with plain_tensors():
            return list(map(SampleDict, islice(samples(), num_samples)))

    @checked()
    def as_webdataset(self, epoch: NonNegativeInt = 0, world: World | None = None) -> Any:
        """Return the raw samples of one epoch as a stock `wds.DataPipeline`, for existing stages.

        Add stages with ``.compose(wds.decode("pil"), ...)``. It runs in any DataLoader with
        ``batch_size=None``. Decoders, functions and `repeat` of this pipeline are not applied, bad
        samples are not substituted, and there is no state.
        """
        if self.order.is_packed:
            raise ConfigError(
                "as_webdataset: its stages take single samples, and batching=mm.Pack(...) has rows "
                "of several: iterate over mm.Loader(pipeline)"
            )
        from webdataset import DataPipeline

        return DataPipeline(RawStream(self.dataset, self.order, epoch, world))


class PipelineRunner:
    """Runs a pipeline in this process, a step at a time. Holds threads; close it at the end.

    After an error it is not used again.

    Args:
        pipeline: what to run.
        num_threads: decode threads.
        memory: for images of one size. None: memory of this process alone.
        progress: where it writes down what it works on. None: nowhere.
        connection: to the reader process of the rank. None: this process reads by itself.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        num_threads: int = 1,
        memory: BatchMemory | None = None,
        progress: Progress | None = None,
        connection: StepConnection | None = None,
    ) -> None:
        self._progress = progress or Progress()
        memory = memory or BatchMemory()
        order, collator = pipeline.order, collator_of(pipeline.decode, memory)
        # Decoders leave the interpreter free; code that only parses would wait for it.
        in_background = num_threads > 1 and pipeline.decode is not None
        self._reader = _reader_of(
            pipeline, connection, in_background=in_background, is_sent=memory.shared
        )
        self._decode = DecodeStage(
            self._reader.lookup,
            pipeline.decode,
            pipeline.transforms,
            before=pipeline.before,
            policy=pipeline.bad_samples,
            num_threads=num_threads,
            memory=memory,
            progress=self._progress,
            limits=order.plan.settings if isinstance(order, PackOrder) else None,
            batch_fields=reserved_batch_fields(pipeline.flat, collator.settings),
        )
        self._stages: dict[Edge, DecodeStage] = {}  # by bucket
        self._pipeline = pipeline
        self._make_batch = batches_of(
            pipeline.batching,
            order,
            pipeline.decode,
            collator,
            pipeline.collate,
            pipeline.repeat,
        )
        self._has_warned = False
        self._next: tuple[Job, Future[tuple[RawStep, PlannedStep | None]]] | None = None
        self._has_functions = _has_user_functions(pipeline)
        # A worker has no other draws to keep.
        self._keeps = self._has_functions and not memory.shared
        # A thread reads and plans the next step while this one is decoded. A reader process reads
        # ahead itself, and the threads that decode also plan videos. The memory of batches has no
        # lock: the thread that prepares takes it alone. Batches take some for media, which are not
        # prepared ahead, and for baked fields, whose preparing takes none.
        has_media = pipeline.decode is not None and bool(pipeline.decode.table.media)
        prepares_ahead = in_background and connection is None and not has_media
        self._pool = ThreadPoolExecutor(1, "mmstream-prepare") if prepares_ahead else None

    def batch(self, job: Job) -> Batch:
        """Return the batch of a job.

        Raises:
            ShardError, StorageError: data or storage that stops a run.
            SampleError: a bad sample, where the policy is to raise.
            BadSampleLimitError: no row of the step has a good sample or substitute.
            ConfigError: a transform or `collate` returned something of the wrong type.
        """
        begun = time.perf_counter()
        step = self._read(job)
        read_s = time.perf_counter() - begun
        with self._drawing():
            batch, collate_s = self._decoded_batch(job, step)
        decode_s = time.perf_counter() - begun - read_s - collate_s
        batch["__lineage__"] = replace(
            batch["__lineage__"], read_s=read_s, decode_s=decode_s, collate_s=collate_s
        )
        return batch

    def _decoded_batch(
        self, job: Job, step: tuple[RawStep, PlannedStep | None]
    ) -> tuple[Batch, float]:
        """Decode a step and make its batch. Return it and the seconds of its making alone."""
        try:
            return self._batch(job, self._decoded(step))
        except SampleError:
            collate = self._pipeline.collate
            if not isinstance(collate, ProcessorCollate):
                raise
        # It does not tell which row is bad: each goes through it alone.
        stage = self._stage_of(job.epoch, job.step).with_transform(collate.alone)
        decoded = self._decoded((step[0], None), stage)
        try:
            return self._batch(job, decoded)
        except SampleError as error:
            raise ConfigError(
                f"epoch {job.epoch} step {job.step}: {error}; each row works alone, so they do "
                "not go together: give pictures one size, by "
                "decode=mm.Decode(image=mm.ImageDecoder(size=336)), or leave rows without "
                "media out with Pipeline(before=)"
            ) from error

    def _batch(self, job: Job, decoded: DecodedStep) -> tuple[Batch, float]:
        self._progress.begin_stage(Stage.BATCH, job.epoch, job.step)
        if self._has_functions:
            seed_draws("collate", self._pipeline.seed, job.epoch, job.step, decoded.lineage.start)
        begun = time.perf_counter()
        batch = self._make_batch(decoded)
        return batch, time.perf_counter() - begun

    def decoded(self, job: Job) -> DecodedStep:
        """Return the decoded and transformed samples of a job; raises as `batch`."""
        step = self._read(job)
        with self._drawing():
            return self._decoded(step)

    def _drawing(self) -> AbstractContextManager[None]:
        """Keep the random generators of the process, where functions of the user may draw."""
        if not self._keeps:
            return nullcontext()
        if not self._has_warned and current_thread() is not main_thread():
            self._has_warned = True
            logger.warning(
                "functions of yours run in a thread beside the main one, and seed the random "
                "generators of the whole process: what the main thread draws meanwhile, such as "
                "dropout, does not repeat; mm.Loader(num_workers=1) runs them in a process apart"
            )
        return kept_generators()

    def _decoded(
        self, step: tuple[RawStep, PlannedStep | None], stage: DecodeStage | None = None
    ) -> DecodedStep:
        stage = stage or self._stage_of(step[0].lineage.epoch, step[0].lineage.step)
        decoded = stage(*step)
        lineage, counts = decoded.lineage, self._reader.lookup.fetcher.counts.pop()
        if not counts.total():  # decoding asked for no reads
            return decoded
        sums = {name: getattr(lineage, name) + count for name, count in counts.items()}
        return decoded._replace(lineage=replace(lineage, **sums))

    def _read(self, job: Job) -> tuple[RawStep, PlannedStep | None]:
        """Return the raw step of a job, and what was prepared of it.

        With several threads, the next step of the epoch is read and prepared while this one is
        decoded, and its pictures are begun. The other threads would wait for that.
        """
        self._progress.begin_stage(Stage.READ, job.epoch, job.step)
        if self._pool is None:
            return self._reader.step(job), None
        foreseen, self._next = self._next, None
        if foreseen is not None and foreseen[0] != job:
            wait([foreseen[1]])  # only one thread asks for steps
            self._stage_of(*foreseen[0][:2]).drop_prepared()
            foreseen = None
        prepared = self._prepare(job) if foreseen is None else foreseen[1].result()
        next_job = job._replace(step=job.step + job.stride)
        if next_job.step < self._pipeline.order.steps_per_epoch:
            self._next = next_job, self._pool.submit(self._prepare, next_job)
        return prepared

    def _prepare(self, job: Job) -> tuple[RawStep, PlannedStep | None]:
        step = self._reader.step(job)
        return step, self._stage_of(job.epoch, job.step).prepare(step)

    def _stage_of(self, epoch: int, step: int) -> DecodeStage:
        """Return the stage that decodes a step, to the size of its bucket where there is one."""
        decode, order = self._pipeline.decode, self._pipeline.order
        if decode is None or not decode.needs_bucket:
            return self._decode
        if not isinstance(order, BucketOrder):
            raise ConfigError(
                f"the rest of epoch {epoch} was planned without buckets, and "
                'ImageDecoder(size="bucket") needs one: give a size until it has ended'
            )
        edge = order.edge(epoch, step)
        if edge not in self._stages:
            assert isinstance(edge, tuple), "the pipeline has refused other edges"
            self._stages[edge] = self._decode.with_decoders(decode.of_bucket(edge))
        return self._stages[edge]

    def close(self) -> None:
        """Stop reading ahead, and end all threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for stage in self._stages.values():
            stage.drop_prepared()
        self._decode.close()  # its threads may look at what was read
        self._reader.close()


def _reader_of(
    pipeline: Pipeline, connection: StepConnection | None, *, in_background: bool, is_sent: bool
) -> Reader | StepReader:
    """Return what reads the steps: this process, or by `connection` the reader of the rank.

    Args:
        pipeline: what runs.
        connection: to the reader process of the rank. None: there is none.
        in_background: threads read ahead in this process.
        is_sent: batches are sent to another process, by a worker beside others.
    """
    dataset, order, large_files = pipeline.dataset, pipeline.order, large_files_of(pipeline)
    is_viewed = _fields_viewed_by(pipeline, is_sent=is_sent)
    if connection is None:
        return Reader(
            dataset,
            order,
            is_viewed=is_viewed,
            in_background=in_background,
            large_files=large_files,
        )
    return StepReader(
        dataset,
        order,
        connection,
        is_viewed=is_viewed,
        keeps_views=pipeline.zero_copy,
        large_files=large_files,
        asks_ahead=not is_sent,  # workers work side by side
    )


def _has_user_functions(pipeline: Pipeline) -> bool:
    """Tell whether functions of the user make something of samples or batches."""
    positions = getattr(pipeline.batching, "positions", None)
    functions = (*pipeline.before, *pipeline.transforms, pipeline.collate, positions)
    is_in_decoders = pipeline.decode is not None and pipeline.decode.has_user_functions
    return is_in_decoders or any(is_user_function(function) for function in functions if function)


def needs_one_thread(pipeline: Pipeline) -> bool:
    """Tell whether threads of one process would only take the interpreter from each other."""
    has_functions = bool(pipeline.before or pipeline.transforms)
    return not has_functions and (pipeline.decode is None or pipeline.decode.holds_interpreter)


def large_files_of(pipeline: Pipeline) -> LargeFiles | None:
    """Return which samples come with their first bytes only, and which files by ranges.

    Without a decoder that reads by ranges, the process that decodes very large samples reads them
    whole by itself.

    Returns:
        None where samples are views, of which nothing is read.
    """
    if pipeline.zero_copy:
        return None
    decode = pipeline.decode
    if decode is None or decode.min_lazy_bytes is None or not decode.has_ranged_decoders:
        return LargeFiles(HUGE_SAMPLE_BYTES, lambda _field: False)
    return LargeFiles(decode.min_lazy_bytes, decode.reads_by_ranges)


def _fields_viewed_by(pipeline: Pipeline, *, is_sent: bool) -> Callable[[str], bool] | None:
    """Return which fields of raw samples may be views of what was read. None: none.

    Functions of the user get bytes, which stay what they are as long as they are held.

    Args:
        pipeline: what runs.
        is_sent: a batch is copied to another process as soon as it is made.
    """
    if pipeline.zero_copy:
        return lambda _field: True
    if pipeline.before:
        return None
    if pipeline.decode is not None:
        return pipeline.decode.takes_view
    if pipeline.transforms or pipeline.collate is not collate or not is_sent:
        return None
    return lambda field: field != "json"  # it is parsed


def _check_decode(decode: object) -> None:
    """Refuse what is no `Decode`, and say what to write."""
    if decode is None or isinstance(decode, Decode):
        return
    got = f"decode: got {type(decode).__name__}"
    refuse_broken(
        (isinstance(decode, ImageDecoder), f"{got}: pass mm.Decode(image=decoder)"),
        (isinstance(decode, TextDecoder), f"{got}: pass mm.Decode(text=decoder)"),
        (isinstance(decode, Mapping), f"{got}: pass mm.Decode({{...}}) with this mapping"),
        (decode is Decode, f"{got}: pass mm.Decode(...), not the class"),
        (
            callable(decode),
            f"{got}: a function of whole samples goes to transforms=(function,), or to "
            "before=(function,) if it takes the raw ones; one of bytes to "
            'decode=mm.Decode({"jpg": function})',
        ),
        (True, f"{got}: pass mm.Decode(image=..., text=...)"),
    )


# -- the same stream of raw samples, for stages written for webdataset -----------------------------
#
# Each rank and each DataLoader worker gets its own rows and steps, in order. There is no state, and
# bad samples have no substitutes: for both use a `Loader`.

SPLITTERS = ("split_by_node", "split_by_worker")


class RawStream(IterableDataset[Sample]):
    """One epoch of raw samples (dicts of bytes) of this rank and worker, in the order of steps.

    Padding rows of a last partial step are left out.

    Raises:
        SampleError, ShardError: a sample cannot be read.
        ConfigError: a later stage would split the stream again, and lose samples.
    """

    def __init__(
        self, source: ShardSource, order: AnyOrder, epoch: int, world: World | None
    ) -> None:
        self._source = source
        self._order = order
        self._epoch = epoch
        self._world = world

    def __iter__(self) -> Iterator[Sample]:
        _refuse_splitters(sys._getframe(1))
        world = resolve_world(self._world)
        if isinstance(self._order, BucketOrder):
            self._order.require_equal_shares(world.world_size, "balanced")
        rows = rows_of_rank(self._order.global_batch_size, world, "balanced")
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        with closing(Reader(self._source, self._order, in_background=True)) as reader:
            for step in range(first, self._order.steps_per_epoch, stride):
                lineage, outcomes, _ = reader.step(Job(self._epoch, step, *rows, stride))
                for ref, outcome, valid in zip(
                    lineage.planned, outcomes, lineage.valid, strict=True
                ):
                    if isinstance(outcome, ChecksumError):
                        outcome = reader.lookup.read_until_right(ref)
                    if isinstance(outcome, TakenDownError):
                        continue
                    if isinstance(outcome, SampleError | ShardError):
                        raise outcome
                    if valid:
                        yield {
                            name: value for name, value in outcome.items() if name != "__lineage__"
                        }


def _refuse_splitters(consumer: FrameType | None) -> None:
    """Refuse stages of webdataset that give each rank or worker a part of what it gets.

    Args:
        consumer: the frame that asks for the first sample. The stages after it ask each other, so
            they all stand above it.

    Raises:
        ConfigError: there is one of them.
    """
    while consumer is not None:
        name = consumer.f_code.co_name
        if name in SPLITTERS and consumer.f_globals.get("__name__", "").startswith("webdataset"):
            raise ConfigError(
                f"as_webdataset: wds.{name} after it would split the samples a second time; leave "
                "it out, each rank and worker has its own samples already"
            )
        consumer = consumer.f_back
