"""The reader process of a rank: it serves loaders, ends with them, and is missed when it dies."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed

import mmstream as mm
from mmstream.loader.batch_makers import _warn_of_patience
from mmstream.reading import process
from mmstream.state import resume_hint
from tests.helpers.corpora import write_corpus
from tests.helpers.paths import ROOT
from tests.helpers.states import edited
from tests.helpers.stores import far
from tests.helpers.topology import collate_in_workers, described
from tests.helpers.wait import has_ended, wait_until

COUNTS = [30, 1, 0, 40, 26]


def pipeline(folder: str, **settings) -> mm.Pipeline:
    settings = {"global_batch_size": 8, "seed": 3, "window": 8, **settings}
    return mm.Pipeline(mm.open_dataset(folder), **settings)


def far_pipeline(folder: str, slow_name: str = "", gate: str = "", **settings) -> mm.Pipeline:
    local = pipeline(folder, **settings)
    return replace(local, dataset=far(local.dataset, slow_name=slow_name, gate=gate))


def pid_of(loader: mm.Loader) -> int:
    return loader._makers.reader.pid


@pytest.fixture
def loaders() -> Iterator[list[mm.Loader]]:
    loaders: list[mm.Loader] = []
    yield loaders
    for loader in loaders:
        loader.close()


def test_two_epochs_an_early_break_and_a_resume_are_those_of_local_reads(corpus, loaders) -> None:
    local, remote = mm.Loader(pipeline(corpus)), mm.Loader(far_pipeline(corpus))
    loaders += [local, remote]
    pid = pid_of(remote)
    expected = [described(batch) for _ in range(2) for batch in local]
    delivered = []
    for batch in remote:  # broken off
        delivered.append(described(batch))
        if len(delivered) == 3:
            break
    remote.load_state_dict(remote.state_dict())
    delivered += [described(batch) for _ in range(2) for batch in remote]
    assert delivered == expected
    remote.load_state_dict(edited(local.state_dict(), epoch=0, step=5))
    assert [described(batch) for batch in remote] == expected[5 : len(local)]
    assert pid_of(remote) == pid
    transfers = remote.stats.transfers
    assert min(transfers.num_requests, transfers.num_index_requests) > 0
    assert remote.stats.wait_quantile_s(99) > 0
    assert remote.memory_bytes() > 0
    remote.close()
    wait_until(lambda: has_ended(pid))


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_of_all_kinds_get_the_same_steps_from_a_cache(tmp_path, loaders, context) -> None:
    folder = write_corpus(tmp_path / "corpus", COUNTS, checksums=True)
    settings = {
        "cache_dir": str(tmp_path / "cache"),
        "max_cache_bytes": 1 << 30,
        "drop_last": False,
        "collate": collate_in_workers,
    }
    with closing(mm.Loader(far_pipeline(folder, **settings))) as first:
        state = [first.state_dict() for _ in first][-1] | {"epoch": 1, "step": 0}
    remote = mm.Loader(
        far_pipeline(folder, **settings),
        num_workers=2,
        multiprocessing_context=context,
    )
    loaders += [remote, mm.Loader(pipeline(folder, reshuffle="lanes", drop_last=False))]
    for loader in loaders:
        loader.load_state_dict(state)
        stream = iter(loader)
        next(stream)
        stream.close()
    both = [[described(batch) for _ in range(2) for batch in loader] for loader in loaders]
    assert both[0] == both[1]
    assert remote.stats.cache_hit_fraction > 0.5  # the first may end before all is written


def unchanged(sample):
    return sample


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"collate": collate_in_workers}, {}),
        ({"transforms": (unchanged,)}, {}),
        ({"before": (unchanged,)}, {}),
        ({"decode": mm.Decode()}, {}),
        ({}, {"stall_timeout_s": 60}),
    ],
    ids=["collate", "transforms", "before", "decode", "stall_timeout_s"],
)
def test_what_workers_do_more_than_copy_starts_them(corpus, loaders, settings, options) -> None:
    far_loader = mm.Loader(far_pipeline(corpus, **settings), num_workers=2, **options)
    loaders += [far_loader, mm.Loader(pipeline(corpus), num_workers=2)]
    assert [loader._makers.settings.num_workers for loader in loaders] == [2, 2]


def test_views_stay_what_they_were(corpus, loaders) -> None:
    loaders += [
        mm.Loader(far_pipeline(corpus, zero_copy=True)),
        mm.Loader(pipeline(corpus, zero_copy=True)),
    ]
    far_batches, near_batches = (list(loader) for loader in loaders)
    assert [batch["jpg"] for batch in far_batches] == [batch["jpg"] for batch in near_batches]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dead_reader_process_is_one_clear_error_and_the_next_iteration_goes_on(
    corpus, loaders, num_workers
) -> None:
    local, remote = (
        mm.Loader(pipeline(corpus)),
        mm.Loader(far_pipeline(corpus, collate=collate_in_workers), num_workers=num_workers),
    )
    loaders += [local, remote]
    expected = [described(batch) for batch in local]
    delivered, pids = [], []

    def kill_reader_after_two() -> None:
        for batch in remote:
            delivered.append(described(batch))
            if len(delivered) == 2:
                pids.append(pid_of(remote))
                os.kill(pids[0], signal.SIGKILL)

    with pytest.raises(mm.MMStreamError) as caught:
        kill_reader_after_two()
    step = remote.state_dict()["step"]
    assert str(caught.value) == (
        f"the reader process (pid {pids[0]}) was killed by SIGKILL (exit code -9); a new loop "
        f"starts another one; {resume_hint(step)}"
    )
    remote.load_state_dict(remote.state_dict())
    assert delivered + [described(batch) for batch in remote] == expected


@pytest.mark.slow
def test_variables_that_are_set_after_the_loader_reach_the_reader_process(
    corpus, loaders, monkeypatch
) -> None:
    remote = mm.Loader(far_pipeline(corpus))
    loaders.append(remote)
    early_pid = pid_of(remote)
    monkeypatch.setenv("AWS_TOLD", "late")
    next(iter(remote))
    late_pid = pid_of(remote)
    assert b"AWS_TOLD=late" in Path(f"/proc/{late_pid}/environ").read_bytes().split(b"\0")
    wait_until(lambda: has_ended(early_pid))
    monkeypatch.setenv("AWS_TOLD", "later")  # what was read ahead is worth more
    next(iter(remote))
    assert pid_of(remote) == late_pid


@pytest.mark.slow
def test_a_pickled_loader_goes_on_with_processes_of_its_own(corpus, loaders) -> None:
    local, remote = mm.Loader(pipeline(corpus)), mm.Loader(far_pipeline(corpus))
    loaders += [local, remote]
    stream = iter(remote)
    delivered = [described(next(stream)) for _ in range(3)]
    copy = pickle.loads(pickle.dumps(remote))
    loaders.append(copy)
    copy.load_state_dict(remote.state_dict())
    delivered += [described(batch) for batch in copy]
    assert delivered == [described(batch) for batch in local]
    assert pid_of(copy) != pid_of(remote)


def test_a_loader_in_a_forked_process_has_a_reader_process_of_its_own(
    corpus, loaders, monkeypatch
) -> None:
    remote = mm.Loader(far_pipeline(corpus))
    loaders.append(remote)
    of_the_parent = remote._makers.reader
    with closing(iter(remote)) as batches:
        next(batches)
    runner_of_the_parent = remote._makers._runner
    with closing(of_the_parent), closing(runner_of_the_parent), monkeypatch.context() as child:
        child.setattr(process.os, "getpid", lambda: 1)
        next(iter(remote))
        assert pid_of(remote) != of_the_parent.pid
        assert remote._makers._runner is not runner_of_the_parent
        remote.close()


def test_a_reader_that_waits_is_named_in_the_warning(
    corpus, loaders, caplog, tmp_path: Path
) -> None:
    def open_gate() -> None:
        # At first it may be too busy to answer.
        wait_until(lambda: "it waits for" in caplog.text)
        gate.touch()

    gate = tmp_path / "gate"
    remote = mm.Loader(far_pipeline(corpus, "shard-000003.tar", str(gate)), stall_warning_s=0.5)
    loaders.append(remote)
    thread = threading.Thread(target=open_gate, daemon=True)
    with caplog.at_level(logging.WARNING):
        thread.start()
        next(iter(remote))
    thread.join()
    warning = next(text for text in caplog.messages if "it waits for" in text)
    assert warning.startswith("waiting for ")
    assert f"the reader process (pid {pid_of(remote)}): it waits for " in warning


def test_what_the_reader_process_logs_is_logged_here(tmp_path: Path, loaders, caplog) -> None:
    folder = write_corpus(tmp_path, COUNTS, checksums=True)
    remote = mm.Loader(far_pipeline(folder))
    loaders.append(remote)
    os.utime(tmp_path / "shard-000003.tar")
    with caplog.at_level(logging.WARNING):
        list(remote)
        remote.close()
    assert any("was replaced while this run read it" in text for text in caplog.messages)


SCRIPT = """
import time
from tests.loader.test_reader_process import far_pipeline, pid_of
import mmstream as mm
loader = mm.Loader(far_pipeline({folder!r}))
stream = iter(loader)
next(stream)
print(pid_of(loader), flush=True)
time.sleep(10_000)
"""


def test_it_ends_with_its_main_process(corpus) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(folder=corpus)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        text=True,
    )
    with process.stdout:
        pid = int(process.stdout.readline())
        process.kill()
        process.wait(500)
        wait_until(lambda: has_ended(pid))


SIGNALLED = """
import os, signal, sys
from pathlib import Path
import mmstream as mm
from tests.helpers.topology import collate_in_workers
from tests.helpers.wait import wait_until
from tests.loader.test_reader_process import far_pipeline

folder, context, notes, num_expected = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]


def note(number, frame):
    with notes.open("a") as file:
        file.write(f"{number}\\n")


def num_noted():
    return len(notes.read_text().splitlines())


if __name__ == "__main__":
    notes.touch()
    signal.signal(signal.SIGUSR1, note)
    loader = mm.Loader(
        far_pipeline(folder, collate=collate_in_workers),
        num_workers=2,
        multiprocessing_context=context,
    )
    batches = iter(loader)
    next(batches)
    for number in (signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, note)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        os.killpg(0, number)
    wait_until(lambda: num_noted() >= int(num_expected))
    num_steps = 1 + sum(1 for _ in batches) + sum(1 for _ in loader)
    loader.close()
    print(num_steps == 2 * len(loader), num_noted())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "num_noted"),
    [
        pytest.param("forkserver", 3, id="forkserver"),
        pytest.param("fork", 5, id="workers-that-have-the-handler-of-the-script"),
    ],
)
def test_signals_to_the_whole_job_end_none_of_its_processes(
    corpus, tmp_path: Path, context, num_noted
) -> None:
    script = tmp_path / "run.py"
    script.write_text(SIGNALLED)
    done = subprocess.run(
        [sys.executable, str(script), corpus, context, str(tmp_path / "notes"), str(num_noted)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
        timeout=500,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"True {num_noted}\n"), done.stderr


def test_a_patience_longer_than_the_time_out_of_the_group_is_a_warning(
    tmp_path: Path, caplog, monkeypatch
) -> None:
    _warn_of_patience()
    assert not caplog.messages  # there is no group
    torch.distributed.init_process_group(
        "gloo", f"file://{tmp_path}/group", timedelta(seconds=77), world_size=1, rank=0
    )
    try:
        _warn_of_patience()
        (warning,) = caplog.messages
        assert warning.startswith("a rank waits up to 300 s for storage")
        assert "gives up after 77 s" in warning
        monkeypatch.setenv("MMSTREAM_STORAGE_PATIENCE_S", "30")
        _warn_of_patience()
        assert len(caplog.messages) == 1
    finally:
        torch.distributed.destroy_process_group()
