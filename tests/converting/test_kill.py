"""Kill -9 at every moment of a conversion.

Afterwards no half dataset opens, and the next run completes it to the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, takewhile
from pathlib import Path

import psutil
import pytest

import mmstream
import mmstream as mm
from mmstream.dataset.manifest import MARKER_NAME
from mmstream.storage import LocalStore
from mmstream.storage.write_lock import LOCK_NAME
from tests.helpers.convert_corpus import grouped, pictures, tree, write_rows
from tests.helpers.wait import wait_until


def make_corpus(folder, num_rows):
    pictures(folder, "0.jpg", "1.jpg", "2.jpg")
    rows = [{"id": i, "image": f"{i % 3}.jpg", "text": f"row {i}"} for i in range(num_rows)]
    rows[1] = {"id": 1, "image": "absent.jpg", "text": "a reject"}
    return write_rows(folder / "rows.jsonl", rows)


def convert_and_die(rows, dest, moment, **options):
    """Convert in a forked process that kills itself at a moment. Return whether it came to that."""
    return dies_at(moment, partial(mm.convert, rows, dest, progress=False, **grouped(**options)))


def dies_at(moment, call):
    """Call in a forked process that kills itself at a moment. Return whether it came to that."""
    child = os.fork()
    if child == 0:
        try:
            die_at(moment)
            call()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), "the call raised an error"
    return status == signal.SIGKILL


def moments_of_death(dies: Callable[[int], bool], step: int = 1) -> Iterator[int]:
    """Call at each moment from 0 on, or at every second, third ... of them.

    Yield those at which it dies, and stop at the first other.
    """
    return takewhile(dies, count(0, step))


def die_at(moment):
    """Kill this process at a moment. Each object has two: half written, and just written."""
    left = [moment]
    create, remove = LocalStore.create, LocalStore.remove

    def tick():
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    @contextmanager
    def dying_create(self, name):
        with create(self, name) as file:
            yield file
            file.flush()
            tick()
        tick()

    def dying_remove(self, name):
        remove(self, name)
        tick()

    LocalStore.create, LocalStore.remove = dying_create, dying_remove


@pytest.mark.slow
def test_killed_at_any_write_a_conversion_is_refused_and_then_completed(tmp_path):
    rows = make_corpus(tmp_path, 5)
    options = {"samples_per_shard": 3}
    mm.convert(rows, tmp_path / "whole", progress=False, **options)
    for moment in moments_of_death(
        lambda moment: convert_and_die(rows, tmp_path / f"out{moment}", moment, **options)
    ):
        out = tmp_path / f"out{moment}"
        if (out / MARKER_NAME).exists() or moment <= 2:
            with pytest.raises(mm.errors.ManifestError):
                mm.open_dataset(out)
        else:
            objects = tree(out)
            assert objects | tree(tmp_path / "whole") == objects
            assert objects.keys() - tree(tmp_path / "whole").keys() <= {LOCK_NAME}
        mm.convert(rows, out, progress=False, **options)
        assert tree(out) == tree(tmp_path / "whole")
    # Two moments each: the marker, two shards of five objects, the rejects of one of them, all
    # rejects, report.json, the index, the manifest. One moment each: two bad lists, removed before
    # the marker is written, and the marker and the lock at the end.
    assert moment == 2 * (1 + 2 * 5 + 1 + 1 + 1 + 1 + 1 + 1) + 3


@pytest.mark.slow
def test_killed_at_any_write_an_overwrite_never_mixes_two_conversions(tmp_path):
    rows = make_corpus(tmp_path, 5)
    mm.convert(rows, tmp_path / "old", samples_per_shard=2, progress=False)
    mm.convert(rows, tmp_path / "new", samples_per_shard=3, progress=False)
    old, new = tree(tmp_path / "old"), tree(tmp_path / "new")

    def dies(moment):
        out = tmp_path / f"out{moment}"
        shutil.copytree(tmp_path / "old", out)
        return convert_and_die(rows, out, moment, samples_per_shard=3, overwrite=True)

    for moment in moments_of_death(dies, 2):  # each write has two
        out = tmp_path / f"out{moment}"
        if (out / MARKER_NAME).exists():
            with pytest.raises(mm.errors.ManifestError):
                mm.open_dataset(out)
            mm.convert(rows, out, samples_per_shard=3, progress=False)  # as the marker's command
        else:
            objects = {name: data for name, data in tree(out).items() if not name.startswith(".")}
            assert objects in (old, new)
            mm.convert(rows, out, progress=False, **grouped(samples_per_shard=3, overwrite=True))
        assert tree(out) == new
    assert moment > 20


SCRIPT = """
import pathlib, sys, time
from mmstream.converting.convert import convert
from mmstream.storage import LocalStore

create = LocalStore.create

def create_some(self, name):  # and stand still, so that who comes late finds it running
    assert "ray" not in sys.modules, "only engine='ray' needs it"
    while len(list(pathlib.Path(sys.argv[2], "reports").glob("*[0-9].json"))) >= 5:
        time.sleep(0.02)
    return create(self, name)

LocalStore.create = create_some  # in workers too: they import this file

if __name__ == "__main__":
    convert(sys.argv[1], sys.argv[2], samples_per_shard=2, num_workers=2, progress=False)
"""


@pytest.fixture
def running(tmp_path):
    """Start a conversion of 20 shards with two workers. Yield it when 5 shards are written."""
    rows = make_corpus(tmp_path, 40)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(mmstream.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, str(script), str(rows), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": root},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("out/reports/*[0-9].json"))) >= 5)
        assert process.poll() is None
        yield process, rows, tmp_path / "out"
    finally:
        process.kill()
        process.communicate()


def family(process):
    """The workers, and the fork server that they come from."""
    return psutil.Process(process.pid).children(recursive=True)


def require_ended(processes):
    _, alive = psutil.wait_procs(processes, timeout=500)
    assert alive == []


def assert_resumable(rows, out):
    """Check that what a killed run left is refused, and that another run completes it."""
    assert 5 <= len(list(out.glob("reports/*[0-9].json"))) < 20
    with pytest.raises(mm.errors.ManifestError, match="mmstream convert"):
        mm.open_dataset(out)
    options = {"samples_per_shard": 2, "progress": False}
    report = mm.convert(rows, out, **options)
    assert (report.num_rows, report.num_samples) == (40, 39)
    assert report.num_new_bytes < report.num_bytes
    mm.convert(rows, out.with_name("whole"), **options)
    assert tree(out) == tree(out.with_name("whole"))


def test_a_killed_main_process_takes_its_workers_with_it_and_can_be_resumed(running):
    process, rows, out = running
    relatives = family(process)
    assert len(relatives) >= 3
    process.kill()
    process.wait()
    require_ended(relatives)
    assert_resumable(rows, out)


@pytest.mark.slow
def test_a_killed_worker_is_an_error_that_says_what_to_do(running):
    process, rows, out = running
    worker = next(
        child for server in psutil.Process(process.pid).children() for child in server.children()
    )
    worker.kill()
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 1
    assert f"a worker process (pid {worker.pid}) was killed by SIGKILL (exit code -9)" in errors
    assert "run the same command again" in errors
    assert_resumable(rows, out)


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_can_be_resumed(running):
    process, rows, out = running
    relatives = family(process)
    for member in [psutil.Process(process.pid), *relatives]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended: the main process stopped it
            member.send_signal(signal.SIGINT)  # as a terminal does, to the whole group
    _, errors = process.communicate(timeout=500)
    assert "KeyboardInterrupt" in errors
    assert "Process ForkServerProcess" not in errors
    require_ended(relatives)
    assert_resumable(rows, out)
