"""CPU time and memory of an order over 10^9 samples: ``python -m tools.bench.order [--quick]``.

Opens a manifest of 100,000 shards, prepares its order, and walks the epoch from four positions,
each in a new process. A resume does the same work, and it does not depend on earlier training.
Rounds are interleaved. The table has medians, and peak memory of the process after each stage.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

POSITIONS = (0.0, 0.1, 0.5, 0.99)
"""Fractions of the epoch."""
BATCH = 4096
WALK_S = 1.0
"""CPU seconds."""
COLUMNS = {
    "open_s": "manifest, s",
    "ready_s": "order, s",
    "first_s": "first refs, s",
    "next_ms": "next refs, ms",
    "rate": "M samples/s",
    "open_mb": "MB, open",
    "walk_mb": "MB, walking",
    "both_mb": "MB, next epoch started",
}

T = TypeVar("T")


def main() -> None:
    """Measure all positions, or with --position a single one in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--samples-per-shard", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1,000 shards, one round")
    parser.add_argument("--reshuffle", choices=["global", "lanes"], default="global")
    parser.add_argument("--position", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--corpus", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.shards, options.rounds = min(options.shards, 1000), 1
    if options.corpus:
        print(json.dumps(measure(options.corpus, options.position, options.reshuffle)))
        return
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = write_manifest(Path(folder), options.shards, options.samples_per_shard)
        runs: dict[float, list[dict[str, float]]] = {position: [] for position in POSITIONS}
        for _ in range(options.rounds):
            for position in POSITIONS:
                runs[position].append(run_process(folder, position, options.reshuffle))
    print(
        f"{options.shards:,} shards, {options.shards * options.samples_per_shard:,} samples, "
        f"a manifest of {num_bytes / 1e6:.1f} MB; global batch {BATCH:,}; "
        f"medians of {options.rounds}\n"
    )
    report(runs)


def write_manifest(folder: Path, num_shards: int, samples_per_shard: int) -> int:
    """Write a manifest without its shards and return its size in bytes."""
    from mmstream.dataset.manifest import MANIFEST_NAME, Manifest, ShardInfo

    shards = tuple(
        ShardInfo(
            f"shard-{number:06d}.tar",
            samples_per_shard,
            samples_per_shard * 110_000,
            hashlib.sha256(b"%d" % number).hexdigest(),
        )
        for number in range(num_shards)
    )
    total = num_shards * samples_per_shard
    data = Manifest(shards, {"jpg": total, "json": total}).to_bytes()
    (folder / MANIFEST_NAME).write_bytes(data)
    return len(data)


def run_process(corpus: str, position: float, reshuffle: Any) -> dict[str, float]:
    """Run one measurement in a new process and return its figures."""
    command = [sys.executable, "-m", "tools.bench.order"]
    command += ["--position", str(position), "--corpus", corpus, "--reshuffle", reshuffle]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def measure(corpus: str, position: float, reshuffle: Any) -> dict[str, float]:
    """Return the figures of a process that starts at this position of an epoch."""
    import mmstream as mm

    figures: dict[str, float] = {}
    dataset, figures["open_s"] = timed(lambda: mm.open_dataset(corpus))
    figures["open_mb"] = peak_mb()
    order, figures["ready_s"] = timed(lambda: make_order(dataset, reshuffle))
    epoch = 3
    step = int(position * order.steps_per_epoch)
    _, figures["first_s"] = timed(lambda: order.refs(epoch, step))
    next_s = timed(lambda: order.refs(epoch, step + 1))[1]
    figures["next_ms"] = 1e3 * next_s
    start = time.process_time()
    num_steps = 0
    while time.process_time() - start < WALK_S and step + num_steps < order.steps_per_epoch:
        order.refs(epoch, step + num_steps)
        num_steps += 1
    figures["rate"] = num_steps * BATCH / (time.process_time() - start) / 1e6
    figures["walk_mb"] = peak_mb()
    order.refs(epoch + 1, 0)  # at the end of an epoch, a reader that reads ahead needs both
    figures["both_mb"] = peak_mb()
    return figures


def make_order(dataset: Any, reshuffle: Any) -> Any:
    """Return the order of a pipeline over this dataset."""
    import mmstream as mm

    names = [dataset.name_of(shard) for shard in range(dataset.num_shards)]
    return mm.Order.from_counts(
        dataset.counts,
        global_batch_size=BATCH,
        names=names,
        num_bytes=dataset.manifest.num_bytes,
        reshuffle=reshuffle,
    )


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return a function's result and its CPU seconds."""
    start = time.process_time()
    return work(), time.process_time() - start


def peak_mb() -> float:
    """Return the peak memory of this process in MB, with Python and numpy."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def report(runs: dict[float, list[dict[str, float]]]) -> None:
    """Print one row per position, as a table in Markdown."""
    print("| position | " + " | ".join(COLUMNS.values()) + " |")
    print("|---|" + "---:|" * len(COLUMNS))
    for position, rounds in runs.items():
        cells = []
        for column in COLUMNS:
            value = statistics.median(figures[column] for figures in rounds)
            cells.append(f"{value:.0f}" if column.endswith("_mb") else f"{value:.2f}")
        print(f"| {position:.0%} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
