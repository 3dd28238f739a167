"""Rows of a step are dealt to the ranks by cost."""

from __future__ import annotations

from functools import partial
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmstream.errors import ConfigError
from mmstream.packing.cost import deal, imbalance, micro_imbalance

COSTS = st.integers(1, 12).flatmap(
    lambda ranks: st.integers(1, 6).flatmap(
        lambda rows: st.tuples(
            st.just(ranks),
            st.lists(st.integers(0, 50), min_size=ranks * rows, max_size=ranks * rows).map(
                partial(np.asarray, dtype=np.int64)
            ),
        )
    )
)


def slowest_at_each_micro_step(costs: np.ndarray, num_ranks: int) -> float:
    """What ranks take that wait for each other at each micro-step."""
    return float(costs.reshape(num_ranks, -1).max(axis=0).sum())


@given(COSTS)
def test_every_row_is_at_one_position_and_a_rank_has_its_rows_by_falling_cost(
    case: tuple[int, np.ndarray],
) -> None:
    num_ranks, costs = case
    positions = deal(costs, num_ranks)
    assert positions.dtype == np.int64
    assert sorted(positions.tolist()) == list(range(len(costs)))
    assert (np.diff(costs[positions].reshape(num_ranks, -1), axis=1) <= 0).all()
    assert deal(costs, num_ranks).tolist() == positions.tolist()


@given(COSTS)
def test_at_each_micro_step_all_ranks_have_neighbours_in_cost(case: tuple[int, np.ndarray]) -> None:
    num_ranks, costs = case
    optimum = float(np.sort(costs)[::-1][::num_ranks].sum())
    assert slowest_at_each_micro_step(costs[deal(costs, num_ranks)], num_ranks) == optimum


@given(st.lists(st.integers(0, 9), min_size=6, max_size=6))
def test_no_other_deal_waits_less_at_the_micro_steps(rows: list[int]) -> None:
    costs = np.asarray(rows, dtype=np.int64)
    for num_ranks in (2, 3):
        dealt = slowest_at_each_micro_step(costs[deal(costs, num_ranks)], num_ranks)
        others = np.asarray(list(permutations(rows)), dtype=np.int64)
        least = others.reshape(len(others), num_ranks, -1).max(axis=1).sum(axis=1).min()
        assert dealt == least


@given(COSTS)
def test_two_ranks_differ_by_less_than_two_rows_do(case: tuple[int, np.ndarray]) -> None:
    num_ranks, costs = case
    totals = costs[deal(costs, num_ranks)].reshape(num_ranks, -1).sum(axis=1)
    assert totals.max() - totals.min() <= costs.max() - costs.min()
    # The deal is no optimum of the sums: rows that lie well by chance may become a little worse.
    mean = max(totals.mean(), 1e-9)
    worse = (costs.max() - costs.min()) / mean
    assert (
        imbalance(costs[deal(costs, num_ranks)], num_ranks) <= imbalance(costs, num_ranks) + worse
    )


def test_rows_of_equal_cost_keep_their_order() -> None:
    assert deal(np.ones(6, np.int64), 2).tolist() == [0, 2, 4, 1, 3, 5]
    assert deal(np.ones(4, np.int64), 1).tolist() == [0, 1, 2, 3]


def test_eight_rows_a_rank_are_dealt_almost_evenly() -> None:
    generator = np.random.Generator(np.random.Philox(5))
    costs = (1e6 * generator.lognormal(0, 0.2, 16 * 8)).astype(np.int64)
    assert imbalance(costs, 16) > 1.1
    assert imbalance(costs[deal(costs, 16)], 16) < 1.02


def test_neighbouring_ranks_deal_among_themselves() -> None:
    costs = np.array([1, 9, 2, 8, 5, 5, 7, 3])
    assert costs[deal(costs, 4, among=2)].reshape(4, 2).tolist() == [[9, 1], [8, 2], [7, 3], [5, 5]]
    assert deal(costs, 4, among=1).tolist() == [1, 0, 3, 2, 4, 5, 6, 7]


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="7 rows do not divide by 2 ranks"):
        deal(np.ones(7, np.int64), 2)
    with pytest.raises(ConfigError, match="4 ranks, among 3 at a time"):
        deal(np.ones(8, np.int64), 4, among=3)


def test_rows_without_cost_are_balanced() -> None:
    assert imbalance(np.zeros(4, np.int64), 2) == 1.0


def test_ranks_that_wait_at_every_row_wait_for_the_most_costly_of_each() -> None:
    costs = np.array([6, 1, 2, 3])  # rank 0 has 6 and 1, rank 1 has 2 and 3
    assert imbalance(costs, 2) == 7 * 2 / 12
    assert micro_imbalance(costs, 2) == (6 + 3) * 2 / 12
