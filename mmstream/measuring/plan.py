"""A pipeline -> the lengths of all samples, and the plan of its packs: `mm.plan`, `mmstream plan`.

    Pipeline -> `LengthCounter` -> `measure`: a file of lengths for each shard -> `make_plan`
        -> mmstream.plan.NAME beside the index

Shards are measured by several processes. What a shard gives is written as soon as it is there, so a
call that was killed goes on where it was. The result is the same for any number of processes.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np
from tqdm import tqdm

from mmstream.batching.flat import Pack
from mmstream.batching.lengths import LengthCounter, misfit, plan_name, seed_of_source
from mmstream.dataset.dataset import Dataset
from mmstream.decoding.decode import Decode
from mmstream.errors import (
    ConfigError,
    ManifestError,
    MMStreamError,
    escaped,
    where,
)
from mmstream.packing.plan import (
    PLAN_NAME,
    TOO_LONG,
    PackLimits,
    PackPlan,
    open_plan,
    plan_folder,
    write_plan,
)
from mmstream.packing.planner import (
    COLUMNS,
    NOT_MEASURED,
    UNUSABLE_NAME,
    Measure,
    ShardLengths,
    left_out_of,
    make_plan,
    measure_folder,
    measure_of_shards,
    plan_digest,
    read_lengths,
    require_first_shards,
    settings_digest,
    write_lengths,
)
from mmstream.pipeline import Pipeline
from mmstream.processes.machine import num_cores
from mmstream.processes.workers import run_in_processes
from mmstream.reading.step import Outcome
from mmstream.settings import NonEmptyStr, NonNegativeInt, PositiveInt, checked
from mmstream.storage import Store, open_store, require_shared
from mmstream.types import SampleRef

logger = logging.getLogger(__name__)

SAMPLES_AT_ONCE = 128
"""Samples whose texts are tokenized together."""

CHECKED_SAMPLES = 64
"""Samples of each shard that are measured with other draws too, where functions may draw."""

MAX_SERIAL_SAMPLES = 20_000
MAX_SERIAL_BYTES = 1 << 30
"""Less work is done in this process: others need seconds to start."""


_ADVICE = {
    "pipeline": "give the mm.Pipeline of training",
    "epochs": "give numbers from 0 up, such as range(3)",
}


@checked(_ADVICE)
def plan(
    pipeline: Pipeline,
    limits: PackLimits | PositiveInt | None = None,
    *,
    name: NonEmptyStr | None = None,
    folder: str | os.PathLike[str] | None = None,
    epochs: Sequence[NonNegativeInt] | None = None,
    room: NonNegativeInt = 0,
    patch_size: PositiveInt = 14,
    overwrite: bool = False,
    measure_only: bool = False,
    num_workers: NonNegativeInt | None = None,
    progress: bool = True,
) -> Any:
    """Measure the lengths of all samples of a pipeline, and decide which form packs.

    The lengths and the plan are written beside the index of the dataset. A call that was killed
    goes on where it was. Shards that are measured are not measured again, for other limits neither.
    Where there is a plan, it is continued: its packs stay, and appended shards form new ones.

    A plan over a view is of its selection: the other samples are not measured and in no pack, and a
    pipeline with another selection refuses the plan. It is not continued.

    Args:
        pipeline: Its dataset, decoders, functions before decoding and seed count. Each source of a
            mixture is planned by itself.
        limits: What a pack may hold: tokens, or `PackLimits`. None: those of
            ``batching=mm.Pack(...)``.
        name: Of the plan, for ``mm.Pack(plan=name)``. None: a digest of decoders and limits, which
            ``mm.Pack`` finds by itself.
        folder: Folder or URL that gets the folders of lengths and plan. None: that of the index.
        epochs: Where lengths depend on draws, such as one of several captions: the epochs that are
            measured. A sample counts with its longest length.
        room: Tokens that each sample gets more, in place of `epochs`.
        patch_size: Side of a patch of the vision tower, in pixels.
        overwrite: Plan all shards again in place of continuing the plan that is there.
        measure_only: Return the lengths, and plan nothing.
        num_workers: Processes. None: as many as there are cores, or this process alone for little
            work. The result does not depend on their number.
        progress: Show a progress bar (on a terminal only).

    Returns:
        The `PackPlan`, or the `Measure` with `measure_only`. Of a mixture: a dict of them by
        source, which ``mm.Pack(plan=)`` takes. A sample that cannot be used has -1 tokens;
        ``unusable.jsonl`` beside the lengths says why.

    Raises:
        ConfigError: The pipeline decodes no texts, no sample fits, there is a plan of other
            settings, lengths depend on draws and neither `epochs` nor `room` is given, or a
            function cannot be sent to another process.
        ShardError, StorageError: A shard cannot be read.
        MMStreamError: A process died. The shards that are done are kept.

    Examples:
        >>> from mmstream.train.tokenizer import byte_tokenizer
        >>> pipeline = mm.Pipeline(
        ...     mm.open_dataset("shards/"),
        ...     global_batch_size=2,
        ...     decode=mm.Decode(text=mm.TextDecoder(byte_tokenizer(), max_length=2048)),
        ...     batching=mm.Pack(2048),
        ... )
        >>> plan = mm.plan(pipeline)
        >>> plan.members.size
        480
        >>> int(mm.plan(pipeline, measure_only=True).column("num_tokens").min()) > 0
        True
    """
    pack = pipeline.batching if isinstance(pipeline.batching, Pack) else None
    if limits is None and pack is not None:
        limits = pack.limits or pack.max_tokens
    if limits is None and not measure_only:
        raise ConfigError(
            "plan: how many tokens has a pack? Give mm.plan(pipeline, 8192), or a pipeline with "
            "batching=mm.Pack(8192)"
        )
    planned = plan_sources(
        pipeline,
        None if measure_only else limits,
        name,
        None if folder is None else os.fspath(folder),
        epochs,
        room,
        patch_size,
        overwrite,
        num_workers,
        progress,
    )
    results = {
        source.name: source.measure if source.plan is None else source.plan for source in planned
    }
    return results.get("", results)


class PlannedSource(NamedTuple):
    """A source of a pipeline, its lengths and its plan."""

    name: str
    """Of a source of a mixture; "" for a dataset alone."""
    dataset: Dataset
    measure: Measure
    plan: PackPlan | None
    """None: the lengths alone were wanted."""


@checked(_ADVICE)
def plan_sources(
    pipeline: Pipeline,
    limits: PackLimits | PositiveInt | None,
    name: NonEmptyStr | None = None,
    folder: str | None = None,
    epochs: Sequence[NonNegativeInt] | None = None,
    room: NonNegativeInt = 0,
    patch_size: PositiveInt = 14,
    overwrite: bool = False,
    num_workers: NonNegativeInt | None = None,
    progress: bool = True,
) -> Iterator[PlannedSource]:
    """Yield each source of a pipeline with its plan; errors and arguments as `plan`."""
    if epochs is not None and (not epochs or min(epochs) < 0):
        raise ConfigError(f"epochs={epochs!r}: give numbers from 0 up, such as range(3)")
    chosen = None if epochs is None else tuple(sorted(set(epochs)))
    decode, data, seed = pipeline.decode or Decode(), pipeline.dataset, pipeline.seed
    sources = {"": data} if isinstance(data, Dataset) else data.datasets
    for source, dataset in sources.items():
        if not dataset.corpus.num_samples:
            raise ConfigError(f"plan: {dataset!r} has no samples to measure: choose others")
        own_seed = seed_of_source(seed, source) if source else seed
        counter = LengthCounter(
            dataset, decode, pipeline.before, own_seed, chosen, room, patch_size
        )
        root = folder or dataset.index_store.url
        if folder is not None and source:
            root = f"{folder.rstrip('/')}/{source}"
        if limits is None:
            yield PlannedSource(
                source, dataset, measure(counter, root, num_workers, progress), None
            )
            continue
        limits = limits if isinstance(limits, PackLimits) else PackLimits(limits)
        target = plan_folder(root, plan_name(limits, counter.settings) if name is None else name)
        previous, difference = _previous(counter, limits, target, overwrite)
        if difference is not None:
            open_store(target).remove(PLAN_NAME)  # a call that is killed must not leave it
        measured = measure(counter, root, num_workers, progress, outdated=difference)
        packed = make_plan(measured, limits, bad=dataset.bad, previous=previous)
        _require_packs(packed, measured.num_samples)
        yield PlannedSource(source, dataset, measured, write_plan(packed, target))


def _previous(
    counter: LengthCounter, limits: PackLimits, target: str, overwrite: bool
) -> tuple[PackPlan | None, str | None]:
    """Return the plan that is continued, if any, and how its lengths are others than those now.

    Raises:
        ConfigError: It is of other settings, shards or lengths. With `overwrite`, none of them is.
        ManifestError: It is damaged, and not overwritten.
    """
    try:
        previous = open_plan(target)
        digest = plan_digest(limits, settings_digest(counter.settings))
        require_first_shards(counter.dataset.manifest.shards, digest, previous)
        difference = misfit(counter, previous)
    except FileNotFoundError:
        return None, None
    except (ConfigError, ManifestError):
        if overwrite:
            return None, None
        raise
    if overwrite:
        return None, difference
    if difference is not None:
        raise ConfigError(
            f"{target}: its lengths are not those of this pipeline: {difference}; give another "
            "name, or replace it with overwrite=True"
        )
    return previous, None


def _require_packs(packed: PackPlan, num_samples: int) -> None:
    """Raise a ConfigError where no sample fits, with the reasons."""
    if packed.num_units or not num_samples:
        return
    counts = (f"{entry.num_samples:,} {entry.reason}" for entry in left_out_of(packed))
    too_long = packed.left_out[packed.left_out[:, 1] == TOO_LONG, 2]
    shortest = f"; the shortest has {too_long.min():,} tokens" if too_long.size else ""
    raise ConfigError(
        f"no sample fits into packs of {packed.settings.max_tokens:,} tokens, so no plan was "
        f"written: {', '.join(counts)}{shortest}"
    )


# -- a corpus -> the lengths of all samples --------------------------------------------------------


def measure(
    counter: LengthCounter,
    root: str,
    num_workers: int | None = None,
    progress: bool = True,
    outdated: str | None = None,
) -> Measure:
    """Measure the shards that are not measured yet, and return the lengths of all samples.

    The samples are read in long ranges, and go through the decoders of training up to the
    tokenizer. All shards are measured again where a few samples that are measured already have
    another length now, because a function or a library counts otherwise.

    Args:
        counter: Counts the samples of a dataset.
        root: Folder or URL that gets the folder of the measure.
        num_workers: Processes. None: as many as there are cores, or this process alone for little
            work.
        progress: Show a progress bar (on a terminal only).
        outdated: Why all shards are measured again. None: only where lengths differ.

    Raises:
        ConfigError: Lengths depend on draws, and neither epochs nor room is given. Or a function
            cannot be sent to another process.
        ShardError, StorageError: A shard cannot be read.
        MMStreamError: A process died. The shards that are done are kept.
    """
    shards = counter.dataset.manifest.shards
    store = open_store(measure_folder(root, counter.settings))
    lengths = read_lengths(store, shards)
    difference = outdated or _difference(counter, lengths)
    if difference is not None:
        logger.warning("%s: %s: all shards are measured again", store.url, difference)
        for file in store.list():
            store.remove(file)
        lengths = [None] * len(shards)
    missing = [number for number, of_shard in enumerate(lengths) if of_shard is None]
    if missing:
        _measure_shards(counter, store, missing, num_workers, progress)
        lengths = read_lengths(store, shards)
    whole = [of_shard for of_shard in lengths if of_shard is not None]
    if len(whole) < len(shards):
        raise MMStreamError(f"{store.url}: was damaged on the way; run the same command again")
    lines = [
        msgspec.json.encode({"shard": shard.name, "index": index, "reason": reason}) + b"\n"
        for shard, of_shard in zip(shards, whole, strict=True)
        for index, reason in of_shard.reasons
    ]
    if lines:
        store.write(UNUSABLE_NAME, b"".join(lines))
        url = store.url_of(UNUSABLE_NAME)
        logger.warning("%s samples cannot be used: %s says why", f"{len(lines):,}", url)
    else:
        store.remove(UNUSABLE_NAME)
    return measure_of_shards(shards, whole, counter.settings)


def _difference(counter: LengthCounter, lengths: Sequence[ShardLengths | None]) -> str | None:
    """Count a few of the samples that are measured. Return how one differs now."""
    counts = [0 if of_shard is None else len(of_shard.values) for of_shard in lengths]
    measured = [of_shard.values[:, 0] for of_shard in lengths if of_shard is not None]
    tokens = np.concatenate([np.zeros(0, np.int64), *measured])
    positions = np.flatnonzero(tokens != NOT_MEASURED)
    return counter.difference(np.cumsum(counts), positions, tokens[positions], "before")


def _measure_shards(
    counter: LengthCounter,
    store: Store,
    shards: Sequence[int],
    num_workers: int | None,
    progress: bool,
) -> None:
    """Measure shards, and write what each gives."""
    infos = [counter.dataset.manifest.shards[shard] for shard in shards]
    num_samples = sum(info.num_samples for info in infos)
    num_bytes = sum(info.num_bytes for info in infos)
    if num_workers is None:
        is_little = num_samples < MAX_SERIAL_SAMPLES and num_bytes < MAX_SERIAL_BYTES
        num_workers = 1 if is_little else num_cores()
    require_shared([counter.dataset.store.url, store.url], num_workers)
    num_workers = min(num_workers, len(shards))
    logger.info(
        "%s: %s samples to measure, of %s MB, with %d processes",
        counter.dataset.store.url,
        f"{num_samples:,}",
        f"{num_bytes / 1e6:,.1f}",
        max(1, num_workers),
    )
    with tqdm(
        total=num_samples,
        unit=" samples",
        unit_scale=True,
        desc="measure",
        disable=None if progress else True,
        smoothing=0.1,
    ) as bar:
        if num_workers <= 1:
            for shard in shards:
                _measure_shard(counter, store, shard, bar.update)
            return
        try:
            data = pickle.dumps((counter, store))
        except Exception as error:
            raise ConfigError(
                f"plan: cannot be sent to other processes ({escaped(error, 200)}): define the "
                "functions in a module, or give num_workers=1"
            ) from None
        jobs = run_in_processes(
            _Worker.measure,
            shards,
            num_workers,
            command="plan",
            prepare=_Worker.begin,
            prepare_args=(data,),
            environment={"TOKENIZERS_PARALLELISM": "false"},  # each process has one core
        )
        for shard, _ in jobs:
            bar.update(counter.dataset.manifest.shards[shard].num_samples)


class _Worker:
    """What a worker process keeps between its shards."""

    counter: LengthCounter
    store: Store

    @classmethod
    def begin(cls, data: bytes) -> None:
        """Take over the counter. It is sent once, because a tokenizer takes megabytes."""
        cls.counter, cls.store = pickle.loads(data)

    @classmethod
    def measure(cls, shard: int) -> None:
        """Measure one shard."""
        _measure_shard(cls.counter, cls.store, shard)


def _measure_shard(
    counter: LengthCounter,
    store: Store,
    shard: int,
    advance: Callable[[int], object] = lambda _: None,
) -> None:
    """Measure the samples of a shard that the dataset shows, and write their lengths."""
    info = counter.dataset.manifest.shards[shard]
    rows: list[tuple[int, ...]] = []
    reasons = []
    indexes = counter.dataset.indexes_of(shard)
    samples = counter.dataset.shards.samples(shard, indexes)
    while batch := list(islice(samples, SAMPLES_AT_ONCE)):
        numbers = slice(len(rows), len(rows) + len(batch))
        refs = [(shard, index) for index in indexes[numbers].tolist()]
        if counter.may_draw and counter.epochs is None and not counter.room:
            _refuse_draws(counter, batch[: max(0, CHECKED_SAMPLES - len(rows))], refs)
        for ref, lengths in zip(refs, counter.lengths(batch, refs), strict=True):
            rows.append(lengths.values)
            if lengths.reason:
                reasons.append((ref[1], lengths.reason))
        advance(len(batch))
    if len(rows) != len(indexes):
        raise ManifestError(
            f"{info.name}: {len(rows)} samples, the manifest says {len(indexes)}; run "
            "`mmstream index --overwrite`"
        )
    values = np.full((info.num_samples, len(COLUMNS)), NOT_MEASURED, dtype=np.int64)
    values[:, 1:] = 0
    values[indexes] = np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS))
    write_lengths(store, info, ShardLengths(values, reasons))


def _refuse_draws(
    counter: LengthCounter, batch: Sequence[Outcome], refs: Sequence[SampleRef]
) -> None:
    """Raise a ConfigError where the lengths of the first samples depend on random draws."""
    refs = refs[: len(batch)]
    lengths = counter.lengths_of_draws(batch, refs, counter.seed, 0)
    again = counter.lengths_of_draws(batch, refs, counter.seed + 1, 1)
    for outcome, ref, first, second in zip(batch, refs, lengths, again, strict=True):
        if first.values != second.values:
            key = outcome["__key__"] if isinstance(outcome, dict) else ""
            raise ConfigError(
                f"{where(counter.dataset.name_of(ref[0]), ref[1], key)}: its length depends on "
                f"random draws: {first.values[0]} or {second.values[0]} tokens; plan the draws of "
                "a run with epochs=range(3), or give room=, the tokens that a sample may have more"
            )
