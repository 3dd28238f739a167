"""The page on launching: its commands run, as far as one machine can play two."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.corpora import write_corpus
from tests.helpers.paths import DOCS

TWO_NODES = re.search(
    r"<!-- not run: two nodes[^\n]*-->\n```bash\n(.*?)\n```",
    (DOCS / "launching.md").read_text(),
    re.S,
)[1]
SMALL = "--epochs 40 --image-size 16 --max-length 16 --global-batch-size 8 --num-workers 0"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("launching") / "shards", [40, 40])


@pytest.fixture
def environment():
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1"}


def metrics(out, rank):
    path = out / f"metrics-rank{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_the_command_for_two_nodes_trains_on_two_agents(shards, tmp_path, environment):
    command = TWO_NODES.replace("node0:29500", f"127.0.0.1:{free_port()}")
    command = command.replace("--nproc-per-node 8", "--nproc-per-node 1 --local-addr 127.0.0.1")
    command = command.replace("shards/ --out run/", f"{shlex.quote(shards)} --out {tmp_path}/run")
    words = [*shlex.split(command), *shlex.split(SMALL), "--max-steps", "4", "--log-keys"]
    agents = [
        subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(2)
    ]
    try:
        said = [agent.communicate(timeout=120)[0].decode() for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    ranks = [metrics(tmp_path / "run", rank) for rank in (0, 1)]
    for first, second in zip(*ranks, strict=True):
        assert first["world_size"] == second["world_size"] == 2
        assert first["loss"] == second["loss"]
        assert len(set(first["keys"]) | set(second["keys"])) == 8


@pytest.fixture
def slurm(tmp_path, environment):
    """Stand-ins: srun runs the command on this machine, scontrol writes down what it was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (folder / "scontrol").write_text(
        '#!/bin/sh\n[ "$1" = show ] && echo 127.0.0.1 && exit\n'
        f'echo "$@" >> {shlex.quote(str(tmp_path / "asked"))}\n'
    )
    for program in folder.iterdir():
        program.chmod(0o755)
    return environment | {
        "PATH": f"{folder}{os.pathsep}{environment['PATH']}",
        "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "42",
        "GPUS_PER_NODE": "2", "RDZV_PORT": str(free_port()),
    }  # fmt: skip


@pytest.mark.slow
def test_the_slurm_script_saves_on_sigterm_asks_for_another_turn_and_goes_on(
    shards, slurm, tmp_path
):
    out, log = tmp_path / "run", tmp_path / "log"
    command = ["bash", str(DOCS / "slurm.sh"), shards, str(out)]

    def run(options):
        with log.open("ab") as file:
            return subprocess.Popen(
                command, env=slurm | {"TRAIN_OPTIONS": f"{SMALL} {options}"},
                stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip

    job = run("--checkpoint-every 100000")
    try:
        deadline = time.monotonic() + 120
        while len(metrics_lines(out)) < 5 and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=60) == 0, log.read_text()
    finally:
        job.kill()
    assert (tmp_path / "asked").read_text() == "requeue 42\n"
    (saved,) = (out / "checkpoints").iterdir()
    num_saved = int(re.search(r"\d+", saved.name)[0])
    assert 5 <= num_saved == metrics(out, 0)[-1]["num_steps"] < 400

    job = run(f"--max-steps {num_saved + 3}")
    assert job.wait(timeout=120) == 0, log.read_text()
    assert [line["num_steps"] for line in metrics(out, 1)] == list(range(1, num_saved + 4))
    assert (tmp_path / "asked").read_text() == "requeue 42\n"  # this time it was done


def metrics_lines(out):
    path = out / "metrics-rank0.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_the_slurm_script_fails_when_training_fails(slurm, tmp_path):
    slurm = slurm | {"TRAIN_OPTIONS": "--epochs 1", "GPUS_PER_NODE": "1"}
    command = ["bash", str(DOCS / "slurm.sh"), str(tmp_path / "nothing"), str(tmp_path / "run")]
    assert subprocess.run(command, env=slurm, capture_output=True, timeout=120).returncode != 0
    assert not (tmp_path / "asked").exists()
