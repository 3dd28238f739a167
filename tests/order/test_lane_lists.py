"""``reshuffle="lanes"``: each lane has the same samples in every epoch of a seed."""

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mmstream.errors import ConfigError, StateError
from mmstream.order import BucketOrder, Buckets, Corpus, Order
from mmstream.order.chunks import ChunkTable, LaneLists
from mmstream.order.selection import Selection
from mmstream.packing.order import PackOrder
from mmstream.packing.plan import PackLimits
from mmstream.packing.planner import plan_of_lengths
from mmstream.state import make_state, resume
from tests.helpers.orders import digest, mixture_order, pairs


def order(counts, rows, **changes):
    return Order.from_counts(counts, global_batch_size=rows, **{"reshuffle": "lanes", **changes})


@st.composite
def orders(draw, **fixed):
    counts = draw(st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any))
    drop_last = fixed.get("drop_last", draw(st.booleans()))
    rows = draw(st.integers(1, min(sum(counts), 24) if drop_last else 24))
    lanes = draw(st.sampled_from([q for q in range(1, rows + 1) if rows % q == 0]))
    return order(
        counts,
        rows,
        seed=draw(st.integers(0, 2**40)),
        grid=draw(st.none() | st.tuples(st.integers(1, 4), st.just(lanes))),
        window=draw(st.none() | st.integers(1, 40)),
        interleave=draw(st.integers(1, 9)),
        chunk=draw(st.none() | st.integers(1, 20)),
        drop_last=drop_last,
    )


def samples_of_lanes(order, epoch):
    """The samples that lane q of any group gives to the steps, by q."""
    lanes = {}
    for step in range(order.steps_per_epoch):
        refs = order.refs(epoch, step)
        for row, (pair, is_valid) in enumerate(zip(pairs(refs), refs.valid, strict=True)):
            if is_valid:
                lane = row * order.grid[1] // order.global_batch_size
                lanes.setdefault(lane, set()).add(pair)
    return lanes


@settings(max_examples=40)
@given(orders())
def test_no_sample_is_ever_in_two_lanes(order):
    lane_of = {}
    for epoch in range(3):
        for lane, samples in samples_of_lanes(order, epoch).items():
            for sample in samples:
                assert lane_of.setdefault(sample, lane) == lane


@settings(max_examples=40)
@given(orders(drop_last=True))
def test_all_lanes_leave_out_as_many_samples_but_for_one(order):
    sizes = [0] * order.grid[1]
    for lane, samples in samples_of_lanes(order, 0).items():
        sizes[lane] = len(samples)
    per_lane = [order._lane_lists.epoch(0).list_sizes[q] - n for q, n in enumerate(sizes)]
    assert max(per_lane) - min(per_lane) <= 1
    assert sum(per_lane) == order.num_samples % order.global_batch_size


def test_each_lane_begins_anywhere_in_each_epoch():
    table = ChunkTable.cut(Corpus(np.array([60])), 60)
    lists = LaneLists.cut(table, np.array([30, 30]), seed=0)  # one piece a lane
    firsts = np.array(
        [lists.epoch(e).locate(np.arange(2), np.zeros(2, int))[1] for e in range(300)]
    )
    assert [np.unique(firsts[:, lane]).tolist() for lane in (0, 1)] == [
        list(range(30)),
        list(range(30, 60)),
    ]
    assert (np.diff(firsts, axis=1) != 30).mean() > 0.9  # and by an offset of its own


def kept_share(first, second):
    """The share of the samples of both orders that are in the same lane."""
    lane_of = [
        {pair: lane for lane, samples in samples_of_lanes(each, 0).items() for pair in samples}
        for each in (first, second)
    ]
    known = lane_of[0].keys() & lane_of[1].keys()
    return np.mean([lane_of[0][pair] == lane_of[1][pair] for pair in known])


@pytest.mark.slow
def test_most_samples_keep_their_lane_when_shards_are_appended_or_samples_turn_out_bad():
    settings_of = {"grid": (1, 16), "chunk": 10}
    before = order([1000] * 40, 64, **settings_of)
    assert kept_share(before, order([1000] * 44, 64, **settings_of)) > 0.8
    bad = [(0, index) for index in range(100)] + [(7, 999), (20, 3)]  # ten chunks, and two samples
    assert kept_share(before, order([1000] * 40, 64, bad=bad, **settings_of)) > 0.97
    assert kept_share(before, order([1000] * 40, 64, seed=1, **settings_of)) < 0.2


@settings(max_examples=40)
@given(st.data())
def test_a_bad_list_leaves_each_other_sample_once_in_every_epoch(data):
    counts = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(any))
    corpus = [(s, i) for s, n in enumerate(counts) for i in range(n)]
    bad = data.draw(st.sets(st.sampled_from(corpus), max_size=len(corpus) - 1))
    planned = order(
        counts, 4, chunk=data.draw(st.integers(1, 9)), bad=sorted(bad), drop_last=False, seed=3
    )
    for epoch in (0, 1):
        seen = samples_of_lanes(planned, epoch).values()
        assert sorted(sample for samples in seen for sample in samples) == sorted({*corpus} - bad)


# -- identity, state and resume --------------------------------------------------------------------


def test_the_identity_says_it_only_where_it_is_so():
    planned = order([90], 6)
    plain = Order.from_counts([90], global_batch_size=6, reshuffle="global")
    assert plain.identity()["version"] == 1
    assert "reshuffle" not in plain.identity()
    # An mmstream that does not know the key reads version 1 alone.
    assert planned.identity() == plain.identity() | {"version": 2, "reshuffle": "lanes"}
    with pytest.raises(StateError, match="order version 1, this mmstream has 2"):
        Order.from_identity(planned.identity() | {"version": 1}, [90])


def test_nobody_said_how_to_reshuffle_then_a_node_cache_decides():
    for shuffle, has_cache, expected in (
        (True, False, "global"),
        (True, True, "lanes"),
        (False, True, "global"),
    ):
        planned = Order.from_counts([9], global_batch_size=2, shuffle=shuffle, has_cache=has_cache)
        assert planned.reshuffle == expected
    given_ = Order.from_counts([9], global_batch_size=2, reshuffle="global", has_cache=True)
    assert given_.reshuffle == "global"


class OneDataset:
    can_finish_epoch = True

    def order_from_identity(self, identity):
        if "buckets" in identity:
            return BucketOrder.from_saved(identity, Corpus(np.array([90])), BUCKETS, SELECTIONS)
        return Order.from_identity(identity, [90])


class ManyDatasets:
    can_finish_epoch = False


def order_now(**how):
    return Order.from_counts([90], global_batch_size=6, window_bytes=1 << 20, **how)


PLAN = plan_of_lengths([90], np.full(90, 5), PackLimits(10))


def packs_now(**how):
    return PackOrder.from_plan(PLAN, Corpus(np.array([90])), global_batch_size=6, **how)


BUCKETS = Buckets("duration_s", edges=[2, 4], min_steps=1)
SELECTIONS = [
    Selection.of_shards([is_chosen], np.array([90]))
    for is_chosen in (np.arange(90) < 40, np.arange(90) >= 40)
]


def buckets_now(**how):
    corpus = Corpus(np.array([90]))
    return BucketOrder.from_corpus(corpus, BUCKETS, SELECTIONS, global_batch_size=6, **how)


SAVED = {"global": {"reshuffle": "global"}, "lanes": {"has_cache": True}}
NOW = {
    "unset": {},
    "unset, with a cache": {"has_cache": True},
    "global": {"reshuffle": "global", "has_cache": True},
    "lanes": {"reshuffle": "lanes"},
}


@pytest.mark.parametrize("build", [order_now, packs_now, mixture_order, buckets_now])
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("now", NOW)
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("on_change", ["refuse", "finish_epoch"])
def test_an_epoch_ends_as_it_began(build, saved, now, step, on_change):
    began, present = build(**SAVED[saved]), build(**NOW[now])
    state = json.loads(json.dumps(make_state(began, 1, step)))
    is_mixture = build is mixture_order
    source = ManyDatasets() if is_mixture else OneDataset()
    goes_on = step > 0 or is_mixture  # the sources of a mixture are mid-epoch
    if goes_on and now in SAVED and now != saved and (is_mixture or on_change == "refuse"):
        with pytest.raises(StateError, match=f"reshuffle was '{saved}' and is '{now}'") as refused:
            resume(source, present, state, on_change)
        assert "version" not in str(refused.value)
        return
    if build is packs_now and goes_on and now in SAVED and now != saved:
        kept = PackOrder.from_identity(state["order"], PLAN, Corpus(np.array([90])))
    else:
        assert resume(source, present, state, on_change)[:2] == (1, step)
        kept = resume(source, present, state, on_change)[2]
    expected = began if goes_on else present
    assert kept.identity() == expected.identity()
    assert pairs(kept.refs(1, step)) == pairs(expected.refs(1, step))


@pytest.mark.parametrize("value", ["LANES", "", 5, True, ["lanes"]])
def test_another_word_is_refused(value):
    with pytest.raises(ConfigError, match=r"^reshuffle .*: give global or lanes$"):
        order([9], 2, reshuffle=value)
    with pytest.raises(StateError, match="not an order's identity: reshuffle"):
        Order.from_identity(order([9], 2).identity() | {"reshuffle": value}, [9])


def test_an_order_that_is_not_shuffled_has_no_lanes_to_keep():
    with pytest.raises(ConfigError, match=r"reshuffle lanes with shuffle=False: .* leave out one"):
        order([9], 2, shuffle=False)
    plain = order([9], 2, reshuffle="global", shuffle=False)
    assert plain.identity() == Order.from_counts([9], global_batch_size=2, shuffle=False).identity()


@pytest.mark.parametrize(
    ("counts", "rows", "changes", "expected"),
    [
        (
            [1000] * 20,
            16,
            {"grid": (2, 8), "window": 64, "interleave": 4, "chunk": 16},
            "627e4e364b2cab4d",
        ),
        (
            [30, 0, 41, 7],
            8,
            {"grid": (1, 4), "window": 5, "chunk": 6, "bad": [(2, 3)]},
            "4b9d80e2f66dca61",
        ),
        (
            [55, 13],
            9,
            {"grid": (3, 3), "window": 4, "chunk": 5, "drop_last": False},
            "7866f09b52315eae",
        ),
    ],
)
def test_golden_digests(counts, rows, changes, expected):
    assert digest(order(counts, rows, seed=3, **changes), epochs=(0, 1, 5)) == expected


def test_golden_digest_of_a_mixture():
    planned = mixture_order(reshuffle="lanes", changes={90: (1, 1, 2)})
    assert digest(planned, epochs=(0, 1, 30)) == "753a8d58a2cf7950"
