"""What ``reshuffle="lanes"`` buys and costs: ``python -m tools.bench.lanes [--quick]``.

The first table has the hit rates of node caches that are filled once and never emptied, with both
kinds of reshuffle, and those of an LRU cache beside them. A node has neighbouring rows of each
step. Rates are those of the third epoch. The most that a cache can hit is its size, divided by
what a node reads in an epoch.

The second table has the hit rates of nodes with room for all that they read in an epoch.

The third table is of a corpus sorted by 1,000 classes, on 32 ranks: pairs of samples that share a
batch in two epochs, and those that share the rows of a rank, both relative to chance; classes in a
batch, in 16 and 64 batches, and in all that the first rank sees in four epochs. Shards and lanes
hold whole chunks, which is the worst case. "not rotated" are lanes without the random offset of
each epoch: it shows what the offset is for.

Nothing is read: the figures follow from the real orders.
"""

from __future__ import annotations

import argparse
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from mmstream import Order
from mmstream.order.lane_lists import EpochLaneLists
from mmstream.types import IntArray
from tools.bench.shuffle import distinct, together
from tools.bench.shuffle_streams import Corpus, make_order, mmstream

CACHED = Corpus("cached", 200, 1000, 1000, 110_000, 256, world_size=8, num_workers=1)
CACHED_QUICK = replace(CACHED, num_shards=40)
SORTED = Corpus("sorted", 1056, 1216, 1000, 110_000, 256, world_size=32, num_workers=1)
SORTED_QUICK = Corpus("quick", 100, 1024, 100, 1_000_000, 256, world_size=32, num_workers=1)
FRACTIONS = (0.06, 0.125, 0.25, 0.5, 0.75)
NODES = (1, 8, 6)
"""6 nodes do not divide the lanes."""
ROWS, MANY_NODES = (256, 384), (3, 6, 12)
"""256 rows are not divided by these nodes, and 384 are."""
NUM_EPOCHS = 3


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small corpora, a few seconds")
    options = parser.parse_args()
    start = time.perf_counter()
    corpus = CACHED_QUICK if options.quick else CACHED
    streams = {
        name: [mmstream(corpus, order, epoch) for epoch in range(NUM_EPOCHS)]
        for name, order in list(orders(corpus).items())[:2]
    }
    print("| nodes | cache, of the corpus | at most | global | lanes | global, LRU | lanes, LRU |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for num_nodes in NODES:
        for fraction in FRACTIONS:
            room = round(fraction * corpus.num_samples)
            rates = [
                f"{hit_rate(policy, of_order, num_nodes, room):.3f}"
                for policy in (filled_once, least_recently_used)
                for of_order in streams.values()
            ]
            cells = [f"{num_nodes}", f"{fraction:.1%}", f"{min(1, fraction * num_nodes):.3f}"]
            print(f"| {' | '.join([*cells, *rates])} |", flush=True)
    print("\n| rows, lanes | nodes | second epoch | third epoch |\n|---:|---:|---:|---:|")
    for num_rows in ROWS:
        print_kept(replace(corpus, global_batch_size=num_rows))
    corpus = SORTED_QUICK if options.quick else SORTED
    print("\n| | meet again | on a rank | classes of a batch | 16 | 64 batches | of a rank |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, order in orders(corpus).items():
        figures = mixing(corpus, order)
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in figures) + " |", flush=True)
    print(f"\n{time.perf_counter() - start:.0f} s, numpy {np.__version__}")


def print_kept(corpus: Corpus) -> None:
    """Print what nodes with room for their part find of it, in the epochs after the first."""
    order = make_order(corpus, reshuffle="lanes")
    epochs = [mmstream(corpus, order, epoch) for epoch in range(NUM_EPOCHS)]
    for num_nodes in MANY_NODES:
        room = round(corpus.num_samples / num_nodes)
        second, third = (hit_rate(filled_once, epochs[:n], num_nodes, room) for n in (2, 3))
        shape = f"{corpus.global_batch_size}, {order.grid[1]}"
        print(f"| {shape} | {num_nodes} | {second:.3f} | {third:.3f} |", flush=True)


def orders(corpus: Corpus) -> dict[str, Order]:
    """Return the default order with both kinds of reshuffle, and lanes that are not rotated."""
    lanes = make_order(corpus, reshuffle="lanes")
    not_rotated = make_order(corpus, reshuffle="lanes")
    not_rotated._lists = partial(_not_rotated, lanes)  # type: ignore[method-assign]
    return {"global": make_order(corpus), "lanes": lanes, "lanes, not rotated": not_rotated}


def _not_rotated(order: Order, epoch: int) -> EpochLaneLists:
    lists = order._lists(epoch)
    return replace(lists, rotations=np.zeros_like(lists.rotations))


def hit_rate(policy: Any, streams: Sequence[IntArray], num_nodes: int, room: int) -> float:
    """Return the share of samples of the last epoch that nodes have in their caches.

    Args:
        policy: a function from streams of samples and room to the hits in the last of them.
        streams: samples of each epoch, int64 [steps, rows].
        num_nodes: nodes with neighbouring rows of each step.
        room: samples that the cache of a node holds.
    """
    bounds = np.arange(num_nodes + 1) * streams[0].shape[1] // num_nodes
    hits = [
        policy([stream[:, start:stop].ravel() for stream in streams], room)
        for start, stop in pairwise(bounds)
    ]
    return float(np.sum(hits) / streams[-1].size)


def filled_once(streams: Sequence[IntArray], room: int) -> int:
    """Return the hits of a cache that keeps the first samples that it sees."""
    seen = np.concatenate(streams[:-1])
    _, first = np.unique(seen, return_index=True)
    kept = seen[np.sort(first)[:room]]
    return int(np.isin(streams[-1], kept).sum())


def least_recently_used(streams: Sequence[IntArray], room: int) -> int:
    """Return the hits of a cache that keeps the samples that it saw last."""
    kept: OrderedDict[int, None] = OrderedDict()
    num_hits = 0
    for stream in streams:
        num_hits = 0
        for sample in stream.tolist():
            if sample in kept:
                kept.move_to_end(sample)
                num_hits += 1
            else:
                kept[sample] = None
                if len(kept) > room:
                    kept.popitem(last=False)
    return num_hits


def mixing(corpus: Corpus, order: Order) -> Iterator[float]:
    """Yield the cells of the second table."""
    epochs = [mmstream(corpus, order, epoch) for epoch in range(4)]
    yield together(corpus.num_samples, *epochs[:2])
    yield together(corpus.num_samples, *(each.reshape(-1, corpus.rows) for each in epochs[:2]))
    classes = epochs[0] * corpus.num_classes // corpus.num_samples
    for number in (1, 16, 64):
        whole = classes[: len(classes) // number * number]
        yield distinct(whole.reshape(-1, number * classes.shape[1]))
    of_rank = np.concatenate([each[:, : corpus.rows].ravel() for each in epochs])
    yield float(np.unique(of_rank * corpus.num_classes // corpus.num_samples).size)


if __name__ == "__main__":
    main()
