"""Time to the first batch after a resume: ``python -m tools.bench.resume --rounds 5``.

A new process makes its loader, loads a state that was saved after 0, 10, 50 or 99 % of an epoch,
and takes a batch. The time runs from the end of the imports to the first batch. Imports have a
column of their own. All loaders shuffle the same photographs, decode them with the same function
(500x375 to 224), and make batches of 64 in 2 worker processes. Loaders with their own file format
use it. Rounds are interleaved.

The first round continues to the end of the epoch, and its batches are compared with those of an
uninterrupted epoch. The same is done for a resume with 1 worker in the middle of the epoch.

The first run installs the peers (minutes): `tools.bench.peers.environments`.
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
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.corpus import write_corpus
from tools.bench.peers import environments

BATCH = 64
POSITIONS = (0.0, 0.1, 0.5, 0.99)
SYSTEMS: dict[str, tuple[str, dict[str, str]]] = {
    "mmstream": ("mmstream", {"BENCH_CONTEXT": "forkserver"}),
    "mmstream, fork": ("mmstream", {"BENCH_CONTEXT": "fork"}),
    "webdataset + StatefulDataLoader": ("webdataset", {}),
    "energon": ("energon", {}),
    "mosaicml-streaming": ("mosaicml", {}),
    "litdata": ("litdata", {}),
}
"""Row of the table -> its runner and the runner's variables. The peers start workers by fork."""


@dataclass
class Measurements:
    """The measurements of one system."""

    uninterrupted: list[list[str]] = field(default_factory=list)
    """Keys of each batch of an uninterrupted epoch."""
    seconds: dict[int, list[float]] = field(default_factory=dict)
    """Step -> time to the first batch, per round."""
    rest: dict[int, list[list[str]]] = field(default_factory=dict)
    """Step -> keys of the batches from a resume to the end of the epoch."""
    imports: list[float] = field(default_factory=list)
    """Seconds, per run."""

    other_workers: dict[str, Any] = field(default_factory=dict)
    """The runner's answer for a resume in the middle of the epoch with 1 worker."""

    def exactness(self) -> str:
        """Compare the batches after the resumes with the uninterrupted epoch, as table cells."""
        steps = [step for step in self.rest if step]
        same_first = sum(self.rest[step][0] == self.uninterrupted[step] for step in steps)
        same_rest = sum(self.rest[step] == self.uninterrupted[step:] for step in steps)
        return f"{same_first} of {len(steps)} | {same_rest} of {len(steps)} | {self.elasticity()}"

    def elasticity(self) -> str:
        """Compare the batches after a resume with another number of workers."""
        if "error" in self.other_workers:
            return f"refused: {self.other_workers['error'][:90]}"
        expected = self.uninterrupted[len(self.uninterrupted) // 2 :]
        delivered = self.other_workers["batches"]
        if expected == delivered:
            return "same"
        expected_keys = Counter(key for batch in expected for key in batch)
        delivered_keys = Counter(key for batch in delivered for key in batch)
        num_lost = (expected_keys - delivered_keys).total()
        num_wrong = (delivered_keys - expected_keys).total()
        return f"{num_lost} of {expected_keys.total()} samples lost, {num_wrong} again or too early"


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cache", type=Path, default=environments.CACHE, help="folder of the peers"
    )
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="only these; repeat")
    parser.add_argument("--quick", action="store_true", help="one round with few samples")
    options = parser.parse_args()
    if options.quick:
        options.samples, options.rounds = 1024, 1
    names = options.system or list(SYSTEMS)
    with tempfile.TemporaryDirectory() as folder:
        systems = measure(Path(folder), names, options.samples, options.rounds, options.cache)
    report(systems, options)


def measure(
    folder: Path, names: list[str], num_samples: int, num_rounds: int, cache: Path
) -> dict[str, Measurements]:
    """Write the corpus, run all systems, and return the measurements of each."""
    corpus = folder / "corpus"
    corpus.mkdir()
    write_corpus(corpus, num_samples, samples_per_shard=max(BATCH, num_samples // 8))
    num_steps = num_samples // BATCH
    steps = [int(position * num_steps) for position in POSITIONS]
    systems = {name: Measurements() for name in names}
    for name in names:
        run(name, cache, "prepare", corpus, data_folder(folder, name))
        states = folder / f"{name} states"
        states.mkdir()
        epoch = run(name, cache, "walk", data_folder(folder, name), states, *steps[1:], num_steps)
        systems[name].uninterrupted = epoch["batches"]
    for number in range(num_rounds):
        for step in steps:
            for name in names:
                state = folder / f"{name} states" / f"{step}.pt" if step else "-"
                num_batches = num_steps - step if number == 0 else 1
                answer = run(name, cache, "resume", data_folder(folder, name), state, num_batches)
                systems[name].seconds.setdefault(step, []).append(answer["seconds"])
                systems[name].imports.append(answer["imports_s"])
                if number == 0:
                    systems[name].rest[step] = answer["batches"]
    half = num_steps // 2
    for name in names:
        arguments = data_folder(folder, name), folder / f"{name} states" / f"{half}.pt", half
        systems[name].other_workers = run(name, cache, "resume", *arguments, num_workers=1)
    return systems


def data_folder(folder: Path, name: str) -> Path:
    """Return the folder of one system's data, and create it if necessary."""
    path = folder / name.replace(" ", "-")
    path.mkdir(exist_ok=True)
    return path


def run(name: str, cache: Path, *arguments: object, num_workers: int = 2) -> dict[str, Any]:
    """Run a runner's command in its environment and return its answer.

    An error ends the benchmark. Only in a resume with another number of workers the last line of
    the error is the answer.
    """
    runner, settings = SYSTEMS[name]
    python = sys.executable if runner == "mmstream" else environments.peer_python(runner, cache)
    module = f"{environments.RUNNERS}.resume_{runner}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        own = {"BENCH_NUM_WORKERS": str(num_workers), "TMPDIR": scratch, **settings}
        done = subprocess.run(
            [str(python), "-m", module, *map(str, arguments)],
            env={**environments.process_variables(), **own, "BENCH_STARTED": str(time.time())},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    if done.returncode and num_workers != 2:
        return {"error": done.stderr.strip().splitlines()[-1]}
    if done.returncode:
        sys.exit(f"{name}: {' '.join(map(str, arguments))} failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def report(systems: dict[str, Measurements], options: argparse.Namespace) -> None:
    """Print the machine, the versions and the table."""
    import torch

    print(
        f"{options.samples} samples of 500x375, {options.rounds} rounds, batches of {BATCH}, "
        f"2 workers, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, warm page cache"
    )
    runners = {SYSTEMS[name][0] for name in systems} - {"mmstream"}
    print("; ".join(sorted(environments.version(runner) for runner in runners)) + "\n")
    columns = " | ".join(f"{position:.0%}" for position in POSITIONS)
    print(
        f"| first batch, s, median (min-max) at | {columns} | same first batch "
        "| same rest of the epoch | rest of the epoch with 1 worker | imports, s |"
    )
    print("|---|" + "---|" * (len(POSITIONS) + 4))
    for name, system in systems.items():
        cells = [
            f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"
            for times in system.seconds.values()
        ]
        imports = statistics.median(system.imports)
        print(f"| {name} | {' | '.join(cells)} | {system.exactness()} | {imports:.1f} |")


if __name__ == "__main__":
    main()
