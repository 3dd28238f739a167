"""A loader worker that is killed ends `mmstream train` with one line that names the rank."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.train.test_signals import start, wait_for_steps


def worker_of(pid: int) -> psutil.Process:
    """Return the loader worker of a rank: the only child of its fork server."""
    workers = [
        worker
        for server in psutil.Process(pid).children()
        if "forkserver" in " ".join(server.cmdline())
        for worker in server.children()
    ]
    assert len(workers) == 1
    return workers[0]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_killed_worker_ends_its_rank_with_one_line(
    corpus: str, tmp_path: Path, world_size: int
) -> None:
    ranks = start(corpus, tmp_path, world_size)
    try:
        wait_for_steps(tmp_path, ranks, 3)
        worker_of(ranks[-1].pid).send_signal(signal.SIGKILL)
        assert ranks[-1].wait(timeout=60) == 1
    finally:
        for rank in ranks:  # the others wait for the rank that has ended; torchrun ends them
            rank.kill()
            rank.wait()
    log = (tmp_path / f"rank{world_size - 1}.log").read_text()
    last = log.rstrip().splitlines()[-1]
    label = "rank 1: " if world_size == 2 else ""
    assert last.startswith(f"error: {label}worker 0 (pid ")
    assert "was killed by SIGKILL (exit code -9)" in last
    assert "the state stands before step" in last
    assert "Traceback" not in log
    assert "DataLoader" not in log
