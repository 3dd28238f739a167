"""Ranks of ``mmstream train`` that share one import of torch and the model: forks of one process.

    python -m tests.helpers.forked_ranks '{"command": [...], "out": ..., "starts": [...]}'

Each start is [ranks, step]: the last rank is killed by kill -9 when it has logged this step of its
own. None: the run ends by itself. The exit code is that of the last start.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from mmstream.train.demo import free_port

END_S = 500
"""A start that takes longer hangs."""


def run_starts(command: Sequence[str], out: Path, starts: Sequence[tuple[int, int | None]]) -> None:
    """Run ``mmstream train COMMAND`` so many times, one after the other.

    Args:
        command: Words behind ``mmstream train``; without ``--out``.
        out: Folder of the run; the log of all ranks goes there too.
        starts: (ranks, steps of this start after which the last rank is killed) of each.
    """
    out.mkdir(exist_ok=True)
    job = {"command": [*command, "--out", str(out)], "out": str(out), "starts": list(starts)}
    with (out / "ranks.log").open("ab") as log:
        process = subprocess.run(
            [sys.executable, "-m", "tests.helpers.forked_ranks", json.dumps(job)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=log,
            stderr=log,
            check=False,
        )
    assert process.returncode == 0, (out / "ranks.log").read_text()


def import_for_ranks() -> None:
    """Import what a rank needs that trains a small model."""
    from mmstream.families.family import import_torchvision
    from mmstream.train import loop, models  # noqa: F401

    import_torchvision()
    from transformers import (  # noqa: F401
        CLIPModel,
        CLIPVisionModel,
        LlamaForCausalLM,
        LlavaForConditionalGeneration,
    )


def main() -> int:
    """Import what a rank needs, and start the ranks."""
    import_for_ranks()
    job = json.loads(sys.argv[1])
    codes = [1]
    for world_size, kill_after in job["starts"]:
        codes = _start(job["command"], Path(job["out"]), world_size, kill_after)
    return max(codes)


def _start(command: list[str], out: Path, world_size: int, kill_after: int | None) -> list[int]:
    """Run the ranks of one start, and return their exit codes."""
    log = out / f"metrics-rank{world_size - 1}.jsonl"
    num_logged = _num_lines(log)
    port = free_port()
    train = partial(_train, command)
    ranks = [fork_rank(rank, world_size, port, train) for rank in range(world_size)]
    deadline = time.monotonic() + END_S
    while kill_after is not None and _num_lines(log) < num_logged + kill_after:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    if kill_after is not None:
        os.kill(ranks[-1], signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _train(command: list[str]) -> None:
    sys.argv = ["mmstream", "train", *command]
    from mmstream.cli import main as cli

    signal.alarm(END_S)
    cli()


def fork_rank(rank: int, world_size: int, port: int, run: Callable[[], object]) -> int:
    """Fork a rank, as of torchrun, that calls a function. Return the number of its process."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "OMP_NUM_THREADS": "1",
    }
    return fork(run, environment)


def fork(run: Callable[[], object], environment: Mapping[str, str] = MappingProxyType({})) -> int:
    """Fork a process that calls a function, and ends. Return the number of the process."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(environment)
        run()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
