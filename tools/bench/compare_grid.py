"""Steps and samples of every rank on a grid of topologies: ``python -m tools.bench.compare_grid``.

1 to 64 shards, 1 to 8 ranks, 0 to 4 workers a rank, 0 to 20 % bad pictures; for each cell, one
epoch of the whole corpus by mmstream, webdataset and Hugging Face datasets. A cell is judged by
what the ranks were given:

    equal steps     all ranks got the same number of batches; otherwise DDP waits for ever
    complete        every readable sample came once, neither lost nor twice, and mmstream's also
                    named every bad one; what it showed in place of those does not count
    same batches    the global batches are those of one rank without workers, row for row
    errors          an exception ended the epoch

Workers are real processes. Ranks run one after another, so a hang shows as unequal steps; the cells
of ``--train`` are run again by real processes, with DDP over gloo and an all-reduce every step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tools.bench.grid_cells import NUM_SAMPLES, Cell, Corpus, Tally, write_corpora
from tools.bench.peers import environments

SHARDS, RANKS, WORKERS, BAD = (1, 2, 5, 16, 64), (1, 2, 3, 8), (0, 1, 4), (0, 5, 20)
TRAINED = [
    Cell(1, 2, 0, 20),
    Cell(1, 3, 1, 20),
    Cell(2, 3, 0, 5),
    Cell(5, 2, 1, 20),
    Cell(64, 2, 2, 20),
    Cell(64, 3, 0, 5),
]
"""Cells for real processes; few workers, as a start of torch costs seconds on a small machine."""

SYSTEMS: dict[str, tuple[str, str]] = {
    "mmstream": ("mmstream", "stock"),
    "webdataset": ("webdataset", "stock"),
    "webdataset, empty_check=False": ("webdataset", "no check"),
    "webdataset, resampled + with_epoch": ("webdataset", "resampled"),
    "datasets": ("datasets", "stock"),
    "datasets, bad samples filtered by hand": ("datasets", "filtered"),
}
"""Row of the table -> its runner and variant."""


def main() -> None:
    """Run the grid and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small grid")
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="only these; repeat")
    parser.add_argument("--train", action="store_true", help="also real processes over gloo")
    parser.add_argument(
        "--cache", type=Path, default=environments.CACHE, help="folder of the peers"
    )
    options = parser.parse_args()
    names = options.system or list(SYSTEMS)
    grid = [Cell(*at) for at in product(SHARDS, RANKS, WORKERS, BAD)]
    cells = small_grid() if options.quick else grid
    with tempfile.TemporaryDirectory() as folder:
        corpora = write_corpora(Path(folder), cells + TRAINED * options.train)
        tallies = {name: judge(name, cells, corpora, options.cache) for name in names}
        report(tallies, cells)
        if options.train:
            trained = {}
            for name in names:
                alone = tallies[name].first
                trained[name] = train_cells(name, TRAINED, corpora, options.cache, alone)
            report_training(trained)


def small_grid() -> list[Cell]:
    """Return a few cells that hold the hard things: one shard, odd ranks, many bad samples."""
    return [Cell(*at) for at in product((1, 5), (1, 3), (0, 2), (0, 20))]


def judge(
    name: str, cells: Sequence[Cell], corpora: dict[tuple[int, int], Corpus], cache: Path
) -> Tally:
    """Run all cells of one system, ranks one after another."""
    tally = Tally(names_bad=name == "mmstream")
    found = [corpora[cell.num_shards, cell.bad_percent] for cell in cells]
    process = start(name, "simulate", list(zip(found, cells, strict=True)), cache)
    for corpus, cell, line in zip(found, cells, finish(process), strict=True):
        tally.add(cell, corpus, line)
    return tally


def train_cells(
    name: str,
    cells: Sequence[Cell],
    corpora: dict[tuple[int, int], Corpus],
    cache: Path,
    first: dict[tuple[int, int], list[list[str]]],
) -> Tally:
    """Run cells by real processes, one a rank; `first` is what one rank alone was given."""
    tally = Tally(names_bad=name == "mmstream", first=first)
    for cell in cells:
        corpus = corpora[cell.num_shards, cell.bad_percent]
        with socket.socket() as listener:  # a free port for the ranks to meet at
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        ranks = [
            start(name, "train", [(corpus, cell)], cache, RANK=str(rank),
                  WORLD_SIZE=str(cell.world_size), GRID_INIT=f"tcp://127.0.0.1:{port}")
            for rank in range(cell.world_size)
        ]  # fmt: skip
        lines = [finish(rank)[0] for rank in ranks]
        failed = [line for line in lines if "error" in line]
        whole = {"ranks": [line["ranks"][0] for line in lines]} if not failed else failed[0]
        tally.add(cell, corpus, whole)
    return tally


def start(
    name: str, command: str, cells: list[tuple[Corpus, Cell]], cache: Path, **variables: str
) -> subprocess.Popen[str]:
    """Start a runner in its environment and give it its cells."""
    runner, variant = SYSTEMS[name]
    python = sys.executable if runner == "mmstream" else environments.peer_python(runner, cache)
    own = {"GRID_VARIANT": variant, "GRID_SAMPLES": str(NUM_SAMPLES), "OMP_NUM_THREADS": "1"}
    first = Path(cells[0][0].folder)
    process = subprocess.Popen(
        [str(python), "-m", f"{environments.RUNNERS}.grid_{runner}", command],
        env={
            **environments.process_variables(),
            **own,
            "HF_HOME": str(first.parent / "hf"),
            **variables,
        },
        cwd=first.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    json.dump([(corpus.folder, cell) for corpus, cell in cells], process.stdin)
    process.stdin.close()
    return process


def finish(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Return a runner's answers, one a cell; a runner that died answered with an error."""
    with process:
        assert process.stdout is not None
        lines = [json.loads(line) for line in process.stdout]
    if process.returncode:
        lines.append({"error": f"exit code {process.returncode}: the process died"})
    return lines


def report(tallies: dict[str, Tally], cells: Sequence[Cell]) -> None:
    """Print what was found on the grid."""
    axes = [sorted({cell[at] for cell in cells}) for at in range(4)]
    print(
        f"{len(cells)} cells: shards {axes[0]} x ranks {axes[1]} x workers {axes[2]} x "
        f"bad % {axes[3]}; {NUM_SAMPLES} samples, global batches of 24; "
        f"{os.cpu_count()} cores, Python {platform.python_version()}"
    )
    print("; ".join(environments.version(name) for name in ("webdataset", "datasets")) + "\n")
    print_table(tallies, "ranks one after another")
    print()
    print_by_axis(tallies, cells)


def report_training(tallies: dict[str, Tally]) -> None:
    """Print what was found with real ranks."""
    print()
    print_table(tallies, "real processes, DDP over gloo")


def print_table(tallies: dict[str, Tally], title: str) -> None:
    """Print a table of cells."""
    print(f"| {title} | equal steps | complete | both | same batches | errors |")
    print("|---|---|---|---|---|---|")
    for name, tally in tallies.items():
        total, both = tally.num_cells, tally.num_cells - len(tally.failed)
        errors = ", ".join(f"{count} {kind}" for kind, count in tally.errors.most_common())
        cells = " | ".join(
            f"{n} of {total}" for n in (tally.equal, tally.complete, both, tally.same)
        )
        print(f"| {name} | {cells} | {errors or 0} |")


def print_by_axis(tallies: dict[str, Tally], cells: Sequence[Cell]) -> None:
    """Print where the cells lie that are in step and complete."""
    points = [
        (axis, value)
        for axis in ("num_shards", "world_size", "num_workers", "bad_percent")
        for value in sorted({getattr(cell, axis) for cell in cells})
    ]
    units = {"num_shards": "shards", "world_size": "ranks", "num_workers": "workers"}
    heads = " | ".join(f"{value} {units.get(axis, '% bad')}" for axis, value in points)
    print(f"| in step and complete, % of cells with | {heads} |")
    print("|---|" + "---|" * len(points))
    for name, tally in tallies.items():
        shares = []
        for axis, value in points:
            total = sum(getattr(cell, axis) == value for cell in cells)
            failed = sum(getattr(cell, axis) == value for cell in tally.failed)
            shares.append(f"{(total - failed) / total:.0%}".rstrip("%"))
        print(f"| {name} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
