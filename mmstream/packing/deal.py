"""Which rank takes which row of a step: rows dealt by cost, so that no rank waits long.

    the costs of a step's rows -> `deal` -> position -> row; rank r has [r G/W, (r + 1) G/W)

It changes who trains on a row, and nothing else: the rows of a step, their substitutes and their
random draws are the order's. So it is no part of a state, and may change at every resume.
"""

from __future__ import annotations

import numpy as np

from mmstream.errors import ConfigError
from mmstream.types import IntArray


def deal(costs: IntArray, num_ranks: int, among: int | None = None) -> IntArray:
    """Return int64 [G], the row at each position: rank r takes positions [r G/W, (r + 1) G/W).

    The rows are sorted by falling cost and dealt W at a time. Each time the rank that has least so
    far gets the most costly one. Ties go by row and rank number. So the sums of the ranks are close
    to each other, and so are the rows that all ranks have at the same micro-step. No other deal has
    a smaller sum of the most costly rows over the micro-steps: what a step takes where ranks wait
    for each other at every micro-step.

    Args:
        costs: int64 [G], the cost of each row.
        num_ranks: W. It must divide G.
        among: neighbouring ranks that share out the rows between them which are theirs undealt.
            None: all ranks. It must divide W.

    Raises:
        ConfigError: W does not divide G, or `among` does not divide W.

    Examples:
        Two ranks. 9 and 8 are dealt first, then 6 and 7, because the first rank has more. After
        that both have 15:

        >>> costs = np.array([9, 6, 5, 1, 7, 8])
        >>> costs[deal(costs, 2)].reshape(2, 3)
        array([[9, 6, 5],
               [8, 7, 1]])
    """
    num_rows, among = len(costs), num_ranks if among is None else among
    if min(num_ranks, among) < 1 or num_rows % num_ranks or num_ranks % among:
        raise ConfigError(
            f"deal: {num_rows} rows do not divide by {num_ranks} ranks, among {among} at a time"
        )
    blocks = costs.reshape(num_ranks // among, -1)
    dealt = [_dealt(block, among) + number * block.size for number, block in enumerate(blocks)]
    return np.concatenate(dealt)


def _dealt(costs: IntArray, num_ranks: int) -> IntArray:
    """Return the row at each position of ranks that share out their rows."""
    rounds = np.argsort(-costs, kind="stable").reshape(-1, num_ranks)
    dealt = np.empty((num_ranks, len(rounds)), dtype=np.int64)
    totals = np.zeros(num_ranks, dtype=np.int64)
    for number, rows in enumerate(rounds):
        ranks = np.argsort(totals, kind="stable")
        dealt[ranks, number] = rows
        totals[ranks] += costs[rows]
    return dealt.reshape(-1)


def imbalance(costs: IntArray, num_ranks: int) -> float:
    """Return the largest cost of a rank over the mean of all, from 1: ranks wait once a step.

    Args:
        costs: int64 [G], the cost of the row at each position.
        num_ranks: W. It must divide G.
    """
    totals = costs.reshape(num_ranks, -1).sum(axis=1)
    return _share(int(totals.max()), int(totals.sum()), num_ranks)


def micro_imbalance(costs: IntArray, num_ranks: int) -> float:
    """Return the same where ranks wait for each other at every row, as FSDP does at micro-steps.

    Args:
        costs: int64 [G], the cost of the row at each position.
        num_ranks: W. It must divide G.
    """
    slowest = costs.reshape(num_ranks, -1).max(axis=0)
    return _share(int(slowest.sum()), int(costs.sum()), num_ranks)


def _share(slowest: int, total: int, num_ranks: int) -> float:
    return slowest * num_ranks / total if total else 1.0
