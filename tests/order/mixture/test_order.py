"""The order of mixtures: exact proportions, and each source once in each of its epochs."""

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mmstream.errors import ConfigError
from mmstream.order import MixtureOrder
from tests.helpers.orders import COUNTS, digest, mixture_order, pairs, recipe, rows_of_run


@pytest.mark.slow
def test_every_source_gives_its_share_to_less_than_two_samples_per_lane():
    order = mixture_order()
    counts = Counter()
    num_lanes = order.grid[0] * order.grid[1]
    for number, step in enumerate(rows_of_run(order, 700), start=1):
        counts.update(source for source, _, _ in step)
        for source, weight in enumerate((0.2, 0.05, 0.75)):
            assert abs(counts[source] - weight * number * 12) < 2 * num_lanes
    assert [counts[0], counts[1], counts[2]] == pytest.approx([1680, 420, 6300], abs=num_lanes)


def test_a_rare_source_of_ten_samples_is_spread_over_64_lanes():
    counts = {"large": [600] * 4, "rare": [10]}
    order = mixture_order(
        counts, (0.998, 0.002), epoch_steps=100, global_batch_size=64, grid=(8, 8)
    )
    batches = [
        [index for source, _, index in step if source == 1]
        for step in rows_of_run(order, 1000, counts)
    ]
    flat = [index for batch in batches for index in batch]
    assert abs(len(flat) - 0.002 * 64 * 1000) <= 3
    assert max(map(len, batches)) <= 2
    for start in range(0, len(flat) - 9, 10):
        assert sorted(flat[start : start + 10]) == list(range(10))
    gaps = np.diff([step for step, batch in enumerate(batches) for _ in batch])
    assert gaps.max() <= 20  # one in 7.8 steps


@given(
    counts=st.lists(
        st.lists(st.integers(0, 60), min_size=1, max_size=4).filter(any), min_size=1, max_size=3
    ),
    rows=st.sampled_from([(1, 1), (4, 2), (6, 3), (12, 4)]),
    groups=st.integers(1, 4),
    weights=st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=3),
    epoch_steps=st.integers(1, 30),
    window=st.integers(1, 50),
    how=st.sampled_from([{}, {"shuffle": False}, {"reshuffle": "lanes"}]),
    seed=st.integers(0, 3),
)
@settings(max_examples=40)
def test_any_mixture_draws_each_sample_once_per_epoch_of_its_source(
    counts, rows, groups, weights, epoch_steps, window, how, seed
):
    size, lanes = rows
    counts = dict(zip("abc", counts, strict=False))
    first, *later = [phase[: len(counts)] for phase in weights]
    order = mixture_order(
        counts,
        [max(1, weight) for weight in first],
        {17 * n: (max(1, head), *tail) for n, (head, *tail) in enumerate(later, start=1)},
        global_batch_size=size,
        grid=(groups, lanes),
        window=window,
        seed=seed,
        epoch_steps=epoch_steps,
        **how,
    )
    by_number = list(counts.values())
    first_shards = np.cumsum([0, *map(len, by_number)])
    epochs = {}
    for run_step in range(90):
        epoch, step = divmod(run_step, epoch_steps)
        refs = order.refs(epoch, step)
        draws = order._step(run_step)
        numbers = order.windows(epoch, step)
        assert refs.valid.all()
        for row in range(size):
            source, shard, index = draws.source[row], refs.shard[row], refs.index[row]
            assert first_shards[source] <= shard < first_shards[source + 1]
            assert 0 <= index < by_number[source][shard - first_shards[source]]
            ref, key = (int(shard), int(index)), (int(source), int(draws.epoch[row]))
            assert ref not in epochs.setdefault(key, set())
            epochs[key].add(ref)
            window_of_row = order.window(epoch, int(numbers[row]))
            assert ((window_of_row.step == step) & (window_of_row.row == row)).sum() == 1
            assert 0 <= window_of_row.step.min() <= window_of_row.step.max() < epoch_steps
            assert window_of_row.step.tolist() == sorted(window_of_row.step.tolist())
    for (source, epoch), seen in epochs.items():
        total = sum(by_number[source])
        ahead = max(e for s, e in epochs if s == source)
        assert len(seen) == total or ahead - epoch <= 2 + groups * size // total


def test_a_walked_order_is_pickled_as_small_as_a_new_one():
    order = mixture_order()
    fresh = len(pickle.dumps(order))
    rows_of_run(order, 40)
    assert len(pickle.dumps(order)) <= fresh + 10_000


def test_a_walk_keeps_the_windows_and_steps_in_use_and_forgets_the_others():
    order = mixture_order(weights=(1, 1, 6), global_batch_size=4, grid=(2, 2), epoch_steps=400)
    number = int(order.windows(0, 0)[0])
    assert order.window(0, number) is order.window(0, number)
    assert order._step(0) is order._step(0)
    for step in range(400):
        order.refs(0, step)
        for number in set(order.windows(0, step).tolist()):
            order.window(0, number)
    assert 50 < len(order._windows) <= 3 * order.stride + 64 == 3 * 12 + 64
    assert 50 < len(order._steps) <= 64


@settings(max_examples=40)
@given(st.integers(0, 39), st.integers(0, 11), st.integers(1, 12), st.booleans())
def test_the_rows_of_a_rank_are_those_rows_of_all(step, start, size, shuffle):
    order = mixture_order(shuffle=shuffle)
    rows = (start, min(12, start + size))
    for own, of_all in zip(order.refs(3, step, rows), order.refs(3, step), strict=True):
        assert own.tolist() == of_all[slice(*rows)].tolist()
    assert order.windows(3, step, rows).tolist() == order.windows(3, step)[slice(*rows)].tolist()


@pytest.mark.parametrize(("stop", "size"), [("first", 7), ("all", 1250)])
def test_an_epoch_stops_when_the_first_or_the_last_source_has_been_seen_once(stop, size):
    order = mixture_order(epoch_steps=stop)
    steps = order.steps_per_epoch
    source = {"first": 1, "all": 2}[stop]
    rows = [{(sh, i) for s, sh, i in step if s == source} for step in rows_of_run(order, steps)]
    before, after = set().union(*rows[:-1]), set().union(*rows)
    assert len(before) < size == len(after)
    assert order.num_samples == steps * 12
    assert order.identity()["epoch_steps"] == steps


@pytest.mark.parametrize("size", [384, 389, 391, 395])
@pytest.mark.parametrize("weight", [0, 5])
def test_an_epoch_of_all_is_no_step_longer_than_it_takes(size, weight):
    counts, weights = {"x": [size], "y": [5]}, (7, weight)
    if not weight:
        counts, weights = {"x": [size]}, (7,)
    order = mixture_order(counts, weights, window=16, epoch_steps="all", seed=0)
    assert not order._sources[0].small
    seen, steps = set(), 0
    while len(seen) < size:
        refs = order.refs(0, steps)
        seen |= set(refs.index[refs.shard == 0].tolist())
        steps += 1
    assert order.steps_per_epoch == steps


@pytest.mark.parametrize("size", [1, 11, 12, 13, 24, 25, 100])
def test_an_epoch_of_a_small_source_is_no_step_longer_than_it_takes(size):
    order = mixture_order({"x": [size]}, (1,), epoch_steps="first")
    assert order._sources[0].small
    assert order.steps_per_epoch == -(-size // 12)


def test_weights_change_at_the_declared_step():
    changes = {30: (0, 1, 1), 60: (1, 0, 0)}
    order = mixture_order(weights=(1, 0, 1), changes=changes, epoch_steps=25)
    steps = [Counter(source for source, _, _ in step) for step in rows_of_run(order, 90)]
    assert not any(step[1] for step in steps[:30])
    assert not any(step[0] for step in steps[30:60])
    assert all(step[0] == 12 for step in steps[60:])
    totals = [sum((c for c in steps[a:b]), Counter()) for a, b in ((0, 30), (30, 60))]
    assert (totals[0][0], totals[1][1]) == pytest.approx((180, 180), abs=6)


def test_a_substitute_is_near_at_first_then_from_anywhere_in_the_source():
    order = mixture_order(weights=(1, 1, 6), global_batch_size=4, grid=(2, 2))
    first_shards = np.cumsum([0, *map(len, COUNTS.values())])
    far = {source: set() for source in range(3)}
    for step, rows in enumerate(rows_of_run(order, 40)):
        for row, (source, shard, index) in enumerate(rows):
            substitutes = [order.substitute(0, step, row, attempt) for attempt in range(16)]
            for other, _ in substitutes:
                assert first_shards[source] <= other < first_shards[source + 1]
            far[source].update(substitutes[8:])
            if source == 2:  # the large one
                window = order.window(0, int(order.windows(0, step)[row]))
                others = window.step != step
                near = set(
                    zip(window.shard[others].tolist(), window.index[others].tolist(), strict=True)
                )
                assert not near or set(substitutes[:8]) <= near
                assert (shard, index) not in near
    assert len(far[1]) == 7
    assert len(far[2]) > 400  # of 1,250, drawn some 900 times


def test_a_step_or_an_epoch_that_does_not_exist_is_refused():
    order = mixture_order()
    for question in (order.refs, order.windows):
        question(0, 39)
        for epoch, step, message in (
            (0, 40, "step 40: an epoch has steps 0 to 39"),
            (0, -1, "step -1: an epoch has steps 0 to 39"),
            (-1, 0, "epoch -1: epochs count from 0"),
        ):
            with pytest.raises(ConfigError, match=message):
                question(epoch, step)
    order = mixture_order(global_batch_size=4, grid=(1, 1), epoch_steps=8)
    order.refs(2**57 - 1, 7)
    with pytest.raises(ConfigError, match=rf"epoch {2**57}: beyond 2\^62 rows"):
        order.refs(2**57, 0)


# Golden values: a change here changes the meaning of saved states. Raise MIXTURE_VERSION then.


def test_golden_mixture():
    order = mixture_order(
        {"x": [300, 500], "y": [9]},
        (0.9, 0.1),
        {40: (1, 1)},
        global_batch_size=6,
        grid=(2, 2),
        window=32,
        seed=1,
        epoch_steps=30,
    )
    steps = [pairs(order.refs(*place)) for place in ((0, 0), (0, 29), (1, 10), (50, 3))]
    assert steps == GOLDEN
    substitutes = [order.substitute(1, 10, row, a) for row in (0, 2) for a in (0, 7, 8, 12)]
    assert substitutes == GOLDEN_SUBSTITUTES
    assert [order.stream(50, 3, row) for row in (0, 1)] == GOLDEN_STREAMS


GOLDEN = [
    [(1, 431), (0, 19), (1, 466), (0, 213), (0, 211), (0, 208)],
    [(1, 30), (1, 184), (1, 218), (1, 469), (2, 3), (1, 128)],
    [(1, 339), (1, 254), (2, 1), (2, 0), (2, 2), (0, 182)],
    [(2, 1), (1, 129), (2, 0), (1, 83), (2, 6), (1, 217)],
]
GOLDEN_SUBSTITUTES = [(1, 258), (1, 338), (0, 8), (1, 32), (2, 0), (2, 3), (2, 3), (2, 1)]
GOLDEN_STREAMS = [
    (322226010498865699246031940426477035021, 490),
    (263014807067010510850813169504384291166, 5),
]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "ae96443c6411b4ca"),
        ({"shuffle": False}, "0b250810d09c61c7"),
        (
            {
                "weights": (1, 1, 6),
                "global_batch_size": 4,
                "grid": (2, 2),
                "changes": {30: (0, 1, 1), 75: (3, 0, 0.1)},
            },
            "1cf4cbd29d21de57",
        ),
        (
            {
                "weights": (0.3, 0, 0.7),
                "changes": {100: (1, 1, 1)},
                "grid": (1, 1),
                "window": 1024,
                "seed": 2**65,
                "epoch_steps": 70,
            },
            "c36f628f9275cd49",
        ),
        ({"epoch_steps": "all"}, "c1b560bf884d8683"),
        (
            {
                "epoch_steps": "first",
                "weights": (5, 0.01, 2),
                "interleave": 3,
                "window": 200,
                "grid": (1, 2),
                "global_batch_size": 4,
            },
            "107169cd8bac01a8",
        ),
    ],
)
def test_golden_digests_of_many_settings(settings, expected):
    assert digest(MixtureOrder(recipe(**settings)), epochs=(0, 1, 30)) == expected
