"""Weights to shares, shares to a schedule, phases of lanes in it; and rows of steps to draws."""

import hashlib
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mmstream.errors import ConfigError
from mmstream.order.mixture.schedule import NEVER, Draws, Schedule, lane_phases, whole_shares


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


def test_phases_are_spread_evenly_if_that_is_good():
    assert phases([1, 15], (2, 2), 1).tolist() == [0, 4, 8, 12]
    assert phases([1], (2, 2), 3).tolist() == [0, 0, 0, 0]


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


# -- rows of steps to draws of sources, and back ---------------------------------------------------


@st.composite
def any_draws(draw):
    num_sources = draw(st.integers(1, 3))
    shares = st.lists(st.integers(0, 6), min_size=num_sources, max_size=num_sources).filter(any)
    changes = draw(st.dictionaries(st.integers(1, 30), shares, max_size=2))
    lanes = draw(st.integers(1, 3))
    return Draws(
        {**changes, 0: draw(shares)},  # not in the order of steps
        lanes * draw(st.integers(1, 3)),
        (draw(st.integers(1, 4)), lanes),
        draw(st.integers(0, 3)),
        rotate=draw(st.booleans()),
    )


def walked(draws, num_steps):
    """(source, lane, lane draw) to (step, row), found by walking; and the counts before each step.

    A lane makes its draws in the order of its positions, which rows follow but for the rotation.
    """
    num_sources = draws.before(0).shape[1]
    counts = np.zeros((draws.grid[0] * draws.grid[1], num_sources), dtype=int)
    steps_of_sources, before = {}, []
    for step in range(num_steps):
        before.append(counts.copy())
        for row, key in enumerate(zip(*map(np.ndarray.tolist, draws.of_step(step)), strict=True)):
            assert key not in steps_of_sources
            steps_of_sources[key] = (step, row)
            counts[key[1], key[0]] += 1
    return steps_of_sources, before


@pytest.mark.slow
@settings(max_examples=100)
@given(any_draws())
def test_each_lane_counts_its_draws_without_gaps_and_the_way_back_is_exact(draws):
    steps_of_sources, before = walked(draws, 70)
    for step, counts in enumerate(before):
        assert draws.before(step).tolist() == counts.tolist()
    for source in range(before[0].shape[1]):
        for lane in range(before[0].shape[0]):
            numbers = sorted(key[2] for key in steps_of_sources if key[:2] == (source, lane))
            assert numbers == list(range(len(numbers)))
            steps, rows = draws.locate(source, lane, np.array(numbers, dtype=np.int64))
            expected = [steps_of_sources[source, lane, draw] for draw in numbers]
            assert list(zip(steps.tolist(), rows.tolist(), strict=True)) == expected
            group = lane % draws.grid[0]
            assert {step % draws.grid[0] for step in steps.tolist()} <= {group}


def test_a_draw_that_no_step_makes_is_never():
    draws = Draws({0: [1, 1], 10: [1, 0]}, 2, (1, 1), 0, rotate=False)
    assert draws.before(100).tolist() == [[10 + 180, 10]]
    steps, _ = draws.locate(1, 0, np.array([0, 9, 10, 11]))
    assert steps.tolist() == [0, 9, NEVER, NEVER]
    assert NEVER == 2**62


def test_a_source_that_pauses_goes_on_with_its_next_draw():
    draws = Draws({0: [1, 1], 4: [1, 0], 8: [0, 1]}, 2, (1, 1), 0, rotate=False)
    steps, rows = draws.locate(1, 0, np.array([2, 3, 4, 5]))
    assert steps.tolist() == [2, 3, 8, 8]
    assert rows.tolist() == [1, 1, 0, 1]


def test_a_lane_is_never_two_samples_off_its_due():
    shares = np.array([45, 3, 17, 35])
    draws = Draws({0: shares.tolist()}, 16, (2, 4), 1, rotate=True)
    for step in range(150):
        positions = -(-(step - np.arange(8) % 2) // 2) * 4  # of lane q*2 + p
        assert (np.abs(draws.before(step) - positions[:, None] * shares / 100) < 2).all()


def test_weights_that_change_too_often_are_refused():
    changes = {3 + 3 * n: [1, 3 * (n % 2), 3 * ((n + 1) % 2)] for n in range(400)}
    with pytest.raises(ConfigError, match=r"changes: at step \d+ some lanes are .* that 4 divides"):
        Draws({0: [4, 1, 14], **changes}, 12, (4, 1), 5, rotate=True)


@pytest.mark.parametrize(("num_turns", "refused"), [(66, False), (67, True)])
def test_lanes_may_drift_apart_by_64_draws_and_two_steps(num_turns, refused):
    # Lane 0 makes the even steps, which draw from source 0 alone: one draw per turn.
    shares = {}
    for turn in range(num_turns):
        shares[2 * turn] = [1, 0]
        shares[2 * turn + 1] = [0, 1]
    if refused:
        with pytest.raises(ConfigError, match="at step 133 some lanes are 67 draws ahead"):
            Draws(shares, 1, (2, 1), 0, rotate=False)
    else:
        Draws(shares, 1, (2, 1), 0, rotate=False)
