"""The order carries every other promise: these hold for any dataset, batch size and setting."""

import json
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mmstream.errors import ConfigError
from mmstream.order import Order
from mmstream.order.permute import permutation, random_words
from tests.helpers.orders import digest, pairs, steps_of_epoch

counts_lists = st.lists(st.integers(0, 90), min_size=1, max_size=8).filter(lambda c: sum(c) > 0)


@st.composite
def orders(draw, tails=True):
    counts = draw(counts_lists)
    drop_last = draw(st.booleans()) if tails else True
    most = sum(counts) if drop_last else sum(counts) + 5
    rows = draw(st.integers(1, min(most, 24)))
    lanes = draw(st.sampled_from([q for q in range(1, rows + 1) if rows % q == 0]))
    reshuffle = draw(st.sampled_from(["global", "lanes"]))
    return Order.from_counts(
        counts,
        global_batch_size=rows,
        seed=draw(st.integers(0, 2**40)),
        grid=draw(st.none() | st.tuples(st.integers(1, 5), st.just(lanes))),
        window=draw(st.none() | st.integers(1, 40)),
        interleave=draw(st.integers(1, 17)),
        chunk=draw(st.none() | st.integers(1, 20)),
        reshuffle=reshuffle,
        shuffle=reshuffle == "lanes" or draw(st.booleans()),
        drop_last=drop_last,
    )


@settings(max_examples=150)
@given(orders(), st.integers(0, 3))
def test_every_sample_comes_exactly_once_per_epoch(order, epoch):
    counts = order._table.counts.tolist()
    corpus = [(s, i) for s, n in enumerate(counts) for i in range(n)]
    seen = Counter(
        pair
        for refs in steps_of_epoch(order, epoch)
        for pair, valid in zip(pairs(refs), refs.valid.tolist(), strict=True)
        if valid
    )
    rows = order.global_batch_size
    assert max(seen.values()) == 1
    assert set(seen) <= set(corpus)
    left_out = len(corpus) % rows if order.drop_last else 0
    assert len(seen) == len(corpus) - left_out
    assert order.steps_per_epoch == (len(corpus) - left_out + rows - 1) // rows


@pytest.mark.slow
@settings(max_examples=30)
@given(orders())
def test_a_step_asked_for_alone_is_the_step_of_a_walk(order):
    walked = steps_of_epoch(order, 1)
    for step in reversed(range(order.steps_per_epoch)):
        for column, walked_column in zip(order.refs(1, step), walked[step], strict=True):
            assert column.tolist() == walked_column.tolist()


@pytest.mark.slow
@settings(max_examples=30)
@given(orders())
def test_windows_deliver_the_rows_that_name_them_and_no_others(order):
    numbers = {n for step in range(order.steps_per_epoch) for n in order.windows(0, step).tolist()}
    delivered = {}
    for number in numbers:
        window = order.window(0, number)
        assert window.step.tolist() == sorted(window.step.tolist())
        for step, row, shard, index in zip(*(a.tolist() for a in window), strict=True):
            assert order.windows(0, step)[row] == number
            assert delivered.setdefault((step, row), (shard, index)) == (shard, index)
    named = {
        (step, row): pair
        for step, refs in enumerate(steps_of_epoch(order, 0))
        for row, pair in enumerate(pairs(refs))
    }
    assert delivered == named


@settings(max_examples=60)
@given(orders(tails=False))
def test_substitutes_are_in_the_corpus_and_near_ones_are_not_in_the_same_step(order):
    step = order.steps_per_epoch - 1
    of_step = set(pairs(order.refs(0, step)))
    window = order.window(0, int(order.windows(0, step)[0]))
    near = set(zip(window.shard.tolist(), window.index.tolist(), strict=True))
    for attempt in range(16):
        shard, index = order.substitute(0, step, 0, attempt)
        assert 0 <= index < order._table.counts[shard]
        if attempt < 8 and near - of_step:
            assert (shard, index) in near - of_step
        assert (shard, index) == order.substitute(0, step, 0, attempt)


def test_far_substitutes_are_from_all_planned_samples_and_from_no_others():
    order = Order.from_counts([60, 43], global_batch_size=10, grid=(1, 1), window=5)
    planned = {pair for refs in steps_of_epoch(order, 0) for pair in pairs(refs)}
    far = {order.substitute(0, s, r, a) for s in range(10) for r in range(10) for a in range(8, 16)}
    assert len(planned) == 100
    assert far == planned
    partial = Order.from_counts([60, 43], global_batch_size=10, grid=(1, 1), drop_last=False)
    far = {
        partial.substitute(0, s, r, a) for s in range(11) for r in range(10) for a in range(8, 16)
    }
    assert len(far) == 103


def test_a_window_of_one_step_has_its_substitutes_in_the_whole_epoch():
    order = Order.from_counts([400], global_batch_size=4, window=4, shuffle=False)
    near = {order.substitute(0, 50, 0, attempt)[1] for attempt in range(8)}
    assert max(near) - min(near) > 50


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(lambda c: sum(c) >= 4))
def test_without_shuffle_samples_come_in_the_order_of_the_corpus(counts):
    order = Order.from_counts(counts, global_batch_size=4, shuffle=False, drop_last=False)
    flat = [
        pair
        for refs in steps_of_epoch(order, 5)
        for pair, valid in zip(pairs(refs), refs.valid, strict=True)
        if valid
    ]
    assert flat == [(s, i) for s, n in enumerate(counts) for i in range(n)]


def test_the_valid_rows_of_a_partial_step_are_spread_evenly():
    order = Order.from_counts([20], global_batch_size=16, drop_last=False)
    assert order.steps_per_epoch == 2
    assert order.refs(0, 1).valid.reshape(4, 4).sum(axis=1).tolist() == [1, 1, 1, 1]
    assert order.refs(0, 0).valid.all()


def test_a_corpus_smaller_than_a_step_needs_drop_last_false():
    with pytest.raises(ConfigError, match=r"3 samples do not fill .*drop_last=False"):
        Order.from_counts([3], global_batch_size=4)
    assert Order.from_counts([4], global_batch_size=4).steps_per_epoch == 1
    refs = Order.from_counts([3], global_batch_size=4, drop_last=False).refs(0, 0)
    assert sorted(refs.index[refs.valid].tolist()) == [0, 1, 2]


@pytest.mark.parametrize("reshuffle", ["global", "lanes"])
def test_epochs_and_seeds_differ_and_so_do_the_samples_left_out(reshuffle):
    settings_of = {"global_batch_size": 64, "grid": (1, 4), "reshuffle": reshuffle}
    order = Order.from_counts([500, 500], seed=3, **settings_of)
    epochs = [[p for refs in steps_of_epoch(order, e) for p in pairs(refs)] for e in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    left_out = [frozenset((n // 500, n % 500) for n in range(1000)) - set(e) for e in epochs]
    assert len(set(left_out)) == 4
    other = Order.from_counts([500, 500], seed=4, **settings_of)
    assert pairs(other.refs(0, 0)) != pairs(order.refs(0, 0))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size 0: needs at least 1"),
        ({"global_batch_size": 2.5}, r"^global_batch_size 2\.5: needs an integer"),
        ({"seed": 3.0}, r"^seed 3\.0: needs an integer"),
        ({"seed": True}, "^seed True: needs an integer"),
        ({"interleave": 3.0}, r"^interleave 3\.0: needs an integer"),
        ({"window": "9"}, r"^window '9': needs an integer"),
        ({"chunk": 1.5}, r"^chunk 1\.5: needs an integer"),
        ({"grid": (1, 3)}, r"grid \(1, 3\): .* Q must divide global_batch_size 4"),
        ({"grid": (0, 1)}, r"grid \(0, 1\): P and Q must be positive"),
        ({"grid": (1, 0)}, r"grid \(1, 0\): P and Q must be positive"),
        ({"window": 0}, "window 0: needs at least 1"),
        ({"interleave": 0}, "interleave 0: needs at least 1"),
        ({"chunk": 0}, "chunk 0: needs at least 1"),
        ({"names": ["a", "b"]}, "2 names for 1 counts"),
    ],
)
def test_impossible_settings_are_refused_by_name(setting, message):
    with pytest.raises(ConfigError, match=message):
        Order.from_counts([100], **{"global_batch_size": 4, **setting})


@pytest.mark.parametrize(
    ("counts", "bad", "message"),
    [
        ([], [], "the dataset has no samples$"),
        ([0, 0], [], "the dataset has no samples$"),
        ([0, 1], [(1, 0)], "the dataset has no samples that are not on its bad list"),
        ([5, -1], [], "a shard has a negative count"),
    ],
)
def test_an_empty_or_impossible_corpus_is_refused(counts, bad, message):
    with pytest.raises(ConfigError, match=message):
        Order.from_counts(counts, global_batch_size=1, drop_last=False, bad=bad)


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_step_or_an_epoch_that_does_not_exist_is_refused(drop_last):
    order = Order.from_counts([10], global_batch_size=4, drop_last=drop_last)
    last = order.steps_per_epoch - 1
    order.refs(0, last)
    for epoch, step, message in (
        (0, last + 1, f"step {last + 1}: an epoch has steps 0 to {last}$"),
        (0, -1, "step -1: an epoch has"),
        (-1, 0, "epoch -1: epochs count from 0"),
    ):
        for question in (order.refs, order.windows):
            with pytest.raises(ConfigError, match=message):
                question(epoch, step)


def test_a_walk_keeps_the_windows_in_use_and_forgets_the_others():
    order = Order.from_counts([4000], global_batch_size=4, grid=(2, 2), window=16)
    assert order.window(0, 0) is order.window(0, 0)
    for step in range(order.steps_per_epoch):
        order.refs(0, step)
        for number in set(order.windows(0, step).tolist()):
            order.window(0, number)
    assert len(order._windows) <= len(order._mixed) <= 3 * 4 + 2
    steps_of_epoch(order, 1)
    steps_of_epoch(order, 2)
    assert list(order._epochs) == [1, 2]
    assert order._epoch(2) is order._epoch(2)


@settings(max_examples=60)
@given(orders(), st.data())
def test_the_rows_of_a_rank_are_those_rows_of_all(order, data):
    step = data.draw(st.integers(0, order.steps_per_epoch - 1))
    start = data.draw(st.integers(0, order.global_batch_size - 1))
    stop = data.draw(st.integers(start + 1, order.global_batch_size))
    for own, of_all in zip(order.refs(2, step, (start, stop)), order.refs(2, step), strict=True):
        assert own.tolist() == of_all[start:stop].tolist()
    own = order.windows(2, step, (start, stop))
    assert own.tolist() == order.windows(2, step)[start:stop].tolist()


@pytest.mark.parametrize("lanes", [64, 1024])
def test_a_rank_computes_the_windows_of_its_own_lanes_alone(lanes):
    order = Order.from_counts(
        [10**6], global_batch_size=4 * lanes, grid=(1, lanes), window=64, interleave=2
    )
    for step in range(20):
        order.refs(0, step, rows=(8, 16))  # lanes 2 and 3
    assert {number % lanes for _, number in order._mixed} == {2, 3}
    assert not order._windows


@pytest.mark.parametrize("reshuffle", ["global", "lanes"])
def test_a_walked_order_is_pickled_as_small_as_a_new_one(reshuffle):
    order = Order.from_counts([50_000], global_batch_size=64, reshuffle=reshuffle)
    fresh = pickle.dumps(order)
    steps_of_epoch(order, 0)
    assert len(pickle.dumps(order)) <= len(fresh) + 2000  # sizes and starts of the lanes
    assert pairs(pickle.loads(pickle.dumps(order)).refs(3, 1)) == pairs(order.refs(3, 1))


def test_numpy_integers_count_as_the_integers_they_hold():
    plain = Order.from_counts([500], global_batch_size=50, seed=3)
    numpy = Order.from_counts(np.array([500]), global_batch_size=np.int64(50), seed=np.int64(3))
    assert pairs(plain.refs(2, 4)) == pairs(numpy.refs(np.int64(2), np.int64(4)))
    assert json.dumps(plain.identity()) == json.dumps(numpy.identity())


@settings(max_examples=40)
@given(orders(), st.integers(0, 3))
def test_an_order_comes_back_from_its_identity(order, epoch):
    again = Order.from_identity(json.loads(json.dumps(order.identity())), order.corpus.counts)
    assert again.identity() == order.identity()
    steps, others = steps_of_epoch(again, epoch), steps_of_epoch(order, epoch)
    assert list(map(pairs, steps)) == list(map(pairs, others))


# Golden values: a change here changes the meaning of every saved state. Raise ORDER_VERSION then.


def test_golden_random_words():
    assert random_words(3, 0, 0, "chunks").tolist() == GOLDEN_WORDS
    assert permutation(8, 1, "x").tolist() == GOLDEN_PERMUTATION


def test_golden_order():
    order = Order.from_counts(
        [7, 0, 12, 5], global_batch_size=4, seed=1, grid=(2, 2), window=5, interleave=3, chunk=4
    )
    assert [pairs(refs) for refs in steps_of_epoch(order, 2)] == GOLDEN_ORDER


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


SMALL = {"grid": (1, 1), "window": 1024, "interleave": 32, "chunk": 64}


@pytest.mark.parametrize(
    ("counts", "setting", "expected"),
    [
        ([1000] * 20, {"global_batch_size": 16, **SMALL, "grid": (2, 8)}, "cca4ea002812bd00"),
        (
            [90_000, 10, 0, 40_000],
            {"global_batch_size": 32, "seed": 7, **SMALL, "grid": (8, 8), "window": 16},
            "0827810f3fae27c8",
        ),
        (
            [30, 0, 41, 7],
            {"global_batch_size": 6, "drop_last": False, "seed": 2**70, **SMALL},
            "60e08b3a8de2ff0b",
        ),
        (
            [30, 0, 41, 7],
            {"global_batch_size": 8, "bad": [(0, 0), (2, 40), (2, 3), (2, 4)], **SMALL},
            "8134b44abcab0093",
        ),
        (
            [30, 0, 41, 7],
            {"global_batch_size": 8, "shuffle": False, "bad": [(3, 6)], **SMALL},
            "f638dca2881b8fa9",
        ),
        (
            [55, 13],
            {"global_batch_size": 9, "grid": (3, 9), "window": 4, "chunk": 5},
            "e0c1a8ac77cb6cc0",
        ),
        (
            [55, 13],
            {"global_batch_size": 6, **SMALL, "grid": (4, 2), "interleave": 7, "seed": -3},
            "a5c150a5f62ecc94",
        ),
        (
            [5],
            {"global_batch_size": 12, "drop_last": False, "names": ["only.tar"], **SMALL},
            "d12eb1352689c5f7",
        ),
    ],
)
def test_golden_digests_of_many_settings(counts, setting, expected):
    assert digest(Order.from_counts(counts, **setting), epochs=(0, 1, 5)) == expected
