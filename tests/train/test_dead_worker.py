"""A loader worker that is killed ends `mmstream train` with one line that names the rank."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil

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


def test_a_killed_worker_ends_its_rank_with_one_line(corpus: str, tmp_path: Path) -> None:
    ranks = start(corpus, tmp_path, 2)
    try:
        wait_for_steps(tmp_path, ranks, 3)
        worker_of(ranks[-1].pid).send_signal(signal.SIGKILL)
        assert ranks[-1].wait(timeout=500) == 1
    finally:
        for rank in ranks:  # the others wait for the rank that has ended; torchrun ends them
            rank.kill()
            rank.wait()
    log = (tmp_path / "rank1.log").read_text()
    last = log.rstrip().splitlines()[-1]
    assert last.startswith("error: rank 1: worker 0 (pid ")
    assert "was killed by SIGKILL (exit code -9)" in last
    assert "the state stands before step" in last
    assert "Traceback" not in log
    assert "DataLoader" not in log
