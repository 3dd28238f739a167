"""Views of a dataset: which samples they show, and that an epoch has each of them once."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import mmstream as mm
from mmstream.order import Corpus, MixtureOrder, Order
from mmstream.order.mixture.order import Recipe
from mmstream.order.selection import Selection
from tests.helpers.bad_corpus import write_tiny

COUNTS = (7, 0, 31, 2, 18)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("views") / "corpus", COUNTS)


def keys(dataset: mm.Dataset) -> list[str]:
    return [sample["__key__"] for sample in dataset]


def seen(pipeline: mm.Pipeline, epoch: int = 0) -> list[tuple[int, int]]:
    """Return (shard, index) of all valid rows of an epoch."""
    order = pipeline.order
    steps = [order.refs(epoch, step) for step in range(order.steps_per_epoch)]
    return [
        (shard, index)
        for refs in steps
        for shard, index, valid in zip(*(column.tolist() for column in refs), strict=True)
        if valid
    ]


def test_slices_show_what_a_list_of_the_samples_shows(corpus: str) -> None:
    dataset = mm.open_dataset(corpus)
    everything = keys(dataset)
    for a, b, step in (
        (None, 10, None),
        (3, 40, 4),
        (-9, None, None),
        (50, 20, 1),
        (None, None, 7),
    ):
        view = dataset[a:b:step]
        assert keys(view) == everything[a:b:step]
        assert keys(view[1:]) == everything[a:b:step][1:]
        assert keys(view[::2]) == everything[a:b:step][::2]
    assert dataset[5:9][-1]["__key__"] == everything[8]
    with pytest.raises(IndexError, match="sample 4 of 4"):
        dataset[5:9][4]
    with pytest.raises(mm.ConfigError, match=r"\[::-1\].*reversed"):
        dataset[::-1]
    for wrong in (slice(None, None, 0), slice(1.5, None)):
        with pytest.raises(mm.ConfigError, match="give whole numbers, and a step"):
            dataset[wrong]


def test_a_key_that_is_not_chosen_is_no_key_of_the_view(corpus: str) -> None:
    dataset = mm.open_dataset(corpus)
    first, last = dataset[0]["__key__"], dataset[-1]["__key__"]
    assert dataset[:5][first]["__key__"] == first
    with pytest.raises(KeyError, match="not chosen"):
        dataset[:5][last]


def test_two_parts_of_a_split_have_each_sample_once(corpus: str) -> None:
    dataset = mm.open_dataset(corpus)
    for seed in range(5):
        first, second = dataset.split(0.7, seed=seed)
        assert sorted(keys(first) + keys(second)) == sorted(keys(dataset))
        assert keys(first) == keys(dataset.sample(0.7, seed=seed))
        assert set(keys(dataset.sample(0.4, seed=seed))) <= set(keys(first))
    assert len({tuple(keys(dataset.sample(0.5, seed=seed))) for seed in range(5)}) == 5
    assert keys(dataset.sample(1)) == keys(dataset)
    assert len(dataset.sample(0)) == 0
    with pytest.raises(mm.ConfigError, match="fraction"):
        dataset.sample(1.5)


def test_without_takes_the_samples_of_another_view_away(corpus: str, tmp_path: Path) -> None:
    dataset = mm.open_dataset(corpus)
    some = dataset[::3]
    assert keys(dataset.without(some)) == [key for key in keys(dataset) if key not in keys(some)]
    assert keys(dataset[:20].without(some)) == [
        k for k in keys(dataset)[:20] if k not in keys(some)
    ]
    other = mm.open_dataset(write_tiny(tmp_path / "other", (3, 4)))
    with pytest.raises(mm.ConfigError, match="other shards"):
        dataset.without(other)


@pytest.mark.parametrize("reshuffle", ["global", "lanes"])
def test_an_epoch_has_each_chosen_sample_once(corpus: str, reshuffle: str) -> None:
    dataset = mm.open_dataset(corpus)
    dataset.bad = np.array([(0, 1), (2, 4), (2, 5), (4, 17)])
    bad = {tuple(row) for row in dataset.bad.tolist()}
    view = dataset.sample(0.6)
    wanted = {tuple(sample["__lineage__"][:2]) for sample in view} - bad
    orders = set()
    for seed in range(3):
        pipeline = mm.Pipeline(
            view, global_batch_size=4, seed=seed, reshuffle=reshuffle, drop_last=False
        )
        for epoch in range(2):
            refs = seen(pipeline, epoch)
            assert sorted(refs) == sorted(wanted)
            orders.add(tuple(refs))
        substitutes = {pipeline.order.substitute(0, 0, 0, attempt) for attempt in range(16)}
        assert substitutes <= wanted
    assert len(orders) == 6
    in_order = mm.Pipeline(view, global_batch_size=4, shuffle=False, drop_last=False)
    assert seen(in_order) == sorted(wanted)


@given(data=st.data())
def test_a_chosen_order_is_that_of_a_corpus_of_the_chosen_samples(data: st.DataObject) -> None:
    """What the order of a view is, by a second way: number i of a shard is its i-th chosen one."""
    counts = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6), "counts")
    masks = [
        np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=bool)
        for count in counts
    ]
    chosen = [int(mask.sum()) for mask in masks]
    selection = Selection.of_shards(masks, np.array(counts))
    assert selection.chosen_counts.tolist() == chosen
    if not sum(chosen):
        return
    settings = {"global_batch_size": min(3, sum(chosen)), "seed": 5, "window": 8, "chunk": 2}
    view = Order.from_corpus(Corpus(np.array(counts), selection=selection), **settings)
    alone = Order.from_corpus(Corpus(np.array(chosen)), **settings)
    for step in range(view.steps_per_epoch):
        refs, expected = view.refs(1, step), alone.refs(1, step)
        assert refs.shard.tolist() == expected.shard.tolist()
        indexes = [
            int(np.flatnonzero(masks[shard])[index])
            for shard, index in zip(expected.shard, expected.index, strict=True)
        ]
        assert refs.index.tolist() == indexes


def test_sources_of_a_mixture_may_be_views_of_one_dataset(corpus: str) -> None:
    dataset = mm.open_dataset(corpus)
    even = dataset[::2]
    mixture = mm.Mixture({"even": (even, 1), "odd": (dataset.without(even), 1)}, stop="all")
    order = mm.Pipeline(mixture, global_batch_size=2).order
    assert isinstance(order, MixtureOrder)
    refs = {
        (shard, index)
        for step in range(order.steps_per_epoch)
        for shard, index in zip(*(c.tolist() for c in order.refs(0, step)[:2]), strict=True)
    }
    num_shards = len(COUNTS)
    assert {(shard, i) for shard, i in refs if shard < num_shards} == {
        tuple(sample["__lineage__"][:2]) for sample in even
    }
    assert {(shard % num_shards, i) for shard, i in refs} == {
        tuple(sample["__lineage__"][:2]) for sample in dataset
    }
    again = mixture.order_from_identity(order.identity())
    assert again.identity() == order.identity()
    other = mm.Mixture({"even": (dataset, 1), "odd": (dataset[1::2], 1)}, stop="all")
    with pytest.raises(mm.StateError, match=r"source 'even' of the state has changed.*selection"):
        other.order_from_identity(order.identity())
    with pytest.raises(mm.StateError, match="selection"):
        Recipe.from_identity(order.identity(), other.corpora)


def test_a_state_of_mid_epoch_needs_the_same_selection(
    corpus: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = mm.open_dataset(corpus)

    def loader(view: mm.Dataset) -> mm.Loader:
        return mm.Loader(mm.Pipeline(view, global_batch_size=4), num_workers=0)

    run = loader(dataset[:40])
    for _ in zip(range(3), run, strict=False):
        state = run.state_dict()
    loader(dataset[:40]).load_state_dict(state)
    for other in (dataset, dataset[1:41]):
        with pytest.raises(mm.StateError, match=r"was 40 samples \(.*Other samples were"):
            loader(other).load_state_dict(state)
    at_end = {**state, "epoch": 1, "step": 0}
    del at_end["crc32c"]
    with caplog.at_level(logging.INFO, "mmstream"):
        loader(dataset).load_state_dict(at_end)
    assert "epoch 1 begins with all samples; before, 40 chosen took part" in caplog.text


def test_a_selection_of_other_shards_is_refused(corpus: str) -> None:
    dataset = mm.open_dataset(corpus)
    with pytest.raises(mm.ConfigError, match="5 samples in 1 shards"):
        dataset.with_selection(Selection.of_all(np.array([5])))
    with pytest.raises(mm.ConfigError, match="the selection has no samples"):
        mm.Pipeline(dataset[:0], global_batch_size=1)


def test_a_selection_of_a_hundred_million_samples_is_looked_up_block_by_block() -> None:
    """The corpus of 10,000 shards of 10,000 samples: every third one is chosen."""
    counts = np.full(10_000, 10_000)
    bits = np.zeros(10_000 * 1250 // 64 * 64 + 64, dtype=np.uint8)
    bits[: 10_000 * 1250].reshape(10_000, 1250)[:] = np.packbits(np.arange(10_000) % 3 == 0)
    selection = Selection(counts, bits)
    assert selection.num_chosen == 10_000 * 3334
    shards = np.array([0, 5000, 9999])
    assert selection.locate(shards, np.array([0, 1000, 3333])).tolist() == [0, 3000, 9999]
    assert selection.numbers(shards, np.array([3, 3000, 9999])).tolist() == [1, 1000, 3333]


def test_other_tars_of_the_same_folder_share_no_samples(tmp_path: Path) -> None:
    url = write_tiny(tmp_path / "corpus", (5, 5))
    first, second = (mm.open_dataset([f"{url}/shard-00000{n}.tar"]) for n in range(2))
    assert first.num_shared(second) == 0
    assert first.num_shared(first[:2]) == 2
    with pytest.raises(mm.ConfigError, match="has other shards"):
        first.without(second)
