"""Conversions beside `cp -r` and three other writers: ``python -m tools.bench.convert.speed``.

    python -m tools.bench.convert.speed --peers-python ~/peers/bin/python --pictures photos/

Every system converts the same rows on the same disk, in interleaved rounds; the table has medians.
Each measurement is a new process, and its start and imports count. Two times are taken: until the
process ends, and until the file system has all of its files on the disk (`sync --file-system`).
mmstream has them there when it ends; the others leave that to the kernel.

Peers run with a Python of their own that has webdataset, litdata and mosaicml-streaming. None of
them writes what mmstream writes beside its tars: checksums, an index, a sidecar.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.bench.convert.corpora import Corpus, write_corpus

OURS = ("cp -r", "mmstream", "mmstream, no sidecar")
PEERS = ("wds.ShardWriter", "MDSWriter", "litdata optimize")
SCRIPT = Path(__file__).with_name("systems.py")


class Times(NamedTuple):
    """One conversion."""

    wall_s: float
    durable_s: float
    """With `sync --file-system`."""
    cpu_s: float
    """Not a number with several workers."""


def main() -> None:
    """Write the corpus, let all systems convert it, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=["photos", "megabytes", "texts"], default="photos")
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--pictures", type=Path, required=True, help="a folder of JPEGs")
    parser.add_argument("--system", action="append", choices=OURS[1:] + PEERS, help="only these")
    parser.add_argument("--peers-python", help="a Python that has the peers; without it, none runs")
    parser.add_argument("--folder", type=Path, help="where corpora and outputs lie")
    parser.add_argument("--cold", action="store_true", help="drop the cached media before each run")
    options = parser.parse_args()
    pictures = sorted(options.pictures.glob("*.jpg"))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        corpus = write_corpus(options.folder or Path(folder), options.kind, options.rows, pictures)
        systems = [*OURS, *(PEERS if options.peers_python else ())]
        if options.system:
            systems = [OURS[0], *options.system]
        times: dict[str, list[Times]] = {system: [] for system in systems}
        for number in range(options.rounds):
            for system in systems[number % 2 :] + systems[: number % 2]:
                if options.cold:
                    drop_cache(corpus)
                python = options.peers_python if system in PEERS else sys.executable
                out = Path(folder, "out")
                times[system].append(timed(python, system, corpus, out, options.workers))
                shutil.rmtree(out)
    print(
        f"{corpus.num_rows:,} rows of {options.kind}, {corpus.num_bytes / 1e6:,.0f} MB, "
        f"{'cold' if options.cold else 'warm'} files, {options.workers} worker(s), "
        f"{options.rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}\n"
    )
    report(corpus, times)


def timed(python: str, system: str, corpus: Corpus, out: Path, workers: int) -> Times:
    """Let one system convert the corpus in a new process."""
    words = [python, str(SCRIPT), system, corpus.rows, corpus.media, out, workers]
    # An installed package has its bytecode, and this one is measured as if it were installed.
    variables = {key: os.environ[key] for key in os.environ if key != "PYTHONDONTWRITEBYTECODE"}
    before, started = os.times(), time.perf_counter()
    subprocess.run(list(map(str, words)), check=True, capture_output=True, env=variables)
    wall_s = time.perf_counter() - started
    subprocess.run(["sync", "--file-system", str(out)], check=True)
    durable_s, after = time.perf_counter() - started, os.times()
    cpu_s = after.children_user + after.children_system
    cpu_s -= before.children_user + before.children_system
    # Nobody waits for the workers of a fork server, so the system does not tell their time.
    return Times(wall_s, durable_s, cpu_s if workers == 1 else math.nan)


def drop_cache(corpus: Corpus) -> None:
    """Have the disk read the rows and media again."""
    for path in (corpus.rows, *corpus.media.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def report(corpus: Corpus, times: dict[str, list[Times]]) -> None:
    """Print the medians."""
    print("| system | s | s with sync | CPU s | MB/s | MB/s with sync | of cp | of cp, sync |")
    print("|---|---|---|---|---|---|---|---|")
    copy = median(times["cp -r"])
    for system, runs in times.items():
        wall_s, durable_s, cpu_s = median(runs)
        print(
            f"| {system} | {wall_s:.2f} | {durable_s:.2f} | {cpu_s:.2f} "
            f"| {corpus.num_bytes / 1e6 / wall_s:.0f} | {corpus.num_bytes / 1e6 / durable_s:.0f} "
            f"| {copy.wall_s / wall_s:.0%} | {copy.durable_s / durable_s:.0%} |"
        )


def median(runs: Sequence[Times]) -> Times:
    """Return the median of each time."""
    return Times(*(statistics.median(column) for column in zip(*runs, strict=True)))


if __name__ == "__main__":
    main()
