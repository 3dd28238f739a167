"""Loaders that are made, used and closed again and again leave nothing behind."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import fields
from multiprocessing import current_process
from pathlib import Path

import pytest

import mmstream as mm
from tests.helpers import soak
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.soak import assert_no_growth
from tests.helpers.states import edited
from tools.prove import soak as prove_soak

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts through /proc"),
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """60 JPEGs, some of them bad."""

    def files(number: int) -> dict[str, bytes]:
        data = jpeg(number, (320, 240))
        return {"jpg": data[: len(data) // 2] if number in (7, 31) else data}

    return write_corpus(tmp_path_factory.mktemp("photos"), [25, 20, 15], files)


def make_pipeline(photos: str, **settings) -> mm.Pipeline:
    settings = {
        "global_batch_size": 12,
        "decode": mm.Decode(image=mm.ImageDecoder(size=224)),
        "bad_samples": mm.BadSamplePolicy(quarantine=None, max_fraction=1.0, max_consecutive=0),
        **settings,
    }
    return mm.Pipeline(mm.open_dataset(photos), **settings)


# -- real loaders -------------------------------------------------------------------------------


def test_workers_that_go_through_many_epochs_hold_no_more_than_after_the_first(photos):
    with closing(mm.Loader(make_pipeline(photos), num_workers=2)) as loader:
        assert_no_growth(lambda: two_epochs(loader), warm_up=3, cycles=40)


def two_epochs(loader: mm.Loader) -> None:
    """Go through an epoch, and through the last steps of the next one."""
    assert sum(1 for _ in loader) == 5
    loader.load_state_dict(edited(loader.state_dict(), step=3))
    assert sum(1 for _ in loader) == 2


@pytest.mark.parametrize("zero_copy", [False, True])
def test_loaders_without_workers_leave_nothing_behind(photos, zero_copy):
    settings = {"zero_copy": True, "decode": None} if zero_copy else {}

    def cycle():
        loader = mm.Loader(make_pipeline(photos, **settings), num_threads=2)
        assert sum(1 for _ in loader) == 5
        next(iter(loader))  # a loop that stays unfinished

    assert_no_growth(cycle, warm_up=3, cycles=30)


def test_all_that_can_happen_to_loaders_leaves_nothing_behind(monkeypatch):
    """The short form of ``python -m tools.prove.soak --minutes 60``."""
    monkeypatch.setitem(current_process()._config, "semprefix", "/mp")  # put back after the test
    lines = []
    assert prove_soak.soak(0, report=lines.append) == []
    assert len(lines) == prove_soak.MIN_LOOKS


# -- a leak that was planted is detected ---------------------------------------------------------


def test_loaders_that_are_never_closed_leak_everything_that_is_counted(photos, monkeypatch):
    monkeypatch.setattr(soak, "SETTLE_S", 0.0)
    described = make_pipeline(photos)
    with ExitStack() as held:

        def cycle():
            loader = held.enter_context(closing(mm.Loader(described, num_workers=1)))
            assert sum(1 for _ in loader) == 5

        with pytest.raises(AssertionError, match=" grew from ") as caught:
            assert_no_growth(cycle, warm_up=0, cycles=2)
    for field in fields(soak.Resources):
        assert f"{field.name} grew from" in str(caught.value)
