"""Stand-ins for Slurm's srun and scontrol, which play several nodes on this machine.

    python -m tests.helpers.slurm srun COMMAND...
    python -m tests.helpers.slurm scontrol show hostnames LIST | scontrol requeue JOB

`srun` starts the command once for each node, with the variables that Slurm sets for a task. As
Slurm does, it passes SIGTERM on to all processes of the tasks, children of children too, and its
exit code is the highest one of a task. `scontrol` notes what it is asked to requeue.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil


def install(folder: Path) -> Path:
    """Write the programs srun and scontrol into a new folder, for the PATH of a job.

    Returns:
        The file that has a line for each job that scontrol was asked to requeue.
    """
    folder.mkdir()
    root = Path(__file__).parents[2]
    for name in ("srun", "scontrol"):
        program = folder / name
        program.write_text(
            f'#!/bin/sh\nPYTHONPATH="{root}" exec "{sys.executable}" -m tests.helpers.slurm '
            f'{name} "$@"\n'
        )
        program.chmod(0o755)
    return folder / "requeued"


def slurm_environment(folder: Path, num_nodes: int) -> dict[str, str]:
    """Return the variables that Slurm sets for the script of a job, and the PATH to srun."""
    return {
        "PATH": os.pathsep.join(
            [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NUM_NODES": str(num_nodes),
        "SLURM_JOB_NODELIST": f"node[0-{num_nodes - 1}]",
        "SLURM_NTASKS": str(num_nodes),
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_REQUEUED_FILE": str(folder / "requeued"),
        "PET_LOCAL_ADDR": "127.0.0.1",  # torchrun's --local-addr: all nodes are this machine
    }


def run_tasks(command: list[str]) -> int:
    """Run a command on each node, and return the highest exit code."""
    num_nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    tasks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for task in tasks:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(task.pid)
                for descendant in [process, *process.children(recursive=True)]:
                    with suppress(psutil.NoSuchProcess):
                        descendant.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    for node in range(num_nodes):
        own = {
            "SLURM_PROCID": str(node),
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": "0",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_NODES": str(num_nodes),
            "SLURM_STEP_NUM_TASKS": str(num_nodes),
            "SLURMD_NODENAME": f"node{node}",
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        }
        tasks.append(subprocess.Popen(command, env=os.environ | own, start_new_session=True))
    codes = [task.wait() for task in tasks]
    return max(128 - code if code < 0 else code for code in codes)


def main() -> int:
    """Play the program that the first argument names."""
    program, *words = sys.argv[1:]
    if program == "srun":
        return run_tasks(words)
    if words[0] == "show":
        print("localhost\n" * int(os.environ["SLURM_JOB_NUM_NODES"]), end="")  # noqa: T201
    else:
        with Path(os.environ["SLURM_REQUEUED_FILE"]).open("a") as file:
            file.write(f"{words[-1]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
