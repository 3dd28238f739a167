"""Counts documents and tokens as batches are delivered, and warns of packs with too much room.

Loader.mark_delivered -> `count_tokens` -> loader.stats
"""

from __future__ import annotations

import logging

from mmstream.bad_samples.limits import Stats
from mmstream.batching.batching import Flat, Pack
from mmstream.types import Batch

__all__ = ["count_tokens"]

logger = logging.getLogger(__name__)

MIN_DOCUMENTS = 1000
"""Delivered documents from which on the fill is judged."""

MISSING_FILL = 0.02
"""So much less than planned is worth a warning, as a share of a row."""


def count_tokens(stats: Stats, batch: Batch, batching: Flat | None, *, has_warned: bool) -> bool:
    """Count the documents and tokens of a batch.

    Args:
        stats: changed in place.
        batch: any batch. One of `collate` is not counted.
        batching: of the pipeline.
        has_warned: whether it has said already that packs are emptier than planned.

    Returns:
        Whether it has said so, now or before.
    """
    if batching is None:
        return has_warned
    stats.num_documents += len(batch["__key__"])
    stats.num_tokens += batch["num_tokens"]
    stats.num_label_tokens += batch.get("num_label_tokens", 0)
    if not isinstance(batching, Pack):
        stats.num_token_slots += batch["input_ids"].numel()
        return has_warned
    stats.num_token_slots += batching.max_tokens * int(batch["__valid__"].sum())
    stats.num_planned_tokens += batch["__lineage__"].num_planned_tokens
    is_full = stats.fill >= stats.planned_fill - MISSING_FILL
    if has_warned or is_full or stats.num_documents < MIN_DOCUMENTS:
        return has_warned
    logger.warning(
        "packs are %.1f %% full, and their plan has %.1f %%: %d samples were bad, %d left out by a "
        "filter, %d shorter than measured; filter in the plan (mmstream plan --where), or measure "
        "anew",
        100 * stats.fill,
        100 * stats.planned_fill,
        stats.num_bad,
        stats.num_skipped,
        stats.num_shorter,
    )
    return True
