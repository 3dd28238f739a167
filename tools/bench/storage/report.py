"""The tables of `tools.bench.storage`, as Markdown."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

from tools.bench.storage.rows import Row
from tools.bench.storage.runs import Run
from tools.bench.storage.scenarios import Scenario

__all__ = ["print_table"]

COLUMNS = (
    "",
    "late samples/s (min-max)",
    "MB/s",
    "to obstore",
    "to the best peer",
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


def print_table(
    scenario: Scenario, rows: list[Row], runs: dict[str, list[Run]], sample_bytes: int
) -> None:
    """Print the medians of one scenario."""
    num_rounds = max(map(len, runs.values()), default=0)
    print(f"\n{scenario.title} ({num_rounds} rounds)\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
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
        finished = [run for run in runs.get(row.name, []) if not run.error]
        if not finished:
            first = _seconds(runs.get(row.name, []), 1)
            print(f"| {row.name} | failed | | | | {first} {'| ' * (len(COLUMNS) - 6)}|")
            continue
        speed, late = speeds[row.name], [run.late for run in finished]
        cells = [
            f"{speed:,.0f} ({min(late):,.0f}-{max(late):,.0f})",
            f"{speed * sample_bytes / 1e6:,.0f}",
            f"{speed / raw:.2f}" if raw else "",
            f"{speed / peer:.2f}" if peer and row.kind == "mmstream" else "",
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
        print(f"| {row.name} | {' | '.join(cells)} |")
    sys.stdout.flush()


def _median(runs: list[Run], figure: Callable[[Run], float]) -> float:
    return statistics.median(map(figure, runs))


def _seconds(runs: list[Run], number: int) -> str:
    moments = [run.first[number] for run in runs if number in run.first]
    return f"{statistics.median(moments):.2f}" if moments else "-"
