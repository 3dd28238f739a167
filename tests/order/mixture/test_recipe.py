"""What a mixture is made of, and how its recipe comes back from a state."""

import dataclasses
import json

import numpy as np
import pytest

from mmstream.errors import ConfigError, StateError
from mmstream.order import Corpus, MixtureOrder, Recipe
from mmstream.order.corpus import SavedOrder
from mmstream.order.mixture.source import SourceSettings
from tests.helpers.orders import COUNTS, mixture_order, pairs, recipe


def corpora(**changes):
    counts = {**COUNTS, **changes}
    return {name: Corpus(np.array(source)) for name, source in counts.items()}


# -- defaults -------------------------------------------------------------------------------------


def test_the_window_of_a_mixture_is_shared_by_weight_when_a_source_begins():
    built = recipe(weights=(2, 0, 6), changes={50: (1, 1, 2)}, window=32)
    assert {name: settings.window for name, settings in built.settings.items()} == {
        "a": 8,
        "b": 8,
        "c": 24,
    }
    assert built.shares == {0: [1, 0, 3], 50: [1, 1, 2]}


def test_sources_that_fit_in_the_windows_share_all_that_these_hold():
    built = recipe(weights=(1, 1, 2), window=None, grid=(1, 1))
    assert built.settings["c"].window == (2 << 30) // (64 << 10) // 2
    assert built.interleave == 32


def test_chunks_are_chosen_by_all_samples_that_share_memory():
    counts = {"x": [4 * 10**9], "y": [10**7]}
    built = recipe(counts, (1, 1), grid=(8, 6))
    assert built.settings["x"] == SourceSettings(12, 1024)
    assert built.settings["y"] == SourceSettings(12, 1024)
    later = recipe(counts, (0, 1), changes={9: (1, 1)}, grid=(8, 6))
    assert later.settings["y"].chunk == 256
    assert later.settings["x"].chunk == 1024


def test_the_default_grid_is_that_of_the_sources_at_the_start():
    counts = {"x": [3000], "y": [10**6]}
    assert recipe(counts, (1, 1), grid=None).grid == (1, 6)
    assert recipe(counts, (1, 0), changes={9: (1, 1)}, grid=None).grid == (1, 2)
    assert recipe(counts, (1, 1), grid=None, shuffle=False).grid == (1, 1)
    assert recipe(shuffle=False).grid == (1, 1)


def test_settings_are_kept_as_plain_values():
    built = recipe(
        global_batch_size=np.int64(12),
        seed=np.int64(3),
        interleave=np.int64(5),
        epoch_steps=np.int64(9),
    )
    assert json.loads(json.dumps(built.identity()))["epoch_steps"] == 9
    assert built.interleave == 5
    weights = {0: dict.fromkeys("abc", 1)}
    plain = Recipe.from_weights(corpora(), weights, epoch_steps="all", global_batch_size=4)
    assert plain.seed == 0
    assert plain.shuffle


def test_a_source_of_large_samples_that_comes_later_keeps_to_the_bytes_of_the_windows():
    text = Corpus(np.array([10**6]), num_bytes=10**9)
    video = Corpus(np.array([10**5]), num_bytes=10**11)
    built = Recipe.from_weights(
        {"text": text, "video": video},
        {0: {"text": 1, "video": 0}, 50: {"text": 1, "video": 1}},
        global_batch_size=8,
        epoch_steps=9,
    )
    lanes = built.grid[0] * built.grid[1]
    assert built.settings["text"].window * lanes * 1000 == pytest.approx(2 << 30, rel=0.01)
    assert 1e9 < built.settings["video"].window * lanes * 10**6 < 2.5e9


def test_a_source_that_comes_later_changes_no_default_of_the_earlier_ones():
    known = Corpus(np.array([4000]), num_bytes=10**9)
    unknown = Corpus(np.array([10**6]))
    weights = {0: {"known": 1, "later": 0}, 50: {"known": 1, "later": 1}}
    settings = {"global_batch_size": 8, "epoch_steps": 9}
    two = Recipe.from_weights({"known": known, "later": unknown}, weights, **settings)
    one = Recipe.from_weights({"known": known}, {0: {"known": 1}}, **settings)
    assert two.grid == one.grid
    assert two.settings["known"] == one.settings["known"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size 0: needs at least 1"),
        ({"global_batch_size": 1.5}, r"^global_batch_size 1\.5: needs an integer"),
        ({"seed": 1.5}, r"^seed 1\.5: needs an integer"),
        ({"epoch_steps": 0}, "epoch_steps 0: needs at least 1"),
        ({"epoch_steps": 2.5}, r"^epoch_steps 2\.5: needs an integer"),
        ({"grid": (1, 5)}, r"grid \(1, 5\): .* Q must divide global_batch_size 12"),
        ({"grid": (0, 1)}, r"grid \(0, 1\): P and Q must be positive"),
        ({"grid": (1, 0)}, r"grid \(1, 0\): P and Q must be positive"),
        ({"window": 0}, "window 0: needs at least 1"),
        ({"window": 1.5}, r"^window 1\.5: needs an integer"),
        ({"interleave": 0}, "interleave 0: needs at least 1"),
        ({"interleave": 2.5}, r"^interleave 2\.5: needs an integer"),
        ({"weights": (1, 0, 1)}, "source 'b' has weight 0 all the time: leave it out"),
        ({"weights": (1, -1, 1)}, "weight -1: needs a number from 0"),
        ({"counts": {"a": [5], "b": [0, 0], "c": [1]}}, "source 'b' has no samples"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        recipe(**settings)


# -- identity -------------------------------------------------------------------------------------


def saved(**settings):
    return json.loads(json.dumps(mixture_order(**settings).identity()))


def test_an_identity_names_sources_weights_and_settings():
    identity = saved(changes={70: (0, 1, 1)}, interleave=4)
    assert [source["name"] for source in identity["sources"]] == ["a", "b", "c"]
    assert identity["sources"][1] == {
        "name": "b",
        **corpora()["b"].identity(),
        "window": 1,
        "chunk": 1,
    }
    assert identity["weights"] == [
        {"step": 0, "shares": {"a": 4, "b": 1, "c": 15}},
        {"step": 70, "shares": {"b": 1, "c": 1}},
    ]
    del identity["sources"], identity["weights"]
    assert identity == {
        "version": 1,
        "epoch_steps": 40,
        "global_batch_size": 12,
        "seed": 5,
        "grid": [2, 3],
        "interleave": 4,
        "shuffle": True,
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"epoch_steps": 40},
        {"epoch_steps": "first", "shuffle": False},
        {"epoch_steps": "all"},
        {"weights": (1, 0, 3), "changes": {50: (0, 1, 1)}},
    ],
)
def test_an_order_comes_back_from_its_identity_and_more_sources(settings):
    first = mixture_order(**settings)
    identity = json.loads(json.dumps(first.identity()))
    again = MixtureOrder(Recipe.from_identity(identity, corpora(new=[9])))
    assert again.identity() == first.identity()
    for step in range(40):
        assert pairs(again.refs(1, step % again.steps_per_epoch)) == pairs(
            first.refs(1, step % first.steps_per_epoch)
        )


def test_a_source_that_is_missing_or_has_changed_is_refused_by_name():
    without = corpora()
    del without["b"]
    with pytest.raises(StateError, match="source 'b' of the state is missing: add it"):
        Recipe.from_identity(saved(), without)
    with pytest.raises(StateError, match="put them in the state's order, new ones at the end"):
        Recipe.from_identity(saved(), dict(reversed(corpora(new=[9]).items())))
    with pytest.raises(StateError, match=r"source 'c' of the state has changed: it was .* and is "):
        Recipe.from_identity(saved(), corpora(c=[1250]))
    listed = corpora()
    listed["a"] = Corpus(np.array(COUNTS["a"]), bad=np.array([(0, 1)]))
    with pytest.raises(StateError, match=r"source 'a' of the state has changed: .*'bad': None"):
        Recipe.from_identity(saved(), listed)


def with_content(name="b", sizes=(9,), checksums=("aa",)):
    sources = corpora()
    sizes = np.array(sizes * len(COUNTS[name]))
    checksums = list(checksums) * len(COUNTS[name])
    sources[name] = Corpus(np.array(COUNTS[name]), sizes=sizes, checksums=checksums)
    return sources


@pytest.mark.parametrize(
    ("content", "key"), [({"sizes": (8,)}, "sizes"), ({"checksums": ("bb",)}, "sha256")]
)
def test_a_source_with_other_bytes_is_refused_by_name(content, key):
    built = dataclasses.replace(recipe(), corpora=with_content())
    identity = json.loads(json.dumps(MixtureOrder(built).identity()))
    again = Recipe.from_identity(identity, with_content())
    assert MixtureOrder(again).identity() == identity
    with pytest.raises(StateError, match=f"source 'b' of the state has changed: it was {{'{key}'"):
        Recipe.from_identity(identity, with_content(**content))
    Recipe.from_identity(identity, corpora())  # whose sizes and checksums are not known
    Recipe.from_identity(saved(), with_content())


@pytest.mark.parametrize("key", sorted(mixture_order().identity()))
def test_an_identity_without_one_of_its_keys_is_refused(key):
    identity = saved()
    del identity[key]
    with pytest.raises(StateError, match=f"not a mixture's order: KeyError: '{key}'"):
        Recipe.from_identity(identity, corpora())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "mixture version 2, this mmstream has 1"),
        ({"grid": [2, 5]}, r"not a mixture's order: grid \(2, 5\)"),
        ({"grid": [0, 3]}, r"not a mixture's order: grid \(0, 3\): P and Q must be positive"),
        ({"grid": [2]}, r"not a mixture's order: grid \[2\]: needs two integers, P and Q"),
        ({"grid": ["x", 3]}, "not a mixture's order: grid 'x': needs an integer"),
        ({"grid": None}, "not a mixture's order: grid None: needs two integers"),
        ({"sources": "x"}, "not a mixture's order: TypeError"),
        (
            {"sources": [saved()["sources"][0] | {"sizes": 5}]},
            "not a mixture's order: ValueError: sizes 5 is not a hash",
        ),
        ({"weights": [{"step": 0, "shares": [1]}]}, "not a mixture's order: AttributeError"),
    ],
)
def test_a_damaged_identity_is_refused(change, message):
    with pytest.raises(StateError, match=message):
        Recipe.from_identity(saved() | change, corpora())


# -- what a resume is bound to --------------------------------------------------------------------


def test_weights_and_sources_that_begin_later_do_not_bind():
    identity = saved(weights=(1, 0, 3), changes={50: (1, 1, 1), 90: (0, 0, 1)})

    def binding(epoch, step):
        return SavedOrder.parse(identity, epoch, step).binding()

    bound = binding(1, 10)  # step 50 of the run: the second weights begin now
    expected = {
        "sources": ["a", "c"],
        "weights from step 0": {"a": 1, "c": 3},
        "source a window": 6,
        "grid": [2, 3],
        "seed": 5,
    }
    assert {key: bound[key] for key in expected} == expected
    assert [key for key in bound if key.startswith("weights")] == ["weights from step 0"]
    assert not any(key.startswith("source b") for key in bound)
    assert binding(1, 11)["sources"] == ["a", "b", "c"]
    assert "weights from step 50" in binding(1, 11)
    assert "weights from step 90" in binding(2, 11)
    assert binding(1, 0) == binding(0, 1) == bound
