"""Runs the rows of a table for `tools.bench.loader`, interleaved, each run a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.bench.corpus import write_tokenizer
from tools.bench.loader_tables import Row, Table
from tools.bench.peers import environments
from tools.bench.process_tree import PeakMemory

TIMEOUT_S = 600

Run = dict[str, float]
"""samples_per_s, cpu_s_per_1000, first_batch_s, peak_bytes."""


def measure(
    table: Table, rows: list[Row], folder: Path, num_rounds: int, num_workers: int, cache: Path
) -> dict[str, list[Run]]:
    """Write a table's data into an empty folder, run its rows, and return by row's name the runs.

    Every second round goes through the rows backwards, so that none always follows the same one.
    Ctrl-C ends it early, with the runs that there are.
    """
    corpus, tokenizer = folder / "corpus", folder / "tokenizer"
    corpus.mkdir()
    tokenizer.mkdir()
    table.write_corpus(corpus)
    write_tokenizer(tokenizer)
    for runner in dict.fromkeys(row.runner for row in rows):
        own = folder / runner
        own.mkdir()
        call(runner, cache, "prepare", str(corpus), str(own))
    # Each of a loader's workers may keep an incomplete batch, and energon's epoch has no end.
    common = {
        "tokenizer": str(tokenizer),
        "batch_size": table.batch_size,
        "num_batches": table.num_samples // table.batch_size - num_workers,
        "num_workers": num_workers,
        **table.settings,
    }
    found: dict[str, list[Run]] = {row.name: [] for row in rows}
    try:
        for number in range(num_rounds):
            for row in rows[:: -1 if number % 2 else 1]:
                settings = json.dumps({**common, **row.settings})
                print(f"round {number + 1} of {num_rounds}: {row.name}", file=sys.stderr)
                run = call(row.runner, cache, "run", str(folder / row.runner), settings)
                found[row.name].append(run)
    except KeyboardInterrupt:
        print("interrupted: the table shows what there is", file=sys.stderr)
    return {name: runs for name, runs in found.items() if runs}


def call(runner: str, cache: Path, *arguments: str) -> dict[str, Any]:
    """Run a runner's command in its environment; return its line, and the peak of its memory."""
    own = runner in ("mmstream", "floor")
    python = sys.executable if own else str(environments.peer_python(runner, cache))
    module = f"{environments.RUNNERS}.decoded_{runner}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        process = subprocess.Popen(
            [python, "-m", module, *arguments],
            env={
                **environments.process_variables(),
                "TMPDIR": scratch,
                "HF_HOME": scratch,
            },
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            with PeakMemory(process.pid) as peak:
                out, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            _end_all(process)
    if process.returncode:
        sys.exit(f"{runner}: {' '.join(arguments)} failed:\n{errors[-3000:]}")
    line = json.loads(out.splitlines()[-1])
    return {**line, "peak_bytes": max(peak.num_bytes, line.get("peak_bytes", 0))}


def _end_all(process: subprocess.Popen[str]) -> None:
    """End what is left of a run: a worker that outlives it would slow the next one."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
