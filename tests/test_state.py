"""A state is a number with an identity: it applies exactly, or it is refused by name."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmstream.errors import StateError
from mmstream.order import Order
from mmstream.state import load_state, make_state


def order(counts=(40, 60), **settings):
    return Order.from_counts(
        list(counts), **{"global_batch_size": 10, "seed": 1, "names": ["a", "b"], **settings}
    )


@given(st.integers(0, 10**9), st.integers(0, 9))
def test_a_state_survives_json(epoch, step):
    state = json.loads(json.dumps(make_state(order(), epoch, step)))
    assert load_state(order(), state) == (epoch, step)


def test_the_step_after_the_last_is_the_next_epochs_first():
    assert load_state(order(), make_state(order(), 3, 10)) == (4, 0)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"seed": 2}, "seed was 1 and is 2"),
        ({"global_batch_size": 20}, "global_batch_size was 10 and is 20"),
        ({"window": 7}, "window was 1024 and is 7"),
        ({"grid": (2, 5)}, "grid was"),
        ({"interleave": 2}, "interleave was 32 and is 2"),
        ({"chunk": 8}, "chunk was 64 and is 8"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"drop_last": False}, "drop_last was True and is False"),
        ({"names": ["a", "c"]}, "corpus was"),
        ({"counts": (41, 60)}, "corpus was"),
    ],
)
def test_in_mid_epoch_any_difference_is_refused_by_name(change, names):
    with pytest.raises(StateError, match=names):
        load_state(order(**change), make_state(order(), 1, 5))


@pytest.mark.parametrize("change", [{"global_batch_size": 20}, {"window": 7}, {"shuffle": False}])
def test_where_an_epoch_begins_all_but_corpus_and_seed_may_change(change):
    assert load_state(order(**change), make_state(order(), 2, 0)) == (2, 0)


@pytest.mark.parametrize("change", [{"seed": 2}, {"counts": (41, 60)}])
def test_corpus_and_seed_may_never_change(change):
    with pytest.raises(StateError):
        load_state(order(**change), make_state(order(), 2, 0))


@pytest.mark.parametrize(
    "damage",
    [{"version": 2}, {"step": -1}, {"step": "3"}, {"epoch": 1.5}, {"step": 10}, {"order": None}],
)
def test_a_damaged_state_is_refused(damage):
    with pytest.raises(StateError):
        load_state(order(), make_state(order(), 1, 5) | damage)


def test_something_else_is_not_a_state():
    with pytest.raises(StateError, match="not a state"):
        load_state(order(), {"model": 1})
