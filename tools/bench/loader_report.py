"""The tables of `tools.bench.loader`: machine, versions, medians and ratios."""

from __future__ import annotations

import os
import platform
import statistics
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tools.bench.loader_runs import Run
from tools.bench.loader_tables import NATIVE_PEERS, PEERS, Kind, Row, Table
from tools.bench.peers import environments

PACKAGES = ("torch", "torchvision", "pillow", "simplejpeg", "transformers", "tokenizers")
COLUMNS = (
    "",
    "delivers",
    "samples/s, median (min-max)",
    "to the best peer",
    "to the bare loop",
    "CPU s per 1,000",
    "peak memory, MB",
    "first batch, s",
)


def print_head() -> None:
    """Print date, machine, load and versions."""
    print_machine()
    print("; ".join(f"{name} {version(name)}" for name in ("mmstream", *PACKAGES)))
    print(
        "; ".join(environments.version(name) for name in (*PEERS.values(), *NATIVE_PEERS.values())),
        flush=True,
    )


def print_machine() -> None:
    """Print date, machine and load."""
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"load {load} at the start, Python {platform.python_version()}, warm page cache",
        flush=True,
    )


def print_table(
    table: Table, rows: list[Row], runs: dict[str, list[Run]], num_workers: int
) -> None:
    """Print one table, and mmstream's ratios to the best of each kind of row."""
    num_rounds = max(map(len, runs.values()), default=0)
    load = os.getloadavg()[0]
    print(
        f"\n{table.title}: {table.num_samples} samples, batches of {table.batch_size}, "
        f"{num_rounds} rounds, {num_workers} worker processes unless a row says otherwise, "
        f"load {load:.1f} at the end\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    peer = _fastest(rows, runs, "peer")
    floor = _fastest(rows, runs, "floor")
    for row in rows:
        speeds = [run["samples_per_s"] for run in runs[row.name]]
        speed = statistics.median(speeds)
        print(
            f"| {row.name} | {row.delivers} | {speed:,.0f} ({min(speeds):,.0f}-{max(speeds):,.0f}) "
            f"| {_ratio(speed, peer, runs)} | {_ratio(speed, floor, runs)} "
            f"| {median(row, runs, 'cpu_s_per_1000'):.2f} "
            f"| {median(row, runs, 'peak_bytes') / 1e6:,.0f} "
            f"| {median(row, runs, 'first_batch_s'):.2f} |"
        )
    for line in verdicts(rows, runs):
        print(line)


def verdicts(rows: list[Row], runs: dict[str, list[Run]]) -> list[str]:
    """Return one line per row of mmstream that compares it with the best row of each other kind."""
    kinds: tuple[Kind, ...] = ("peer", "peer with mmstream's decoder", "floor")
    lines = []
    for ours in (row for row in rows if row.kind == "mmstream"):
        comparisons = [
            f"{_quotient(ours, best, runs, 'samples_per_s'):.2f}x {best.name} "
            f"with {_quotient(ours, best, runs, 'cpu_s_per_1000'):.0%} of its CPU time"
            for best in (_fastest(rows, runs, kind) for kind in kinds)
            if best is not None
        ]
        if comparisons:
            lines.append(f"- {ours.name}: {', '.join(comparisons)}")
    return ["", *lines] if lines else []


def median(row: Row, runs: dict[str, list[Run]], figure: str) -> float:
    """Return the median of a figure over a row's rounds."""
    return statistics.median(run[figure] for run in runs[row.name])


def _quotient(row: Row, base: Row, runs: dict[str, list[Run]], figure: str) -> float:
    return median(row, runs, figure) / median(base, runs, figure)


def _fastest(rows: list[Row], runs: dict[str, list[Run]], kind: Kind) -> Row | None:
    candidates = [row for row in rows if row.kind == kind]
    return max(candidates, key=lambda row: median(row, runs, "samples_per_s"), default=None)


def _ratio(speed: float, base: Row | None, runs: dict[str, list[Run]]) -> str:
    return f"{speed / median(base, runs, 'samples_per_s'):.2f}" if base else "-"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
