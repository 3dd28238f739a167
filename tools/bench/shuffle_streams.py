"""The streams that `tools.bench.shuffle` measures: epochs in the order of different systems.

A stream is int64 [steps, global_batch_size]: the source position of each sample in the order of
delivery; rank r has columns [r*B, (r+1)*B). Nothing is read: orders are compared, not readers.

webdataset and py1e are simulated, with the published algorithm and in favour of the other side
wherever there is a choice: webdataset shuffles its shards anew each epoch (as with
`detshuffle=True`), and steps end with the shortest rank instead of hanging.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmstream import Order

__all__ = ["Corpus", "make_order", "mean_read", "mmstream", "py1e", "uniform", "webdataset"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Corpus:
    """Shards of equal size, sorted by class, and who reads them."""

    name: str
    num_shards: int
    samples_per_shard: int
    num_classes: int
    sample_bytes: int
    global_batch_size: int
    world_size: int
    num_workers: int
    """Of each rank."""

    @property
    def num_samples(self) -> int:
        """Samples over all shards."""
        return self.num_shards * self.samples_per_shard

    @property
    def rows(self) -> int:
        """Samples of a rank's part of a step."""
        return self.global_batch_size // self.world_size

    def steps(self, ids: Ints) -> Ints:
        """Cut one long stream into full steps."""
        whole = ids.size // self.global_batch_size * self.global_batch_size
        return ids[:whole].reshape(-1, self.global_batch_size)


def make_order(corpus: Corpus, **settings: Any) -> Order:
    """Return mmstream's order of a corpus; settings as of `Order.from_counts`."""
    return Order.from_counts(
        [corpus.samples_per_shard] * corpus.num_shards,
        global_batch_size=corpus.global_batch_size,
        num_bytes=corpus.num_samples * corpus.sample_bytes,
        **settings,
    )


def mmstream(corpus: Corpus, order: Order, epoch: int) -> Ints:
    """Return what `order.refs` says, step by step."""
    steps = []
    for step in range(order.steps_per_epoch):
        shard, index, _ = order.refs(epoch, step)
        steps.append(shard * corpus.samples_per_shard + index)
    return np.stack(steps)


def mean_read(corpus: Corpus, order: Order, epoch: int) -> float:
    """Return how many neighbouring samples one read fetches when a window is read at once."""
    steps = range(order.steps_per_epoch)
    windows = np.concatenate([order.windows(epoch, step) for step in steps])
    ids = mmstream(corpus, order, epoch).ravel()
    sort = np.lexsort((ids, windows))
    ids, windows = ids[sort], windows[sort]
    joined = (np.diff(ids) == 1) & (np.diff(windows) == 0)
    joined &= ids[1:] % corpus.samples_per_shard != 0
    return ids.size / (ids.size - int(joined.sum()))


def uniform(corpus: Corpus, epoch: int) -> Ints:
    """Return a true permutation of the corpus."""
    return corpus.steps(np.random.default_rng((7, epoch)).permutation(corpus.num_samples))


def webdataset(corpus: Corpus, buffer: int, epoch: int) -> Ints:
    """Return webdataset 1.0.2's: shards to ranks, then workers, shuffled; then a sample buffer.

    Args:
        corpus: must have a shard for each worker of each rank.
        buffer: samples of one worker's buffer, `shuffle(buffer)`.
        epoch: seeds both shuffles.
    """
    ranks = []
    for rank in range(corpus.world_size):
        batches: list[tuple[int, int, Ints]] = []
        for worker in range(corpus.num_workers):
            rng = np.random.default_rng((epoch, rank, worker))
            shards = range(rank, corpus.num_shards, corpus.world_size)[worker :: corpus.num_workers]
            ids = np.fromiter(_buffered(_samples(corpus, shards, rng), buffer, rng), np.int64)
            for turn in range(ids.size // corpus.rows):
                batch = ids[turn * corpus.rows : (turn + 1) * corpus.rows]
                batches.append((turn, worker, batch))
        batches.sort(key=lambda found: found[:2])  # a DataLoader asks its workers in turn
        ranks.append([batch for _, _, batch in batches])
    return np.stack([np.concatenate(step) for step in zip(*ranks, strict=False)])


def _samples(corpus: Corpus, shards: Iterable[int], rng: np.random.Generator) -> Iterator[int]:
    for shard in _buffered(shards, 100, rng):
        start = shard * corpus.samples_per_shard
        yield from range(start, start + corpus.samples_per_shard)


def _buffered(
    source: Iterable[int], size: int, rng: np.random.Generator, initial: int = 100
) -> Iterator[int]:
    """Yield items through a buffer that takes in two for each one it gives until it is full."""
    source, held = iter(source), list[int]()
    draws = _uniforms(rng)

    def draw() -> int:
        place = int(next(draws) * len(held))
        held[place], held[-1] = held[-1], held[place]
        return held.pop()

    for item in source:
        held.append(item)
        if len(held) < size:
            held.extend([second for second in [next(source, None)] if second is not None])
        if len(held) >= min(initial, size):
            yield draw()
    while held:
        yield draw()


def _uniforms(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.random(4096).tolist()


def py1e(corpus: Corpus, block: int, epoch: int) -> Ints:
    """Return what mosaicml-streaming's `py1e` does on one node, all ranks of it.

    Shards are permuted; each sample then moves by a uniform random distance, so that a shard's
    samples spread over about `block` places; the ranks deal out the result like cards.
    """
    rng = np.random.default_rng((11, epoch))
    size, total = corpus.samples_per_shard, corpus.num_samples
    shards = np.random.default_rng(11).permutation(corpus.num_shards)[  # fixed for a run ...
        rng.permutation(corpus.num_shards)  # ... and permuted anew each epoch
    ]
    ids = shards[:, None] * size + rng.permuted(np.tile(np.arange(size), (shards.size, 1)), axis=1)
    start = np.arange(shards.size) * size
    blocks = rng.integers(int(0.75 * block), int(1.25 * block), shards.size)
    reach = np.maximum((blocks - size) / 2, 0)  # nothing for a shard larger than its block
    low, high = np.maximum(-reach, -start), np.minimum(reach, total - start - size)
    shift = rng.uniform(low[:, None], high[:, None], (shards.size, size))
    steps = corpus.steps(
        ids.ravel()[np.argsort((np.arange(total).reshape(-1, size) + shift).ravel())]
    )
    dealt = steps.reshape(-1, corpus.rows, corpus.world_size).transpose(0, 2, 1)
    return dealt.reshape(steps.shape)
