"""The runs of `tools.bench.loader`: the rows of a table, interleaved, each in a new process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
    table: Table,
    rows: list[Row],
    folder: Path,
    num_rounds: int,
    num_workers: int,
    cache: Path,
    photographs: Sequence[Path] = (),
) -> dict[str, list[Run]]:
    """Write a table's data into an empty folder, run its rows, and return the runs by row name.

    Every second round takes the rows in reverse order, so that a row does not always follow the
    same other row. Ctrl-C ends the measurement early and keeps the finished runs.
    """
    common = prepare(table, rows, folder, num_workers, cache, photographs)
    runs: dict[str, list[Run]] = {row.name: [] for row in rows}
    try:
        for number in range(num_rounds):
            for row in rows[:: -1 if number % 2 else 1]:
                settings = json.dumps({**common, **row.settings})
                print(f"round {number + 1} of {num_rounds}: {row.name}", file=sys.stderr)
                run = call(row.runner, cache, "run", str(folder / row.runner), settings)
                runs[row.name].append(run)
    except KeyboardInterrupt:
        print("interrupted: the table shows the finished runs", file=sys.stderr)
    return {name: finished for name, finished in runs.items() if finished}


def prepare(
    table: Table,
    rows: list[Row],
    folder: Path,
    num_workers: int,
    cache: Path,
    photographs: Sequence[Path],
) -> dict[str, Any]:
    """Write a table's data, in the formats of its rows, and return the settings of all rows."""
    corpus, tokenizer = folder / "corpus", folder / "tokenizer"
    corpus.mkdir()
    tokenizer.mkdir()
    table.write_corpus(corpus, photographs)
    write_tokenizer(tokenizer)
    for runner in dict.fromkeys(row.runner for row in rows):
        own = folder / runner
        own.mkdir()
        call(runner, cache, "prepare", str(corpus), str(own))
    # Each worker of a loader may drop an incomplete batch, and Energon's epoch does not end.
    return {
        "tokenizer": str(tokenizer),
        "batch_size": table.batch_size,
        "num_batches": table.num_samples // table.batch_size - num_workers,
        "num_workers": num_workers,
        **table.settings,
    }


def python_of(runner: str, cache: Path) -> str:
    """Return the Python that runs a runner."""
    if runner in ("mmstream", "floor"):
        return sys.executable
    return str(environments.peer_python(runner, cache))


def call(runner: str, cache: Path, *arguments: str) -> dict[str, Any]:
    """Run a runner's command in its environment and return its figures, with peak memory."""
    python = python_of(runner, cache)
    module = f"{environments.RUNNERS}.decoded_{runner}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        process = subprocess.Popen(
            [python, "-m", module, *arguments],
            env={**environments.process_variables(), "TMPDIR": scratch, "HF_HOME": scratch},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            with PeakMemory(process.pid) as peak:
                out, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            kill_group(process)
    if process.returncode:
        sys.exit(f"{runner}: {' '.join(arguments)} failed:\n{errors[-3000:]}")
    figures = json.loads(out.splitlines()[-1])
    return {**figures, "peak_bytes": max(peak.num_bytes, figures.get("peak_bytes", 0))}


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill all processes of a run: a worker that outlives it would slow down the next run."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
