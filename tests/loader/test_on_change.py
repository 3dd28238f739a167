"""Settings or a corpus that change mid-epoch: refused, or after the epoch as it was planned."""

import json
from dataclasses import replace

import pytest

import mmstream as mm
from mmstream.dataset.bad_list import write_bad
from tests.helpers.bad_corpus import make_pipeline, write_tiny
from tests.helpers.topology import described, run


@pytest.fixture
def corpus(tmp_path):
    return write_tiny(tmp_path / "corpus", [30, 20, 14])


def stopped_at(pipeline, step):
    """The state after some steps of epoch 1."""
    loader = mm.Loader(pipeline)
    list(loader)
    for batch in loader:
        if batch["__lineage__"].step + 1 == step:
            return json.loads(json.dumps(loader.state_dict()))
    raise AssertionError


def resumed(pipeline, state, num_workers=0):
    """The rest of epoch 1, and all of epoch 2."""
    loader = mm.Loader(pipeline, num_workers=num_workers, on_change="finish_epoch")
    loader.load_state_dict(state)
    rest = [described(batch) for batch in loader]
    middle = json.loads(json.dumps(loader.state_dict()))
    after = [described(batch) for batch in loader]
    loader.close()
    return rest, middle, after


@pytest.mark.parametrize(
    "change",
    [
        {"global_batch_size": 8},
        {"global_batch_size": 20, "grid": (1, 2)},
        {"window": 7},
        {"grid": (2, 3)},
        {"seed": 9},
        {"shuffle": False},
        {"drop_last": False},
    ],
)
def test_changed_settings_begin_with_the_next_epoch(corpus, change):
    before = make_pipeline(corpus, window=24)
    now = replace(before, **change)
    state = stopped_at(before, 2)
    with pytest.raises(mm.StateError, match="finish_epoch"):
        mm.Loader(now).load_state_dict(state)
    rest, middle, after = resumed(now, state)
    assert rest == run(before, epoch=1).steps[2:]
    assert (middle["epoch"], middle["step"]) == (2, 0)
    assert middle["order"] == now.order.identity()
    assert after == run(now, epoch=2).steps


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_grown_corpus_begins_with_the_next_epoch(corpus, num_workers):
    before = make_pipeline(corpus)
    state = stopped_at(before, 2)
    expected = run(before, epoch=1).steps[2:]
    now = make_pipeline(write_tiny(corpus, [30, 20, 14, 40]))
    with pytest.raises(mm.StateError, match=r"num_shards was 3 and is 4.*added at the end"):
        mm.Loader(replace(now, window=7)).load_state_dict(state)
    rest, middle, after = resumed(now, state, num_workers)
    assert rest == expected
    assert after == run(now, epoch=2).steps
    assert {shard for step in after for shard, _ in step.shown} == {0, 1, 2, 3}
    again = mm.Loader(now)
    again.load_state_dict(middle)  # no flag is needed where an epoch begins in the new corpus
    assert len(again) == now.order.steps_per_epoch > len(expected) + 2


def test_the_length_is_that_of_the_epoch_that_is_finished(corpus):
    before, now = make_pipeline(corpus), make_pipeline(corpus, global_batch_size=4)
    loader = mm.Loader(now, on_change="finish_epoch")
    loader.load_state_dict(stopped_at(before, 1))
    assert len(loader) == before.order.steps_per_epoch == 5
    list(loader)
    assert len(loader) == now.order.steps_per_epoch == 16


def test_an_epoch_that_is_being_finished_can_be_resumed_again(corpus):
    before, now = make_pipeline(corpus), make_pipeline(corpus, global_batch_size=4)
    loader = mm.Loader(now, on_change="finish_epoch")
    loader.load_state_dict(stopped_at(before, 1))
    next(iter(loader))
    rest, _, _ = resumed(now, loader.state_dict())
    assert rest == run(before, epoch=1).steps[2:]


def test_a_first_bad_list_is_taken_with_the_next_epoch(corpus):
    before = make_pipeline(corpus)
    state = stopped_at(before, 2)
    expected = run(before, epoch=1).steps[2:]
    write_bad(mm.open_dataset(corpus), [(0, 3), (1, 7), (1, 8)])
    now = make_pipeline(corpus)
    rest, _, after = resumed(now, state)
    assert rest == expected
    assert not {(0, 3), (1, 7), (1, 8)} & {ref for step in after for ref in step.planned}


@pytest.mark.parametrize("counts", [[30, 20, 14], [30, 20, 14, 40]])
def test_another_bad_list_is_taken_at_an_epochs_begin(corpus, counts):
    write_bad(mm.open_dataset(corpus), [(0, 3)])
    loader = mm.Loader(make_pipeline(corpus))
    list(loader)
    state = loader.state_dict()
    write_bad(mm.open_dataset(write_tiny(corpus, counts)), [(0, 3), (1, 7)])
    now = make_pipeline(corpus)
    rest, _, _ = resumed(now, state)
    assert rest == run(now, epoch=1).steps


def test_another_bad_list_in_mid_epoch_is_refused_with_the_way_out(corpus):
    write_bad(mm.open_dataset(corpus), [(0, 3)])
    state = stopped_at(make_pipeline(corpus), 2)
    write_bad(mm.open_dataset(corpus), [(0, 3), (1, 7)])
    for on_change in ("refuse", "finish_epoch"):
        with pytest.raises(mm.StateError, match=r"put back.*mmstream.bad.previous.json"):
            mm.Loader(make_pipeline(corpus), on_change=on_change).load_state_dict(state)


def test_a_list_of_rows_waits_for_the_batch_size_that_it_is_for(corpus):
    before, now = make_pipeline(corpus), make_pipeline(corpus, global_batch_size=7)
    state, parts = stopped_at(before, 2), []
    for rank in range(2):
        world = mm.World(rank=rank, world_size=2)
        loader = mm.Loader(now, world=world, rows_per_rank=[5, 2], on_change="finish_epoch")
        loader.load_state_dict(state)
        parts.append([len(batch["__key__"]) for _ in range(2) for batch in loader])
    assert parts[0] == [6] * 3 + [5] * now.order.steps_per_epoch
    assert parts[1] == [6] * 3 + [2] * now.order.steps_per_epoch


def test_after_an_upgrade_an_epoch_ends_as_it_began_and_the_new_defaults_follow(corpus):
    dataset = mm.open_dataset(corpus)
    # What an older version might have chosen where nothing was given.
    old = mm.Pipeline(dataset, global_batch_size=8, grid=(2, 4), window=9)
    now = mm.Pipeline(dataset, global_batch_size=8)
    state = stopped_at(old, 2)
    loader = mm.Loader(now, world=mm.World(1, 2), rows_per_rank=[2, 6])
    loader.load_state_dict(state)
    rest = [described(batch) for batch in loader]
    planned = [step.planned[2:] for step in run(old, epoch=1).steps[2:]]
    assert [step.planned for step in rest] == planned  # with the rows that were asked for
    assert loader.state_dict()["order"] == now.order.identity() != old.order.identity()
    after = [described(batch).planned for batch in loader]
    assert after == [step.planned[2:] for step in run(now, epoch=2).steps]
