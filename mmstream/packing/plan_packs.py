"""Plan the packs of a dataset: from its measure to a plan beside its index."""

from __future__ import annotations

import os
from contextlib import suppress

import numpy as np

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.open import open_dataset
from mmstream.errors import ConfigError, escaped
from mmstream.machine import num_cores
from mmstream.packing.measure_file import Measure, is_same_shard, measure_folder, open_measure
from mmstream.packing.plan import LEFT_OUT_REASONS, TOO_LONG, PackPlan
from mmstream.packing.plan_file import open_plan, plan_folder, write_plan
from mmstream.packing.planner import make_plan, plan_digest
from mmstream.packing.settings import Overlong, PackLimits
from mmstream.wrong_arguments import require_numbers

__all__ = ["default_plan_name", "measure_of", "plan_packs"]

MIN_SAMPLES_OF_A_PROCESS = 1_000_000
"""Fewer samples are packed before a process has started."""


def plan_packs(
    source: str | os.PathLike[str] | Dataset,
    max_tokens: int,
    *,
    measure: str = "default",
    name: str | None = None,
    folder: str | None = None,
    max_documents: int | None = None,
    max_images: int | None = None,
    max_patches: int | None = None,
    max_seconds: int | None = None,
    document_multiple_of: int = 1,
    where: str = "",
    overlong: Overlong = "reject",
    overwrite: bool = False,
    num_workers: int | None = None,
) -> PackPlan:
    """Decide which samples of a dataset form packs, and write the plan beside its index.

    `measure` must have counted the lengths of all samples before. The packs depend on these and on
    the limits. They do not depend on the number of processes. Where there is a plan already, it is
    continued: its packs stay, and shards that were appended since form new ones.

    Args:
        source: A dataset, or what `open_dataset` takes.
        max_tokens: T, tokens of a pack.
        measure: Name of the measure, or its folder or URL.
        name: Of the plan. None: the name of the measure and T, such as "default-8192".
        folder: Folder or URL of the plan. None: ``mmstream.plan.NAME`` beside the index.
        max_documents: Documents of a pack. None: no limit.
        max_images: Images of a pack. None: no limit.
        max_patches: Patches of all pictures and frames of a pack. None: no limit.
        max_seconds: Seconds of sound of a pack. None: no limit.
        document_multiple_of: Each document takes a multiple of so many tokens of its pack.
        where: Condition over the columns of the measure. Other samples are left out.
        overlong: "reject" leaves out samples with more than T tokens. "truncate" keeps those of
            plain text, which lose their end.
        overwrite: Plan all shards anew in place of continuing the plan that is there.
        num_workers: Processes. None: one for each million samples, at most one for each core.

    Returns:
        The plan, opened.

    Raises:
        ConfigError: A limit or the condition cannot be, no sample fits, or there is a plan of other
            settings.
        FileNotFoundError: There is no measure.
        ManifestError: The measure is of other shards, or damaged.
        StorageError: The storage failed after retries.

    Examples:
        >>> from mmstream.train.tokenizer import byte_tokenizer
        >>> decode = mm.Decode(text=mm.TextDecoder(byte_tokenizer()))
        >>> measure = mm.measure("shards/", decode=decode)
        >>> plan = mm.plan_packs("shards/", 2048, where="num_label_tokens > 4")
        >>> plan.num_units < measure.num_samples
        True
    """
    require_numbers(num_workers=num_workers)
    limits = PackLimits(
        max_tokens,
        max_documents=max_documents,
        max_images=max_images,
        max_patches=max_patches,
        max_seconds=max_seconds,
        document_multiple_of=document_multiple_of,
        where=where,
        overlong=overlong,
    )
    dataset = source if isinstance(source, Dataset) else open_dataset(source)
    if not isinstance(dataset, Dataset):
        raise ConfigError("plan: a mixture has no packs of its own; plan each source")
    measured = measure_of(dataset, measure)
    name = (
        default_plan_name(limits, measure.rstrip("/").rpartition("/")[2]) if name is None else name
    )
    target = plan_folder(dataset.index_store.url, name) if folder is None else folder
    previous = None
    if not overwrite:
        with suppress(FileNotFoundError):
            previous = open_plan(target)
    if num_workers is None:
        num_workers = min(num_cores(), measured.num_samples // MIN_SAMPLES_OF_A_PROCESS)
    plan = make_plan(measured, limits, bad=dataset.bad, previous=previous, num_workers=num_workers)
    if not plan.num_units and measured.num_samples:
        reasons = np.bincount(plan.left_out[:, 1], minlength=len(LEFT_OUT_REASONS))
        counts = (
            f"{n:,} {reason}" for n, reason in zip(reasons, LEFT_OUT_REASONS, strict=True) if n
        )
        too_long = plan.left_out[plan.left_out[:, 1] == TOO_LONG, 2]
        shortest = f"; the shortest has {too_long.min():,} tokens" if too_long.size else ""
        raise ConfigError(
            f"no sample fits into packs of {max_tokens:,} tokens, so no plan was written: "
            f"{', '.join(counts)}{shortest}"
        )
    return write_plan(plan, target)


def measure_of(dataset: Dataset, measure: str = "default") -> Measure:
    """Open the measure of a dataset.

    Args:
        dataset: The dataset.
        measure: Name of the measure, or its folder or URL.

    Raises:
        FileNotFoundError: There is no measure.
        ConfigError: The measure is of other shards, or of fewer.
        ManifestError: It is damaged.
        StorageError: The storage failed after retries.
    """
    folder = measure if "/" in measure else measure_folder(dataset.index_store.url, measure)
    try:
        measured = open_measure(folder)
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder}: no measure; run `mmstream measure` first") from None
    shards = dataset.manifest.shards
    if len(measured.shards) != len(shards):
        raise ConfigError(
            f"{folder}: the measure is of {len(measured.shards)} shards, and the dataset has "
            f"{len(shards)}; run `mmstream measure` again"
        )
    for shard, known in zip(shards, measured.shards, strict=True):
        if not is_same_shard(shard, known):
            raise ConfigError(
                f"{folder}: {escaped(shard.name)} is another shard than the measure has; run "
                "`mmstream measure` again"
            )
    return measured


def default_plan_name(limits: PackLimits, measure_name: str) -> str:
    """Return the name of a plan by what it was made with.

    Examples:
        >>> default_plan_name(PackLimits(8192), "default")
        'default-8192'
        >>> default_plan_name(PackLimits(8192, max_images=16), "qwen")
        'qwen-8192-...'
    """
    name = f"{measure_name.removeprefix('mmstream.measure.')}-{limits.max_tokens}"
    if limits == PackLimits(limits.max_tokens):
        return name
    return f"{name}-{plan_digest(limits, '')[:8]}"
