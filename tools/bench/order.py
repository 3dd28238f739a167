"""What an order of 10^9 samples costs: ``python -m tools.bench.order [--quick]``.

A manifest of 100,000 shards is opened, its order made ready, and the epoch walked from four places,
each in a process of its own: a resume is this and nothing else, whatever was trained before. Rounds
are interleaved; medians are printed, and the peak memory of the process after each stage.
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

PLACES = (0.0, 0.1, 0.5, 0.99)
BATCH = 4096
WALK_S = 1.0
COLUMNS = {
    "open_s": "manifest, s",
    "ready_s": "order, s",
    "first_s": "first refs, s",
    "next_s": "next refs, ms",
    "walked": "M positions/s",
    "open_mb": "MB, open",
    "walk_mb": "MB, walking",
    "both_mb": "MB, next epoch begun",
}

T = TypeVar("T")


def main() -> None:
    """Measure all places, or with --place one of them, in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--samples-per-shard", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1,000 shards, one round")
    parser.add_argument("--place", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--corpus", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.shards, options.rounds = min(options.shards, 1000), 1
    if options.corpus:
        print(json.dumps(measure(options.corpus, options.place)))
        return
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = write_manifest(Path(folder), options.shards, options.samples_per_shard)
        found: dict[float, list[dict[str, float]]] = {place: [] for place in PLACES}
        for _ in range(options.rounds):
            for place in PLACES:
                found[place].append(in_a_process(folder, place))
    print(
        f"{options.shards:,} shards, {options.shards * options.samples_per_shard:,} samples, "
        f"a manifest of {num_bytes / 1e6:.1f} MB; global batch {BATCH:,}; "
        f"medians of {options.rounds}\n"
    )
    report(found)


def write_manifest(folder: Path, num_shards: int, samples_per_shard: int) -> int:
    """Write a manifest without shards; return its bytes."""
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


def in_a_process(corpus: str, place: float) -> dict[str, float]:
    """Run one measurement in a process of its own and return its figures."""
    command = [sys.executable, "-m", "tools.bench.order", "--place", str(place), "--corpus", corpus]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(corpus: str, place: float) -> dict[str, float]:
    """Return what a process that starts at this place of an epoch pays."""
    import mmstream as mm

    found: dict[str, float] = {}
    dataset, found["open_s"] = timed(lambda: mm.open_dataset(corpus))
    found["open_mb"] = peak_mb()
    order, found["ready_s"] = timed(lambda: order_of(dataset))
    epoch, step = 3, int(place * order.steps_per_epoch)
    _, found["first_s"] = timed(lambda: order.refs(epoch, step))
    next_s = timed(lambda: order.refs(epoch, step + 1))[1]
    found["next_s"] = 1e3 * next_s
    begin, walked = time.perf_counter(), 0
    while time.perf_counter() - begin < WALK_S and step + walked < order.steps_per_epoch:
        order.refs(epoch, step + walked)
        walked += 1
    found["walked"] = walked * BATCH / (time.perf_counter() - begin) / 1e6
    found["walk_mb"] = peak_mb()
    order.refs(epoch + 1, 0)  # at an epoch's end, a reader that looks ahead needs both
    found["both_mb"] = peak_mb()
    return found


def order_of(dataset: Any) -> Any:
    """Return the order that a pipeline of this dataset has."""
    import mmstream as mm

    names = [dataset.name_of(shard) for shard in range(dataset.num_shards)]
    return mm.Order.from_counts(
        dataset.counts, global_batch_size=BATCH, names=names, num_bytes=dataset.manifest.num_bytes
    )


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return a result and the seconds it took."""
    begin = time.perf_counter()
    return work(), time.perf_counter() - begin


def peak_mb() -> float:
    """Return the most memory this process had, Python and numpy included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def report(found: dict[float, list[dict[str, float]]]) -> None:
    """Print a row a place, as markdown."""
    print("| place | " + " | ".join(COLUMNS.values()) + " |")
    print("|---|" + "---:|" * len(COLUMNS))
    for place, rounds in found.items():
        cells = []
        for column in COLUMNS:
            value = statistics.median(measured[column] for measured in rounds)
            cells.append(f"{value:.0f}" if column.endswith("_mb") else f"{value:.2f}")
        print(f"| {place:.0%} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
