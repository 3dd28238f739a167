"""Raw samples a second, beside the peers: ``python -m tools.bench.raw --rounds 5``.

The same samples, nothing decoded: as views of the bytes on disk, as ``bytes``, and both again with
one crc32 over every payload. Each system runs in this process' way (no workers) and with worker
processes; its best configuration is what the ratios are to. Rounds are interleaved, every
measurement is a process of its own, medians are printed.
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
    """Measure all systems and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--workers", type=int, default=2)
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
    found: dict[tuple[str, int, str], list[dict[str, float]]] = {cell: [] for cell in cells}
    with tempfile.TemporaryDirectory() as corpus, tempfile.TemporaryDirectory() as made:
        write_corpus(Path(corpus), options.samples)
        for name, python in pythons.items():
            Path(made, name).mkdir()
            call(python, "prepare", name, corpus, str(Path(made, name)))
        for _ in range(options.rounds):
            for name, workers, crc in cells:
                kind = name.split()[0]
                words = [name, str(Path(made, kind)), str(workers), str(options.seconds), crc]
                line = call(pythons[kind], "run", *words).splitlines()[-1]
                found[name, workers, crc].append(json.loads(line))
    versions = ", ".join(version(name) for name in PEERS if name in pythons)
    print(
        f"{options.samples} samples of 48 kB, {options.rounds} rounds of {options.seconds:g} s, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python "
        f"{platform.python_version()}, {versions}\n"
    )
    report(found)


def call(python: str, *words: str) -> str:
    """Run the runner in a system's own environment and return what it printed."""
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


def report(found: dict[tuple[str, int, str], list[dict[str, float]]]) -> None:
    """Print medians, spreads, and ratios to the best peer, as a table."""
    for crc, title in (("", "Raw"), ("crc", "Raw, and a crc32 over every payload")):
        rows = {key[:2]: runs for key, runs in found.items() if key[2] == crc}
        speeds = {
            key: statistics.median(run["samples_per_s"] for run in runs)
            for key, runs in rows.items()
        }
        best = max((speeds[key] for key in rows if key[0] in PEERS), default=0.0)
        print(f"\n{title}:\n")
        print("| | workers | samples/s, median (min-max) | CPU us a sample | to the best peer |")
        print("|---|---|---|---|---|")
        for (name, workers), runs in rows.items():
            each = sorted(run["samples_per_s"] for run in runs)
            spread = f"{each[0]:,.0f}-{each[-1]:,.0f}"
            used = [run["cpu_us"] for run in runs if "cpu_us" in run]
            cpu = f"{statistics.median(used):.1f}" if used else ""
            speed = speeds[name, workers]
            ratio = f"{speed / best:.2f}x" if best else ""
            print(f"| {name} | {workers} | {speed:,.0f} ({spread}) | {cpu} | {ratio} |")


if __name__ == "__main__":
    main()
