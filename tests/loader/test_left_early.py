"""A loop that is left early is over: the next one begins at a beginning, as with a DataLoader."""

from dataclasses import replace
from itertools import islice

import pytest

import mmstream as mm
from tests.helpers.bad_corpus import make_pipeline
from tests.helpers.states import edited


@pytest.fixture(params=[False, True], ids=["loader", "to_device"])
def new_loader(request):
    def make(pipeline, **settings):
        loader = mm.Loader(pipeline, **settings)
        return mm.to_device(loader, "cpu") if request.param else loader

    return make


def steps_of(loader, count=None):
    """Take some batches of a loop, or all of them, and return their epochs and steps."""
    lineages = [batch["__lineage__"] for batch in islice(loader, count)]
    return [(lineage.epoch, lineage.step) for lineage in lineages]


def test_the_next_loop_begins_the_next_epoch_and_says_once_what_is_not_shown(
    corpus, new_loader, caplog
):
    loader = new_loader(make_pipeline(corpus))
    length = len(loader)
    assert steps_of(loader, 2) == [(0, 0), (0, 1)]
    assert steps_of(loader, 1) == [(1, 0)]
    assert steps_of(loader) == [(2, step) for step in range(length)]
    (line,) = [record.message for record in caplog.records if "left epoch" in record.message]
    assert line.startswith(f"left epoch 0 at step 2 of {length}, the rest of it is not shown; to")


def test_a_loop_in_the_order_of_the_corpus_begins_it_anew(corpus, new_loader, caplog):
    loader = new_loader(make_pipeline(corpus, shuffle=False))
    first = [batch["__key__"] for batch in islice(loader, 2)]
    assert [batch["__key__"] for batch in islice(loader, 2)] == first
    assert steps_of(loader) == [(0, step) for step in range(len(loader))]
    assert "left epoch" not in caplog.text


def test_a_loop_goes_on_after_its_state_is_loaded_again(corpus, new_loader):
    loader = new_loader(make_pipeline(corpus))
    seen = steps_of(loader, 3)
    loader.load_state_dict(loader.state_dict())
    assert seen + steps_of(loader) == [(0, step) for step in range(len(loader))]


def test_the_last_batch_ends_an_epoch_and_a_loop_without_a_batch_never_began(corpus, new_loader):
    loader = new_loader(make_pipeline(corpus))
    length = len(loader)
    assert steps_of(loader, length)[-1] == (0, length - 1)  # nobody asks for StopIteration
    assert iter(loader) is not iter(loader)
    assert steps_of(loader, 0) == []
    assert steps_of(loader, 1) == [(1, 0)]
    loader.load_state_dict(edited(loader.state_dict(), epoch=4, step=2))
    assert steps_of(loader, 0) == []
    assert steps_of(loader, 1) == [(4, 2)]


def test_an_epoch_that_is_finished_as_it_was_planned_ends_with_its_loop(corpus):
    old = make_pipeline(corpus, seed=1)
    loader = mm.Loader(old)
    steps_of(loader, 2)
    changed = mm.Loader(replace(old, seed=2), on_change="finish_epoch")
    changed.load_state_dict(loader.state_dict())
    assert steps_of(changed, 1) == [(0, 2)]
    fresh = mm.Loader(replace(old, seed=2))
    list(fresh)
    assert changed.next_epoch_state() == fresh.state_dict()
    keys = [batch["__key__"] for batch in changed]
    assert keys == [batch["__key__"] for batch in fresh]


@pytest.mark.slow
def test_workers_go_to_the_next_epoch_too(corpus):
    loader = mm.Loader(make_pipeline(corpus), num_workers=2)
    assert steps_of(loader, 2) == [(0, 0), (0, 1)]
    assert steps_of(loader) == [(1, step) for step in range(len(loader))]
    loader.close()


def test_the_state_of_the_next_epoch_is_known_before_the_loop_is_left(corpus):
    for shuffle in (True, False):
        loader = mm.Loader(make_pipeline(corpus, shuffle=shuffle))
        assert loader.next_epoch_state() == loader.state_dict()
        steps_of(loader, 2)
        other = mm.Loader(loader.pipeline)
        other.load_state_dict(loader.next_epoch_state())
        assert steps_of(other, 1) == steps_of(loader, 1)
