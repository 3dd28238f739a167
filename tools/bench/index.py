"""Indexing tars of small samples, beside Energon: ``python -m tools.bench.index --rounds 3``.

Energon's documentation has figures for 400,000 small samples in 40 shards: 40.1 s with 1 worker,
6.5 s with 8. This benchmark lets both index the same tars in interleaved rounds. Every measurement
is a new process, and its start and imports count. If Energon cannot be installed
(`tools.bench.peers.environments`), its rows are left out.

Energon's ``prepare`` also writes a database of keys and files that describe the dataset. With
``--tar-index-only`` it writes offsets only, as mmstream does.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.bench.peers.environments import CACHE, peer_python, process_variables, version

PREPARE = "prepare --non-interactive --no-progress"


def main() -> None:
    """Write the tars, let both systems index them, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=400_000)
    parser.add_argument("--shards", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the peers")
    options = parser.parse_args()
    systems = {
        "mmstream index": [sys.executable, "-m", "mmstream", "index", "--overwrite", "TARS"],
    }
    try:
        tool = str(peer_python("energon", options.cache).parent / "energon")
    except (OSError, SystemExit) as error:
        print(f"energon is left out: {error}\n", file=sys.stderr)
    else:
        workers = ["--num-workers", str(options.workers), "TARS"]
        full = "--split-ratio 1,0,0 --skip-dataset-yaml --force-overwrite"
        systems["energon prepare"] = [tool, *PREPARE.split(), *full.split(), *workers]
        index_only = [tool, *PREPARE.split(), "--tar-index-only", *workers]
        systems["energon prepare --tar-index-only"] = index_only
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = write_tars(Path(folder), options.samples, options.shards)
        for _ in range(options.rounds):
            for name, command in systems.items():
                seconds[name].append(timed(command, folder))
    print(
        f"{options.samples:,} samples in {options.shards} shards, {num_bytes / 1e6:,.0f} MB, "
        f"{options.rounds} rounds, energon with {options.workers} workers, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, {version('energon')}\n"
    )
    report(seconds)


def write_tars(folder: Path, num_samples: int, num_shards: int) -> int:
    """Write tars of samples of two files, about 1 kB together, and return the tars' bytes."""
    from mmstream.tar.writer import TarWriter

    rng = random.Random(0)
    num_bytes = 0
    for shard in range(num_shards):
        with Path(folder, f"shard-{shard:06d}.tar").open("wb") as file:
            writer = TarWriter(file)
            for number in range(
                num_samples * shard // num_shards, num_samples * (shard + 1) // num_shards
            ):
                fields = {"jpg": rng.randbytes(rng.randrange(200, 1000)), "json": b"{}"}
                writer.add(f"{number:09d}", fields)
            writer.close()
            num_bytes += writer.num_bytes
    return num_bytes


def timed(command: list[str], folder: str) -> float:
    """Run a command on the tars and return its seconds."""
    words = [folder if word == "TARS" else word for word in command]
    started = time.perf_counter()
    done = subprocess.run(
        words, env=process_variables(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - started


def report(seconds: dict[str, list[float]]) -> None:
    """Print medians, spreads and ratios as a table."""
    base = statistics.median(seconds["mmstream index"])
    print("| | s, median (min-max) | times mmstream's |")
    print("|---|---|---|")
    for name, runs in seconds.items():
        median = statistics.median(runs)
        spread = f"{min(runs):.2f}-{max(runs):.2f}"
        print(f"| {name} | {median:.2f} ({spread}) | {median / base:.1f}x |")


if __name__ == "__main__":
    main()
