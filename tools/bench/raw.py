"""Samples per second without decoding, beside the peers: ``python -m tools.bench.raw --rounds 5``.

All systems read the same samples. mmstream delivers them as views of the mapped files and as
``bytes``. A second table adds a crc32 over every payload. The peers run without and with worker
processes, and ratios are to the best of all these. Every measurement is a new process, rounds are
interleaved, and the tables have medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.bench.corpus import write_corpus
from tools.bench.peers.environments import CACHE, RUNNERS, peer_python, process_variables, version

PEERS = ("webdataset", "mosaicml")
OURS = (
    "mmstream zero_copy",
    "mmstream Loader, zero_copy",
    "mmstream bytes(zero_copy)",
    "mmstream bytes",
)


def main() -> None:
    """Measure all systems and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    parser.add_argument("--workers", type=int, default=2, help="of the peers")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the peers")
    options = parser.parse_args()
    pythons = {"mmstream": sys.executable}
    for name in PEERS:
        try:
            pythons[name] = str(peer_python(name, options.cache))
        except (OSError, SystemExit) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    cells = [(name, 0, crc) for name in OURS for crc in ("", "crc")]
    for name in PEERS:
        if name in pythons:
            cells += [(name, n, crc) for n in (0, options.workers) for crc in ("", "crc")]
    measured: dict[tuple[str, int, str], list[dict[str, float]]] = {cell: [] for cell in cells}
    with tempfile.TemporaryDirectory() as corpus, tempfile.TemporaryDirectory() as prepared:
        write_corpus(Path(corpus), options.samples)
        for name, python in pythons.items():
            Path(prepared, name).mkdir()
            call(python, "prepare", name, corpus, str(Path(prepared, name)))
        for _ in range(options.rounds):
            for name, workers, crc in cells:
                kind = name.split()[0]
                words = [name, str(Path(prepared, kind)), str(workers), str(options.seconds), crc]
                line = call(pythons[kind], "run", *words).splitlines()[-1]
                measured[name, workers, crc].append(json.loads(line))
    versions = ", ".join(version(name) for name in PEERS if name in pythons)
    print(
        f"{options.samples} samples of 48 kB, {options.rounds} rounds of {options.seconds:g} s, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python "
        f"{platform.python_version()}, {versions}\n"
    )
    report(measured)


def call(python: str, *words: str) -> str:
    """Run the runner in a system's environment and return its output."""
    done = subprocess.run(
        [python, "-m", f"{RUNNERS}.raw", *words],
        env=process_variables(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def report(measured: dict[tuple[str, int, str], list[dict[str, float]]]) -> None:
    """Print medians, spreads, and ratios to the best peer, as tables."""
    for crc, title in (("", "Without decoding"), ("crc", "With a crc32 over every payload")):
        rows = {key[:2]: runs for key, runs in measured.items() if key[2] == crc}
        speeds = {
            key: statistics.median(run["samples_per_s"] for run in runs)
            for key, runs in rows.items()
        }
        best = max((speeds[key] for key in rows if key[0] in PEERS), default=0.0)
        print(f"\n{title}:\n")
        print("| | workers | samples/s, median (min-max) | CPU us per sample | to the best peer |")
        print("|---|---|---|---|---|")
        for (name, workers), runs in rows.items():
            each = sorted(run["samples_per_s"] for run in runs)
            spread = f"{each[0]:,.0f}-{each[-1]:,.0f}"
            cpu_us = [run["cpu_us"] for run in runs if "cpu_us" in run]
            cpu = f"{statistics.median(cpu_us):.1f}" if cpu_us else ""
            speed = speeds[name, workers]
            ratio = f"{speed / best:.2f}x" if best else ""
            print(f"| {name} | {workers} | {speed:,.0f} ({spread}) | {cpu} | {ratio} |")


if __name__ == "__main__":
    main()
