"""A pipeline -> the plan of its packs: all samples are measured, and then packed.

    Pipeline -> `LengthCounter` -> `measure` -> `make_plan` -> mmstream.plan.NAME beside the index

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
from mmstream.errors import ConfigError
from mmstream.measuring.find_plan import plan_name, seed_of_source
from mmstream.measuring.lengths import LengthCounter
from mmstream.measuring.measure import measure
from mmstream.packing.measure_file import Measure, settings_digest
from mmstream.packing.plan import (
    LEFT_OUT_REASONS,
    TOO_LONG,
    PackPlan,
    open_plan,
    plan_folder,
    write_plan,
)
from mmstream.packing.planner import make_plan, plan_digest, require_first_shards
from mmstream.packing.settings import PackLimits
from mmstream.pipeline import Pipeline
from mmstream.wrong_arguments import NonEmptyStr, NonNegativeInt, PositiveInt, checked

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
        overwrite: Plan all shards anew in place of continuing the plan that is there.
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
    decode, data, seed = pipeline.decode or Decode(), pipeline.dataset, pipeline.seed
    sources = {"": data} if isinstance(data, Dataset) else data.datasets
    for source, dataset in sources.items():
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
        previous = None if overwrite else _previous(counter, limits, target)
        measured = measure(counter, root, num_workers, progress)
        packed = make_plan(measured, limits, bad=dataset.bad, previous=previous)
        _require_packs(packed, measured.num_samples)
        yield PlannedSource(source, dataset, measured, write_plan(packed, target))


def _previous(counter: LengthCounter, limits: PackLimits, target: str) -> PackPlan | None:
    """Return the plan that is continued. None: there is none.

    Raises:
        ConfigError: It is of other settings or shards.
        ManifestError: It is damaged.
    """
    try:
        previous = open_plan(target)
    except FileNotFoundError:
        return None
    digest = plan_digest(limits, settings_digest(counter.settings))
    require_first_shards(counter.dataset.manifest.shards, digest, previous)
    return previous


def _require_packs(packed: PackPlan, num_samples: int) -> None:
    """Raise a ConfigError where no sample fits, with the reasons."""
    if packed.num_units or not num_samples:
        return
    reasons = np.bincount(packed.left_out[:, 1], minlength=len(LEFT_OUT_REASONS))
    counts = (f"{n:,} {reason}" for n, reason in zip(reasons, LEFT_OUT_REASONS, strict=True) if n)
    too_long = packed.left_out[packed.left_out[:, 1] == TOO_LONG, 2]
    shortest = f"; the shortest has {too_long.min():,} tokens" if too_long.size else ""
    raise ConfigError(
        f"no sample fits into packs of {packed.settings.max_tokens:,} tokens, so no plan was "
        f"written: {', '.join(counts)}{shortest}"
    )
