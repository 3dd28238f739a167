"""How far is the order from a uniform permutation? ``python -m tools.bench.shuffle [--quick]``.

The corpus is sorted by class, which is the worst case. It is ordered by mmstream, by webdataset's
shard shuffle and sample buffer, by mosaicml-streaming's py1e, and by a true permutation. In rows
with "same memory", a system holds as many undecoded samples as mmstream, over all ranks and
workers. The columns:

    held            samples that fit in all windows or buffers together
    classes         different classes per global batch, mean
    rank 0          the same, in the rows of rank 0
    64 steps        the same, in 64 consecutive global batches
    shards          different shards per global batch, mean
    run, longest    consecutive samples of one class on rank 0: mean and longest
    position        correlation between a sample's position in the epoch and in the corpus
    neighbour       correlation between the corpus positions of consecutive samples of rank 0
    together        pairs that share a batch in epoch 0 and again in epoch 1, relative to chance
    read            neighbouring samples per read
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from mmstream.types import IntArray
from tools.bench.shuffle_streams import (
    Corpus,
    make_order,
    mean_read,
    mmstream,
    py1e,
    uniform,
    webdataset,
)

CORPORA = [
    Corpus("many shards", 1281, 1000, 1000, 110_000, 256, world_size=8, num_workers=4),
    Corpus("few huge shards", 8, 125_000, 1000, 110_000, 256, world_size=4, num_workers=2),
    Corpus("small", 20, 500, 100, 60_000, 64, world_size=2, num_workers=2),
]
QUICK = [
    Corpus("many shards, quick", 100, 1000, 100, 1_000_000, 256, world_size=8, num_workers=4),
    CORPORA[-1],
]
SWEEP: list[dict[str, Any]] = [
    *({"window_bytes": 1 << exponent} for exponent in (28, 30, 32, 33, 34)),
    *({"interleave": interleave} for interleave in (1, 4, 16, 32)),
    *({"chunk": chunk} for chunk in (38, 76, 304, 1000)),
    *({"grid": grid} for grid in ((1, 8), (1, 32), (1, 128), (1, 256), (8, 8))),
]
"""Each is used alone. The default window depends on the grid, so that all grids hold as many
samples."""

COLUMNS = (
    "held",
    "classes",
    "rank 0",
    "64 steps",
    "shards",
    "run",
    "longest",
    "position",
    "neighbour",
    "together",
    "read",
)


def main() -> None:
    """Print a table for each corpus, and a table of mmstream's settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small corpora, a few seconds")
    options = parser.parse_args()
    start = time.perf_counter()
    corpora = QUICK if options.quick else CORPORA
    for corpus in corpora:
        order = make_order(corpus)
        print(
            f"\n## {corpus.name}: {corpus.num_samples:,} samples of {corpus.num_classes:,} classes"
        )
        print(
            f"\n{corpus.num_shards:,} shards of {corpus.samples_per_shard:,}, "
            f"{corpus.sample_bytes // 1000:,} kB per sample, "
            f"global batch {corpus.global_batch_size}, "
            f"{corpus.world_size} ranks of {corpus.num_workers} workers; {settings_of(order)}; "
            f"classes expected in a batch: {expected_classes(corpus):.1f}\n"
        )
        table((name, held, measure(corpus, stream)) for name, held, stream in systems(corpus))
    corpus = corpora[0]
    print(f"\n## mmstream's settings, each changed alone ({corpus.name})\n")
    table(sweep(corpus))
    print(f"\n{time.perf_counter() - start:.0f} s, numpy {np.__version__}")


def systems(corpus: Corpus) -> Iterator[tuple[str, int, Callable[[int], IntArray]]]:
    """Yield (name, held samples, function from an epoch to its stream) of each system."""
    order = make_order(corpus)
    held = num_held(order)
    num_workers = corpus.world_size * corpus.num_workers
    yield "true permutation", corpus.num_samples, partial(uniform, corpus)
    yield "mmstream", held, partial(mmstream, corpus, order)
    buffer = held // num_workers
    yield "webdataset, same memory", buffer * num_workers, partial(webdataset, corpus, buffer)
    yield "webdataset, 1000 per worker", 1000 * num_workers, partial(webdataset, corpus, 1000)
    yield "py1e, block of the same size", held, partial(py1e, corpus, held)
    block = min(1 << 22, corpus.num_samples)  # its default, for one node
    yield "py1e, default block, on disk", block, partial(py1e, corpus, 1 << 22)


def sweep(corpus: Corpus) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yield (name, held samples, figures) of mmstream with different settings."""
    for settings in [{}, *SWEEP]:
        order = make_order(corpus, **settings)
        figures = measure(corpus, partial(mmstream, corpus, order))
        name = ", ".join(f"{key} {value}" for key, value in settings.items()) or settings_of(order)
        yield name, num_held(order), figures | {"read": mean_read(corpus, order, 0)}


def num_held(order: Any) -> int:
    """Return how many samples fit in all windows together."""
    settings = order.identity()
    num_lanes = settings["grid"][0] * settings["grid"][1]
    return int(min(settings["window"] * num_lanes, order.num_samples))


def settings_of(order: Any) -> str:
    """Return the settings of an order as text."""
    settings = order.identity()
    numbers = ", ".join(f"{name} {settings[name]}" for name in ("window", "interleave", "chunk"))
    return f"grid {tuple(settings['grid'])}, {numbers}"


def measure(corpus: Corpus, stream: Callable[[int], IntArray]) -> dict[str, float]:
    """Return the figures of a system's first two epochs."""
    return compare(corpus, stream(0), stream(1))


def compare(corpus: Corpus, first: IntArray, second: IntArray) -> dict[str, float]:
    """Return the figures of the streams of two epochs, each [steps, rows] corpus positions."""
    classes = first * corpus.num_classes // corpus.num_samples
    rank_ids = first[:, : corpus.rows].ravel()
    rank_classes = classes[:, : corpus.rows].ravel()
    changes = np.flatnonzero(np.diff(rank_classes)) + 1
    runs = np.diff(np.concatenate([[0], changes, [rank_classes.size]]))
    ids = first.ravel()
    return {
        "classes": distinct(classes),
        "rank 0": distinct(classes[:, : corpus.rows]),
        "64 steps": distinct(classes[: len(classes) // 64 * 64].reshape(-1, 64 * len(first[0]))),
        "shards": distinct(first // corpus.samples_per_shard),
        "run": float(runs.mean()),
        "longest": float(runs.max()),
        "position": float(np.corrcoef(np.arange(ids.size), ids)[0, 1]),
        "neighbour": float(np.corrcoef(rank_ids[1:], rank_ids[:-1])[0, 1]),
        "together": together(corpus.num_samples, first, second),
    }


def distinct(rows: IntArray) -> float:
    """Return the mean number of different values per row."""
    return float(1 + (np.diff(np.sort(rows, axis=1), axis=1) > 0).sum(axis=1).mean())


def together(num_samples: int, first: IntArray, second: IntArray) -> float:
    """Return how often pairs share a batch in both epochs, relative to independent permutations."""
    batch = np.full((2, num_samples), -1, dtype=np.int64)
    for epoch, stream in enumerate((first, second)):
        batch[epoch, stream.ravel()] = np.repeat(np.arange(len(stream)), stream.shape[1])
    both = batch[0] * len(second) + batch[1]
    _, sizes = np.unique(both[(batch >= 0).all(axis=0)], return_counts=True)
    pairs = [
        len(stream) * stream.shape[1] * (stream.shape[1] - 1) / 2 for stream in (first, second)
    ]
    chance = pairs[0] * pairs[1] / (num_samples * (num_samples - 1) / 2)
    return float((sizes * (sizes - 1) / 2).sum() / chance)


def expected_classes(corpus: Corpus) -> float:
    """Return the expected number of classes in a batch of a uniform permutation."""
    total, size = corpus.num_samples, corpus.num_samples // corpus.num_classes
    drawn = np.arange(corpus.global_batch_size)
    return float(corpus.num_classes * (1 - np.prod((total - size - drawn) / (total - drawn))))


def table(rows: Any) -> None:
    """Print rows of (name, held samples, figures) as a table in Markdown."""
    print("| | " + " | ".join(COLUMNS) + " |")
    print("|---|" + "---:|" * len(COLUMNS))
    digits = {"longest": 0, "classes": 1, "rank 0": 1, "64 steps": 1, "shards": 1}
    for name, held, figures in rows:
        cells = [f"{held:,}"]
        for column in COLUMNS[1:]:
            value = figures.get(column)
            cells.append("" if value is None else f"{value:.{digits.get(column, 2)}f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
