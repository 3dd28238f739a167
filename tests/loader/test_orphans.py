"""No process of a run outlives its main process, whatever phase that was killed in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from mmstream.processes.machine import process_state
from mmstream.processes.workers import is_main_process_alive
from tests.helpers.wait import has_ended, wait_until

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes are listed through /proc"
)

SCRIPT = """
import sys, time
from pathlib import Path
import mmstream as mm

folder, context, phase = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if __name__ == "__mp_main__" and phase == "import":  # as a rendezvous that nobody joins
    Path(sys.argv[4], "importing").touch()
    time.sleep(1000)


def wait(sample):
    Path(sys.argv[4], "running").touch()
    time.sleep(1000)


if __name__ == "__main__":
    pipeline = mm.Pipeline(mm.open_dataset(folder), global_batch_size=4, transforms=(wait,))
    next(iter(mm.Loader(pipeline, num_workers=1, multiprocessing_context=context)))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def mark():
    """Marks the processes of a test in their environment; they are ended after it."""
    mark = f"MMSTREAM_TEST_MARK={uuid.uuid4().hex}"
    yield mark
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Return the living processes that were started with a mark."""
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return [pid for pid in pids if has(pid, mark)]


def has(pid: int, mark: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return not has_ended(pid) and mark.encode() in environment.split(b"\0")


def start(mark: str, *command: str) -> subprocess.Popen:
    name, _, value = mark.partition("=")
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=os.environ | {name: value},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def command_lines(pids: list[int]) -> list[bytes]:
    lines = []
    for pid in pids:
        with suppress(OSError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes()[:200])
    return lines


@pytest.mark.parametrize(
    ("phase", "context"),
    [
        pytest.param("import", "forkserver", marks=pytest.mark.slow),
        ("running", "forkserver"),
        pytest.param("import", "spawn", marks=pytest.mark.slow),
    ],
)
def test_nothing_outlives_a_main_process_that_was_killed(
    corpus, tmp_path, script, mark, context, phase
):
    main = start(mark, script, corpus, context, phase, tmp_path)
    seen = "importing" if phase == "import" else phase
    wait_until((tmp_path / seen).exists)
    assert len(marked(mark)) >= (2 if context == "forkserver" else 1)
    main.kill()
    main.wait()
    wait_until(lambda: not marked(mark), lambda: command_lines(marked(mark)))


@pytest.mark.slow
def test_nothing_outlives_ranks_and_torchrun_that_were_killed(corpus, tmp_path, script, mark):
    torchrun = "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"
    agent = start(mark, *torchrun, script, corpus, "fork", "running", tmp_path)
    wait_until((tmp_path / "running").exists)
    ranks: list[int] = []

    def are_all_there() -> bool:
        ranks[:] = [pid for pid in marked(mark) if parent_of(pid) == agent.pid]
        return len(ranks) == 2

    wait_until(are_all_there)
    agent.kill()
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()
    wait_until(lambda: not marked(mark), lambda: command_lines(marked(mark)))


def parent_of(pid: int) -> int:
    """The parent of a process; 0 when the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_a_main_process_is_told_from_a_later_one_with_its_number():
    _, began = process_state(os.getpid())
    assert is_main_process_alive(f"{os.getpid()} {began}")
    assert not is_main_process_alive(f"{os.getpid()} {int(began) - 1}")
