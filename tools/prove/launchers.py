"""Kill and stop runs under torchrun and the Slurm script, at every awkward moment.

    python -m tools.prove.launchers [--only WORDS]

Each run of two ranks is disturbed once, and goes on by itself or with the same command. Its log is
then compared with its plan and with the log of a run that nothing disturbed: each sample once, none
lost, the same batches, the same losses. The last line of output is JSON. The exit code is 1 if a
run differs. It takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import mmstream as mm
from mmstream.audit.compare_runs import History, prove, read_history
from mmstream.order import Order
from mmstream.state import order_of_state
from mmstream.train.saved_state import read_state
from tests.helpers.corpora import write_corpus
from tests.helpers.slurm import install, slurm_environment
from tools.prove.attempt import free_port

ROOT = Path(__file__).resolve().parents[2]
NUM_EPOCHS = 6
MOMENT_STEP = 23
"""The run is disturbed after this step, or at the first save after it."""
TRAIN = (
    f"--epochs {NUM_EPOCHS} --image-size 16 --max-length 16 --global-batch-size 8 --num-workers 0 "
    "--log-keys --checkpoint-every 3 --device cpu"
)
TURN_S = 180
MAX_TURNS = 3
"""Most times that the same command is given."""


@dataclass(frozen=True)
class Run:
    """A run under a launcher, which is disturbed."""

    shards: str
    folder: Path
    launcher: str

    @property
    def out(self) -> Path:
        """Folder of checkpoints and metrics."""
        return self.folder / "run"

    def start(self) -> subprocess.Popen[bytes]:
        """Give the command, and return the process of the launcher."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = ["torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
        command += ["-m", "mmstream", "train", self.shards, "--out", str(self.out), *TRAIN.split()]
        if self.launcher == "slurm":
            environment |= slurm_environment(self.folder / "bin", 2)
            environment |= {"GPUS_PER_NODE": "1", "RDZV_PORT": str(free_port())}
            environment["TRAIN_OPTIONS"] = TRAIN
            command = ["bash", str(ROOT / "docs" / "slurm.sh"), self.shards, str(self.out)]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def num_steps(self) -> int:
        """Return the steps that rank 0 has logged."""
        path = self.out / "metrics-rank0.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else -1

    def is_saving(self) -> bool:
        """Return whether a checkpoint is being written."""
        return any((self.out / "checkpoints").glob(".step-*"))


def ranks_below(launcher: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
    """Return the processes of the ranks, by rank."""
    ranks: dict[int, psutil.Process] = {}
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            words, environment = process.cmdline(), process.environ()
            if "mmstream" in words and "train" in words and "LOCAL_RANK" in environment:
                ranks.setdefault(int(environment["RANK"]), process)
    return ranks


def kill_everything(launcher: subprocess.Popen[bytes]) -> None:
    """Kill the launcher and all processes below it."""
    processes = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def terminate_twice(launcher: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, and once more after more than a second."""
    launcher.terminate()
    time.sleep(1.3)
    launcher.terminate()


Disturb = Callable[[subprocess.Popen[bytes]], None]


def kill_rank(rank: int) -> Disturb:
    """Return a function that kills a rank."""
    return lambda launcher: ranks_below(launcher)[rank].kill()


def terminate_rank(rank: int) -> Disturb:
    """Return a function that sends SIGTERM to a rank only."""
    return lambda launcher: ranks_below(launcher)[rank].terminate()


def terminate(launcher: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the launcher."""
    launcher.terminate()


EVENTS: dict[str, tuple[str, Disturb]] = {
    "rank 0 is killed": ("between", kill_rank(0)),
    "rank 1 is killed": ("between", kill_rank(1)),
    "rank 0 is killed while it saves": ("saving", kill_rank(0)),
    "rank 1 is killed while rank 0 saves": ("saving", kill_rank(1)),
    "all are killed": ("between", kill_everything),
    "all are killed while rank 0 saves": ("saving", kill_everything),
    "SIGTERM": ("between", terminate),
    "SIGTERM in the first step": ("first", terminate),
    "SIGTERM before the first step": ("start", terminate),
    "SIGTERM while rank 0 saves": ("saving", terminate),
    "SIGTERM twice": ("between", terminate_twice),
    "SIGTERM to rank 1 only": ("between", terminate_rank(1)),
}
"""What happens -> its moment, and how."""


def wait_for(moment: str, run: Run, launcher: subprocess.Popen[bytes]) -> None:
    """Wait until a run is where it is to be disturbed."""
    conditions = {
        "start": lambda: len(ranks_below(launcher)) == 2,
        "first": lambda: run.num_steps() >= 0,
        "between": lambda: run.num_steps() >= MOMENT_STEP,
        "saving": lambda: run.num_steps() >= MOMENT_STEP and run.is_saving(),
    }
    deadline = time.monotonic() + TURN_S
    while not conditions[moment]():
        if launcher.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the run ended before it was disturbed; see {run.folder / 'log'}")
        time.sleep(0.0005 if run.num_steps() >= MOMENT_STEP else 0.02)


def exit_code(launcher: subprocess.Popen[bytes]) -> int | None:
    """Wait for a launcher, and return its exit code. None: it did not end in time, and was killed.

    Its command is given again then, as a user would do.
    """
    try:
        return launcher.wait(TURN_S)
    except subprocess.TimeoutExpired:
        kill_everything(launcher)
        launcher.wait()
        return None


def disturbed(run: Run, moment: str, disturb: Disturb) -> dict[str, Any]:
    """Disturb a run once, give its command until it is done, and return how that went."""
    launcher = run.start()
    codes: list[int | None] = []
    try:
        wait_for(moment, run, launcher)
        num_steps = run.num_steps()
        disturb(launcher)
        codes.append(exit_code(launcher))
        while len(codes) < MAX_TURNS and not _is_done(run):
            launcher = run.start()
            codes.append(exit_code(launcher))
    finally:
        if launcher.poll() is None:
            kill_everything(launcher)
    return {"step": num_steps, "exit codes": codes}


def _is_done(run: Run) -> bool:
    with suppress(mm.StateError):
        return bool(read_state(str(run.out))["epoch"] == NUM_EPOCHS)
    return False


def main() -> None:
    """Disturb runs, compare them, and exit with 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="Events whose name has these words.")
    parser.add_argument("--launcher", choices=["torchrun", "slurm"], action="append")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mmstream-prove-"))
    shards = write_corpus(folder / "shards", [40, 40])
    order, undisturbed = _undisturbed(shards, folder)
    holds = True
    results = {}
    for launcher in options.launcher or ["torchrun", "slurm"]:
        for number, (event, (moment, disturb)) in enumerate(EVENTS.items()):
            if options.only not in event:
                continue
            run = Run(shards, folder / f"{launcher}-{number}", launcher)
            run.folder.mkdir()
            install(run.folder / "bin")
            outcome = disturbed(run, moment, disturb)
            proof = prove(order, read_history(run.out), undisturbed, NUM_EPOCHS)
            has_ended = None not in outcome["exit codes"]
            holds &= proof.holds and has_ended
            results[f"{launcher}: {event}"] = {**outcome, "holds": proof.holds and has_ended}
            print(f"{launcher}: {event}: {outcome}, {proof}", flush=True)
    print(json.dumps(results))
    if not holds:
        sys.exit(f"a run differs; see {folder}")
    shutil.rmtree(folder)


def _undisturbed(shards: str, folder: Path) -> tuple[Order, History]:
    """Run once without any event, and return the plan and what was logged."""
    run = Run(shards, folder / "undisturbed", "torchrun")
    run.folder.mkdir()
    launcher = run.start()
    if launcher.wait(TURN_S):
        sys.exit(f"training failed; see {run.folder / 'log'}")
    order, _, _ = order_of_state(read_state(str(run.out)), mm.open_dataset(shards))
    assert isinstance(order, Order)
    return order, read_history(run.out)


if __name__ == "__main__":
    main()
