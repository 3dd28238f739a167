"""Rows of packs dealt to the ranks by their cost: among which ranks.

    Loader.iter_undelivered -> `balanced` -> PackOrder.with_ranks -> workers and the reader process

It is the loader's alone. The order of the steps and its state know nothing of it, so a run may
resume on other ranks, with another cost, or without one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial

from mmstream.batching.flat import Pack
from mmstream.packing.cost import Cost, deal, imbalance
from mmstream.packing.order import PackOrder
from mmstream.pipeline import Pipeline
from mmstream.ranks import RowsPerRank
from mmstream.reading.process import needs_reader_process
from mmstream.types import IntArray

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Balance:
    """The rows of a run, dealt or not."""

    pipeline: Pipeline
    """What the ranks run: the pipeline, with an order whose rows are dealt."""
    settings: dict[str, str]
    """What all ranks must have in common, by name."""
    cost: Cost | None = None
    """What packs cost, where several equal ranks wait for each other."""
    world_size: int = 1

    def imbalance(self, epoch: int, step: int) -> float | None:
        """Return the largest modelled cost of a rank over the mean of all, from 1.

        None: nothing says what packs cost, there is one rank, or the step has padding rows.
        """
        order = self.pipeline.order
        if self.cost is None or not isinstance(order, PackOrder):
            return None
        costs = _costs_of_step(order, self.cost, epoch, step)
        return None if costs is None else imbalance(costs, self.world_size)


def balanced(pipeline: Pipeline, world_size: int, shares: RowsPerRank, *, logs: bool) -> Balance:
    """Return a pipeline whose rows are dealt to the ranks by cost, where one is given.

    Args:
        pipeline: what the loader runs.
        world_size: W.
        shares: how the rows are shared out, as the Loader has it. Rows are dealt in equal shares.
        logs: whether this rank says in the log what was decided.
    """
    order, batching = pipeline.order, pipeline.batching
    if not (isinstance(order, PackOrder) and isinstance(batching, Pack)) or world_size == 1:
        return Balance(pipeline, {})
    undealt = Balance(pipeline, {"rows dealt": "no"})
    if batching.cost is None:
        return undealt
    if not _are_equal(shares, order.global_batch_size, world_size):
        if logs:
            logger.info(
                "without effect: mm.Pack(cost=), because rows are dealt in equal shares only: "
                "global_batch_size %d over %d ranks, rows_per_rank=%s",
                order.global_batch_size,
                world_size,
                shares,
            )
        return undealt
    undealt = replace(undealt, cost=batching.cost, world_size=world_size)
    if batching.deal == "off":
        return undealt
    among = _ranks_that_deal(pipeline, batching, order, world_size)
    if logs:
        logger.info("packs are dealt by cost, among %d of %d ranks", among, world_size)
    dealt_order = order.with_ranks(world_size, partial(deal, among=among), batching.cost.modelled)
    settings = {"rows dealt": f"among {among} of {world_size} ranks"}
    return replace(undealt, pipeline=pipeline.with_order(dealt_order), settings=settings)


def _are_equal(shares: RowsPerRank, num_rows: int, world_size: int) -> bool:
    """Tell whether all ranks have as many rows."""
    if shares is None or isinstance(shares, str):  # "balanced"
        return num_rows % world_size == 0
    return len(set(shares)) == 1


def _ranks_that_deal(pipeline: Pipeline, batching: Pack, order: PackOrder, world_size: int) -> int:
    """Return how many neighbouring ranks share out their rows between them.

    1: each rank has its own rows, by falling cost. That costs no request to storage.
    """
    if batching.deal == "all" or not needs_reader_process(pipeline.dataset):
        return world_size
    num_lanes = order.grid[1]
    return max(1, world_size // num_lanes) if world_size % num_lanes == 0 else 1


def _costs_of_step(order: PackOrder, cost: Cost, epoch: int, step: int) -> IntArray | None:
    """Return the costs of the rows of a step. None: it has padding rows."""
    costs = cost.modelled(order.unit_sums(epoch, step))
    return costs if costs.size == order.global_batch_size else None
