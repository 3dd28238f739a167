"""Counts texts that were delivered with less than they had, and says so in the log.

Runs in the main process of a rank, beside `limits`. Such samples are good: they never reach a
limit. A warning for each would flood the log. So there is one for the first of a kind, and a
summary at the end of each epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mmstream.bad_samples.limits import Stats

__all__ = ["count_text_losses", "log_text_losses"]

logger = logging.getLogger(__name__)


def count_text_losses(
    stats: Stats, num_cut_texts: int, num_dropped_parts: int, examples: Sequence[str]
) -> None:
    """Count the texts of a batch that have lost something. Warn of the first of each kind.

    Args:
        stats: changed in place.
        num_cut_texts: texts that `max_length` has cut.
        num_dropped_parts: parts of conversations that were dropped.
        examples: a text of each kind, for the log.
    """
    is_new = (num_cut_texts and not stats.num_cut_texts) or (
        num_dropped_parts and not stats.num_dropped_parts
    )
    stats.num_cut_texts += num_cut_texts
    stats.num_dropped_parts += num_dropped_parts
    for example in examples if is_new else ():
        logger.warning("%s; others are only counted, see loader.stats", example)


def log_text_losses(stats: Stats, epoch: int) -> None:
    """Log what the texts have lost since the loader was made, at the end of an epoch."""
    losses = []
    if stats.num_cut_texts:
        losses.append(
            f"{stats.num_cut_texts:,} of {stats.num_samples:,} samples had their text cut at "
            "max_length"
        )
    if stats.num_dropped_parts:
        losses.append(f"{stats.num_dropped_parts:,} parts of conversations were dropped")
    if losses:
        logger.warning("after epoch %d, since the loader was made: %s", epoch, "; ".join(losses))
