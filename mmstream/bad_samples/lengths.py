"""Counts samples of packs that have other lengths than were measured, and warns of the first.

Runs in the main process of a rank, beside `limits`. Such a sample is good where its pack has room.
But a pack is no longer what the plan says, so its measure is out of date.
"""

from __future__ import annotations

import logging

from mmstream.bad_samples.limits import Stats

__all__ = ["count_lengths"]

logger = logging.getLogger(__name__)


def count_lengths(stats: Stats, num_longer: int, num_shorter: int, example: str) -> None:
    """Count the samples of a batch that are unlike measured, and warn of the first one.

    Args:
        stats: changed in place.
        num_longer: samples with more tokens than were measured.
        num_shorter: samples with fewer.
        example: one of them, for the log.
    """
    if (num_longer or num_shorter) and not (stats.num_longer or stats.num_shorter):
        logger.warning(
            "%s: decoders, templates or draws are not those of the measure, so packs are emptier "
            "than planned, or samples do not fit: measure and plan anew; others are only counted, "
            "see loader.stats",
            example,
        )
    stats.num_longer += num_longer
    stats.num_shorter += num_shorter
