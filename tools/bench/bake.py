"""Epochs of a baked dataset beside raw reads of the same shards: ``python -m tools.bench.bake``.

Photographs of 500x375 with captions are baked to pixels and tokens. Then each run is a process that
reads epochs of them:

    baked       ``Decode.baked()``: batches of tensors, as the pipeline made them
    raw         no decoder: the same files as bytes
    source      the pipeline that was baked, from its JPEGs

Runs are interleaved, and the table has medians. Columns: samples/s and CPU time of all processes
per sample, both from the second epoch on; bytes of a sample's files; samples/s as a share of `raw`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from tools.bench.corpus import write_corpus
from tools.bench.loader_report import print_machine
from tools.bench.peers.environments import process_variables
from tools.bench.process_tree import cpu_seconds

if TYPE_CHECKING:  # the run that is measured imports torch by itself
    import mmstream as mm

BATCH_SIZE = 64
ROWS = ("baked", "raw", "source")


def main() -> None:
    """Measure all rows, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="per measurement")
    parser.add_argument("--size", type=int, default=224, help="side of a baked picture in pixels")
    parser.add_argument("--num-workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        row, folder, num_workers, size, seconds = options.run
        print(json.dumps(run(row, Path(folder), int(num_workers), int(size), float(seconds))))
        return
    cells = [(row, workers) for workers in options.num_workers for row in options.rows]
    runs: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        bake_corpus(Path(folder), options.samples, options.size)
        for number in range(options.rounds):
            for row, workers in cells[:: -1 if number % 2 else 1]:
                words = [row, folder, workers, options.size, options.seconds]
                line = subprocess.run(
                    [sys.executable, "-m", "tools.bench.bake", "--run", *map(str, words)],
                    env={**os.environ, **process_variables()},
                    stdout=subprocess.PIPE,
                    check=True,
                    text=True,
                ).stdout.splitlines()[-1]
                runs[row, workers].append(json.loads(line))
                print(f"{number} {row} {workers} {line}", file=sys.stderr, flush=True)
    print_machine()
    print(f"{options.samples:,} samples, pictures of {options.size}, {options.rounds} rounds\n")
    report(runs)


def bake_corpus(folder: Path, num_samples: int, size: int) -> None:
    """Write photographs to ``source``, and what a pipeline makes of them to ``baked``."""
    import mmstream as mm
    from mmstream.dataset.index_tars import index_tars

    (folder / "source").mkdir()
    write_corpus(folder / "source", num_samples)
    index_tars(str(folder / "source"), progress=False)
    mm.bake(pipeline_of("source", folder, size), folder / "baked", progress=False)


def pipeline_of(row: str, folder: Path, size: int) -> mm.Pipeline:
    """Return what a row runs."""
    import mmstream as mm
    from mmstream.train.tokenizer import byte_tokenizer

    decode = None
    if row == "baked":
        decode = mm.Decode.baked()
    elif row == "source":
        decode = mm.Decode(
            image=mm.ImageDecoder(size=size),
            text=mm.TextDecoder(byte_tokenizer(), max_length=128),
        )
    dataset = mm.open_dataset(folder / ("source" if row == "source" else "baked"))
    return mm.Pipeline(dataset, global_batch_size=BATCH_SIZE, decode=decode)


def run(row: str, folder: Path, num_workers: int, size: int, seconds: float) -> dict[str, float]:
    """Take batches of one row in this process, and return its figures."""
    import mmstream as mm

    pipeline = pipeline_of(row, folder, size)
    dataset = pipeline.dataset
    assert isinstance(dataset, mm.Dataset)
    with closing(mm.Loader(pipeline, num_workers=num_workers)) as loader:
        for _ in loader:
            pass
        began, cpu_s, num_samples = time.perf_counter(), cpu_seconds(os.getpid()), 0
        while not num_samples or time.perf_counter() < began + seconds:
            for _ in loader:
                num_samples += BATCH_SIZE
        elapsed_s = time.perf_counter() - began
        return {
            "samples/s": num_samples / elapsed_s,
            "CPU us": (cpu_seconds(os.getpid()) - cpu_s) / num_samples * 1e6,
            "bytes": dataset.manifest.num_bytes / len(dataset),
        }


def report(runs: dict[tuple[str, int], list[dict[str, float]]]) -> None:
    """Print medians, and ratios to raw reads with as many workers."""
    medians = {
        cell: {name: statistics.median(each[name] for each in of_cell) for name in of_cell[0]}
        for cell, of_cell in runs.items()
    }
    print("| | workers | samples/s | to raw | CPU us per sample | to raw | bytes per sample |")
    print("|---|---|---|---|---|---|---|")
    for (row, workers), figures in medians.items():
        raw = medians.get(("raw", workers), figures)
        ratios = [f"{figures[name] / raw[name]:.2f}x" for name in ("samples/s", "CPU us")]
        print(
            f"| {row} | {workers} | {figures['samples/s']:,.0f} | {ratios[0]} | "
            f"{figures['CPU us']:,.0f} | {ratios[1]} | {figures['bytes']:,.0f} |"
        )


if __name__ == "__main__":
    main()
