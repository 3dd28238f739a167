"""The order is what everything stands on: these hold for any corpus, batch size and topology."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmstream.errors import ConfigError
from mmstream.order import Order
from mmstream.order.defaults import better_grid, default_grid
from mmstream.order.permute import permutation, random_words

counts_lists = st.lists(st.integers(0, 90), min_size=1, max_size=8).filter(lambda c: sum(c) > 0)


@st.composite
def orders(draw, tails=True):
    counts = draw(counts_lists)
    drop_last = draw(st.booleans()) if tails else True
    most = sum(counts) if drop_last else sum(counts) + 5
    rows = draw(st.integers(1, min(most, 24)))
    lanes = draw(st.sampled_from([q for q in range(1, rows + 1) if rows % q == 0]))
    return Order.from_counts(
        counts,
        global_batch_size=rows,
        seed=draw(st.integers(0, 2**40)),
        grid=draw(st.none() | st.tuples(st.integers(1, 5), st.just(lanes))),
        window=draw(st.none() | st.integers(1, 40)),
        interleave=draw(st.integers(1, 17)),
        chunk=draw(st.none() | st.integers(1, 20)),
        shuffle=draw(st.booleans()),
        drop_last=drop_last,
    )


def epoch_of(order, epoch):
    return [order.refs(epoch, step) for step in range(order.steps_per_epoch)]


def pairs(refs):
    return list(zip(refs.shard.tolist(), refs.index.tolist(), strict=True))


@settings(max_examples=300, deadline=None)
@given(orders(), st.integers(0, 3))
def test_every_sample_comes_exactly_once_an_epoch(order, epoch):
    counts = order._table.counts.tolist()
    corpus = [(s, i) for s, n in enumerate(counts) for i in range(n)]
    seen = Counter(
        pair
        for refs in epoch_of(order, epoch)
        for pair, ok in zip(pairs(refs), refs.valid.tolist(), strict=True)
        if ok
    )
    rows = order.global_batch_size
    assert max(seen.values()) == 1
    assert set(seen) <= set(corpus)
    left_out = len(corpus) % rows if order.drop_last else 0
    assert len(seen) == len(corpus) - left_out
    assert order.steps_per_epoch == (len(corpus) - left_out + rows - 1) // rows


@settings(max_examples=100, deadline=None)
@given(orders())
def test_a_step_asked_for_alone_is_the_step_of_the_walk(order):
    walked = epoch_of(order, 1)
    for step in reversed(range(order.steps_per_epoch)):
        alone = order.refs(1, step)
        for ours, theirs in zip(alone, walked[step], strict=True):
            assert ours.tolist() == theirs.tolist()


@settings(max_examples=100, deadline=None)
@given(orders())
def test_windows_deliver_what_steps_name_and_no_more(order):
    numbers = {n for step in range(order.steps_per_epoch) for n in order.windows(0, step).tolist()}
    delivered = {}
    for number in numbers:
        window = order.window(0, number)
        for step, row, shard, index in zip(*(a.tolist() for a in window), strict=True):
            assert order.windows(0, step)[row] == number
            assert delivered.setdefault((step, row), (shard, index)) == (shard, index)
    named = {
        (step, row): pair
        for step, refs in enumerate(epoch_of(order, 0))
        for row, pair in enumerate(pairs(refs))
    }
    assert delivered == named


@settings(max_examples=100, deadline=None)
@given(orders(tails=False))
def test_substitutes_are_of_the_corpus_and_near_ones_not_of_the_same_step(order):
    step = order.steps_per_epoch - 1
    here = set(pairs(order.refs(0, step)))
    window = order.window(0, int(order.windows(0, step)[0]))
    near = set(zip(window.shard.tolist(), window.index.tolist(), strict=True))
    for attempt in range(16):
        shard, index = order.substitute(0, step, 0, attempt)
        assert 0 <= index < order._table.counts[shard]
        if attempt < 8 and near - here:
            assert (shard, index) in near - here
        assert (shard, index) == order.substitute(0, step, 0, attempt)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(lambda c: sum(c) >= 4))
def test_without_shuffle_slots_come_in_the_order_of_the_corpus(counts):
    order = Order.from_counts(counts, global_batch_size=4, shuffle=False, drop_last=False)
    flat = [
        pair
        for refs in epoch_of(order, 5)
        for pair, ok in zip(pairs(refs), refs.valid, strict=True)
        if ok
    ]
    assert flat == [(s, i) for s, n in enumerate(counts) for i in range(n)]


def test_the_tails_valid_rows_are_spread_evenly():
    order = Order.from_counts([20], global_batch_size=16, drop_last=False)
    assert order.steps_per_epoch == 2
    assert order.refs(0, 1).valid.reshape(4, 4).sum(axis=1).tolist() == [1, 1, 1, 1]


def test_a_corpus_smaller_than_a_step_needs_drop_last_false():
    with pytest.raises(ConfigError, match="drop_last=False"):
        Order.from_counts([3], global_batch_size=4)
    refs = Order.from_counts([3], global_batch_size=4, drop_last=False).refs(0, 0)
    assert sorted(refs.index[refs.valid].tolist()) == [0, 1, 2]


def test_epochs_seeds_and_what_is_left_out_differ():
    order = Order.from_counts([500, 500], global_batch_size=64, seed=3)
    epochs = [[p for refs in epoch_of(order, e) for p in pairs(refs)] for e in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    left_out = [set(range(1000)) - {s * 500 + i for s, i in e} for e in epochs]
    assert left_out[0] != left_out[1]
    other = Order.from_counts([500, 500], global_batch_size=64, seed=4)
    assert pairs(other.refs(0, 0)) != pairs(order.refs(0, 0))


def test_a_corpus_sorted_by_shard_is_mixed_in_every_batch():
    order = Order.from_counts([5000] * 8, global_batch_size=256, grid=(8, 8), window=1024)
    for step in (0, 50, 100):
        assert len(set(order.refs(0, step).shard.tolist())) >= 7


def test_windows_of_different_lanes_end_one_after_another():
    order = Order.from_counts([40000], global_batch_size=64, grid=(8, 8), window=640)
    fresh = [
        sum(int(order.window(0, int(n)).step[0]) == step for n in np.unique(order.windows(0, step)))
        for step in range(100, 400)
    ]
    assert max(fresh) <= 3  # of the 8 lanes that a step draws from


@pytest.mark.parametrize(
    ("samples", "rows", "grid"),
    [(100, 16, (1, 1)), (10_000, 16, (1, 8)), (10**6, 256, (8, 8)), (10**6, 6, (8, 6))],
)
def test_the_default_grid_grows_with_the_corpus(samples, rows, grid):
    assert default_grid(samples, rows) == grid


def test_a_better_grid_is_named_only_where_it_pays():
    assert better_grid(10**6, 256, (8, 8), 8, 4) is None  # whole lanes already
    assert better_grid(10**6, 256, (8, 8), 16, 4) == (8, 16)
    assert better_grid(10**6, 240, (8, 8), 6, 3) == (24, 24)
    assert better_grid(10**6, 256, (8, 8), 3, 1) is None  # 24 does not divide 256
    assert better_grid(5_000, 256, (1, 4), 8, 4) is None  # too small to matter


@pytest.mark.parametrize(
    "settings",
    [
        {"global_batch_size": 0},
        {"global_batch_size": 2.5},
        {"global_batch_size": 4, "seed": 3.0},
        {"global_batch_size": 4, "grid": (1, 3)},
        {"global_batch_size": 4, "window": 0},
        {"global_batch_size": 4, "names": ["a", "b"]},
    ],
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        Order.from_counts([100], **settings)


@pytest.mark.parametrize("counts", [[], [0, 0], [5, -1]])
def test_an_empty_or_impossible_corpus_is_refused(counts):
    with pytest.raises(ConfigError):
        Order.from_counts(counts, global_batch_size=1, drop_last=False)


# Golden values: a change here is a change of every saved run's meaning; raise ORDER_VERSION.


def test_golden_random_words():
    assert random_words(3, 0, 0, "chunks").tolist() == GOLDEN_WORDS
    assert permutation(8, 1, "x").tolist() == GOLDEN_PERMUTATION


def test_numpy_integers_are_the_integers_they_hold():
    plain = Order.from_counts([500], global_batch_size=50, seed=3)
    numpy = Order.from_counts(np.array([500]), global_batch_size=np.int64(50), seed=np.int64(3))
    assert pairs(plain.refs(2, 4)) == pairs(numpy.refs(np.int64(2), np.int64(4)))
    assert json.dumps(plain.identity()) == json.dumps(numpy.identity())


def test_golden_order():
    order = Order.from_counts(
        [7, 0, 12, 5], global_batch_size=4, seed=1, grid=(2, 2), window=5, interleave=3, chunk=4
    )
    assert [pairs(refs) for refs in epoch_of(order, 2)] == GOLDEN_ORDER


GOLDEN_WORDS = [8242133052120399129, 1243914943889289070, 6345094687357287636]
GOLDEN_PERMUTATION = [2, 4, 3, 6, 5, 7, 0, 1]
GOLDEN_ORDER = [
    [(2, 3), (0, 3), (0, 6), (0, 4)],
    [(2, 4), (2, 6), (2, 1), (2, 10)],
    [(0, 0), (3, 4), (3, 2), (0, 5)],
    [(2, 5), (2, 7), (2, 9), (2, 11)],
    [(0, 2), (0, 1), (3, 3), (2, 8)],
    [(3, 0), (3, 1), (2, 2), (2, 0)],
]
