"""docs/ray_train.py trains on two workers, and goes on when one of them is killed.

The example always runs with a stand-in for Ray, which starts the workers and a process group as
Ray does. Where Ray Train is installed (``pip install ".[ray]"``), it runs with Ray too.
"""

import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.corpora import write_corpus
from tests.helpers.paths import DOCS, ROOT

STAND_IN = ROOT / "tests" / "helpers" / "stand_in_for_ray"
has_ray_train = all(map(importlib.util.find_spec, ("ray", "pandas", "tensorboardX")))
"""`ray.train` needs more packages than `ray`, which is all that the extra "dev" has."""
NUM_STEPS = 30
CHECKPOINT_STEP = 20
"""The example saves after every 20th step."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """30 steps of 16 samples."""
    return write_corpus(tmp_path_factory.mktemp("ray") / "shards", [300, 180])


@pytest.fixture(
    params=[
        "stand-in",
        pytest.param("ray", marks=pytest.mark.skipif(not has_ray_train, reason="no ray[train]")),
    ]
)
def environment(request, tmp_path):
    names = [ROOT] if request.param == "ray" else [STAND_IN, ROOT]
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # Ray's sockets need a short path
        yield os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, names)),
            "HOME": str(tmp_path),  # Ray writes its results there
            "RAY_TMPDIR": short,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # other programs' memory ends no worker
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
        }


def metrics(out, rank):
    path = out / f"metrics-rank{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def process_that_writes(driver, file):
    """Return the descendant of a process that has a file open."""
    for process in driver.children(recursive=True):
        try:
            if any(Path(opened.path) == file for opened in process.open_files()):
                return process
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    raise AssertionError(f"nobody writes {file}")


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_training_goes_on_from_the_checkpoint(
    shards, environment, tmp_path
):
    out, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, DOCS / "ray_train.py", shards, out, "2"]
    with log.open("wb") as file:
        driver = psutil.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 240
        while len(metrics(out, 1)) <= CHECKPOINT_STEP and driver.poll() is None:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        assert driver.poll() is None, log.read_text()
        process_that_writes(driver, out / "metrics-rank1.jsonl").kill()
        before = metrics(out, 1)
        assert driver.wait(timeout=240) == 0, log.read_text()
    finally:
        for process in [*driver.children(recursive=True), driver] if driver.is_running() else []:
            process.kill()
        driver.wait()
    assert CHECKPOINT_STEP < len(before) < NUM_STEPS
    for rank in (0, 1):
        lines = metrics(out, rank)
        assert [line["num_steps"] for line in lines] == list(range(1, NUM_STEPS + 1))
        assert {line["world_size"] for line in lines} == {2}
    assert lines[:CHECKPOINT_STEP] == before[:CHECKPOINT_STEP]  # with the same times: not repeated
    assert lines[CHECKPOINT_STEP] != before[CHECKPOINT_STEP]
    assert f"'num_steps': {NUM_STEPS}" in log.read_text()  # what the example reports to Ray
