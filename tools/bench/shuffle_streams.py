"""The streams that `tools.bench.shuffle` measures: an epoch in the order of different systems.

A stream is int64 [steps, global_batch_size]. Its values are the corpus positions of the samples in
the order of delivery. Rank r has columns [r*B, (r+1)*B). No sample is read.

webdataset and py1e are simulated with their published algorithms. Where there is a choice, the
simulation favours them: webdataset reshuffles its shards in each epoch (as with
`detshuffle=True`), and all ranks stop with the shortest rank instead of hanging.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmstream import Order
from mmstream.types import IntArray

__all__ = ["Corpus", "make_order", "mean_read", "mmstream", "py1e", "uniform", "webdataset"]


@dataclass(frozen=True)
class Corpus:
    """Shards of equal size, sorted by class, and the topology that reads them."""

    name: str
    num_shards: int
    samples_per_shard: int
    num_classes: int
    sample_bytes: int
    global_batch_size: int
    world_size: int
    num_workers: int
    """Per rank."""

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return self.num_shards * self.samples_per_shard

    @property
    def rows(self) -> int:
        """Rows of a rank in a global batch."""
        return self.global_batch_size // self.world_size

    def steps(self, ids: IntArray) -> IntArray:
        """Split [samples] into [steps, global_batch_size] without the incomplete last step."""
        num_full = ids.size // self.global_batch_size * self.global_batch_size
        return ids[:num_full].reshape(-1, self.global_batch_size)


def make_order(corpus: Corpus, **settings: Any) -> Order:
    """Return mmstream's order of a corpus, with settings of `Order.from_counts`."""
    return Order.from_counts(
        [corpus.samples_per_shard] * corpus.num_shards,
        global_batch_size=corpus.global_batch_size,
        num_bytes=corpus.num_samples * corpus.sample_bytes,
        **settings,
    )


def mmstream(corpus: Corpus, order: Order, epoch: int) -> IntArray:
    """Return the stream of mmstream's order."""
    steps = []
    for step in range(order.steps_per_epoch):
        shard, index, _ = order.refs(epoch, step)
        steps.append(shard * corpus.samples_per_shard + index)
    return np.stack(steps)


def mean_read(corpus: Corpus, order: Order, epoch: int) -> float:
    """Return the mean number of neighbouring samples per read, if a window is read at once."""
    steps = range(order.steps_per_epoch)
    windows = np.concatenate([order.windows(epoch, step) for step in steps])
    ids = mmstream(corpus, order, epoch).ravel()
    sort = np.lexsort((ids, windows))
    ids, windows = ids[sort], windows[sort]
    joined = (np.diff(ids) == 1) & (np.diff(windows) == 0)
    joined &= ids[1:] % corpus.samples_per_shard != 0
    return ids.size / (ids.size - int(joined.sum()))


def uniform(corpus: Corpus, epoch: int) -> IntArray:
    """Return the stream of a true permutation."""
    return corpus.steps(np.random.default_rng((7, epoch)).permutation(corpus.num_samples))


def webdataset(corpus: Corpus, buffer: int, epoch: int) -> IntArray:
    """Return the stream of webdataset 1.0.2.

    Shards go to ranks, then to workers, and are shuffled. Samples pass through a buffer.

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
            ids = np.fromiter(_buffered(_samples(corpus, shards, rng), buffer, rng), np.int64)
            for number in range(ids.size // corpus.rows):
                batch = ids[number * corpus.rows : (number + 1) * corpus.rows]
                batches.append((number, worker, batch))
        batches.sort(key=lambda entry: entry[:2])  # a DataLoader takes from its workers in turn
        ranks.append([batch for _, _, batch in batches])
    return np.stack([np.concatenate(step) for step in zip(*ranks, strict=False)])


def _samples(corpus: Corpus, shards: Iterable[int], rng: np.random.Generator) -> Iterator[int]:
    for shard in _buffered(shards, 100, rng):
        start = shard * corpus.samples_per_shard
        yield from range(start, start + corpus.samples_per_shard)


def _buffered(source: Iterable[int], size: int, rng: np.random.Generator) -> Iterator[int]:
    """Yield items in random order from a buffer, from its first 100 items on.

    Until the buffer is full, it takes two items for each item that it yields.
    """
    source = iter(source)
    held: list[int] = []
    draws = _uniforms(rng)

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


def _uniforms(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.random(4096).tolist()


def py1e(corpus: Corpus, block: int, epoch: int) -> IntArray:
    """Return the stream of mosaicml-streaming's `py1e`, with all ranks on one node.

    Shards are permuted. Then each sample moves by a uniform random distance, so that the samples of
    a shard spread over about `block` positions. Consecutive samples go to the ranks in turn.
    """
    rng = np.random.default_rng((11, epoch))
    size = corpus.samples_per_shard
    total = corpus.num_samples
    run_permutation = np.random.default_rng(11).permutation(corpus.num_shards)
    shards = run_permutation[rng.permutation(corpus.num_shards)]
    ids = shards[:, None] * size + rng.permuted(np.tile(np.arange(size), (shards.size, 1)), axis=1)
    start = np.arange(shards.size) * size
    blocks = rng.integers(int(0.75 * block), int(1.25 * block), shards.size)
    reach = np.maximum((blocks - size) / 2, 0)  # 0 for a shard that is larger than its block
    low, high = np.maximum(-reach, -start), np.minimum(reach, total - start - size)
    shift = rng.uniform(low[:, None], high[:, None], (shards.size, size))
    steps = corpus.steps(
        ids.ravel()[np.argsort((np.arange(total).reshape(-1, size) + shift).ravel())]
    )
    dealt = steps.reshape(-1, corpus.rows, corpus.world_size).transpose(0, 2, 1)
    return dealt.reshape(steps.shape)
