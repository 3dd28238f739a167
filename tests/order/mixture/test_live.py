"""Weights that are set during a run: near their shares after many changes, and in the identity."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mmstream.errors import ConfigError, StateError
from mmstream.order import Corpus
from mmstream.order.corpus import SavedOrder
from mmstream.order.mixture.order import MAX_LIVE_CHANGES, MixtureOrder, Recipe
from mmstream.order.mixture.schedule import live_shares

EPOCH_STEPS = 10


@st.composite
def changed_orders(draw, most=12):
    """An order, and the orders before each of its changes."""
    num_sources = draw(st.integers(1, 5))
    names = [f"s{number}" for number in range(num_sources)]
    corpora = {name: Corpus(np.array([draw(st.integers(1, 900))])) for name in names}
    lanes = draw(st.integers(1, 3))
    first = {name: draw(st.integers(1, 9)) for name in names}
    declared = draw(st.dictionaries(st.integers(1, 60), st.just(first), max_size=1))
    recipe = Recipe.from_weights(
        corpora,
        {0: first, **declared},
        epoch_steps=EPOCH_STEPS,
        global_batch_size=lanes * draw(st.integers(1, 4)),
        grid=(draw(st.integers(1, 3)), lanes),
        window=draw(st.integers(1, 30)),
        seed=draw(st.integers(0, 9)),
        shuffle=draw(st.booleans()),
    )
    orders, step = [MixtureOrder(recipe)], 0
    weights = st.lists(st.floats(0, 1), min_size=num_sources, max_size=num_sources).filter(any)
    for _ in range(draw(st.integers(1, most))):
        step += draw(st.integers(0, 8))
        given = dict(zip(names, draw(weights), strict=True))
        orders.append(orders[-1].with_weights(step, given))
    return orders, step


def of_step(order, run_step):
    refs = order.refs(*divmod(run_step, EPOCH_STEPS))
    return list(zip(refs.shard.tolist(), refs.index.tolist(), strict=True))


@pytest.mark.slow
@settings(max_examples=20)
@given(changed_orders(most=8))
def test_changes_leave_the_steps_before_them_and_each_sample_comes_once(case):
    orders, end = case
    order, corpora = orders[-1], orders[-1].recipe.corpora
    steps = [of_step(order, run_step) for run_step in range(end + 12)]
    for earlier, later in pairwise(orders):
        known = later.recipe.live[-1]
        assert [of_step(earlier, run_step) for run_step in range(known)] == steps[:known]
    seen = Counter()
    for run_step, refs in enumerate(steps):
        step = order._step(run_step)
        seen.update(zip(step.source.tolist(), step.epoch.tolist(), refs, strict=True))
    assert max(seen.values()) == 1
    for number in range(len(corpora)):  # all lanes make their draws without a gap
        counts = order._draws.before(end + 12)[:, number]
        assert sum(1 for source, _, _ in seen if source == number) == counts.sum()
    saved = json.loads(json.dumps(order.identity()))
    again = MixtureOrder(Recipe.from_identity(saved, corpora))
    resumed = orders[0].with_saved_defaults(SavedOrder.parse(saved, 0, 1))
    for run_step, refs in enumerate(steps):
        assert of_step(again, run_step) == of_step(resumed, run_step) == refs
    assert again.identity() == resumed.identity() == order.identity()


@settings(max_examples=30)
@given(changed_orders())
def test_windows_hold_the_rows_that_name_them(case):
    orders, end = case
    order = orders[-1]
    for run_step in (*order.recipe.live, end + 3):
        epoch, step = divmod(run_step, EPOCH_STEPS)
        for row, (number, ref) in enumerate(
            zip(order.windows(epoch, step).tolist(), of_step(order, run_step), strict=True)
        ):
            window = order.window(epoch, number)
            (place,) = np.flatnonzero((window.step == step) & (window.row == row))
            assert (int(window.shard[place]), int(window.index[place])) == ref


def test_substitutes_do_not_know_later_changes():
    corpora = {name: Corpus(np.array([500])) for name in "ab"}
    order = MixtureOrder(
        Recipe.from_weights(
            corpora,
            {0: {"a": 1, "b": 1}},
            epoch_steps=EPOCH_STEPS,
            global_batch_size=4,
            grid=(1, 1),
            window=100,
        )
    )
    changed = order.with_weights(5, {"a": 1, "b": 100}).with_weights(7, {"a": 1, "b": 0})
    rows = [(4, row, attempt) for row in range(4) for attempt in range(8)]
    (number,) = set(order.windows(0, 4)[changed._step(4).source == 0].tolist())
    assert len(order.window(0, number).step) != len(changed.window(0, number).step)
    before = [order.substitute(0, *row) for row in rows]
    assert [changed.substitute(0, *row) for row in rows] == before
    between = order.with_weights(5, {"a": 1, "b": 100})
    assert changed.substitute(0, 6, 0, 0) == between.substitute(0, 6, 0, 0)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 4))]
)
def test_no_lane_is_three_samples_from_its_share_after_200_changes(seed):
    rng = np.random.default_rng(seed)
    names = [f"s{number}" for number in range(int(rng.integers(2, 9)))]
    corpora = {name: Corpus(np.array([int(rng.integers(5, 20000))])) for name in names}
    grid = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 4]))
    recipe = Recipe.from_weights(
        corpora,
        {0: dict.fromkeys(names, 1)},
        epoch_steps=EPOCH_STEPS,
        global_batch_size=grid[1] * 3,
        grid=grid,
        seed=seed,
    )
    order, step = MixtureOrder(recipe), 0
    due = np.zeros((grid[0] * grid[1], len(names)))
    worst, counted = 0.0, 0
    for _ in range(200):
        step += int(rng.integers(1, 30))
        drawn = order._draws
        share = np.array(drawn.phases[-1].shares) / sum(drawn.phases[-1].shares)
        for until in ((counted + step) // 2, step):
            positions = drawn._positions_before(until) - drawn._positions_before(counted)
            due += positions[:, None] * share
            counted = until
            worst = max(worst, float(np.abs(drawn.before(until) - due).max()))
        weights = rng.dirichlet(np.full(len(names), rng.choice([0.3, 1, 3])))
        order = order.with_weights(step, dict(zip(names, weights.tolist(), strict=True)))
    assert worst < 3


def test_weights_are_rounded_to_thousandths():
    assert live_shares([1, 1, 2]) == [1, 1, 2]
    assert live_shares([1, 1e-9, 0]) == [1000, 1, 0]
    with pytest.raises(ConfigError, match="at least one must be above 0"):
        live_shares([0, 0])


def test_a_recipe_with_changes_has_another_version_and_a_limit():
    corpora = {"a": Corpus(np.array([50])), "b": Corpus(np.array([50]))}
    recipe = Recipe.from_weights(
        corpora, {0: {"a": 1, "b": 1}}, epoch_steps=EPOCH_STEPS, global_batch_size=2
    )
    changed = recipe.with_weights(3, {"a": 1, "b": 0})
    identity = json.loads(json.dumps(changed.identity()))
    assert identity["version"] == recipe.identity()["version"] + 2
    assert identity["weights"][1] == {"step": 3, "shares": {"a": 1}, "live": True}
    with pytest.raises(StateError, match="version 1"):
        Recipe.from_identity({**identity, "version": 1}, corpora)
    for step in range(4, 3 + MAX_LIVE_CHANGES):
        changed = changed.with_weights(step, {"a": 1, "b": 1})
    changed = changed.with_weights(step, {"a": 1, "b": 0})  # in place of the last one
    with pytest.raises(ConfigError, match="set 1,000 times"):
        changed.with_weights(step + 1, {"a": 1, "b": 1})
