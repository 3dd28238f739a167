"""Time to the first batch after a resume: ``python -m tools.bench.resume --rounds 5``.

A fresh process makes its loader, loads a state saved after 0, 10, 50 or 99 % of an epoch, and takes
a batch. The clock runs from after the imports to the first batch; interpreter and imports are
printed apart. All loaders get the same photographs, decode them with the same function (500x375 to
224), make batches of 64 in 2 worker processes and shuffle; those with formats of their own have
theirs. Rounds are interleaved. The first round goes on to the end of the epoch, and what comes is
compared with what an undisturbed epoch brought; so is a resume with 1 worker at half the epoch.

The peers' environments are made at the first run (minutes): see `tools.bench.peers.environments`.
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
    "mmstream": ("mmstream", {"BENCH_START_METHOD": "forkserver"}),
    "mmstream, fork": ("mmstream", {"BENCH_START_METHOD": "fork"}),
    "webdataset + StatefulDataLoader": ("webdataset", {}),
    "energon": ("energon", {}),
    "mosaicml-streaming": ("mosaicml", {}),
    "litdata": ("litdata", {}),
}
"""Row of the table -> its runner, and settings of it. The peers start workers by fork."""


@dataclass
class Found:
    """What was measured of one system."""

    undisturbed: list[list[str]] = field(default_factory=list)
    """Keys of each batch of an epoch that nothing interrupts."""
    seconds: dict[int, list[float]] = field(default_factory=dict)
    """By step: time to the first batch, one a round."""
    rest: dict[int, list[list[str]]] = field(default_factory=dict)
    """By step: the batches from a resume to the end of the epoch."""
    imports: list[float] = field(default_factory=list)

    other_workers: dict[str, Any] = field(default_factory=dict)
    """The line of a resume at half the epoch with 1 worker."""

    def exactness(self) -> str:
        """Say how the batches after the resumes compare with the undisturbed ones."""
        steps = [step for step in self.rest if step]
        first = sum(self.rest[step][0] == self.undisturbed[step] for step in steps)
        whole = sum(self.rest[step] == self.undisturbed[step:] for step in steps)
        return f"{first} of {len(steps)} | {whole} of {len(steps)} | {self.elasticity()}"

    def elasticity(self) -> str:
        """Say what a resume with another number of workers brought."""
        if "error" in self.other_workers:
            return f"refused: {self.other_workers['error'][:90]}"
        due, shown = self.undisturbed[len(self.undisturbed) // 2 :], self.other_workers["batches"]
        if due == shown:
            return "same"
        wanted, got = [Counter(key for batch in part for key in batch) for part in (due, shown)]
        lost, again = (wanted - got).total(), (got - wanted).total()
        return f"{lost} of {wanted.total()} samples lost, {again} again or too early"


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cache", type=Path, default=environments.CACHE, help="folder of the peers"
    )
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="only these; repeat")
    parser.add_argument("--quick", action="store_true", help="one round of a small corpus")
    options = parser.parse_args()
    if options.quick:
        options.samples, options.rounds = 1024, 1
    names = options.system or list(SYSTEMS)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), names, options.samples, options.rounds, options.cache)
    report(found, options)


def measure(
    folder: Path, names: list[str], num_samples: int, num_rounds: int, cache: Path
) -> dict[str, Found]:
    """Write the corpus, run all systems, and return what was found."""
    corpus = folder / "corpus"
    corpus.mkdir()
    write_corpus(corpus, num_samples, samples_per_shard=max(BATCH, num_samples // 8))
    num_steps = num_samples // BATCH
    steps = [int(position * num_steps) for position in POSITIONS]
    found = {name: Found() for name in names}
    for name in names:
        run(name, cache, "prepare", corpus, data_of(folder, name))
        states = folder / f"{name} states"
        states.mkdir()
        walked = run(name, cache, "walk", data_of(folder, name), states, *steps[1:], num_steps)
        found[name].undisturbed = walked["batches"]
    for number in range(num_rounds):
        for step in steps:
            for name in names:
                state = folder / f"{name} states" / f"{step}.pt" if step else "-"
                to_the_end = num_steps - step if number == 0 else 1
                line = run(name, cache, "resume", data_of(folder, name), state, to_the_end)
                found[name].seconds.setdefault(step, []).append(line["seconds"])
                found[name].imports.append(line["imports_s"])
                if number == 0:
                    found[name].rest[step] = line["batches"]
    half = num_steps // 2
    for name in names:
        arguments = data_of(folder, name), folder / f"{name} states" / f"{half}.pt", half
        found[name].other_workers = run(name, cache, "resume", *arguments, num_workers=1)
    return found


def data_of(folder: Path, name: str) -> Path:
    """Return the folder of one system's own data; made when it is not there."""
    path = folder / name.replace(" ", "-")
    path.mkdir(exist_ok=True)
    return path


def run(name: str, cache: Path, *arguments: object, num_workers: int = 2) -> dict[str, Any]:
    """Run a runner's command in its environment and return its line, or its error's last line.

    An error ends the benchmark, but for a resume with other workers than saved the state.
    """
    runner, settings = SYSTEMS[name]
    python = sys.executable if runner == "mmstream" else environments.peer_python(runner, cache)
    module = f"{environments.RUNNERS}.resume_{runner}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        own = {"BENCH_NUM_WORKERS": str(num_workers), "TMPDIR": scratch, **settings}
        done = subprocess.run(
            [str(python), "-m", module, *map(str, arguments)],
            env={**environments.process_variables(), **own, "BENCH_STARTED": str(time.time())},
            capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
    if done.returncode and num_workers != 2:
        return {"error": done.stderr.strip().splitlines()[-1]}
    if done.returncode:
        sys.exit(f"{name}: {' '.join(map(str, arguments))} failed:\n{done.stderr[-3000:]}")
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


def report(found: dict[str, Found], options: argparse.Namespace) -> None:
    """Print the machine, the versions and the table."""
    import torch

    print(
        f"{options.samples} samples of 500x375, {options.rounds} rounds, batches of {BATCH}, "
        f"2 workers, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, warm page cache"
    )
    runners = {SYSTEMS[name][0] for name in found} - {"mmstream"}
    print("; ".join(sorted(environments.version(runner) for runner in runners)) + "\n")
    columns = " | ".join(f"{position:.0%}" for position in POSITIONS)
    print(f"| first batch, s, median (min-max) at | {columns} | same first batch "
          "| same rest of the epoch | rest of the epoch with 1 worker | imports, s |")  # fmt: skip
    print("|---|" + "---|" * (len(POSITIONS) + 4))
    for name, line in found.items():
        cells = [
            f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"
            for times in line.seconds.values()
        ]
        imports = statistics.median(line.imports)
        print(f"| {name} | {' | '.join(cells)} | {line.exactness()} | {imports:.1f} |")


if __name__ == "__main__":
    main()
