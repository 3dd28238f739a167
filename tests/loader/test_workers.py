"""A rank's workers: who makes the first steps, and that nobody can tell."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.errors import ConfigError, ShardError
from mmstream.loader.workers import Workers


def note_process(sample):
    """Write down which process transforms a sample."""
    return {**sample, "process": os.getpid()}


class KeepsALock:
    """Opens on its first sample what cannot be sent to another process."""

    lock = None

    def __call__(self, sample):
        self.lock = self.lock or threading.Lock()
        with self.lock:
            return note_process(sample)


def draw(sample):
    """Draw from all global generators, as transforms should not."""
    drawn = random.random() + np.random.random() + torch.rand(()).item()
    return {**sample, "process": os.getpid(), "drawn": drawn}


@pytest.fixture
def held(monkeypatch):
    """Let workers of a Loader start only when this event is set."""
    event = threading.Event()
    start = Workers._start

    def wait(self, *given):
        assert event.wait(60)
        return start(self, *given)

    monkeypatch.setattr(Workers, "_start", wait)
    return event


def pipeline(corpus, **settings):
    settings = {"global_batch_size": 4, "transforms": (note_process,), **settings}
    return mm.Pipeline(mm.open_dataset(corpus), **settings)


def plain(batch):
    """Return what must not depend on who made a batch."""
    lineage = batch["__lineage__"]
    return batch["__key__"], lineage.epoch, lineage.step, lineage.shown


def taken(loader, released=None, after=0):
    """Run an epoch; return its batches and the process of each step."""
    found = []
    for step, batch in enumerate(loader):
        if released is not None and step == after:
            released.set()
        if released is not None and step > after:
            time.sleep(0.05)  # as a training step would
        (process,) = set(batch["process"].tolist())
        found.append((plain(batch), process))
    return found


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("after", [0, 3])
def test_steps_are_made_here_until_workers_are_up_and_nobody_can_tell(
    corpus, held, num_workers, after
):
    wanted = [plain(batch) for batch in mm.Loader(pipeline(corpus))]
    loader = mm.Loader(pipeline(corpus), num_workers=num_workers)
    found = taken(loader, held, after)
    assert [batch for batch, _ in found] == wanted
    here = [process == os.getpid() for _, process in found]
    assert all(here[: after + 1])
    assert here == sorted(here, reverse=True)  # from some step on it is workers alone
    again = taken(loader)
    assert os.getpid() not in {process for _, process in again}
    assert len({process for _, process in again}) == num_workers
    loader.close()


def test_what_a_transform_keeps_stays_out_of_the_pipeline_that_is_sent(corpus, held):
    keeps = KeepsALock()
    made = pipeline(corpus, transforms=(keeps,))
    loader = mm.Loader(made, num_workers=2)
    assert len(taken(loader, held, after=2)) == len(loader)
    assert keeps.lock is None
    loader.close()
    assert len(taken(loader)) == len(loader)  # new workers are sent the same
    loader.close()


@pytest.mark.parametrize("num_here", [1, 4])
def test_steps_made_here_move_no_global_generator(corpus, held, num_here):
    loader = mm.Loader(pipeline(corpus, transforms=(draw,)), num_workers=1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    drawn = [batch["drawn"].tolist() for batch, _ in zip(loader, range(num_here), strict=False)]
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after
    assert len({number for batch in drawn for number in batch}) == 4 * num_here
    held.set()
    loader.close()


def test_an_epoch_may_end_before_there_are_workers(corpus, held):
    loader = mm.Loader(pipeline(corpus), num_workers=2)
    steps = iter(loader)
    found = [plain(next(steps)) for _ in range(len(loader))]
    held.set()
    assert next(steps, None) is None
    assert found == [plain(batch) for batch in mm.Loader(pipeline(corpus))]
    assert os.getpid() not in {process for _, process in taken(loader)}
    loader.close()


def test_a_loop_that_is_left_before_there_are_workers_goes_on_with_them(corpus, held):
    wanted = [plain(batch) for batch in mm.Loader(pipeline(corpus))]
    loader = mm.Loader(pipeline(corpus), num_workers=2)
    for batch in loader:
        assert plain(batch) == wanted[0]
        break
    held.set()
    found = taken(loader)
    assert [batch for batch, _ in found] == wanted[1:]
    assert os.getpid() not in {process for _, process in found}
    loader.close()


def test_a_loader_can_be_closed_while_its_workers_start(corpus, held):
    loader = mm.Loader(pipeline(corpus), num_workers=2)
    steps = iter(loader)
    first = plain(next(steps))
    held.set()
    loader.close()
    assert loader.memory_bytes() > 0
    rest = taken(loader)
    assert [first, *(batch for batch, _ in rest)] == [
        plain(batch) for batch in mm.Loader(pipeline(corpus))
    ]
    loader.close()


def test_a_step_that_fails_here_fails_as_everywhere(corpus, held, tmp_path):
    copy = tmp_path / "corpus"
    shutil.copytree(corpus, copy)
    made = pipeline(str(copy), bad_samples=mm.BadSamplePolicy(shards=False))
    for path in copy.glob("*.tar"):
        os.truncate(path, 512)
    loader = mm.Loader(made, num_workers=1)
    threading.Timer(0.2, held.set).start()
    with pytest.raises(ShardError, match="truncated"):
        next(iter(loader))


def test_workers_that_end_while_they_start_are_no_bad_data(corpus, held, monkeypatch):
    def end(_transport):
        raise RuntimeError("DataLoader worker (pid(s) 1) exited unexpectedly")

    monkeypatch.setattr("torch.utils.data.DataLoader.__iter__", end)
    held.set()
    with pytest.raises(ConfigError, match="workers ended while they started"):
        list(mm.Loader(pipeline(corpus), num_workers=1))


UNGUARDED = """
import sys
import mmstream as mm
loader = mm.Loader(
    mm.Pipeline(mm.open_dataset(sys.argv[1]), global_batch_size=4), num_workers=1
)
for _ in range(2):
    for batch in loader:
        pass
"""


def test_a_script_without_a_main_guard_is_told_so(corpus, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(UNGUARDED)
    command = [sys.executable, str(script), corpus]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1].startswith("mmstream.errors.ConfigError: workers")
    assert "this script would start its workers again in each worker" in done.stderr
