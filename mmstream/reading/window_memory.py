"""How much memory the windows of a rank take, and what to do where that is too much.

Runs are held whole until their last sample, so a rank holds its part of all windows. That part is
large where a run that was planned for many ranks goes on with few.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from mmstream.dataset.source import ShardSource, datasets_of
from mmstream.errors import ConfigError
from mmstream.machine import memory_bytes, num_local_ranks
from mmstream.order import AnyOrder
from mmstream.packing.mixture_plan import MixturePlan
from mmstream.packing.order import PackOrder

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.25
"""Part of a machine's memory that the windows of its ranks may take together."""

LEAST_SINGLE_BYTES = 64_000
"""Mean size of samples that are read one by one where windows are too large. Smaller ones would be
too many requests."""


def window_bytes(
    source: ShardSource,
    order: AnyOrder,
    num_rows: int,
    *,
    least_large_bytes: int | None = None,
) -> float:
    """Return the bytes of all windows of a rank when they are full.

    Args:
        source: the datasets that `order` plans.
        order: which samples, and when.
        num_rows: rows of the rank.
        least_large_bytes: no sample takes more, because the first bytes of a larger one are read.
    """
    identity = order.identity()
    datasets = datasets_of(source)
    settings: list[Mapping[str, Any]] = identity.get("sources", [identity])
    num_lanes = int(np.prod(identity["grid"]))
    total = 0.0
    samples_of_rows = _samples_of_rows(order, len(datasets))
    for dataset, setting, row_samples in zip(datasets, settings, samples_of_rows, strict=False):
        num_samples = max(1, len(dataset))
        held = min(num_samples, num_lanes * setting["window"] * row_samples)
        sample_bytes = dataset.manifest.num_bytes / num_samples
        if least_large_bytes is not None:
            sample_bytes = min(sample_bytes, least_large_bytes)
        total += held * sample_bytes
    return total * num_rows / order.global_batch_size


def _samples_of_rows(order: AnyOrder, num_sources: int) -> list[float]:
    """Return how many samples a row of each source has, in the mean."""
    if not isinstance(order, PackOrder):
        return [1] * num_sources
    plan = order.plan
    plans = plan.plans.values() if isinstance(plan, MixturePlan) else [plan]
    return [of_source.mean_samples for of_source in plans]


def needs_single_samples(
    source: ShardSource,
    order: AnyOrder,
    num_rows: int,
    memory: int | None = None,
    *,
    least_large_bytes: int | None = None,
) -> bool:
    """Tell whether a rank must read its samples one by one, because its windows are too large.

    Args:
        source: what it reads.
        order: which samples, and when.
        num_rows: rows of the rank.
        memory: bytes of memory for all ranks of the machine. None: `memory_bytes`.
        least_large_bytes: as `window_bytes`.

    Raises:
        ConfigError: the windows are too large, and the samples too small for that.
    """
    wanted = window_bytes(source, order, num_rows, least_large_bytes=least_large_bytes)
    memory = memory_bytes() if memory is None else memory
    limit = MEMORY_SHARE * memory / num_local_ranks()
    if wanted <= limit:
        return False
    datasets = datasets_of(source)
    mean_bytes = sum(dataset.manifest.num_bytes for dataset in datasets) / max(1, len(source))
    words = (
        f"the windows (shuffle buffers) of this rank take {wanted / 1e9:.1f} GB for {num_rows} of "
        f"{order.global_batch_size} rows, and a quarter of the memory is {limit / 1e9:.1f} GB"
    )
    if mean_bytes < LEAST_SINGLE_BYTES:
        raise ConfigError(
            f"{words}: run it on more ranks, or begin a new run with a smaller window_bytes="
        )
    logger.warning("%s: samples are read one by one, which are many requests", words)
    return True
