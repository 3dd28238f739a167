"""The order over packs of a mixture: shares on average, each sample once a source epoch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mmstream.errors import ConfigError, StateError
from mmstream.order import Corpus
from mmstream.order.corpus import SavedOrder
from mmstream.packing.order import MixturePackOrder
from mmstream.packing.plan import MixturePlan, PackLimits, PackPlan, unit_shares
from mmstream.packing.planner import plan_of_lengths
from mmstream.state import make_state
from tests.helpers.pack_orders import (
    packs_of_step,
    saved,
    walk,
)
from tests.helpers.states import load_state

COUNTS = {"long": [70, 3, 0, 90], "short": [400, 410]}
"""Samples of each shard: of a source of long samples, and of one of short ones."""

LIMITS = PackLimits(32)

Ref = tuple[int, int]


def plan_of(
    name: str, counts: Sequence[int], seed: int = 0, limits: PackLimits = LIMITS
) -> PackPlan:
    most = 33 if name == "long" else 5
    return plan_of_lengths(
        counts, np.random.default_rng(seed).integers(1, most, sum(counts)), limits
    )


def plans_of(counts: Mapping[str, Sequence[int]] = COUNTS, seed: int = 0) -> MixturePlan:
    plans = {name: plan_of(name, of_source, seed) for name, of_source in counts.items()}
    return MixturePlan(plans, [len(of_source) for of_source in counts.values()])


def corpora_of(
    counts: Mapping[str, Sequence[int]] = COUNTS, bad: Mapping[str, Any] | None = None
) -> dict[str, Corpus]:
    return {
        name: Corpus(
            np.array(of_source),
            [f"shard-{number:06d}.tar" for number in range(len(of_source))],
            bad=np.array((bad or {}).get(name, ()), dtype=np.int64).reshape(-1, 2),
        )
        for name, of_source in counts.items()
    }


def order_of(
    counts: Mapping[str, Sequence[int]] = COUNTS,
    weights: Sequence[float] = (1, 1),
    *,
    rows: int = 6,
    bad: Mapping[str, Any] | None = None,
    plan: MixturePlan | None = None,
    plan_seed: int = 0,
    **options: Any,
) -> MixturePackOrder:
    plan = plan or plans_of(counts, plan_seed)
    shares = dict(zip(counts, plan.shares(weights, "samples"), strict=True))
    given = {"epoch_steps": 40, "global_batch_size": rows, "seed": 3} | options
    return MixturePackOrder.from_plans(plan, corpora_of(counts, bad), {0: shares}, **given)


def source_of(pack: Sequence[Ref]) -> int:
    """Which source a pack is of; COUNTS has four shards of the first."""
    (source,) = {int(shard >= 4) for shard, _ in pack}
    return source


# -- shares -----------------------------------------------------------------------------------


@pytest.mark.parametrize("weights_of", ["samples", "tokens"])
def test_weights_are_those_of_samples_or_tokens_in_the_mean(weights_of: Any) -> None:
    plan = plans_of()
    shares = plan.shares((7, 3), weights_of)
    order = MixturePackOrder.from_plans(
        plan,
        corpora_of(),
        {0: dict(zip(COUNTS, shares, strict=True))},
        epoch_steps=150,
        global_batch_size=6,
    )
    amounts = [0, 0]
    for step in range(150):
        tokens = np.split(
            order.document_tokens(0, step), np.cumsum(order.document_counts(0, step))[:-1]
        )
        for pack, lengths in zip(packs_of_step(order, 0, step), tokens, strict=True):
            amount = len(pack) if weights_of == "samples" else int(lengths.sum())
            amounts[source_of(pack)] += amount
    assert amounts[0] / sum(amounts) == pytest.approx(0.7, rel=0.05)


@pytest.mark.parametrize(
    ("weights", "means"), [((1, 0, 2), (80, 1, 3)), ((0.1, 0.9), (101, 2)), ((1, 1), (1, 300))]
)
def test_shares_of_packs_are_near_their_weights(weights: Any, means: Any) -> None:
    shares = unit_shares(weights, [Fraction(mean, 7) for mean in means])
    exact = np.array(weights) / np.array(means)
    assert np.array(shares) / sum(shares) == pytest.approx(exact / exact.sum(), rel=0.01)


def test_a_source_of_too_few_packs_is_refused() -> None:
    with pytest.raises(ConfigError, match="too small"):
        unit_shares([1, 1], [Fraction(1), Fraction(10**6)])


def test_simple_shares_have_a_short_period() -> None:
    assert unit_shares([1, 1], [Fraction(8), Fraction(8)]) == [1, 1]
    assert unit_shares([3, 1], [Fraction(3), Fraction(1)]) == [1, 1]
    assert sum(unit_shares([0.7, 0.3], [Fraction(1001, 10), Fraction(33, 4)])) <= 4096


def test_sources_with_other_limits_do_not_go_together() -> None:
    plans = {"a": plan_of("short", [30]), "b": plan_of("short", [30], limits=PackLimits(64))}
    with pytest.raises(ConfigError, match="plan both with the same limits"):
        MixturePlan(plans, [1, 1])
    chosen = replace(PackLimits(32), where="num_tokens > 2")
    plans["b"] = plan_of("short", [30], limits=chosen)
    assert MixturePlan(plans, [1, 1]).settings == PackLimits(32)


# -- packs ------------------------------------------------------------------------------------


def test_a_substitute_is_a_pack_of_the_same_source() -> None:
    order = order_of()
    for row, pack in enumerate(packs_of_step(order, 0, 2)):
        for attempt in range(16):
            refs, num_tokens = order.substitute_unit(0, 2, row, attempt)
            assert source_of(refs) == source_of(pack)
            assert sum(num_tokens or [99]) <= 32


def test_samples_of_bad_lists_are_left_out_of_their_packs() -> None:
    bad = {"short": [(0, 5), (1, 7)], "long": [(3, 2)]}
    order = order_of(bad=bad)
    seen = {
        ref
        for e in range(12)
        for s in range(40)
        for pack in packs_of_step(order, e, s)
        for ref in pack
    }
    assert seen.isdisjoint({(4, 5), (5, 7), (3, 2)})
    assert {(4, 4), (5, 6), (3, 1)} <= seen


# -- states -----------------------------------------------------------------------------------


def test_a_state_of_packs_of_a_mixture_resumes() -> None:
    state = saved(order_of(), 1, 2)
    assert load_state(order_of(), state) == (1, 2)
    assert len(json.dumps(state)) < 2000
    rebuilt = MixturePackOrder.from_mixture_identity(state["order"], plans_of(), corpora_of())
    assert rebuilt.identity() == state["order"]
    for step in range(5):
        assert packs_of_step(rebuilt, 2, step) == packs_of_step(order_of(), 2, step)


@pytest.mark.parametrize("step", [0, 2])
def test_other_packs_shares_or_bad_lists_are_refused_once_a_run_has_begun(step: int) -> None:
    state = saved(order_of(), 1, step)
    with pytest.raises(StateError, match="source short corpus was"):  # other groups
        load_state(order_of({**COUNTS, "short": [400, 409]}), state)
    with pytest.raises(StateError, match="sha256"):  # as many packs, of other lengths
        load_state(order_of(plan=with_other_members()), state)
    with pytest.raises(StateError, match="weights from step 0"):
        load_state(order_of(weights=(9, 1)), state)
    with pytest.raises(StateError, match="source long dataset bad was"):
        load_state(order_of(bad={"long": [(0, 1)]}), state)


def with_other_members() -> MixturePlan:
    """A plan whose packs differ from those of `plans_of()` in their members alone."""
    own = plans_of()
    short = own.plans["short"]
    others = replace(short, group_digests=tuple("0" * 64 for _ in short.group_digests))
    return MixturePlan({**own.plans, "short": others}, own.num_shards)


def test_a_state_of_single_samples_is_not_one_of_packs() -> None:
    from mmstream.order import MixtureOrder, Recipe

    recipe = Recipe.from_weights(
        corpora_of(), {0: {"long": 1, "short": 1}}, epoch_steps=40, global_batch_size=6, seed=3
    )
    for epoch, step in ((0, 3), (1, 0)):
        with pytest.raises(StateError, match="is of single samples"):
            load_state(order_of(), make_state(MixtureOrder(recipe), epoch, step))
    assert load_state(order_of(), make_state(MixtureOrder(recipe), 0, 0)) == (0, 0)


def test_a_plan_of_the_first_shards_goes_on_after_shards_were_appended() -> None:
    order = order_of()
    grown = {"long": [*COUNTS["long"], 50], "short": COUNTS["short"]}
    plan = MixturePlan(order.plan.plans, [5, 2])
    shares = {0: dict(zip(COUNTS, plan.shares((1, 1), "samples"), strict=True))}
    resumed = MixturePackOrder.from_plans(
        plan, corpora_of(grown), shares, epoch_steps=40, global_batch_size=6, seed=3
    )
    assert load_state(resumed, saved(order, 1, 7)) == (1, 7)
    for before, after in zip(packs_of_step(order, 1, 7), packs_of_step(resumed, 1, 7), strict=True):
        moved = [(shard + (shard >= 4), index) for shard, index in before]
        assert moved == after


def test_a_source_may_be_added_before_it_is_drawn_from() -> None:
    counts = {**COUNTS, "new": [60]}
    state = saved(order_of(), 1, 2)
    plan = plans_of(counts)
    old = order_of().inner.recipe.shares[0]
    shares = {0: dict(zip(counts, [*old, 0], strict=True)), 500: dict.fromkeys(counts, 1)}
    order = MixturePackOrder.from_plans(
        plan, corpora_of(counts), shares, epoch_steps=40, global_batch_size=6, seed=3
    ).with_saved_defaults(SavedOrder.parse(state["order"], 1, 2))
    assert load_state(order, state) == (1, 2)
    assert packs_of_step(order, 1, 2) == packs_of_step(order_of(), 1, 2)


# -- any chain of topologies ------------------------------------------------------------------


@pytest.mark.slow
@given(
    counts=st.lists(
        st.lists(st.integers(0, 60), min_size=1, max_size=4).filter(lambda c: sum(c) > 5),
        min_size=1,
        max_size=3,
    ),
    legs=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 6]), st.booleans(), st.integers(1, 9)),
        min_size=1,
        max_size=4,
    ),
    weights=st.tuples(*[st.integers(1, 9)] * 3),
    window=st.none() | st.integers(1, 20),
    seed=st.integers(0, 3),
)
@settings(max_examples=10, deadline=None)
def test_any_chain_of_topologies_delivers_each_sample_once_per_epoch_of_its_source(
    counts: list[list[int]],
    legs: list[tuple[int, bool, int]],
    weights: tuple[int, ...],
    window: int | None,
    seed: int,
) -> None:
    by_name = dict(zip(("long", "short", "other"), counts, strict=False))
    order = order_of(by_name, weights[: len(counts)], window=window, plan_seed=seed, epoch_steps=25)
    first_shards = np.cumsum([0, *map(len, counts)])
    shown: dict[tuple[int, int], Counter[Ref]] = {}
    for epoch, step, packs in walk(order, legs, num_epochs=2):
        source_epochs = order.inner._step(epoch * 25 + step).epoch.tolist()
        for row, pack in enumerate(packs):
            source = int(np.searchsorted(first_shards, pack[0][0], side="right")) - 1
            shown.setdefault((source, source_epochs[row]), Counter()).update(pack)
    for (source, epoch), samples in shown.items():
        assert set(samples.values()) == {1}
        size, ahead = sum(counts[source]), max(e for s, e in shown if s == source)
        num_packs = list(order.plan.plans.values())[source].num_units
        assert len(samples) == size or ahead - epoch <= 2 + 6 // num_packs
