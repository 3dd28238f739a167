"""The rows of a table of `tools.bench.loader` in turns of a few seconds, for shared machines.

All rows start, and are stopped (SIGSTOP) as soon as they deliver batches. Then one after the other
goes on for a turn and is stopped again. So each row is measured many times within a minute, and
what else the machine does hits all rows alike. Runs of eleven seconds, one after another, would
show that instead.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tools.bench.loader_runs import TIMEOUT_S, Run, kill_group, prepare, python_of
from tools.bench.loader_tables import Row, Table
from tools.bench.peers import environments
from tools.bench.process_tree import cpu_seconds, pss_bytes

SETTLE_S = 0.3
"""Not measured at the start of a turn: queues are full then."""

POLL_S = 0.002
"""How often a turn looks for another batch."""

NUM_FIRST_BATCHES = 8
"""A row takes part once it has delivered as many."""


@dataclass(frozen=True)
class Counter:
    """A process that takes batches for ever, and the file where it writes how many samples."""

    process: subprocess.Popen[bytes]
    path: Path

    @property
    def num_samples(self) -> int:
        """The samples so far."""
        return int.from_bytes(self.path.read_bytes(), "little")


def measure_in_turns(
    table: Table,
    rows: list[Row],
    folder: Path,
    num_turns: int,
    turn_s: float,
    num_workers: int,
    cache: Path,
    photographs: Sequence[Path] = (),
) -> dict[str, list[Run]]:
    """Write a table's data into an empty folder, and return one run per turn by row name."""
    common = prepare(table, rows, folder, num_workers, cache, photographs)
    counters: dict[str, Counter] = {}
    first_batch_s: dict[str, float] = {}
    with ExitStack() as stack:
        for number, row in enumerate(rows):
            path = folder / f"samples{number}"
            path.write_bytes(bytes(8))
            command = [python_of(row.runner, cache), "-m"]
            command += [f"{environments.RUNNERS}.decoded_{row.runner}", "count"]
            command += [str(folder / row.runner), json.dumps({**common, **row.settings}), str(path)]
            counter = start(command, path, environments.process_variables())
            stack.callback(kill_group, counter.process)
            started = time.perf_counter()
            wait_for(counter, 1)
            first_batch_s[row.name] = time.perf_counter() - started
            wait_for(counter, NUM_FIRST_BATCHES * table.batch_size)
            os.killpg(counter.process.pid, signal.SIGSTOP)
            counters[row.name] = counter
        return take_turns(counters, num_turns, turn_s, first_batch_s)


def start(command: list[str], path: Path, variables: Mapping[str, str]) -> Counter:
    """Start a process that counts, with its children in a group of their own."""
    process = subprocess.Popen(
        command,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return Counter(process, path)


def wait_for(counter: Counter, num_samples: int) -> None:
    """Wait until a process has counted that far."""
    deadline = time.monotonic() + TIMEOUT_S
    while counter.num_samples < num_samples:
        if counter.process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"no batches from {counter.process.args!r}")
        time.sleep(0.01)


def take_turns(
    counters: Mapping[str, Counter],
    num_turns: int,
    turn_s: float,
    first_batch_s: Mapping[str, float],
) -> dict[str, list[Run]]:
    """Let stopped processes go on in turns, and return one run per turn by name.

    Every second time the turns are in reverse order.
    """
    runs: dict[str, list[Run]] = {name: [] for name in counters}
    for number in range(num_turns):
        for name in list(counters)[:: -1 if number % 2 else 1]:
            counter = counters[name]
            pid = counter.process.pid
            os.killpg(pid, signal.SIGCONT)
            time.sleep(SETTLE_S)
            speed, cpu_s_per_1000 = _speed(counter, turn_s)
            peak = pss_bytes(pid)
            os.killpg(pid, signal.SIGSTOP)
            if counter.process.poll() is not None:
                sys.exit(f"{name} has ended")
            runs[name].append(
                {
                    "samples_per_s": speed,
                    "cpu_s_per_1000": cpu_s_per_1000,
                    "first_batch_s": first_batch_s[name],
                    "peak_bytes": peak,
                }
            )
    return runs


def _speed(counter: Counter, seconds: float) -> tuple[float, float]:
    """Return samples per second and CPU seconds per 1,000 samples, from batch to batch.

    Counted from one clock time to another, a slow row would have one batch too many or too few.
    """
    marks: list[tuple[float, int, float]] = []
    stop = time.perf_counter() + seconds
    num_samples = counter.num_samples
    while time.perf_counter() < stop:
        time.sleep(POLL_S)
        if counter.num_samples != num_samples:
            num_samples = counter.num_samples
            marks.append((time.perf_counter(), num_samples, cpu_seconds(counter.process.pid)))
    if len(marks) < 2:
        return 0.0, 0.0
    (begin, first, begin_cpu), (end, last, end_cpu) = marks[0], marks[-1]
    return (last - first) / (end - begin), (end_cpu - begin_cpu) / (last - first) * 1000
