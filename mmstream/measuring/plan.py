"""A pipeline -> the plan of its packs: all samples are measured, and then packed.

    Pipeline -> `Work` -> `measure` -> `make_plan` -> mmstream.plan.NAME beside the index

`mm.plan` and ``mmstream plan``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmstream.batching.batching import Pack
from mmstream.dataset.dataset import Dataset
from mmstream.decoding.decode import Decode
from mmstream.errors import ConfigError, ManifestError
from mmstream.machine import num_cores
from mmstream.measuring.find_plan import misfit, plan_name, seed_of_source
from mmstream.measuring.measure import Counter, Work, measure
from mmstream.packing.measure_file import Measure, settings_digest
from mmstream.packing.plan import LEFT_OUT_REASONS, TOO_LONG, PackPlan
from mmstream.packing.plan_file import PLAN_NAME, open_plan, plan_folder, write_plan
from mmstream.packing.planner import make_plan, plan_digest, require_first_shards
from mmstream.packing.settings import PackLimits
from mmstream.pipeline import Pipeline
from mmstream.storage import open_store
from mmstream.wrong_arguments import NonEmptyStr, NonNegativeInt, PositiveInt, checked

MIN_SAMPLES_OF_A_PROCESS = 1_000_000
"""Fewer samples are packed before a process has started."""

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
        overwrite: Plan all shards anew in place of continuing the plan that is there. Where its
            lengths are not those of the pipeline any more, all shards are measured anew too.
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
    results = {each.name: each.measure if each.plan is None else each.plan for each in planned}
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
    counter = Counter(pipeline.decode or Decode(), pipeline.before, patch_size)
    data, seed = pipeline.dataset, pipeline.seed
    sources = {"": data} if isinstance(data, Dataset) else data.datasets
    for source, dataset in sources.items():
        own_seed = seed_of_source(seed, source) if source else seed
        work = Work(dataset, counter, own_seed, chosen, room)
        root = folder or dataset.index_store.url
        if folder is not None and source:
            root = f"{folder.rstrip('/')}/{source}"
        measured, packed = _plan_work(work, root, limits, name, overwrite, num_workers, progress)
        yield PlannedSource(source, dataset, measured, packed)


def _plan_work(
    work: Work,
    root: str,
    limits: PackLimits | int | None,
    name: str | None,
    overwrite: bool,
    num_workers: int | None,
    progress: bool,
) -> tuple[Measure, PackPlan | None]:
    """Measure a dataset, pack its samples, and write the plan; errors and arguments as `plan`.

    Returns:
        The lengths, and the plan. None: `limits` is None.
    """
    if limits is None:
        return measure(work, root, num_workers, progress), None
    limits = limits if isinstance(limits, PackLimits) else PackLimits(limits)
    target = plan_folder(root, plan_name(limits, work.settings) if name is None else name)
    previous = _previous(work, limits, target, overwrite)
    words = None if previous is None else misfit(work, previous)
    if words is not None and not overwrite:
        raise ConfigError(
            f"{target}: its lengths are not those of this pipeline: {words}; give another name, or "
            "replace it with overwrite=True"
        )
    if words is not None:  # a call that is killed now goes on without it
        open_store(target).remove(PLAN_NAME)
    measured = measure(work, root, num_workers, progress, is_anew=words is not None)
    if num_workers is None:
        num_workers = min(num_cores(), measured.num_samples // MIN_SAMPLES_OF_A_PROCESS)
    packed = make_plan(
        measured,
        limits,
        bad=work.dataset.bad,
        previous=None if overwrite else previous,
        num_workers=num_workers,
    )
    if not packed.num_units and measured.num_samples:
        reasons = np.bincount(packed.left_out[:, 1], minlength=len(LEFT_OUT_REASONS))
        counts = (
            f"{n:,} {reason}" for n, reason in zip(reasons, LEFT_OUT_REASONS, strict=True) if n
        )
        too_long = packed.left_out[packed.left_out[:, 1] == TOO_LONG, 2]
        shortest = f"; the shortest has {too_long.min():,} tokens" if too_long.size else ""
        raise ConfigError(
            f"no sample fits into packs of {limits.max_tokens:,} tokens, so no plan was written: "
            f"{', '.join(counts)}{shortest}"
        )
    return measured, write_plan(packed, target)


def _previous(work: Work, limits: PackLimits, target: str, overwrite: bool) -> PackPlan | None:
    """Return the plan that is there. None: there is none, or one that is replaced without a look.

    Raises:
        ConfigError: It is of other settings or shards, and is not to be replaced.
        ManifestError: It is damaged, and is not to be replaced.
    """
    shards = work.dataset.manifest.shards
    try:
        previous = open_plan(target)
        require_first_shards(shards, plan_digest(limits, settings_digest(work.settings)), previous)
    except FileNotFoundError:
        return None
    except (ConfigError, ManifestError):
        if overwrite:
            return None
        raise
    return previous
