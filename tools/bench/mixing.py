"""How well the order mixes, and what its windows cost: ``python -m tools.bench mixing``.

The corpora are sorted by class, which is the worst case. Nothing is read: all figures follow from
the orders. webdataset's shard shuffle and sample buffer are simulated by the algorithm of version
1.0.2; it reshuffles its shards in each epoch, and its ranks stop together. "Same memory" means that
it holds as many undecoded samples as mmstream, over all ranks and workers. The columns:

    held            samples that fit in all windows or buffers together
    classes         different classes of a global batch, mean
    rank 0          the same, in the rows of rank 0
    64 steps        the same, in 64 global batches in a row
    longest         most samples of one class in a row on rank 0
    position        correlation between a sample's position in the epoch and in the corpus
    neighbour       correlation between the corpus positions of consecutive samples of rank 0
    together        pairs that share a batch in epoch 0 and again in epoch 1, relative to chance

The second table has what the default windows cost. A request reads neighbouring samples that one
rank needs: up to 8 MiB, or one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mmstream import Order
from mmstream.reading.plan import MAX_RUN_BYTES
from mmstream.types import IntArray


@dataclass(frozen=True)
class Corpus:
    """Shards of equal size, sorted by class, and the topology that reads them."""

    num_shards: int
    samples_per_shard: int
    num_classes: int
    sample_bytes: int
    global_batch_size: int
    world_size: int = 1
    num_workers: int = 0
    """Per rank."""

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return self.num_shards * self.samples_per_shard

    @property
    def rows(self) -> int:
        """Rows of a rank in a global batch."""
        return self.global_batch_size // self.world_size

    def order(self, **settings: Any) -> Order:
        """Return mmstream's order. Settings left out are the defaults."""
        return Order.from_counts(
            [self.samples_per_shard] * self.num_shards,
            global_batch_size=self.global_batch_size,
            num_bytes=self.num_samples * self.sample_bytes,
            **settings,
        )

    def ids(self, order: Order, epoch: int, steps: Iterable[int]) -> IntArray:
        """Return int64 [steps, G]: the corpus positions of the samples of some steps."""
        refs = [order.refs(epoch, step) for step in steps]
        return np.stack([shard * self.samples_per_shard + index for shard, index, _ in refs])


MANY_SHARDS = Corpus(1281, 1000, 1000, 110_000, 256, world_size=8, num_workers=4)
HUGE_SHARDS = Corpus(8, 125_000, 1000, 110_000, 256, world_size=4, num_workers=2)
COST_CORPUS = Corpus(400, 10_000, 1000, 110_000, 256)
COST_STEPS = 192
"""Steps whose classes are counted, from the middle of an epoch."""
COLUMNS = ("classes", "rank 0", "64 steps", "longest", "position", "neighbour", "together")


def tables() -> None:
    """Print both tables. This takes a minute."""
    print(f"\n| | held | {' | '.join(COLUMNS)} |\n|---|{'---:|' * (1 + len(COLUMNS))}")
    for title, corpus in {"": MANY_SHARDS, "huge shards: ": HUGE_SHARDS}.items():
        order = corpus.order()
        num_workers = corpus.world_size * corpus.num_workers
        buffer = num_held(order) // num_workers
        systems: tuple[tuple[str, int, Callable[[int], IntArray]], ...] = (
            ("true permutation", corpus.num_samples, partial(uniform, corpus)),
            (f"mmstream, {settings_of(order)}", num_held(order), partial(mmstream, corpus, order)),
            ("webdataset, same memory", buffer * num_workers, partial(webdataset, corpus, buffer)),
        )
        for name, held, stream in systems:
            figures = compare(corpus, stream(0), stream(1))
            cells = [f"{held:,}", *(f"{figures[column]:.2f}" for column in COLUMNS)]
            print(f"| {title}{name} | {' | '.join(cells)} |", flush=True)
    print(
        "\n| sample | G | grid, M, K, C | windows, GB | requests/GB on 1 | 12 | 64 ranks "
        "| classes of | 64 steps |\n|---:|---:|---|---:|---:|---:|---:|---:|---:|"
    )
    for sample_bytes in (5_000, 20_000, 110_000, 1_000_000):
        for rows in (256, 4096):
            corpus = replace(COST_CORPUS, sample_bytes=sample_bytes, global_batch_size=rows)
            print(f"| {cost_line(corpus)} |", flush=True)


def num_held(order: Order) -> int:
    """Return how many samples fit in all windows together."""
    settings = order.identity()
    num_lanes = settings["grid"][0] * settings["grid"][1]
    return int(min(settings["window"] * num_lanes, order.num_samples))


def settings_of(order: Order) -> str:
    """Return the grid, the window, the interleaved places and the chunk of an order."""
    settings = order.identity()
    numbers = (f"{settings[name]:,}" for name in ("window", "interleave", "chunk"))
    return f"{tuple(settings['grid'])} {' '.join(numbers)}"


def mmstream(corpus: Corpus, order: Order, epoch: int) -> IntArray:
    """Return an epoch of mmstream's order: int64 [steps, G] corpus positions."""
    return corpus.ids(order, epoch, range(order.steps_per_epoch))


def uniform(corpus: Corpus, epoch: int) -> IntArray:
    """Return an epoch of a true permutation."""
    ids = np.random.default_rng((7, epoch)).permutation(corpus.num_samples)
    num_full = ids.size // corpus.global_batch_size * corpus.global_batch_size
    return ids[:num_full].reshape(-1, corpus.global_batch_size)


def webdataset(corpus: Corpus, buffer: int, epoch: int) -> IntArray:
    """Return an epoch of webdataset: shards go to ranks and workers, samples through a buffer.

    Args:
        corpus: has at least one shard for each worker of each rank.
        buffer: samples in the buffer of one worker, `shuffle(buffer)`.
        epoch: seeds both shuffles.
    """
    ranks = []
    for rank in range(corpus.world_size):
        batches: list[tuple[int, int, IntArray]] = []
        for worker in range(corpus.num_workers):
            rng = np.random.default_rng((epoch, rank, worker))
            shards = range(rank, corpus.num_shards, corpus.world_size)[worker :: corpus.num_workers]
            samples = (
                shard * corpus.samples_per_shard + index
                for shard in buffered(shards, 100, rng)
                for index in range(corpus.samples_per_shard)
            )
            ids = np.fromiter(buffered(samples, buffer, rng), np.int64)
            whole = ids[: ids.size // corpus.rows * corpus.rows].reshape(-1, corpus.rows)
            batches += [(number, worker, batch) for number, batch in enumerate(whole)]
        batches.sort(key=lambda entry: entry[:2])  # a DataLoader takes from its workers in turn
        ranks.append([batch for _, _, batch in batches])
    return np.stack([np.concatenate(step) for step in zip(*ranks, strict=False)])


def buffered(source: Iterable[int], size: int, rng: np.random.Generator) -> Iterator[int]:
    """Yield items in random order from a buffer, from its first 100 items on.

    Until the buffer is full, it takes two items for each item that it yields.
    """
    source = iter(source)
    held: list[int] = []
    draws = uniforms(rng)

    def draw() -> int:
        index = int(next(draws) * len(held))
        held[index], held[-1] = held[-1], held[index]
        return held.pop()

    for item in source:
        held.append(item)
        if len(held) < size:
            held.extend([second for second in [next(source, None)] if second is not None])
        if len(held) >= min(100, size):
            yield draw()
    while held:
        yield draw()


def uniforms(rng: np.random.Generator) -> Iterator[float]:
    """Yield numbers in [0, 1)."""
    while True:
        yield from rng.random(4096).tolist()


def compare(corpus: Corpus, first: IntArray, second: IntArray) -> dict[str, float]:
    """Return the figures of two epochs, each [steps, G] corpus positions."""
    classes = first * corpus.num_classes // corpus.num_samples
    rank_ids = first[:, : corpus.rows].ravel()
    changes = np.flatnonzero(np.diff(classes[:, : corpus.rows].ravel())) + 1
    runs = np.diff(np.concatenate([[0], changes, [rank_ids.size]]))
    return {
        "classes": distinct(classes, 1),
        "rank 0": distinct(classes[:, : corpus.rows], 1),
        "64 steps": distinct(classes, 64),
        "longest": float(runs.max()),
        "position": float(np.corrcoef(np.arange(first.size), first.ravel())[0, 1]),
        "neighbour": float(np.corrcoef(rank_ids[1:], rank_ids[:-1])[0, 1]),
        "together": together(corpus.num_samples, first, second),
    }


def distinct(classes: IntArray, num_steps: int) -> float:
    """Return the mean number of different classes in so many steps in a row."""
    whole = classes[: len(classes) // num_steps * num_steps]
    rows = whole.reshape(-1, num_steps * classes.shape[1])
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


def expected_classes(num_classes: int, rows: int) -> float:
    """Return the number of classes that a batch of a true permutation shows."""
    return float(num_classes * (1 - (1 - 1 / num_classes) ** rows))


def cost_line(corpus: Corpus) -> str:
    """Return the cells of a corpus in the table of costs."""
    order = corpus.order()
    first = int(0.4 * order.steps_per_epoch)
    ids = corpus.ids(order, 0, range(first, first + COST_STEPS))
    classes = ids * corpus.num_classes // corpus.num_samples
    expected = expected_classes(corpus.num_classes, corpus.global_batch_size)
    cells = [
        f"{corpus.sample_bytes // 1000:,} kB",
        f"{corpus.global_batch_size:,}",
        settings_of(order),
        f"{num_held(order) * corpus.sample_bytes / 1e9:.1f}",
        *(f"{requests(corpus, order, world_size):,.0f}" for world_size in (1, 12, 64)),
        f"{distinct(classes, 1):.0f} of {expected:.0f}",
        f"{distinct(classes, 64):.0f}",
    ]
    return " | ".join(cells)


def requests(corpus: Corpus, order: Order, world_size: int) -> float:
    """Return the requests for 1 GB of samples that all ranks make together."""
    first = int(0.4 * order.steps_per_epoch)
    numbers = np.unique(np.concatenate([order.windows(0, first + step) for step in range(32)]))
    bounds = np.arange(1, world_size) * order.global_batch_size // world_size
    samples_of_range = max(1, MAX_RUN_BYTES // corpus.sample_bytes)
    num_requests = num_samples = 0
    for number in numbers.tolist():
        window = order.window(0, number)
        ranks = np.searchsorted(bounds, window.row, side="right")
        ids = window.shard * corpus.samples_per_shard + window.index
        by_rank = np.lexsort((ids, ranks))
        ids, ranks, shards = ids[by_rank], ranks[by_rank], window.shard[by_rank]
        is_next = (np.diff(ids) == 1) & (np.diff(ranks) == 0) & (np.diff(shards) == 0)
        begins = np.flatnonzero(np.concatenate([[True], ~is_next]))
        lengths = np.diff(np.append(begins, ids.size))
        num_requests += int((-(-lengths // samples_of_range)).sum())
        num_samples += ids.size
    return num_requests / (num_samples * corpus.sample_bytes / 1e9)
