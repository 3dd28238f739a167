"""Rows of steps to draws of sources, and back."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmstream.errors import ConfigError
from mmstream.order.mixture.order import BLOCK_STEPS, NEVER, Draws


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


@settings(max_examples=50)
@given(any_draws())
def test_lanes_are_ordered_by_their_first_draw_of_a_source_in_its_first_phase(draws):
    for source in range(draws.before(0).shape[1]):
        phase = next((p for p in draws._phases if p.schedule.shares[source]), None)
        if phase is None:
            continue
        begun = []
        for lane in range(draws.grid[0] * draws.grid[1]):
            position = next(
                position
                for position in range(10_000)
                if phase.schedule.source_at(np.array([phase.begins[lane] + position]))[0] == source
            )
            round_, offset = divmod(position, draws.rows_per_lane)
            begun.append((round_ * draws.grid[0] + lane % draws.grid[0], offset, lane))
        in_order = [lane for *_, lane in sorted(begun)]
        assert draws.lanes_by_first_draw(source).tolist() == in_order


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


def test_rows_of_a_lane_are_rotated_by_any_number_also_far_into_a_run():
    draws = Draws({0: [1, 3]}, 4, (1, 1), 0, rotate=True)
    rows = Counter()
    for step in (
        *range(300),
        *range(BLOCK_STEPS - 50, BLOCK_STEPS + 50),
        *range(10**9, 10**9 + 50),
    ):
        sources, _, lane_draws = draws.of_step(step)
        (row,) = np.flatnonzero(sources == 0)
        rows[int(row)] += 1
        assert [int(a[0]) for a in draws.locate(0, 0, lane_draws[[row]])] == [step, row]
    assert set(rows) == {0, 1, 2, 3}
    assert max(rows.values()) < 2 * min(rows.values())
    blocks = [draws._rotations(np.arange(BLOCK_STEPS) + n * BLOCK_STEPS).tolist() for n in (0, 1)]
    assert blocks[0] != blocks[1]
    plain = Draws({0: [1, 3]}, 4, (1, 1), 0, rotate=False)
    assert {int(np.flatnonzero(plain.of_step(step)[0] == 0)[0]) for step in range(50)} == {
        int(plain.locate(0, 0, np.array([0]))[1][0])
    }


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
