"""The order over packs: every sample once, the same packs in the same steps, whatever the deal."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mmstream.errors import ConfigError, StateError
from mmstream.order import Corpus, Order
from mmstream.order.corpus import SavedOrder
from mmstream.packing.order import PackOrder
from mmstream.packing.plan import PackLimits, PackPlan
from mmstream.packing.planner import plan_of_lengths
from mmstream.ranks import World, rows_of_rank
from mmstream.state import make_state
from mmstream.types import IntArray
from tests.helpers.pack_orders import (
    by_square,
    dealt,
    packs_of_step,
    packs_of_windows,
    saved,
    walk,
)
from tests.helpers.states import load_state

LIMITS = PackLimits(16)


def lengths_of(counts: list[int], seed: int = 0) -> IntArray:
    return np.random.default_rng(seed).integers(1, 17, sum(counts))


def corpus_of(plan: PackPlan, bad: Any = ()) -> Corpus:
    counts = np.array([shard.num_samples for shard in plan.shards])
    names = [shard.name for shard in plan.shards]
    return Corpus(counts, names, bad=np.array(bad, dtype=np.int64).reshape(-1, 2))


def order_of(
    counts: list[int], *, rows: int = 6, bad: Any = (), seed: int = 0, **options: Any
) -> PackOrder:
    plan = plan_of_lengths(counts, lengths_of(counts), LIMITS)
    return PackOrder.from_plan(
        plan, corpus_of(plan, bad), global_batch_size=rows, seed=seed, **options
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_rank_keeps_its_packs_where_lanes_keep_them(num_ranks: int) -> None:
    bad = [(3, 7), (3, 8), (0, 0)]
    order = order_of([70, 3, 0, 90, 141], grid=(1, 6), chunk=2, bad=bad, reshuffle="lanes")
    assert order.identity()["reshuffle"] == "lanes"
    rank_of: dict[tuple[int, int], int] = {}
    epochs = []
    for epoch in range(4):
        epochs.append([packs_of_step(order, epoch, step) for step in range(order.steps_per_epoch)])
        for step, packs in enumerate(epochs[-1]):
            for rank in range(num_ranks):
                rows = rows_of_rank(6, World(rank, num_ranks), None)
                assert packs_of_step(order, epoch, step, rows) == packs[slice(*rows)]
                for ref in (ref for pack in packs[slice(*rows)] for ref in pack):
                    assert rank_of.setdefault(ref, rank) == rank
    assert epochs[0] != epochs[1]
    assert not rank_of.keys() & set(bad)
    again = PackOrder.from_identity(
        json.loads(json.dumps(order.identity())), order.plan, corpus_of(order.plan, bad)
    )
    assert packs_of_step(again, 3, 1) == packs_of_step(order, 3, 1)


def test_rows_are_the_packs_of_the_plan() -> None:
    order = order_of([70, 3, 0, 90, 41])
    plan = order.plan
    units = plan.units(np.arange(plan.num_units))
    refs = list(zip(units.shard.tolist(), units.index.tolist(), strict=True))
    ends = np.cumsum(units.counts).tolist()
    planned = {tuple(refs[start:end]) for start, end in zip([0, *ends], ends, strict=False)}
    for step in range(order.steps_per_epoch):
        for pack in packs_of_step(order, 3, step):
            assert tuple(pack) in planned


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("is_dealt", [False, True])
def test_windows_hold_the_samples_of_their_rows(is_dealt: bool, drop_last: bool) -> None:
    order = order_of([70, 3, 0, 90, 41], rows=8, drop_last=drop_last, window=5, grid=(1, 2))
    if is_dealt:
        order = order.with_ranks(4, dealt, by_square)
    for step, from_windows in packs_of_windows(order, 1).items():
        packs = packs_of_step(order, 1, step)
        assert {row: pack for row, pack in enumerate(packs) if pack} == from_windows


def test_padding_rows_have_no_samples() -> None:
    order = order_of([25], rows=5, drop_last=False)
    last = order.steps_per_epoch - 1
    counts = order.document_counts(0, last)
    num_left = order.num_units % 5
    assert 0 < num_left == np.count_nonzero(counts)
    assert order.refs(0, last).shard.size == counts.sum()


def test_a_deal_moves_rows_between_ranks_and_changes_nothing_else() -> None:
    order = order_of([120, 90])
    copy = pickle.loads(pickle.dumps(order.with_ranks(3, dealt, by_square)))
    assert copy.identity() == order.identity()
    for step in range(order.steps_per_epoch):
        rows = copy.order_rows(0, step)
        assert sorted(rows.tolist()) == list(range(6))
        assert rows.tolist() != list(range(6)) or step
        packs, of_copy = packs_of_step(order, 0, step), packs_of_step(copy, 0, step)
        assert [packs[row] for row in rows.tolist()] == of_copy
        of_ranks = [
            pack
            for rank in range(3)
            for pack in packs_of_step(copy, 0, step, rows_of_rank(6, World(rank, 3), None))
        ]
        assert of_ranks == of_copy
        tokens = copy.document_tokens(0, step)
        assert tokens.size == copy.refs(0, step).shard.size
        for row in range(6):
            assert copy.substitute_unit(0, step, row, 0) == order.substitute_unit(0, step, row, 0)


def test_substitutes_are_packs_of_other_steps_of_the_window() -> None:
    order = order_of([200, 200])
    for row in range(6):
        refs, num_tokens = order.substitute_unit(0, 2, row, 0)
        assert refs not in packs_of_step(order, 0, 2)
        assert num_tokens is not None
        assert sum(num_tokens) <= 16
        steps = [s for s in range(order.steps_per_epoch) if refs in packs_of_step(order, 0, s)]
        assert len(steps) <= 1


def test_samples_of_the_bad_list_are_left_out_of_their_packs() -> None:
    counts = [60, 60]
    order = order_of(counts)
    packs = [p for s in range(order.steps_per_epoch) for p in packs_of_step(order, 0, s)]
    pair = next(pack for pack in packs if len(pack) > 1)
    single = next(pack for pack in packs if len(pack) == 1)
    bad = [pair[0], *single]
    without = order_of(counts, bad=bad, rows=1)
    assert without.num_units == order.num_units - 1
    left = [p for s in range(without.steps_per_epoch) for p in packs_of_step(without, 0, s)]
    everything = {(shard, index) for shard in range(2) for index in range(60)}
    assert {ref for pack in left for ref in pack} == everything - set(bad)
    assert pair[1:] in left
    assert all(left)


def test_fewer_packs_than_rows_are_refused() -> None:
    words = r"packs of 16 tokens do not fill one step of global_batch_size 64, which counts packs"
    with pytest.raises(ConfigError, match=words):
        order_of([10], rows=64)
    assert order_of([10], rows=64, drop_last=False).steps_per_epoch == 1


# -- states -----------------------------------------------------------------------------------


def test_other_packs_are_refused_in_the_middle_of_an_epoch() -> None:
    counts = [100, 100]
    state = saved(order_of(counts), 1, 2)
    plan = plan_of_lengths(counts, lengths_of(counts), PackLimits(32))
    other = PackOrder.from_plan(plan, corpus_of(plan), global_batch_size=6)
    with pytest.raises(StateError, match="other packs than those of the state"):
        load_state(other, state)
    with pytest.raises(StateError, match="is of packs"):
        load_state(Order.from_counts(counts, global_batch_size=6), state)
    plain = Order.from_counts(counts, global_batch_size=6, names=corpus_of(plan).names)
    with pytest.raises(StateError, match="is of single samples"):
        load_state(other, make_state(plain, 0, 3))


def test_a_run_may_begin_to_pack_or_change_its_plan_where_an_epoch_begins() -> None:
    counts = [100, 100]
    order = order_of(counts)
    plan = plan_of_lengths(counts, lengths_of(counts), PackLimits(32))
    other = PackOrder.from_plan(plan, corpus_of(plan), global_batch_size=4)
    plain = Order.from_counts(counts, global_batch_size=6, names=corpus_of(plan).names)
    for before in (order, other, plain):
        for after in (order, other, plain):
            assert load_state(after, make_state(before, 2, 0)) == (2, 0)
    with pytest.raises(StateError, match="seed"):
        load_state(order_of(counts, seed=1), make_state(order, 2, 0))
    with pytest.raises(StateError, match="corpus"):
        load_state(order_of([100, 99]), make_state(order, 2, 0))


def test_settings_that_were_left_to_defaults_are_those_of_the_state() -> None:
    order = order_of([300, 300])
    state = saved(order_of([300, 300], window=7), 1, 2)
    midway, at_start = (SavedOrder.parse(state["order"], 1, step) for step in (2, 0))
    assert order.with_saved_defaults(midway).identity() == state["order"]
    assert order.with_saved_defaults(at_start) is order


def test_an_old_order_is_rebuilt_after_groups_were_appended() -> None:
    counts = [300, 300]
    old = order_of(counts)
    lengths = np.concatenate((lengths_of(counts), lengths_of([400], seed=1)))
    grown = plan_of_lengths([*counts, 400], lengths, LIMITS)
    identity = json.loads(json.dumps(old.identity()))
    rebuilt = PackOrder.from_identity(identity, grown, corpus_of(grown, bad=[(2, 3)]))
    assert rebuilt.identity() == old.identity()
    for step in range(old.steps_per_epoch):
        assert packs_of_step(rebuilt, 1, step) == packs_of_step(old, 1, step)
    with pytest.raises(StateError, match="shards are not those of the state"):
        PackOrder.from_identity(identity, grown, Corpus(np.array([300, 299, 401])))


@pytest.mark.parametrize("key", ["plan", "dataset num_shards", "num_shards", "dataset corpus"])
def test_an_identity_without_a_key_is_refused(key: str) -> None:
    order = order_of([100])
    identity = order.identity()
    del identity[key]
    with pytest.raises(StateError):
        PackOrder.from_identity(identity, order.plan, corpus_of(order.plan))


# -- any chain of topologies ------------------------------------------------------------------


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[int], int, list[tuple[int, bool, int]]]:
    """Shards, rows of a step, and legs: ranks, whether rows are dealt, steps until the next leg."""
    counts = draw(
        st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(lambda c: sum(c) > 40)
    )
    legs = st.tuples(st.sampled_from([1, 2, 3, 6]), st.booleans(), st.integers(1, 4))
    return counts, 6, draw(st.lists(legs, min_size=1, max_size=5))


@pytest.mark.slow
@given(chains(), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_any_chain_of_topologies_delivers_each_pack_once(
    chain: tuple[list[int], int, list[tuple[int, bool, int]]], seed: int
) -> None:
    counts, rows, legs = chain
    plan = plan_of_lengths(counts, lengths_of(counts, seed), LIMITS)
    order = PackOrder.from_plan(
        plan, corpus_of(plan), global_batch_size=rows, seed=seed, drop_last=False
    )
    walked = walk(order, legs, num_epochs=1)
    delivered = Counter(ref for _, _, packs in walked for pack in packs for ref in pack)
    assert set(delivered.values()) == {1}
    assert len(delivered) == sum(counts)
