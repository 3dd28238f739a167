"""Weights to shares, shares to a schedule, and the phases of the lanes in it."""

import hashlib
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmstream.errors import ConfigError
from mmstream.order.mixture.schedule import Schedule, lane_phases, whole_shares


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.1, 0.9], [1, 9]),
        ([2, 4, 6], [1, 2, 3]),
        ([0.5, 0, 0.25], [2, 0, 1]),
        ([7], [1]),
        ([0.3, 0.35], [6, 7]),
        ([1e-3, 1], [1, 1000]),
        ([Decimal("0.2"), Fraction(4, 5), np.float64(1)], [1, 4, 5]),
        ([32_768, 32_767], [32_768, 32_767]),
        ([1, 65_535], [1, 65_535]),
        ([1, 65_536], [1, 65_535]),
        ([3, 65_534], [3, 65_533]),
        ([131_072, 131_073], [1, 1]),
    ],
)
def test_weights_are_whole_shares_without_a_common_divisor(weights, shares):
    assert whole_shares(weights) == shares


def test_weights_without_a_common_measure_are_shares_of_65536():
    weights = np.array([np.pi, np.e, 0.01])
    shares = whole_shares(weights.tolist())
    assert sum(shares) == 65_536
    assert shares == pytest.approx(weights / weights.sum() * 65_536, abs=1)


def test_equal_remainders_are_rounded_up_from_the_first_weight_on():
    assert whole_shares([200_001] * 3) == [1, 1, 1]
    assert whole_shares([100_001, 100_001, 100_003]) == [21_845, 21_845, 21_846]
    assert whole_shares([100_003, 100_001, 100_001]) == [21_846, 21_845, 21_845]
    assert whole_shares([100_001, 100_001, 100_001, 99_997, 100_007]) == [
        13_107,
        13_107,
        13_107,
        13_107,
        13_108,
    ]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([-1, 1], "weight -1: needs a number from 0"),
        ([float("nan")], "weight nan: needs a number from 0"),
        ([float("inf"), 1], "weight inf: needs a number from 0"),
        ([True], "weight True: needs a number from 0"),
        ([None, 1], "weight None: needs a number from 0"),
        (["1"], "weight '1': needs a number from 0"),
        pytest.param([10**400], "needs a number from 0", id="huge"),
        ([0, 0.0], r"weights \[0, 0.0\]: at least one must be above 0"),
        ([1e-7, 1], r"weight 1e-07 of 1.0000001 in all is too small to be kept: .* 65,536 at most"),
        # 9.4986 of 65,536 are rounded to 9, which is 5.2 % less.
        ([9.5, 65_536], r"weight 9.5 of 65545.5 in all is too small"),
    ],
)
def test_impossible_weights_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        whole_shares(weights)


def test_a_rounding_of_less_than_5_percent_is_allowed():
    assert whole_shares([10.6, 65_536]) == [11, 65_525]  # 10.598 of 65,536: 3.8 % more
    assert whole_shares([10.4, 65_536]) == [5, 32_763]  # 10.398 of 65,536: 3.8 % less


@given(weights=st.lists(st.integers(0, 400), min_size=1, max_size=6).filter(any))
@settings(max_examples=60)
def test_at_every_position_of_a_schedule_each_source_has_had_its_due(weights):
    shares = whole_shares(weights)
    schedule = Schedule.from_shares(shares)
    period = sum(shares)
    assert schedule.period == period
    due = np.arange(period + 1)[:, None] * np.array(shares)
    assert (np.abs(schedule.before * period - due) < period).all()  # exact, in whole numbers
    assert schedule.shares.tolist() == shares


@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any))
@settings(max_examples=60)
def test_a_schedule_goes_on_period_after_period(weights):
    schedule = Schedule.from_shares(weights)
    positions = np.arange(3 * sum(weights) + 1)
    sources = schedule.source_at(positions).tolist()
    assert sources == (schedule.sources.tolist() * 4)[: positions.size]
    for source, share in enumerate(weights):
        before = [sources[:position].count(source) for position in positions]
        assert schedule.draws_before(source, positions).tolist() == before
        if share:
            taken = [position for position in positions if sources[position] == source]
            assert schedule.position_of(source, np.arange(len(taken))).tolist() == taken
    pairs = schedule.draws_before(np.arange(len(weights)), positions[:, None])
    assert pairs[-1].tolist() == [sources[:-1].count(s) for s in range(len(weights))]


def phases(shares, grid, rows_per_lane, seed=0):
    return lane_phases(Schedule.from_shares(shares), grid, rows_per_lane, seed)


def rows_per_step(shares, grid, rows_per_lane, begins):
    """[steps, S] rows of each source in each step of 20 periods."""
    groups, lanes = grid
    schedule = Schedule.from_shares(shares)
    steps = []
    for step in range(20 * sum(shares)):
        group_begins = np.repeat(begins.reshape(lanes, groups)[:, step % groups], rows_per_lane)
        offsets = np.tile(np.arange(rows_per_lane), lanes)
        positions = group_begins + step // groups * rows_per_lane + offsets
        steps.append(np.bincount(schedule.source_at(positions), minlength=len(shares)))
    return np.array(steps)


def test_phases_are_spread_evenly_if_that_is_good():
    assert phases([1, 15], (2, 2), 1).tolist() == [0, 4, 8, 12]
    assert phases([1], (2, 2), 3).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("shares", "grid", "rows_per_lane"),
    [([8, 143], (2, 8), 4), ([16, 8, 197], (1, 8), 4), ([4, 61], (1, 4), 1), ([3, 2], (4, 4), 2)],
)
def test_phases_make_steps_vary_less_than_evenly_spread_ones_or_chance(shares, grid, rows_per_lane):
    num_lanes = grid[0] * grid[1]
    chosen = phases(shares, grid, rows_per_lane)
    assert ((chosen >= 0) & (chosen < sum(shares))).all()
    even = np.arange(num_lanes) * sum(shares) // num_lanes
    share = np.array(shares) / sum(shares)
    chance = grid[1] * rows_per_lane * share * (1 - share)

    def worst(begins):
        return (rows_per_step(shares, grid, rows_per_lane, begins).var(axis=0) / chance).max()

    assert worst(chosen) < 0.85
    assert worst(chosen) <= worst(even)


def test_phases_depend_on_the_key_and_stay_small_for_many_lanes():
    assert phases([8, 143], (2, 8), 4, seed=1).tolist() != phases([8, 143], (2, 8), 4).tolist()
    assert phases([8, 143], (16, 32), 4).size == 512


def test_golden_phases():
    assert phases([8, 143], (2, 8), 4).tolist() == GOLDEN_PHASES[0]
    assert phases([5, 3, 90], (3, 4), 2, seed=7).tolist() == GOLDEN_PHASES[1]
    assert phases([1, 1], (4, 1), 1, seed=7).tolist() == GOLDEN_PHASES[2]


@pytest.mark.parametrize(
    ("num_seeds", "shares", "grid", "rows_per_lane", "expected"),
    [
        (300, (3, 7, 20), (3, 4), 1, "7a5553d2040fb17b"),
        (100, (3, 7, 90), (3, 4), 3, "de87d7d4d9e08dd0"),
        (60, (8, 143), (4, 24), 1, "479171412146e18e"),  # 96 lanes: 14 sets are compared
        (20, (264, 7001), (8, 33), 1, "06e63f84b068ab10"),  # 264 lanes: two sets
    ],
)
def test_golden_digests_of_phases(num_seeds, shares, grid, rows_per_lane, expected):
    hashed = hashlib.sha256()
    for seed in range(num_seeds):  # so many that each of the sets is taken by some of them
        *others, last = shares
        hashed.update(phases([*others, last + seed], grid, rows_per_lane, seed).tobytes())
    assert hashed.hexdigest()[:16] == expected


GOLDEN_PHASES = [
    [140, 101, 123, 61, 48, 143, 116, 143, 60, 25, 145, 148, 112, 150, 76, 71],
    [94, 2, 46, 50, 11, 29, 65, 94, 41, 81, 56, 33],
    [0, 0, 1, 1],
]
