"""What a loader says once where lanes keep their samples: ``reshuffle="lanes"``."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mmstream.batching.batching import Pack
from mmstream.machine import num_local_ranks
from mmstream.order.checks import reshuffle_of
from mmstream.order.shared_lanes import kept_share
from mmstream.pipeline import Pipeline

__all__ = ["advise_on_kept_lanes"]

logger = logging.getLogger(__name__)

LEAST_KEPT = 0.98
"""A smaller share of samples that come on the same node again is worth a line."""


def advise_on_kept_lanes(pipeline: Pipeline, row_starts: Sequence[int]) -> None:
    """Log what the ranks and nodes of a run see of a dataset whose lanes keep their samples.

    Args:
        pipeline: what the ranks run.
        row_starts: where the rows of each rank begin.
    """
    order = pipeline.order
    if reshuffle_of(order.identity()) == "global" or len(row_starts) == 1:
        return
    given = "" if pipeline.reshuffle else ", because of cache_dir"
    if num_local_ranks() >= len(row_starts):
        logger.info(
            "reshuffle lanes%s: each rank sees its own part of the dataset in every epoch; on one "
            "node a cache finds as much with reshuffle='global', where a rank sees all of it",
            given,
        )
        return
    logger.info(
        "reshuffle lanes%s: a node reads the same samples in every epoch, and each of the %d ranks "
        "sees its own part of the dataset; for losses inside a rank, pass reshuffle='global'",
        given,
        len(row_starts),
    )
    if isinstance(pipeline.batching, Pack) and pipeline.batching.deal == "all":
        logger.warning(
            "mm.Pack(deal='all') gives packs to ranks of all nodes, so a node seldom reads the "
            "same samples again: pass deal='auto' for the sake of the cache"
        )
        return
    lanes, starts = order.grid[1], row_starts[:: num_local_ranks()]
    share = kept_share(lanes, [*starts, order.global_batch_size])
    if share < LEAST_KEPT:
        logger.info(
            "%d nodes share the %d lanes of this order, so a cache finds at most %.0f %% of the "
            "samples again in the second epoch: a number of nodes that divides %d finds all",
            len(starts),
            lanes,
            100 * share,
            lanes,
        )
