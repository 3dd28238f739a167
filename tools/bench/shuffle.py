"""How far from a uniform permutation is the order? ``python -m tools.bench.shuffle [--quick]``.

The worst case, a corpus sorted by class, is ordered by mmstream, by webdataset's shard shuffle and
sample buffer, by mosaicml-streaming's py1e and by a true permutation. At "same memory" all hold as
many undecoded samples, over all ranks and workers. The columns:

    held            samples that the windows or buffers hold together
    classes         different classes in a global batch, on the average
    of a rank       the same in rank 0's part of it
    64 steps        the same in 64 consecutive global batches
    shards          different shards in a global batch
    run, longest    consecutive samples of one class in the stream that rank 0 sees: mean, longest
    position        correlation of a sample's place in the epoch with its place in the corpus
    neighbour       correlation of the places in the corpus of a rank's consecutive samples
    together        pairs that share a batch in epoch 0 and again in epoch 1, relative to chance
    read            neighbouring samples that one read fetches
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from tools.bench.shuffle_streams import (
    Corpus,
    Ints,
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
    *({"window": window} for window in (16, 64, 1024, 4096)),
    *({"interleave": places} for places in (1, 4, 8, 16, 32, 64)),
    *({"chunk": chunk} for chunk in (16, 64, 256, 1000)),
    *({"grid": grid} for grid in ((1, 1), (1, 8), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32))),
]
"""What is tried, each alone; the window follows the grid, so that all hold the same."""

COLUMNS = (
    "held",
    "classes",
    "of a rank",
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
    """Print a table for each corpus, and one of mmstream's settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small corpora, a few seconds")
    options = parser.parse_args()
    begin = time.perf_counter()
    corpora = QUICK if options.quick else CORPORA
    for corpus in corpora:
        order = make_order(corpus)
        print(
            f"\n## {corpus.name}: {corpus.num_samples:,} samples of {corpus.num_classes:,} classes"
        )
        print(
            f"\n{corpus.num_shards:,} shards of {corpus.samples_per_shard:,}, "
            f"{corpus.sample_bytes // 1000:,} kB a sample, "
            f"global batch {corpus.global_batch_size}, "
            f"{corpus.world_size} ranks of {corpus.num_workers} workers; {settings_of(order)}; "
            f"classes expected in a batch: {expected_classes(corpus):.1f}\n"
        )
        table((name, held, measure(corpus, stream)) for name, held, stream in systems(corpus))
    corpus = corpora[0]
    print(f"\n## mmstream's settings, each changed alone ({corpus.name})\n")
    table(sweep(corpus))
    print(f"\n{time.perf_counter() - begin:.0f} s, numpy {np.__version__}")


def systems(corpus: Corpus) -> Iterator[tuple[str, int, Callable[[int], Ints]]]:
    """Yield name, samples held and stream by epoch of what is compared."""
    order = make_order(corpus)
    held, workers = held_by(order), corpus.world_size * corpus.num_workers
    yield "true permutation", corpus.num_samples, partial(uniform, corpus)
    yield "mmstream", held, partial(mmstream, corpus, order)
    same = held // workers
    yield "webdataset, same memory", same * workers, partial(webdataset, corpus, same)
    yield "webdataset, 1000 a worker", 1000 * workers, partial(webdataset, corpus, 1000)
    yield "py1e, block of the same size", held, partial(py1e, corpus, held)
    block = min(1 << 22, corpus.num_samples)  # its default, for one node
    yield "py1e, default block, on disk", block, partial(py1e, corpus, 1 << 22)


def sweep(corpus: Corpus) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yield rows of the settings table."""
    for settings in [{}, *SWEEP]:
        order = make_order(corpus, **settings)
        found = measure(corpus, partial(mmstream, corpus, order))
        name = ", ".join(f"{key} {value}" for key, value in settings.items()) or settings_of(order)
        yield name, held_by(order), found | {"read": mean_read(corpus, order, 0)}


def held_by(order: Any) -> int:
    """Return how many samples all windows hold together."""
    found = order.identity()
    lanes = found["grid"][0] * found["grid"][1]
    return int(min(found["window"] * lanes, order.num_samples))


def settings_of(order: Any) -> str:
    """Return the settings of an order in words."""
    found = order.identity()
    grid = tuple(found["grid"])
    return f"grid {grid}, " + ", ".join(
        f"{k} {found[k]}" for k in ("window", "interleave", "chunk")
    )


def measure(corpus: Corpus, stream: Callable[[int], Ints]) -> dict[str, float]:
    """Return the figures of a system's first two epochs."""
    return compare(corpus, stream(0), stream(1))


def compare(corpus: Corpus, first: Ints, second: Ints) -> dict[str, float]:
    """Return the figures of two epochs' streams: [steps, rows] source positions."""
    classes = first * corpus.num_classes // corpus.num_samples
    mine, seen = first[:, : corpus.rows].ravel(), classes[:, : corpus.rows].ravel()
    changes = np.flatnonzero(np.diff(seen)) + 1
    runs = np.diff(np.concatenate([[0], changes, [seen.size]]))
    ids = first.ravel()
    return {
        "classes": distinct(classes),
        "of a rank": distinct(classes[:, : corpus.rows]),
        "64 steps": distinct(classes[: len(classes) // 64 * 64].reshape(-1, 64 * len(first[0]))),
        "shards": distinct(first // corpus.samples_per_shard),
        "run": float(runs.mean()),
        "longest": float(runs.max()),
        "position": float(np.corrcoef(np.arange(ids.size), ids)[0, 1]),
        "neighbour": float(np.corrcoef(mine[1:], mine[:-1])[0, 1]),
        "together": together(corpus.num_samples, first, second),
    }


def distinct(rows: Ints) -> float:
    """Return how many different values a row has, on the average."""
    return float(1 + (np.diff(np.sort(rows, axis=1), axis=1) > 0).sum(axis=1).mean())


def together(num_samples: int, first: Ints, second: Ints) -> float:
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
    """Print rows of (name, held, figures) as markdown."""
    print("| | " + " | ".join(COLUMNS) + " |")
    print("|---|" + "---:|" * len(COLUMNS))
    for name, held, found in rows:
        cells = [f"{held:,}"]
        for column in COLUMNS[1:]:
            value, digits = found.get(column), 0 if column == "longest" else 2
            digits = 1 if column in ("classes", "of a rank", "64 steps", "shards") else digits
            cells.append("" if value is None else f"{value:.{digits}f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
