"""Prints the tables of `tools.bench.loader`: the machine, the versions, medians and ratios."""

from __future__ import annotations

import os
import platform
import statistics
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tools.bench.loader_runs import Run
from tools.bench.loader_tables import PEERS, Kind, Row, Table
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
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"load {load} at the start, Python {platform.python_version()}, warm page cache"
    )
    print("; ".join(f"{name} {version(name)}" for name in ("mmstream", *PACKAGES)))
    print("; ".join(environments.version(name) for name in PEERS.values()), flush=True)


def print_table(
    table: Table, rows: list[Row], found: dict[str, list[Run]], num_workers: int
) -> None:
    """Print one table and what it says about mmstream."""
    num_rounds = max(map(len, found.values()), default=0)
    load = os.getloadavg()[0]
    print(
        f"\n{table.title}: {table.num_samples} samples, batches of {table.batch_size}, "
        f"{num_rounds} rounds, {num_workers} worker processes where a row says nothing else, "
        f"load {load:.1f} at the end\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    peer, floor = _fastest(rows, found, "peer"), _fastest(rows, found, "floor")
    for row in rows:
        speeds = [run["samples_per_s"] for run in found[row.name]]
        speed = statistics.median(speeds)
        print(
            f"| {row.name} | {row.delivers} | {speed:,.0f} ({min(speeds):,.0f}-{max(speeds):,.0f}) "
            f"| {_ratio(speed, peer, found)} | {_ratio(speed, floor, found)} "
            f"| {middle(row, found, 'cpu_s_per_1000'):.2f} "
            f"| {middle(row, found, 'peak_bytes') / 1e6:,.0f} "
            f"| {middle(row, found, 'first_batch_s'):.2f} |"
        )
    for line in verdicts(rows, found):
        print(line)


def verdicts(rows: list[Row], found: dict[str, list[Run]]) -> list[str]:
    """Say in one line for each of mmstream's rows how it stands to the best of each other kind."""
    kinds: tuple[Kind, ...] = ("peer", "peer with mmstream's decoder", "floor")
    lines = []
    for ours in (row for row in rows if row.kind == "mmstream"):
        parts = [
            f"{_share(ours, best, found, 'samples_per_s'):.2f}x {best.name} "
            f"with {_share(ours, best, found, 'cpu_s_per_1000'):.0%} of its CPU time"
            for best in (_fastest(rows, found, kind) for kind in kinds)
            if best is not None
        ]
        if parts:
            lines.append(f"- {ours.name}: {', '.join(parts)}")
    return ["", *lines] if lines else []


def middle(row: Row, found: dict[str, list[Run]], what: str) -> float:
    """Return the median over the rounds."""
    return statistics.median(run[what] for run in found[row.name])


def _share(row: Row, base: Row, found: dict[str, list[Run]], what: str) -> float:
    return middle(row, found, what) / middle(base, found, what)


def _fastest(rows: list[Row], found: dict[str, list[Run]], kind: Kind) -> Row | None:
    of_kind = [row for row in rows if row.kind == kind]
    return max(of_kind, key=lambda row: middle(row, found, "samples_per_s"), default=None)


def _ratio(speed: float, base: Row | None, found: dict[str, list[Run]]) -> str:
    return f"{speed / middle(base, found, 'samples_per_s'):.2f}" if base else "-"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
