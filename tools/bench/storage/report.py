"""The tables of `tools.bench.storage`, as Markdown."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence

from tools.bench.storage.rows import Row
from tools.bench.storage.runs import Run
from tools.bench.storage.scenarios import Scenario

__all__ = ["COLUMNS", "SHORT", "print_table"]

COLUMNS = (
    "",
    "late samples/s (min-max)",
    "MB/s",
    "to obstore",
    "to the best peer",
    "start s",
    "@1 s",
    "@10 s",
    "@100 s",
    "wait p50, ms",
    "p99, ms",
    "longest, s",
    "CPU s/GB",
    "GET/GB",
    "read/used",
    "most in flight",
    "connections",
    "memory, MB",
    "faults",
)


SHORT = (
    *("", "late samples/s (min-max)", "start s", "@1 s", "@10 s", "@100 s"),
    *("p99, ms", "CPU s/GB", "GET/GB", "read/used", "memory, MB"),
)
"""The columns of tables in the documentation."""


def print_table(
    scenario: Scenario,
    rows: list[Row],
    runs: dict[str, list[Run]],
    sample_bytes: int,
    columns: Sequence[str] = COLUMNS,
) -> None:
    """Print the medians of one scenario."""
    num_rounds = max(map(len, runs.values()), default=0)
    print(f"\n{scenario.title} ({num_rounds} rounds)\n")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    speeds = {
        row.name: statistics.median(run.late for run in runs[row.name])
        for row in rows
        if runs.get(row.name)
    }
    raw = speeds.get("obstore", 0.0)
    peer = max(
        (speeds[row.name] for row in rows if row.kind == "peer" and row.name in speeds), default=0.0
    )
    for row in rows:
        row_runs = runs.get(row.name, [])
        finished = [run for run in row_runs if not run.error]
        if not finished:
            print(f"| {row.name} | failed {'| ' * (len(columns) - 1)}|")
            continue
        speed, late = speeds[row.name], [run.late for run in finished]
        words = f"{speed:,.0f} ({min(late):,.0f}-{max(late):,.0f})"
        if 10 not in finished[0].first:
            words = _not_reached(finished)
        cells = [
            row.name,
            words,
            f"{speed * sample_bytes / 1e6:,.0f}",
            f"{speed / raw:.2f}" if raw else "",
            f"{speed / peer:.2f}" if peer and row.kind == "mmstream" else "",
            _start(finished),
            *(_seconds(finished, number) for number in (1, 10, 100)),
            f"{_median(finished, lambda run: run.wait_p50) * 1000:.1f}",
            f"{_median(finished, lambda run: run.wait_p99) * 1000:.0f}",
            f"{_median(finished, lambda run: run.longest_s):.1f}",
            f"{_median(finished, lambda run: run.cpu_s_per_gb):.2f}",
            f"{_median(finished, lambda run: run.gets_per_gb):,.0f}",
            f"{_median(finished, lambda run: run.read_per_used):.2f}",
            f"{_median(finished, lambda run: run.max_in_flight):.0f}",
            f"{_median(finished, lambda run: run.num_connections):.0f}",
            f"{_median(finished, lambda run: run.peak_bytes) / 1e6:,.0f}",
            f"{_median(finished, lambda run: run.faults):.0f}",
        ]
        shown = dict(zip(COLUMNS, cells, strict=True))
        print(f"| {' | '.join(shown[name] for name in columns)} |")
    print()
    for row in rows:
        print(f"- {row.name}: {row.note}")
        for error in {run.error.splitlines()[-1] for run in runs.get(row.name, []) if run.error}:
            print(f"  failed: {error[-300:]}")
    sys.stdout.flush()


def _not_reached(runs: list[Run]) -> str:
    """Say which batch never came, and in how many seconds."""
    number = min(number for number in (1, 10) if any(number not in run.first for run in runs))
    seconds = max(run.seconds for run in runs if number not in run.first)
    return f"did not reach batch {number} in {seconds:.0f} s"


def _start(runs: list[Run]) -> str:
    """Return the seconds until the workers were up."""
    starts = [run.start_s for run in runs if run.start_s is not None]
    return f"{statistics.median(starts):.1f}" if starts else "-"


def _median(runs: list[Run], figure: Callable[[Run], float]) -> float:
    return statistics.median(map(figure, runs))


def _seconds(runs: list[Run], number: int) -> str:
    """Return when a batch came, or the end of the runs in which it did not."""
    moments = [run.first.get(number, run.seconds) for run in runs]
    is_late = sum(number not in run.first for run in runs) * 2 >= len(runs)
    return f"{'> ' if is_late else ''}{statistics.median(moments):.2f}"
