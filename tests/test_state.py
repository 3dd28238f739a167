"""A state is a number with an identity: it applies exactly, or it is refused by name."""

import dataclasses
import json
import logging

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mmstream.errors import StateError
from mmstream.order import Corpus, MixtureOrder, Order, Recipe
from mmstream.packing.order import PackOrder
from mmstream.packing.plan import PackLimits
from mmstream.packing.planner import plan_of_lengths
from mmstream.state import make_state as make_sealed_state, order_of_state, resume
from tests.helpers.memory import allocations_below
from tests.helpers.orders import COUNTS, mixture_order, recipe
from tests.helpers.states import edited, load_state


def make_state(*position):
    """A state that tests may edit."""
    return edited(make_sealed_state(*position))


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
        ({"window": 7}, "window was 100 and is 7"),
        ({"grid": (2, 5)}, "grid was"),
        ({"interleave": 2}, "interleave was 32 and is 2"),
        ({"chunk": 8}, "chunk was 64 and is 8"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"drop_last": False}, "drop_last was True and is False"),
        ({"names": ["a", "c"]}, "corpus was"),
        ({"counts": (41, 60)}, "corpus was"),
        ({"seed": 2, "window": 7}, "run: seed was 1 and is 2; window was 100 and is 7"),
    ],
)
def test_in_mid_epoch_any_difference_is_refused_by_name(change, names):
    with pytest.raises(StateError, match=names):
        load_state(order(**change), make_state(order(), 1, 5))


@pytest.mark.parametrize(
    "change", [{"global_batch_size": 20}, {"window": 7}, {"shuffle": False}, {"bad": [(0, 0)]}]
)
def test_where_an_epoch_begins_all_but_corpus_and_seed_may_change(change):
    assert load_state(order(**change), make_state(order(), 2, 0)) == (2, 0)


CONTENT = {"sizes": [400, 600], "checksums": ["aa", "bb"]}
OTHER_CONTENT = [
    ({**CONTENT, "sizes": [401, 600]}, "sizes", "sizes"),
    ({**CONTENT, "checksums": ["aa", "cc"]}, "sha256", "bytes (sha256)"),
]


@pytest.mark.parametrize("step", [0, 5])
@pytest.mark.parametrize(("change", "key", "subject"), OTHER_CONTENT)
def test_shards_with_other_bytes_are_refused_by_name(change, key, subject, step):
    message = refused(order(**change), make_state(order(**CONTENT), 1, step))
    assert f"step {step} does not fit this run: {key} was '" in message
    assert message.endswith(
        f". The {subject} of the shards are not those of the state, though names and sample counts "
        "are: another conversion, or replaced. Resume on the old shards, or start over."
    )


@pytest.mark.parametrize("value", [5, "x", ["a" * 32]])
@pytest.mark.parametrize("key", ["sizes", "sha256"])
@pytest.mark.parametrize("step", [0, 5])
def test_malformed_content_of_shards_is_refused_even_where_it_is_not_compared(value, key, step):
    state = make_state(order(), 1, step)
    state["order"] = {**state["order"], key: value}
    assert refused(order(), state).startswith(f"not an order of a state: ValueError: {key} ")


def test_a_state_that_says_nothing_of_its_shards_is_refused():
    text = "the state has no 'sizes', so it does not tell which shards it is of: "
    mixture = mixture_order(weights=(1, 0, 3), changes={50: (1, 1, 1)})
    for of_state in (order(**CONTENT), mixture):
        state = make_state(of_state, 1, 5)
        for identity in state["order"].get("sources", [state["order"]]):
            del identity["sizes"]
        assert refused(of_state, state).startswith(text)


def test_a_source_of_a_mixture_with_other_bytes_is_refused_by_name():
    def with_content(checksum):
        sources = {name: Corpus(np.array(counts)) for name, counts in COUNTS.items()}
        sources["b"] = Corpus(sources["b"].counts, checksums=[checksum] * len(COUNTS["b"]))
        return MixtureOrder(dataclasses.replace(recipe(), corpora=sources))

    state = make_state(with_content("aa"), 1, 0)
    assert load_state(with_content(None), state) == (1, 0)  # whose bytes are not known
    message = refused(with_content("bb"), state)
    assert "this run: source b sha256 was '" in message
    assert ". The bytes (sha256) of source b are not those of the state, " in message


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"version": 2}, "state version 2, this mmstream reads 1: resume with the version that"),
        ({"step": -1}, "epoch 1, step -1: must be integers, 0 or more"),
        ({"step": "3"}, "epoch 1, step '3': must be integers, 0 or more"),
        ({"step": True}, "epoch 1, step True: must be integers, 0 or more"),
        ({"epoch": -1}, "epoch -1, step 5: must be integers, 0 or more"),
        ({"epoch": 1.5}, r"epoch 1\.5, step 5: must be integers, 0 or more"),
        ({"step": 10}, "step 10: an epoch has 10 steps"),
        ({"version": True}, "state version True, this mmstream reads 1"),
        ({"version": 1.0}, "state version 1.0, this mmstream reads 1"),
        ({"epoch": 10**30}, r"epoch 1000000000000000000000000000000: at most 1,099,511,627,776"),
        ({"epoch": 10**5000}, "epoch a int that is too long to show: at most"),
        ({"order": None}, "not a state of a Loader: it holds no order"),
    ],
)
def test_a_damaged_state_is_refused(damage, message):
    with pytest.raises(StateError, match=message):
        load_state(order(), make_state(order(), 1, 5) | damage)


STATE = make_state(order(), 1, 5)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        *(
            ({k: v for k, v in STATE.items() if k != key}, f"it has no '{key}'")
            for key in ("version", "epoch", "step")
        ),
        ({k: v for k, v in STATE.items() if k != "order"}, "it holds no order"),
        (None, "it holds no order"),
        ([1, 2], "it holds no order"),
    ],
)
def test_something_else_and_a_state_without_one_of_its_keys_are_refused(other, message):
    with pytest.raises(StateError, match=f"not a state of a Loader: {message}"):
        load_state(order(), other)


def test_a_state_is_four_plain_values_and_their_checksum():
    assert make_sealed_state(order(), 2, 3) == {
        "version": 1,
        "epoch": 2,
        "step": 3,
        "order": order().identity(),
        "crc32c": "e2d53234",
    }


def test_a_setting_that_only_one_side_knows_is_named():
    state = make_state(order(), 0, 1)
    state["order"] = {**state["order"], "extra": 7}
    with pytest.raises(
        StateError, match=r"step 1 does not fit this run: extra was 7 and is None\."
    ):
        load_state(order(), state)
    del state["order"]["extra"], state["order"]["chunk"]
    with pytest.raises(StateError, match=r"does not fit this run: chunk was None and is 64\."):
        load_state(order(), state)


def refused(run, state):
    with pytest.raises(StateError) as caught:
        load_state(run, state)
    return str(caught.value)


def test_a_state_of_a_mixture_and_one_of_a_dataset_have_no_order_in_common():
    one, mixture = (order(), "one dataset"), (mixture_order(), "a mixture")
    for (run, its_kind), (other, other_kind) in ((one, mixture), (mixture, one)):
        assert refused(run, make_state(other, 0, 0)) == (
            f"the state is of {other_kind}, this run of {its_kind}: they have no order in common"
        )


def test_a_malformed_order_of_a_mixture_is_refused():
    state = make_state(mixture_order(), 1, 2)
    state["order"] = {**state["order"], "epoch_steps": None}
    assert refused(mixture_order(), state).startswith("not an order of a state: TypeError: ")


ADVICE = {
    "version": "Resume with the mmstream that saved it: another version plans another order.",
    "corpus": "Shards were added, removed or changed: resume on the old ones, or start over; "
    'where they were only added at the end, Loader(on_change="finish_epoch") ends this epoch as '
    "it was planned, then changes.",
    "bad": "The list of bad samples has changed: put back the one that this epoch began with "
    "(mmstream.bad.previous.json is the one before the last change); where it began with none, "
    'Loader(on_change="finish_epoch") ends this epoch as it was planned, then changes. Either way '
    "the rest of this epoch still shows samples that only the new list names: to show none of "
    "them, resume from a state of step 0, or start over.",
    "setting": "Resume with the saved values; they may change where an epoch begins: "
    'Loader(on_change="finish_epoch") ends this epoch as it was planned, then changes.',
    "start": "Resume with the saved values, or start over.",
    "mixture": "Sources of a mixture have epochs of their own, so what has begun goes on: only "
    "weights that begin later, and sources not drawn from yet, may change.",
    "mixture bad": " Bad lists that came later are for new runs: put back "
    "mmstream.bad.previous.json, or move mmstream.bad.json away where there was none. This run "
    "then still shows samples that only the new lists name.",
}


@pytest.mark.parametrize(
    ("changes", "step", "advice"),
    [
        ({"counts": (41, 60)}, 5, "corpus"),
        ({"counts": (41, 60)}, 0, "corpus"),
        ({"counts": (41, 60), "window": 7, "bad": [(0, 0)]}, 5, "corpus"),
        ({"bad": [(0, 0)], "window": 7}, 5, "bad"),
        ({"window": 7}, 5, "setting"),
        ({"seed": 3}, 0, "start"),
    ],
)
def test_a_refusal_says_what_to_do(changes, step, advice):
    assert refused(order(**changes), make_state(order(), 1, step)).endswith(". " + ADVICE[advice])


def test_a_refused_version_of_the_order_comes_before_all_other_advice():
    for run in (order(), mixture_order()):
        state = make_state(run, 1, 5)
        state["order"] = {**state["order"], "version": 9, "corpus": "x", "seed": 3}
        assert refused(run, state).endswith(ADVICE["version"])


def test_a_refused_state_of_a_mixture_says_what_may_change():
    state = make_state(mixture_order(), 1, 5)
    assert refused(mixture_order(weights=(1, 1, 1)), state).endswith(ADVICE["mixture"])
    listed = {name: Corpus(np.array(counts)) for name, counts in COUNTS.items()}
    listed["a"] = Corpus(listed["a"].counts, bad=np.array([(0, 0)]))
    with_bad_list = MixtureOrder(dataclasses.replace(recipe(), corpora=listed, seed=6))
    message = refused(with_bad_list, state)
    assert "this run: seed was 5 and is 6; source a bad was None and is '" in message
    assert message.endswith(ADVICE["mixture"] + ADVICE["mixture bad"])


# -- where a run goes on --------------------------------------------------------------------------


class Source:
    """A dataset as far as states ask for it."""

    def __init__(self, counts=(40, 60), names=("a", "b"), bad=(), can_finish_epoch=True):
        self.corpus = (list(counts), list(names), list(bad))
        self.can_finish_epoch = can_finish_epoch

    def order_from_identity(self, identity):
        return Order.from_identity(identity, *self.corpus)


def test_a_state_that_fits_goes_on_with_the_present_order():
    present = order()
    for on_change in ("refuse", "finish_epoch"):
        resumed = resume(Source(), present, make_state(order(), 1, 5), on_change)
        assert resumed[:2] == (1, 5)
        assert resumed[2] is present


def test_a_state_that_does_not_fit_is_refused_unless_its_epoch_may_be_finished():
    state = make_state(order(), 1, 5)
    with pytest.raises(StateError, match="window was 100 and is 7"):
        resume(Source(), order(window=7), state, "refuse")
    with pytest.raises(StateError, match="window was 100 and is 7"):
        resume(Source(can_finish_epoch=False), order(window=7), state, "finish_epoch")
    for on_change in ("refuse", "finish_epoch"):
        with pytest.raises(StateError, match="not a state of a Loader: it holds no order"):
            resume(Source(), order(), None, on_change)


def test_an_epoch_is_finished_in_the_order_that_it_began_with(caplog):
    present = order(counts=(40, 60, 9), names=["a", "b", "c"], window=7, global_batch_size=20)
    source = Source(counts=(40, 60, 9), names=("a", "b", "c"))
    with caplog.at_level(logging.INFO, "mmstream.state"):
        epoch, step, resumed = resume(source, present, make_state(order(), 1, 5), "finish_epoch")
    assert (epoch, step) == (1, 5)
    assert resumed.identity() == order().identity()
    assert caplog.messages == [
        "steps 5 to 9 of epoch 1 follow the saved settings, 10 rows each; then the present "
        "settings begin"
    ]


OTHER_DEFAULTS = {"grid": (2, 2), "window": 9, "interleave": 5, "chunk": 3}
"""What another version might have chosen."""


@pytest.mark.parametrize("on_change", ["refuse", "finish_epoch"])
def test_settings_that_were_left_to_defaults_are_those_of_the_state_until_its_epoch_ends(on_change):
    saved = order(**OTHER_DEFAULTS)
    present = order()
    epoch, step, resumed = resume(Source(), present, make_state(saved, 1, 5), on_change)
    assert (epoch, step) == (1, 5)
    assert resumed.identity() == saved.identity() != present.identity()
    assert resume(Source(), present, make_state(saved, 2, 0), on_change) == (2, 0, present)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": 7}, "step 5 does not fit this run: window was 9 and is 7. Resume"),
        ({"grid": (1, 5)}, r"this run: grid was \[2, 2\] and is \[1, 5\]. Resume"),
        ({"interleave": 2}, "this run: interleave was 5 and is 2. Resume"),
        ({"chunk": 2}, "this run: chunk was 3 and is 2. Resume"),
        ({"window_bytes": 1 << 30}, "this run: chunk was 3 .*; grid was .*; window was 9 "),
        ({"global_batch_size": 5}, "this run: .*global_batch_size was 10 and is 5"),
        ({"seed": 2}, "this run: seed was 1 and is 2. Resume"),
    ],
)
def test_a_setting_that_was_given_and_differs_is_refused_beside_those_that_nobody_gave(
    given, message
):
    with pytest.raises(StateError, match=message):
        resume(Source(), order(**given), make_state(order(**OTHER_DEFAULTS), 1, 5), "refuse")


def test_without_shuffle_other_defaults_do_not_hinder_a_resume():
    saved = order(**OTHER_DEFAULTS, shuffle=False)
    *_, resumed = resume(Source(), order(shuffle=False), make_state(saved, 1, 5), "refuse")
    assert resumed.identity() == saved.identity()


OTHER_MIXTURE_DEFAULTS = {"grid": (2, 3), "window": 16, "interleave": 3}


@pytest.mark.parametrize("value", ["1", [1], None, True, 1.0])
def test_an_epoch_that_is_no_integer_takes_no_memory(value):
    state = make_state(mixture_order(**OTHER_MIXTURE_DEFAULTS), 1, 5)
    state["order"] = {**state["order"], "epoch_steps": 1 << 39}
    present = mixture_order(grid=None, window=None, interleave=None)
    for name in ("epoch", "step"):
        with pytest.raises(StateError, match="must be integers"), allocations_below(16 << 20):
            resume(Source(can_finish_epoch=False), present, {**state, name: value}, "refuse")


def test_a_mixture_keeps_the_settings_of_its_state_from_its_first_step_on():
    saved = mixture_order(**OTHER_MIXTURE_DEFAULTS)
    present = mixture_order(grid=None, window=None, interleave=None)
    source = Source(can_finish_epoch=False)
    for epoch, step in ((0, 1), (3, 0), (3, 7)):
        *_, resumed = resume(source, present, make_state(saved, epoch, step), "refuse")
        assert resumed.identity() == saved.identity() != present.identity()
    assert resume(source, present, make_state(saved, 0, 0), "refuse")[2] is present


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grid": (1, 2)}, "grid was"),
        ({"window": 8}, "source a window was 3 and is 2"),
        ({"interleave": 4}, "interleave was 3 and is 4"),
        ({"window_bytes": 1 << 30}, "grid was"),
    ],
)
def test_a_mixtures_settings_that_were_given_and_differ_are_refused(given, message):
    state = make_state(mixture_order(**OTHER_MIXTURE_DEFAULTS), 1, 5)
    present = mixture_order(**{"grid": None, "window": None, "interleave": None, **given})
    with pytest.raises(StateError, match=message):
        resume(Source(can_finish_epoch=False), present, state, "refuse")


def test_a_source_that_comes_later_has_its_defaults_beside_the_settings_of_the_state():
    counts = {"a": [40, 31], "c": [400, 350]}
    saved = mixture_order(counts, (1, 3), **OTHER_MIXTURE_DEFAULTS)
    unset = {"grid": None, "window": None, "interleave": None}
    more = mixture_order({**counts, "d": [900]}, (1, 3, 0), {50: (1, 2, 1)}, **unset)
    *_, resumed = resume(Source(), more, make_state(saved, 0, 20), "refuse")
    assert resumed.grid == (2, 3)
    assert resumed.recipe.settings["c"] == saved.recipe.settings["c"]
    beside = mixture_order({**counts, "d": [900]}, (1, 3, 0), {50: (1, 2, 1)}, window=None)
    assert beside.grid == (2, 3)
    assert resumed.recipe.settings["d"] == beside.recipe.settings["d"]


def test_a_dataset_that_has_not_only_grown_cannot_finish_its_epoch():
    state = make_state(order(), 1, 5)
    with pytest.raises(StateError, match="the corpus' first 2 shards are not those of the state"):
        resume(Source(counts=(41, 60)), order(counts=(41, 60)), state, "finish_epoch")


GROWN = {"counts": (40, 60, 9), "names": ["a", "b", "c"]}


@pytest.mark.parametrize("change", [GROWN, GROWN | {"bad": [(1, 3)]}])
@pytest.mark.parametrize("saved_bad", [[], [(0, 7)]])
@pytest.mark.parametrize("on_change", ["refuse", "finish_epoch"])
def test_at_the_start_of_an_epoch_the_present_order_begins(change, saved_bad, on_change, caplog):
    present = order(**change)
    state = make_state(order(bad=saved_bad), 2, 0)
    with caplog.at_level(logging.INFO):
        epoch, step, resumed = resume(Source(**change), present, state, on_change)
    assert (epoch, step) == (2, 0)
    assert resumed is present
    num_samples = present.num_samples
    assert caplog.messages == [
        f"the dataset has grown from 2 to 3 shards: epoch 2 begins with {num_samples} samples"
    ]


@pytest.mark.parametrize("on_change", ["refuse", "finish_epoch"])
@pytest.mark.parametrize("unset", [{}, {"window": None, "grid": None, "interleave": None}])
def test_in_mid_epoch_a_dataset_that_only_grew_ends_the_epoch_as_planned(on_change, unset, caplog):
    saved, present = order(**unset), order(**GROWN, **unset)
    with caplog.at_level(logging.INFO):
        epoch, step, resumed = resume(Source(**GROWN), present, make_state(saved, 1, 5), on_change)
    assert (epoch, step) == (1, 5)
    assert resumed.identity() == saved.identity()
    assert caplog.messages == [
        "the dataset has grown from 2 to 3 shards: epoch 2 begins with 109 samples; epoch 1 ends "
        "with its 100"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 7}, "window was 100 and is 7.*finish_epoch"),
        ({"seed": 9}, "seed was 1 and is 9"),
        ({"global_batch_size": 20}, "global_batch_size was 10 and is 20"),
        ({"drop_last": False}, "drop_last was True and is False"),
        ({"bad": [(0, 7)]}, "bad was None"),
        ({"counts": (40, 61, 9)}, "corpus was"),
        ({"names": ["a", "x", "c"]}, "corpus was"),
    ],
)
def test_in_mid_epoch_a_dataset_that_grew_and_changed_is_refused(change, message):
    with pytest.raises(StateError, match=message):
        resume(Source(), order(**GROWN | change), make_state(order(), 1, 5), "refuse")


def test_a_dataset_that_shrank_is_refused():
    with pytest.raises(StateError, match="num_shards was 3 and is 2"):
        resume(Source(), order(), make_state(order(**GROWN), 1, 5), "refuse")


def test_in_mid_epoch_another_bad_list_is_refused_and_a_first_one_waits():
    present = order(bad=[(1, 3)])
    source = Source(bad=[(1, 3)])
    with pytest.raises(StateError, match="the known bad samples are not those of the state"):
        resume(source, present, make_state(order(bad=[(0, 7)]), 2, 1), "finish_epoch")
    *_, resumed = resume(source, present, make_state(order(), 2, 1), "finish_epoch")
    assert resumed.num_samples == 100


def test_the_order_of_a_state_comes_back_with_its_epoch_and_step():
    saved, epoch, step = order_of_state(make_state(order(window=7), 3, 4), Source())
    assert saved.identity() == order(window=7).identity()
    assert (epoch, step) == (3, 4)


@pytest.mark.parametrize(
    "state",
    [
        *({}, {"order": None}, {"order": []}, {"order": [1]}, {"epoch": 1, "step": 0}),
        *(None, [], "state", 3),
    ],
)
def test_a_state_without_an_order_is_refused(state):
    with pytest.raises(StateError, match=r"^not a state of a Loader: it holds no order"):
        order_of_state(state, Source())
    with pytest.raises(StateError):
        resume(Source(), order(), state, "finish_epoch")


def pack_order():
    counts = (40, 60)
    lengths = np.arange(100) % 16 + 1
    plan = plan_of_lengths(counts, lengths, PackLimits(16))
    corpus = Corpus(np.array(counts), [shard.name for shard in plan.shards])
    return PackOrder.from_plan(plan, corpus, global_batch_size=4)


def test_a_state_of_packs_comes_back_with_its_plan_alone():
    saved = pack_order()
    state = make_state(saved, 1, 2)
    with pytest.raises(StateError, match=r"has no plan of them: bring the plan's folder back"):
        order_of_state(state, Source())
    state["order"]["sources"] = []
    with pytest.raises(StateError, match="is of packs of a mixture, this run of one dataset"):
        order_of_state(state, Source(), saved.plan)


HUGE = [
    {"grid": [10**9, 5]},
    {"grid": [10**9, 10**9]},
    {"grid": "11"},
    {"grid": [1, 1, 1]},
    {"grid": 1},
    {"window": 10**30},
    {"window": "7"},
    {"interleave": 10**30},
    {"chunk": 10**30},
    {"global_batch_size": 10**12, "drop_last": False},
    {"global_batch_size": 10**30},
    {"drop_last": "yes"},
    {"shuffle": "no"},
    {"seed": "1"},
    {"num_shards": 10**30},
    {"version": True},
]


@pytest.mark.parametrize("change", HUGE, ids=repr)
@pytest.mark.parametrize("on_change", ["refuse", "finish_epoch"])
def test_impossible_settings_in_a_state_are_refused_before_anything_is_allocated(change, on_change):
    state = make_state(order(), 1, 5)
    state["order"] = {**state["order"], **change}
    source = Source()
    with pytest.raises(StateError), allocations_below(16 << 20):
        resume(source, order(), state, on_change)


MIXTURE_CHANGES = [
    {"grid": [10**9, 4]},
    {"grid": [1 << 10, 1 << 10]},
    {"grid": "22"},
    {"interleave": 10**30},
    {"interleave": 0},
    {"global_batch_size": 10**12},
    {"epoch_steps": 10**30},
    {"epoch_steps": "first"},
    {"seed": None},
    {"weights": []},
    {"weights": [{"step": 0, "shares": {"a": 10**12}}]},
    {"weights": [{"step": 0, "shares": {"a": -1, "b": 2}}]},
    {"weights": [{"step": 0, "shares": {}}]},
    {"weights": [{"step": 5, "shares": {"a": 1}}]},
    {"weights": [{"step": 0.5, "shares": {"a": 1}}]},
    {"weights": 7},
    {"sources": []},
    {"sources": [[]]},
]


@pytest.mark.parametrize("change", MIXTURE_CHANGES, ids=repr)
def test_impossible_settings_in_a_state_of_a_mixture_are_refused(change):
    identity = {**mixture_order().identity(), **change}
    with pytest.raises(StateError), allocations_below(64 << 20):
        MixtureOrder(Recipe.from_identity(identity, mixture_order().recipe.corpora))


def test_a_long_value_of_a_state_leaves_room_for_the_other_differences():
    state = make_state(order(), 1, 5)
    state["order"] = {**state["order"], "bad": "x" * 10_000, "chunk": 9}
    text = refused(order(), state)
    assert "characters left out]" in text
    assert "chunk was 9 and is 64" in text
