"""Steps and samples of every rank on a grid of topologies: ``python -m tools.bench.compare_grid``.

The grid has 1 to 64 shards, 1 to 8 ranks, 0 to 4 workers per rank, and 0 to 20 % bad images. In
each cell, mmstream, webdataset and Hugging Face datasets deliver one epoch of the whole corpus.
A cell is judged by the batches of the ranks:

    equal steps     all ranks got the same number of batches; otherwise DDP waits for ever
    complete        every readable sample came exactly once, and mmstream also logged every bad
                    sample; substitutes of bad samples do not count
    same batches    the global batches equal those of one rank without workers, row by row
    errors          an exception ended the epoch

Workers are real processes. Ranks run one after another, so a hang shows as unequal steps. With
``--train`` some cells run again with one process per rank, with DDP over gloo and an all-reduce in
every step.
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
"""Cells with a process per rank. They have few workers, because importing torch takes seconds."""

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
    grid = [Cell(*values) for values in product(SHARDS, RANKS, WORKERS, BAD)]
    cells = small_grid() if options.quick else grid
    with tempfile.TemporaryDirectory() as folder:
        corpora = write_corpora(Path(folder), cells + TRAINED * options.train)
        tallies = {name: judge(name, cells, corpora, options.cache) for name in names}
        report(tallies, cells)
        if options.train:
            trained = {}
            for name in names:
                one_rank = tallies[name].one_rank
                trained[name] = train_cells(name, TRAINED, corpora, options.cache, one_rank)
            print()
            print_table(trained, "one process per rank, DDP over gloo")


def small_grid() -> list[Cell]:
    """Return a few hard cells: one shard, an odd number of ranks, many bad samples."""
    return [Cell(*values) for values in product((1, 5), (1, 3), (0, 2), (0, 20))]


def judge(
    name: str, cells: Sequence[Cell], corpora: dict[tuple[int, int], Corpus], cache: Path
) -> Tally:
    """Run all cells of one system, with its ranks one after another."""
    tally = Tally(logs_bad=name == "mmstream")
    pairs = [(corpora[cell.num_shards, cell.bad_percent], cell) for cell in cells]
    process = start(name, "simulate", pairs, cache)
    for (corpus, cell), answer in zip(pairs, finish(process), strict=True):
        tally.add(cell, corpus, answer)
    return tally


def train_cells(
    name: str,
    cells: Sequence[Cell],
    corpora: dict[tuple[int, int], Corpus],
    cache: Path,
    one_rank: dict[tuple[int, int], list[list[str]]],
) -> Tally:
    """Run cells with one process per rank and compare with the batches of one rank."""
    tally = Tally(logs_bad=name == "mmstream", one_rank=one_rank)
    for cell in cells:
        corpus = corpora[cell.num_shards, cell.bad_percent]
        with socket.socket() as listener:  # a free port for the rendezvous
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        ranks = [
            start(
                name,
                "train",
                [(corpus, cell)],
                cache,
                RANK=str(rank),
                WORLD_SIZE=str(cell.world_size),
                GRID_INIT=f"tcp://127.0.0.1:{port}",
            )
            for rank in range(cell.world_size)
        ]
        answers = [finish(rank)[0] for rank in ranks]
        failed = [answer for answer in answers if "error" in answer]
        whole = {"ranks": [answer["ranks"][0] for answer in answers]} if not failed else failed[0]
        tally.add(cell, corpus, whole)
    return tally


def start(
    name: str, command: str, cells: list[tuple[Corpus, Cell]], cache: Path, **variables: str
) -> subprocess.Popen[str]:
    """Start a runner in its environment and send it its cells."""
    runner, variant = SYSTEMS[name]
    python = sys.executable if runner == "mmstream" else environments.peer_python(runner, cache)
    folder = Path(cells[0][0].folder).parent
    process = subprocess.Popen(
        [str(python), "-m", f"{environments.RUNNERS}.grid_{runner}", command],
        env={
            **environments.process_variables(),
            "GRID_VARIANT": variant,
            "GRID_SAMPLES": str(NUM_SAMPLES),
            "OMP_NUM_THREADS": "1",
            "HF_HOME": str(folder / "hf"),
            **variables,
        },
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    json.dump([(corpus.folder, cell) for corpus, cell in cells], process.stdin)
    process.stdin.close()
    return process


def finish(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Return a runner's answers, one per cell; if the runner died, the last is an error."""
    with process:
        assert process.stdout is not None
        answers = [json.loads(line) for line in process.stdout]
    if process.returncode:
        answers.append({"error": f"exit code {process.returncode}: the process died"})
    return answers


def report(tallies: dict[str, Tally], cells: Sequence[Cell]) -> None:
    """Print the grid, the versions and the tables."""
    axes = [sorted(set(values)) for values in zip(*cells, strict=True)]
    print(
        f"{len(cells)} cells: shards {axes[0]} x ranks {axes[1]} x workers {axes[2]} x "
        f"bad % {axes[3]}; {NUM_SAMPLES} samples, global batches of 24; "
        f"{os.cpu_count()} cores, Python {platform.python_version()}"
    )
    print("; ".join(environments.version(name) for name in ("webdataset", "datasets")) + "\n")
    print_table(tallies, "ranks one after another")
    print()
    print_by_axis(tallies, cells)


def print_table(tallies: dict[str, Tally], title: str) -> None:
    """Print how many cells passed, per system."""
    print(f"| {title} | equal steps | complete | both | same batches | errors |")
    print("|---|---|---|---|---|---|")
    for name, tally in tallies.items():
        num_passed = tally.num_cells - len(tally.failed)
        errors = ", ".join(f"{count} {kind}" for kind, count in tally.errors.most_common())
        counts = (tally.equal, tally.complete, num_passed, tally.same)
        cells = " | ".join(f"{count} of {tally.num_cells}" for count in counts)
        print(f"| {name} | {cells} | {errors or 0} |")


def print_by_axis(tallies: dict[str, Tally], cells: Sequence[Cell]) -> None:
    """Print the share of cells with equal steps and complete data, per value of each axis."""
    points = [
        (axis, value)
        for axis in ("num_shards", "world_size", "num_workers", "bad_percent")
        for value in sorted({getattr(cell, axis) for cell in cells})
    ]
    units = {"num_shards": "shards", "world_size": "ranks", "num_workers": "workers"}
    heads = " | ".join(f"{value} {units.get(axis, '% bad')}" for axis, value in points)
    print(f"| equal steps and complete, % of cells with | {heads} |")
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
