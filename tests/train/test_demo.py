"""The demo: the README's first command, and a proof that can fail."""

import copy
import math
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mmstream as mm
from mmstream.audit import Check, History, LoggedRows, check_logs
from mmstream.converting.convert import ConvertReport
from mmstream.train.demo import EPOCHS, GLOBAL_BATCH_SIZE, corpus_rows, holds, markdown_report
from tests.helpers.paths import ROOT


@pytest.fixture(scope="module")
def run():
    """The order of a corpus like that of the demo, and what a faultless run would log."""
    order = mm.Order.from_counts([20] * 24, global_batch_size=GLOBAL_BATCH_SIZE)
    history = History({}, {})
    for epoch in range(EPOCHS):
        for step in range(order.steps_per_epoch):
            rows = np.stack(order.refs(epoch, step)[:2], axis=1)
            history.lines[epoch, step] = {"loss": 2.0}
            history.rows[epoch, step] = LoggedRows(0, rows, rows)
    return order, history


@pytest.mark.parametrize(
    "fault", [None, "lost", "repeated", "moved", "loss", "missing", "substituted"]
)
def test_a_history_is_proven_unless_it_has_a_fault(run, fault):
    order, history = run
    faulty = copy.deepcopy(history)
    rows, other_rows = (faulty.rows[1, step].planned for step in (3, 4))
    more_rows = np.concatenate([rows, rows[:1]])
    changes = {
        "lost": {(1, 3): LoggedRows(0, other_rows, other_rows)},
        "repeated": {(1, 3): LoggedRows(0, more_rows, more_rows)},
        "moved": {(1, 3): faulty.rows[1, 4], (1, 4): faulty.rows[1, 3]},
        "substituted": {(1, 3): LoggedRows(0, rows, np.roll(rows, 1, axis=0))},
    }
    faulty.rows.update(changes.get(fault, {}))
    if fault == "missing":
        del faulty.rows[0, 7]
    if fault == "loss":
        faulty.lines[2, 1]["loss"] = 2.1
    check = check_logs(order, faulty.rows, history.rows)
    assert holds(check, history.lines, faulty.lines) is (fault is None)


@pytest.mark.slow
def test_the_readmes_first_command_does_the_main_job_on_a_real_s3_server(tmp_path):
    command = re.search(r"^bash (tools/quickstart\.sh)", (ROOT / "README.md").read_text(), re.M)[1]
    if not (ROOT / ".venv" / ".mmstream-dev").exists():
        pytest.skip("this environment was not made by tools/test.sh")
    done = subprocess.run(
        ["bash", ROOT / command, "--s3", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=500,
        # One thread each: those of several processes spin where cores are shared.
        env={**os.environ, "PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = (tmp_path / "out" / "report.md").read_text()
    assert "the proof holds" in report
    assert "| samples lost / repeated per epoch | 0 / 0 |" in report


def test_the_embedded_corpus_names_its_photographers():
    table = (Path(corpus_rows()).parent / "ATTRIBUTION.md").read_text()
    images = sorted(path.name for path in (Path(corpus_rows()).parent / "images").iterdir())
    assert len(images) == 96
    assert all(f"| {name} | " in table for name in images)


# -- the report -----------------------------------------------------------------------------------

NUM_EPOCHS, STEPS, G, KILLED, SAVED = 3, 10, 6, 17, 15
CHECK = Check(NUM_EPOCHS * STEPS, 480, 0, 0, 0, 0, 0, [])


def lines(start=0, stop=NUM_EPOCHS * STEPS, world_size=1):
    return {
        (n // STEPS, n % STEPS): {
            "loss": 3 * math.exp(-n / 20),
            "keys": [f"{n}-{row}" for row in range(G)],
            "samples_per_s": 100.0 + n,
            "wait_fraction": 0.25,
            "world_size": world_size,
        }
        for n in range(start, stop)
    }


def report(check):
    return markdown_report(
        ConvertReport(96, 480, 0, 5, 8_000_000, 8_000_000, 1.0),
        check,
        undisturbed=lines(),
        killed=lines(stop=KILLED, world_size=2),
        disturbed=lines(stop=SAVED, world_size=2) | lines(start=SAVED),
    )


def test_the_report_says_what_happened_and_which_proof_fails():
    text = report(CHECK)
    assert text.startswith("# mmstream demo: the proof holds\n")
    assert "| steps | 30 of 6 samples, 3 epochs |" in text
    assert "killed at step 17; resumed with one process from the checkpoint of step 15" in text
    assert "96 rows -> 480 samples, 5 shards, 8.0 MB, 0 rejected" in text
    for fault in ("lost", "repeated", "unplanned"):
        assert "the proof DOES NOT HOLD" in report(replace(CHECK, **{fault: 1}))
