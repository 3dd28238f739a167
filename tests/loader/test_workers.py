"""Worker processes: who makes the steps, and what becomes of their errors."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

import mmstream as mm


def note_process(sample):
    """Write down which process transforms a sample."""
    return {**sample, "process": os.getpid()}


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


def test_a_step_that_fails_in_a_worker_fails_as_everywhere(corpus, tmp_path):
    copy = tmp_path / "corpus"
    shutil.copytree(corpus, copy)
    for path in copy.glob("*.tar"):
        os.truncate(path, 512)
    truncated = make_pipeline(str(copy), bad_samples=mm.BadSamplePolicy(shards=False))
    with pytest.raises(mm.errors.ShardError, match="truncated"):
        next(iter(mm.Loader(truncated, num_workers=1)))


class NeedsAbsentModule:
    """A transform that a worker cannot load: its process ends with code 1 while it starts."""

    def __call__(self, sample):
        return sample

    def __reduce__(self):
        return __import__, ("no_such_module_in_a_worker",)


def test_workers_that_end_while_they_start_are_no_bad_data(corpus):
    pipeline = make_pipeline(corpus, transforms=(NeedsAbsentModule(),))
    with pytest.raises(mm.ConfigError, match="workers ended before their first batch"):
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


@pytest.mark.slow
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
        monkeypatch.setattr("mmstream.loader.batch_makers.num_cores", lambda n=num_cores: n)
        mm.Loader(make_pipeline(corpus), num_workers=most).close()
        with pytest.raises(mm.ConfigError, match=f"at most {most} with {num_cores} cores"):
            mm.Loader(make_pipeline(corpus), num_workers=most + 1)


FORKING = """
import gc, os, sys
import mmstream as mm


def unchanged(sample):
    return sample


def in_child(function):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    print(function.__name__, os.waitstatus_to_exitcode(status), flush=True)


def keys(batches):
    return [list(batch["__key__"]) for batch in batches]


def go_on_with_the_loop():
    next(batches)


def begin_a_loop():
    loader.load_state_dict(loader.state_dict())
    assert keys(loader) == expected[1:]
    assert keys(loader)
    loader.close()


def close():
    loader.close()


def drop():
    global loader, batches
    loader = batches = None
    gc.collect()


if __name__ == "__main__":
    folder, num_workers, context = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    pipeline = mm.Pipeline(
        mm.open_dataset(folder), global_batch_size=4, decode=mm.Decode(), transforms=(unchanged,)
    )
    expected = keys(mm.Loader(pipeline))
    loader = mm.Loader(
        pipeline, num_workers=num_workers, num_threads=2, multiprocessing_context=context
    )
    batches = iter(loader)
    next(batches)
    for function in (go_on_with_the_loop, begin_a_loop, close, drop):
        in_child(function)
    print("parent", keys(batches) == expected[1:], len(keys(loader)) == len(loader))
    loader.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "context"), [(0, "fork"), (2, "forkserver")])
def test_a_forked_child_and_its_parent_go_on_with_processes_of_their_own(
    corpus, tmp_path, num_workers, context
):
    script = tmp_path / "run.py"
    script.write_text(FORKING)
    with subprocess.Popen(
        [sys.executable, str(script), corpus, str(num_workers), context],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as main:
        try:
            output, _ = main.communicate(timeout=500)
        finally:
            with suppress(ProcessLookupError):  # a child that hangs
                os.killpg(main.pid, signal.SIGKILL)
    assert output.splitlines() == [
        "ConfigError this loop began before this process was forked: begin another loop over the "
        "loader here",
        "go_on_with_the_loop 1",
        "begin_a_loop 0",
        "close 0",
        "drop 0",
        "parent True True",
    ]
    assert main.returncode == 0
