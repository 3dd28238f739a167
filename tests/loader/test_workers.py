"""Worker processes: who makes the steps, and what becomes of their errors."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.errors import ConfigError, ShardError


def note_process(sample):
    """Write down which process transforms a sample."""
    return {**sample, "process": os.getpid()}


def draw(sample):
    """Draw from all global generators, as transforms should not."""
    drawn = random.random() + np.random.random() + torch.rand(()).item()
    return {**sample, "process": os.getpid(), "drawn": drawn}


def make_pipeline(corpus, **settings):
    settings = {"global_batch_size": 4, "transforms": (note_process,), **settings}
    return mm.Pipeline(mm.open_dataset(corpus), **settings)


def plain(batch):
    """Return what must not depend on who made a batch."""
    lineage = batch["__lineage__"]
    return batch["__key__"], lineage.epoch, lineage.step, lineage.shown


def processes_of(loader):
    """Run an epoch; return its batches, and the processes that made them."""
    batches, processes = [], set()
    for batch in loader:
        processes |= set(batch["process"].tolist())
        batches.append(plain(batch))
    return batches, processes


@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_step_is_made_by_a_worker_and_by_all_of_them(corpus, num_workers):
    expected = [plain(batch) for batch in mm.Loader(make_pipeline(corpus))]
    loader = mm.Loader(make_pipeline(corpus), num_workers=num_workers)
    for epoch in range(2):
        batches, processes = processes_of(loader)
        assert (batches == expected) == (epoch == 0)
        assert os.getpid() not in processes
        assert len(processes) == num_workers
    loader.close()


def test_a_loop_that_is_left_after_a_step_goes_on_with_the_next(corpus):
    expected = [plain(batch) for batch in mm.Loader(make_pipeline(corpus))]
    loader = mm.Loader(make_pipeline(corpus), num_workers=2)
    for batch in loader:
        assert plain(batch) == expected[0]
        break
    batches, _ = processes_of(loader)
    assert batches == expected[1:]
    loader.close()


def test_workers_move_no_global_generator_of_the_main_process(corpus):
    loader = mm.Loader(make_pipeline(corpus, transforms=(draw,)), num_workers=1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    next(iter(loader))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after
    loader.close()


def test_a_step_that_fails_in_a_worker_fails_as_everywhere(corpus, tmp_path):
    copy = tmp_path / "corpus"
    shutil.copytree(corpus, copy)
    for path in copy.glob("*.tar"):
        os.truncate(path, 512)
    truncated = make_pipeline(str(copy), bad_samples=mm.BadSamplePolicy(shards=False))
    with pytest.raises(ShardError, match="truncated"):
        next(iter(mm.Loader(truncated, num_workers=1)))


class NeedsAbsentModule:
    """A transform that a worker cannot load: its process ends with code 1 while it starts."""

    def __call__(self, sample):
        return sample

    def __reduce__(self):
        return __import__, ("no_such_module_in_a_worker",)


def test_workers_that_end_while_they_start_are_no_bad_data(corpus):
    pipeline = make_pipeline(corpus, transforms=(NeedsAbsentModule(),))
    with pytest.raises(ConfigError, match="workers ended before their first batch"):
        list(mm.Loader(pipeline, num_workers=1))


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1].startswith("mmstream.errors.ConfigError: workers")
    assert "this script would start its workers again in each worker" in done.stderr


def test_workers_that_would_stop_the_machine_are_refused_before_one_starts(corpus, monkeypatch):
    for num_cores, most in ((2, 64), (100, 400)):
        monkeypatch.setattr("mmstream.loader.maker_settings.num_cores", lambda n=num_cores: n)
        mm.Loader(make_pipeline(corpus), num_workers=most).close()
        with pytest.raises(ConfigError, match=f"at most {most} with {num_cores} cores"):
            mm.Loader(make_pipeline(corpus), num_workers=most + 1)
