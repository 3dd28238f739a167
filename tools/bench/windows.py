"""What the default windows cost and how they mix: ``python -m tools.bench.windows [--quick]``.

For samples of 5 kB to 20 MB and batches of 256 to 4,096 rows: the requests that ranks make to a
store, the bytes of all windows, and how many of 1,000 classes a batch shows, and 16 and 64 batches
in a row. The corpora are sorted by class, which is the worst case, and have 4 million samples.
Nothing is read: the figures follow from the real orders. The last table has the defaults of 0.1.

A request reads neighbouring samples of a window that one rank needs: up to 8 MiB, or one sample.
Nothing is read that is not needed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from mmstream import Order
from mmstream.reading.plan import MAX_RUN_BYTES
from mmstream.types import IntArray

NUM_SAMPLES, SAMPLES_PER_SHARD, NUM_CLASSES = 4_000_000, 10_000, 1000
SIZES = (5_000, 20_000, 110_000, 1_000_000, 20_000_000)
BATCHES = (256, 1024, 4096)
FORMER = {"grid": (8, 8), "window": 305, "interleave": 32, "chunk": 64}
"""The defaults of 0.1 for samples of 110 kB, whatever the batch."""
NUM_STEPS = 192
"""Steps that are measured, from the middle of an epoch."""
NUM_WINDOWS = 4096
"""Windows whose requests are counted, at most. Every n-th one may miss the lanes that ranks share:
the orders of the table of ranks have fewer."""


def main() -> None:
    """Print the table of all sizes, and one of numbers of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one size, two batch sizes")
    options = parser.parse_args()
    start = time.perf_counter()
    sizes, batches = ((110_000,), BATCHES[:2]) if options.quick else (SIZES, BATCHES)
    head = (
        "| sample | G | grid, M, K, C | windows, GB | requests/GB on 1 | 8 | 64 ranks "
        "| samples a request | classes of | 16 steps | 64 steps |\n"
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    print(head)
    for sample_bytes in sizes:
        for rows in batches:
            order = make_order(sample_bytes, rows)
            print(f"| {line(sample_bytes, rows, order)} |", flush=True)
    print("\n| ranks | " + " | ".join(f"G = {rows}" for rows in batches) + " |")
    print("|---:|" + "---:|" * len(batches))
    orders_of_batches = [make_order(110_000, rows) for rows in batches]
    for world_size in (1, 3, 8, 12, 48, 64, 96, 128, 256, 512, 1024):
        cells = [
            f"{requests(order, 110_000, world_size)[0]:,.0f}"
            if world_size <= order.global_batch_size
            else ""
            for order in orders_of_batches
        ]
        print(f"| {world_size} | " + " | ".join(cells) + " |", flush=True)
    print(f"\n{head}")
    for rows in batches:
        print(f"| {line(110_000, rows, make_order(110_000, rows, **FORMER))} |", flush=True)
    print(f"\n{time.perf_counter() - start:.0f} s, numpy {np.__version__}")


def make_order(sample_bytes: int, rows: int, **settings: Any) -> Order:
    """Return the order of a corpus of samples of one size. Settings left out are the defaults."""
    return Order.from_counts(
        [SAMPLES_PER_SHARD] * (NUM_SAMPLES // SAMPLES_PER_SHARD),
        global_batch_size=rows,
        num_bytes=NUM_SAMPLES * sample_bytes,
        **settings,
    )


def line(sample_bytes: int, rows: int, order: Order) -> str:
    """Return the cells of an order."""
    identity = order.identity()
    grid = tuple(identity["grid"])
    window = identity["window"]
    held = 0 if window == 1 else grid[0] * grid[1] * window * sample_bytes / 1e9
    per_gb = [requests(order, sample_bytes, world_size) for world_size in (1, 8, 64)]
    classes = steps(order) * NUM_CLASSES // NUM_SAMPLES
    mixing = [distinct(classes, number) for number in (1, 16, 64)]
    cells = [
        f"{sample_bytes // 1000:,} kB",
        f"{rows:,}",
        f"{grid} {window:,} {identity['interleave']} {identity['chunk']}",
        f"{held:.1f}",
        *(f"{number:,.0f}" for number, _ in per_gb),
        f"{per_gb[0][1]:.1f}",
        f"{mixing[0]:.0f} of {uniform(rows):.0f}",
        f"{mixing[1]:.0f}",
        f"{mixing[2]:.0f}",
    ]
    return " | ".join(cells)


def steps(order: Order) -> IntArray:
    """Return int64 [steps, G]: the samples of steps in the middle of an epoch, as ids."""
    first = int(0.4 * order.steps_per_epoch)
    refs = [order.refs(0, first + number) for number in range(NUM_STEPS)]
    return np.stack([shard * SAMPLES_PER_SHARD + index for shard, index, _ in refs])


def distinct(classes: IntArray, num_steps: int) -> float:
    """Return the mean number of different classes in so many steps in a row."""
    rows = classes.reshape(len(classes) // num_steps, -1)
    return float(1 + (np.diff(np.sort(rows, axis=1), axis=1) > 0).sum(axis=1).mean())


def uniform(rows: int) -> float:
    """Return the number of classes that a batch of a uniform permutation shows."""
    return float(NUM_CLASSES * (1 - (1 - 1 / NUM_CLASSES) ** rows))


def requests(order: Order, sample_bytes: int, world_size: int) -> tuple[float, float]:
    """Return the requests for 1 GB of samples, and the samples of a request."""
    first = int(0.4 * order.steps_per_epoch)
    numbers = np.unique(np.concatenate([order.windows(0, first + step) for step in range(32)]))
    chosen = numbers[:: max(1, numbers.size // NUM_WINDOWS)]
    bounds = np.arange(1, world_size) * order.global_batch_size // world_size
    samples_of_range = max(1, MAX_RUN_BYTES // sample_bytes)
    num_requests = num_samples = 0
    for number in chosen.tolist():
        window = order.window(0, number)
        ranks = np.searchsorted(bounds, window.row, side="right")
        ids = window.shard * SAMPLES_PER_SHARD + window.index
        by_rank = np.lexsort((ids, ranks))
        ids, ranks, shards = ids[by_rank], ranks[by_rank], window.shard[by_rank]
        is_next = (np.diff(ids) == 1) & (np.diff(ranks) == 0) & (np.diff(shards) == 0)
        begins = np.flatnonzero(np.concatenate([[True], ~is_next]))
        lengths = np.diff(np.append(begins, ids.size))
        num_requests += int((-(-lengths // samples_of_range)).sum())
        num_samples += ids.size
    return num_requests / (num_samples * sample_bytes / 1e9), num_samples / num_requests


if __name__ == "__main__":
    main()
