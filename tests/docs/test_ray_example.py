"""docs/ray_train.py on a Ray cluster of two nodes: one is killed, and the other goes on alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpora import write_corpus
from tests.helpers.logged_runs import metrics, require_exact
from tests.helpers.paths import DOCS, ROOT
from tests.helpers.wait import wait_until

for name in ("ray", "pandas", "tensorboardX"):
    pytest.importorskip(name, reason="no ray[train]")

pytestmark = pytest.mark.slow

NUM_STEPS = 60
CHECKPOINT_STEP = 20
"""The example saves after every 20th step."""
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # other programs' memory
    "RAY_worker_niceness": "0",  # with the default, 15, other tests leave workers no processor time
    "RAY_health_check_initial_delay_ms": "500",  # a dead node is noticed
    "RAY_health_check_period_ms": "500",  # in a second or two
    "RAY_health_check_failure_threshold": "2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",  # and not waited for long
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process for each group
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    """A head with one CPU. Its processes have their own environment and folder."""
    from ray.cluster_utils import Cluster

    with (
        tempfile.TemporaryDirectory(prefix="ray") as short,  # Ray's sockets need a short path
        pytest.MonkeyPatch.context() as environment,
    ):
        for name, value in {**RAY_SETTINGS, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": short}.items():
            environment.setenv(name, value)
        options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
        options |= {"no_monitor": True, "include_log_monitor": False}  # processes that only look
        cluster = Cluster(initialize_head=True, head_node_args=options)
        yield cluster
        cluster.shutdown()


def test_a_run_goes_on_by_itself_on_the_node_that_is_left(cluster: Any, tmp_path: Path) -> None:
    shards = write_corpus(tmp_path / "shards", [16 * 40, 16 * 20])
    out, log = tmp_path / "run", tmp_path / "log"
    node = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    with log.open("wb") as file:
        driver = subprocess.Popen(
            [sys.executable, DOCS / "ray_train.py", shards, out, "1:2"],
            env=os.environ | {"RAY_ADDRESS": cluster.address},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(
            lambda: len(metrics(out, 1)) > CHECKPOINT_STEP or driver.poll() is not None,
            log.read_text,
        )
        assert len(metrics(out, 1)) > CHECKPOINT_STEP, log.read_text()
        cluster.remove_node(node, allow_graceful=False)
        assert driver.wait(timeout=1200) == 0, log.read_text()
    finally:
        driver.kill()
        driver.wait()
    lines = require_exact(shards, out, NUM_STEPS)
    worlds = [line["world_size"] for line in lines]
    num_saved = worlds.index(1)
    assert worlds == [2] * num_saved + [1] * (NUM_STEPS - num_saved)
    assert num_saved % CHECKPOINT_STEP == 0 < num_saved < NUM_STEPS
    logs = Path(os.environ["RAY_TMPDIR"]).glob("ray/session_2*/logs/worker-*")
    reported = "".join(log.read_text() for log in logs)
    assert f"'num_steps': {NUM_STEPS}" in reported  # what the example reports to Ray
