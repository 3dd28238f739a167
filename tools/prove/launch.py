"""Ranks of ``mmstream train`` on this machine, as torchrun would start them, and one killed.

media_training.py, packed_training.py -> `launch_ranks`
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tools.prove.attempt import free_port

RUN_S = 400
"""Longest time of one start."""


def launch_ranks(command: list[str], out: Path, world_size: int, kill: int | None = None) -> None:
    """Run a command as so many ranks. Kill -9 the last rank after the step `kill`.

    Args:
        command: Words behind ``mmstream train``.
        out: Folder of the run; the ranks' logs go there too.
        world_size: Number of ranks.
        kill: Optimizer step after which the last rank is killed. None: the run ends by itself.

    Raises:
        SystemExit: A run that was not killed has failed.
    """
    out.mkdir(exist_ok=True)
    environment = os.environ | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    logs = [out / f"rank{rank}-of-{world_size}.log" for rank in range(world_size)]
    ranks = []
    try:
        for rank, path in enumerate(logs):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with path.open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "mmstream", "train", *command],
                        env=own,
                        stdout=log,
                        stderr=log,
                    )
                )
        if kill is not None:
            _wait_for_step(out / f"metrics-rank{world_size - 1}.jsonl", kill, ranks)
            ranks[-1].send_signal(signal.SIGKILL)
        codes = [rank.wait(RUN_S) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if kill is None and any(codes):
        sys.exit(f"training failed with exit codes {codes}; see {logs[0]}")


def _wait_for_step(path: Path, step: int, ranks: list[subprocess.Popen[bytes]]) -> None:
    """Wait until a rank has logged a step."""
    deadline = time.monotonic() + RUN_S
    while not path.exists() or f'"num_steps": {step},' not in path.read_text():
        if any(rank.poll() is not None for rank in ranks) or time.monotonic() > deadline:
            sys.exit(f"training ended before step {step}; see {path.parent}")
        time.sleep(0.02)
