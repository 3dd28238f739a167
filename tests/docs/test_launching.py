"""The page on launching: its commands run, as far as one machine can play two, and processes die.

Each run goes on by itself or with the same command, and its log is compared with its plan.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from mmstream.train.demo import corpus_rows, free_port
from tests.helpers.corpora import write_corpus
from tests.helpers.doc_pages import blocks_of
from tests.helpers.logged_runs import metrics, require_exact
from tests.helpers.paths import DOCS, ROOT
from tests.helpers.slurm import install, slurm_environment
from tests.helpers.wait import wait_until
from tests.helpers.warm_ranks import warm_ranks

pytestmark = pytest.mark.slow

TWO_NODES = re.search(
    r"<!-- not run: two nodes[^\n]*-->\n```bash\n(.*?)\n```",
    (DOCS / "launching.md").read_text(),
    re.S,
)[1]
SMALL = "--image-size 16 --max-length 16 --global-batch-size 8 --num-workers 0 --log-keys"
NUM_STEPS = 40
"""80 samples, 8 a step, 4 epochs."""
MANY_EPOCHS = 1000
"""Of a run that must not end before this test stops it, however busy the machine is."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("launching") / "shards", [40, 40])


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables with which the ranks of torchrun are forks that need not import torch."""
    with warm_ranks(tmp_path_factory.mktemp("warm")) as variables:
        yield variables


@pytest.fixture
def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1"}


def wait_for_steps(out: Path, num_steps: int, job: subprocess.Popen[bytes], log: Path) -> None:
    wait_until(lambda: len(metrics(out, 0)) >= num_steps or job.poll() is not None, log.read_text)
    assert len(metrics(out, 0)) >= num_steps, log.read_text()


def test_two_nodes_go_on_by_themselves_when_a_rank_is_killed(
    shards: str, tmp_path: Path, environment: Mapping[str, str], warm: Mapping[str, str]
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    command = TWO_NODES.replace("node0:29500", f"127.0.0.1:{free_port()}")
    command = command.replace("--nproc-per-node 8", "--nproc-per-node 1 --local-addr 127.0.0.1")
    command = command.replace("shards/ --out run/", f"{shlex.quote(shards)} --out {out}")
    words = ["bash", "-c", f"{command} {SMALL} --epochs 4 --checkpoint-every 4"]
    with log.open("wb") as file:
        agents = [
            subprocess.Popen(
                words, env={**environment, **warm}, stdout=file, stderr=subprocess.STDOUT
            )
            for _ in range(2)
        ]
    try:
        wait_for_steps(out, 1, agents[0], log)
        rank_0 = next(
            process
            for agent in agents
            for process in psutil.Process(agent.pid).children(recursive=True)
            if process.environ().get("LOCAL_RANK") and process.environ()["RANK"] == "0"
        )
        wait_for_steps(out, 6, agents[0], log)
        rank_0.kill()
        assert [agent.wait(timeout=500) for agent in agents] == [0, 0], log.read_text()
    finally:
        for agent in agents:
            agent.kill()
    resumed = re.findall(r"resuming from .*, step (\d+)", log.read_text())
    assert resumed
    assert 4 <= int(resumed[0]) < NUM_STEPS
    lines = require_exact(shards, out, NUM_STEPS)
    assert {line["world_size"] for line in lines} == {2}
    assert [line["loss"] for line in metrics(out, 1)] == [line["loss"] for line in lines]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The folder of stand-ins for srun and scontrol."""
    install(tmp_path / "bin")
    return tmp_path / "bin"


def test_the_slurm_script_saves_on_sigterm_asks_for_another_turn_and_goes_on(
    shards: str,
    environment: Mapping[str, str],
    warm: Mapping[str, str],
    programs: Path,
    tmp_path: Path,
) -> None:
    """Two SIGTERMs come to two nodes. The second turn has one node."""
    out, log = tmp_path / "run", tmp_path / "log"

    def submit(num_nodes: int, options: str) -> subprocess.Popen[bytes]:
        own = {"TRAIN_OPTIONS": f"{SMALL} {options}", "RDZV_PORT": str(free_port())}
        with log.open("ab") as file:
            return subprocess.Popen(
                ["bash", str(DOCS / "slurm.sh"), shards, str(out)],
                env={**environment, **warm, **slurm_environment(programs, num_nodes), **own}
                | {"GPUS_PER_NODE": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    job = submit(2, f"--epochs {MANY_EPOCHS} --checkpoint-every 100000")
    try:
        wait_for_steps(out, 5, job, log)
        job.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=500) == 0, log.read_text()
    finally:
        job.kill()
    assert (programs / "requeued").read_text() == "42\n"
    (saved,) = (out / "checkpoints").iterdir()
    num_saved = int(re.search(r"\d+", saved.name)[0])
    assert 5 <= num_saved == len(metrics(out, 0)) == len(metrics(out, 1))

    job = submit(1, f"--epochs {MANY_EPOCHS} --max-steps {num_saved + 3}")
    assert job.wait(timeout=500) == 0, log.read_text()
    lines = require_exact(shards, out, num_saved + 3)
    assert [line["world_size"] for line in lines] == [2] * num_saved + [1] * 3
    assert (programs / "requeued").read_text() == "42\n"  # this time it was done


def test_the_slurm_script_fails_when_training_fails(
    environment: Mapping[str, str], warm: Mapping[str, str], programs: Path, tmp_path: Path
) -> None:
    own = {"TRAIN_OPTIONS": "--epochs 1", "GPUS_PER_NODE": "1", "MAX_RESTARTS": "0"}
    own["RDZV_PORT"] = str(free_port())
    command = ["bash", str(DOCS / "slurm.sh"), str(tmp_path / "nothing"), str(tmp_path / "run")]
    environment = {**environment, **warm, **slurm_environment(programs, 1), **own}
    job = subprocess.run(command, env=environment, capture_output=True, timeout=500, check=False)
    assert job.returncode != 0
    assert not (programs / "requeued").exists()


def test_the_readme_converts_in_a_line_and_trains_on_two_ranks_each_sample_once(
    tmp_path: Path, environment: Mapping[str, str], warm: Mapping[str, str]
) -> None:
    blocks = [b for b in blocks_of((ROOT / "README.md").read_text()) if not b.not_run]
    program = next(block for block in blocks if block.file == "train.py")
    step = "        optimizer.step()\n"
    assert program.code.count(step) == 1
    assert len(program.code.partition("loader = ")[2].splitlines()) <= 10
    noted = 'print(*batch["__key__"], file=open("keys" + os.environ["RANK"], "a"))'
    (tmp_path / "train.py").write_text(
        "import os\n" + program.code.replace(step, f"{step}        {noted}\n")
    )
    images = Path(corpus_rows()).parent / "images"
    (tmp_path / "media").symlink_to(images.parent)
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({"image": f"images/{image.name}", "text": "a picture"}) + "\n"
            for image in sorted(images.iterdir())
        )
    )
    commands = [block.code for block in blocks if block.language == "bash"]
    assert [command.split()[0] for command in commands] == ["mmstream", "torchrun"]
    for command in commands:
        run = subprocess.run(
            ["bash", "-ec", command],
            cwd=tmp_path,
            env={**environment, **warm, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert run.returncode == 0, run.stderr
    seen = [(tmp_path / f"keys{rank}").read_text().split() for rank in range(2)]
    assert [len(keys) for keys in seen] == [48, 48]
    assert len(set(seen[0] + seen[1])) == 96
