"""Loaders that are made, used and closed again and again leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice
from multiprocessing import current_process
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest

import mmstream as mm
from tests.helpers import soak
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.soak import assert_no_growth, growth
from tests.helpers.states import edited
from tools.prove import soak as prove_soak

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts through /proc"),
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """60 JPEGs, some of them bad."""

    def fields(number: int) -> dict[str, bytes]:
        data = jpeg(number, (320, 240))
        return {"jpg": data[: len(data) // 2] if number in (7, 31) else data}

    return write_corpus(tmp_path_factory.mktemp("photos"), [25, 20, 15], fields)


def make_pipeline(photos: str, **settings) -> mm.Pipeline:
    settings = {
        "global_batch_size": 12,
        "decode": mm.Decode(image=mm.ImageDecoder(size=224)),
        "bad_samples": mm.BadSamplePolicy(quarantine=None, max_fraction=1.0, max_consecutive=0),
        **settings,
    }
    return mm.Pipeline(mm.open_dataset(photos), **settings)


# -- real loaders -------------------------------------------------------------------------------


def test_loaders_that_are_opened_and_closed_leave_nothing_behind(photos):
    described = make_pipeline(photos)

    def cycle():
        loader = mm.Loader(described, num_workers=2)
        for _ in range(2):
            assert sum(1 for _ in mm.to_device(loader, "cpu")) == 5
        loader.close()

    assert_no_growth(cycle, warm_up=1, cycles=4)


def test_loaders_that_are_dropped_in_mid_epoch_leave_nothing_behind(photos):
    described = make_pipeline(photos)

    def cycle():
        loader = mm.Loader(described, num_workers=1)
        assert sum(1 for _ in loader) == 5
        assert sum(1 for _ in islice(loader, 2)) == 2

    assert_no_growth(cycle, warm_up=1, cycles=4)


def test_loaders_that_a_transform_stopped_leave_nothing_behind(photos):
    described = make_pipeline(photos, transforms=(broken,))

    def cycle():
        with pytest.raises(NameError):
            next(iter(mm.Loader(described, num_workers=1)))

    assert_no_growth(cycle, warm_up=1, cycles=4)


def broken(sample):
    return undefined_name  # noqa: F821


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


def test_the_long_soak_names_what_has_grown():
    look = prove_soak.Look(9, 8, 7, 6, 5, 10**9)
    more = replace(look, threads=9, shm_entries=6, pss_bytes=look.pss_bytes + 10**7)
    lines = growth([look, look], [more, more], pss_bytes=prove_soak.MEMORY_SLACK)
    assert lines == [
        "threads grew from 8 to 9 and more",
        "shm_entries grew from 5 to 6 and more",
    ]
    assert growth([look, more], [more, more], pss_bytes=prove_soak.MEMORY_SLACK) == []


# -- leaks that were planted are detected --------------------------------------------------------


def open_file(held: ExitStack) -> None:
    held.callback(os.close, os.open(os.devnull, os.O_RDONLY))


def start_thread(held: ExitStack) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    held.callback(thread.join)
    held.callback(ended.set)


def start_process(held: ExitStack) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    held.callback(process.wait)
    held.callback(process.kill)
    held.callback(process.stdin.close)


def share_memory(held: ExitStack) -> None:
    block = SharedMemory(create=True, size=4096)
    held.callback(block.unlink)
    held.callback(block.close)


def hold_memory(held: ExitStack) -> None:
    blocks = [np.full(96 << 20, 1, np.uint8)]
    held.callback(blocks.clear)


LEAKS = {
    "open_files": open_file,
    "threads": start_thread,
    "child_processes": start_process,
    "shared_memory": share_memory,
    "memory_bytes": hold_memory,
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_planted_leak_is_named(name, monkeypatch):
    monkeypatch.setattr(soak, "SETTLE_S", 0.0)
    with ExitStack() as held, pytest.raises(AssertionError, match=rf"{name} grew from"):
        # Enough cycles to outgrow a worker of an earlier test that ends meanwhile.
        assert_no_growth(lambda: LEAKS[name](held), warm_up=1, cycles=8)


def test_a_loader_that_is_never_closed_is_a_leak(photos, monkeypatch):
    monkeypatch.setattr(soak, "SETTLE_S", 0.0)
    described = make_pipeline(photos)
    with ExitStack() as held:

        def cycle():
            loader = held.enter_context(closing(mm.Loader(described, num_workers=1)))
            assert sum(1 for _ in loader) == 5

        with pytest.raises(AssertionError, match="child_processes grew from"):
            assert_no_growth(cycle, warm_up=0, cycles=2)


HOARD = []


def hoarding(sample):
    HOARD.append(os.urandom(1_000_000))  # more than a worker of an earlier test that ends meanwhile
    return sample


def test_a_transform_that_hoards_memory_in_its_worker_is_a_leak(photos, monkeypatch):
    monkeypatch.setattr(soak, "SETTLE_S", 0.0)
    described = make_pipeline(photos, transforms=(hoarding,))
    leak = pytest.raises(AssertionError, match="memory_bytes grew from")
    with closing(mm.Loader(described, num_workers=1)) as loader, leak:
        assert_no_growth(lambda: two_epochs(loader), warm_up=1, cycles=6)
    HOARD.clear()
