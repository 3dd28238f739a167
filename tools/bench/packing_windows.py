"""What the default windows of packs cost, and how they mix.

    python -m tools.bench.packing_windows --data ../shared/data

Lengths are those of `tools.bench.packing`, drawn from real rows. Pictures have 110 kB in the mean,
captions 1 kB. Plan, order and the cut into ranges are the real ones; nothing is read. The columns:

    T, G, ranks     tokens of a pack, packs of a step over all ranks
    pack            mean bytes of a pack, and samples of it
    spread          packs in a row among whose bytes the samples of a pack lie
    fill            of the plan
    Q, M, K, C      lanes, window, interleave, chunk, in packs
    GETs            requests for 1 GB of samples, and how much is read beyond what is needed
    without packs   requests for the same samples as single rows, tokens of a step being equal
    classes         of 1,000, by which the samples are sorted: in a step, in 16 and 64 steps,
                    relative to those of a true permutation of the packs

"single rows" are the defaults of an order whose rows are single samples of that size.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mmstream.dataset.manifest import ShardInfo
from mmstream.order import AnyOrder, Corpus, Order
from mmstream.packing.measure_file import Measure
from mmstream.packing.order import PackOrder
from mmstream.packing.plan import PackPlan
from mmstream.packing.planner import make_plan
from mmstream.packing.settings import PackLimits
from mmstream.reading.fetcher import starts_of_ranges
from mmstream.reading.plan import MAX_RUN_BYTES
from mmstream.types import IntArray
from tools.bench.packing import corpora

GAP_BYTES = 256 << 10
"""On object storage, so many bytes are read along, if the sample behind them is larger."""
PER_SHARD = 1000
NUM_CLASSES = 1000
NUM_WINDOWS = 48
NUM_STEPS = 64
CELLS = (
    ("LLaVA-like, 576 a picture", 4096, 256, 8),
    ("LLaVA-like, 576 a picture", 8192, 64, 8),
    ("Qwen-like, own sizes", 8192, 64, 8),
    ("Qwen-like, own sizes", 8192, 256, 64),
    ("Qwen-like, own sizes", 32768, 64, 8),
    ("Qwen-like, own sizes", 8192, 8, 4),
    ("1-6 pictures of 576", 8192, 64, 8),
    ("COCO captions", 8192, 8, 8),
    ("COCO captions", 8192, 64, 8),
)
"""Samples, T, ranks, and packs of a rank."""


def main() -> None:
    """Print a line for each cell and kind of defaults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--num-samples", type=int, default=400_000)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cells, from 0")
    options = parser.parse_args()
    start = time.perf_counter()
    lengths = corpora(options.data, options.num_samples)
    print(
        "| samples | T | ranks x packs | pack | spread | fill | Q M K C | GETs | without packs "
        "| a step | 16 | 64 |"
    )
    print("|---|---:|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|")
    plans: dict[tuple[str, int], PackPlan] = {}
    for number, (name, max_tokens, ranks, packs) in enumerate(CELLS):
        if options.only is not None and number not in options.only:
            continue
        of_samples, num_bytes = sizes(name, lengths[name])
        key = name, max_tokens
        if key not in plans:
            plans = {key: plan_of(of_samples, num_bytes, max_tokens)}
        for kind, order in orders(plans[key], ranks * packs):
            cells = line(plans[key], order, of_samples, num_bytes, ranks)
            print(f"| {name}{kind} | {max_tokens:,} | {ranks} x {packs} | {cells} |", flush=True)
    print(f"\n{time.perf_counter() - start:.0f} s, numpy {np.__version__}")


def sizes(name: str, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Return the tokens and the bytes of samples."""
    rng = np.random.default_rng(1)
    if name == "COCO captions":  # many more, because they are small
        lengths = np.tile(lengths, 10)
        return lengths, np.full(lengths.size, 1024, dtype=np.int64)
    pictures = np.maximum(1, lengths // 578) if name.startswith("1-6") else np.ones_like(lengths)
    each = rng.lognormal(np.log(110_000) - 0.08, 0.4, lengths.size)
    return lengths, (pictures * each).astype(np.int64) // 512 * 512 + 2048


def plan_of(lengths: IntArray, num_bytes: IntArray, max_tokens: int) -> PackPlan:
    """Plan the packs of samples."""
    shards = tuple(
        ShardInfo(
            f"{number}.tar",
            min(PER_SHARD, lengths.size - start),
            int(num_bytes[start : start + PER_SHARD].sum()),
        )
        for number, start in enumerate(range(0, lengths.size, PER_SHARD))
    )
    return make_plan(Measure(shards, {"num_tokens": lengths}), PackLimits(max_tokens))


def orders(plan: PackPlan, rows: int) -> Iterator[tuple[str, PackOrder]]:
    """Yield the default order, and that with the defaults of single rows."""
    corpus = Corpus(np.array([shard.num_samples for shard in plan.shards]))
    yield "", PackOrder.from_plan(plan, corpus, global_batch_size=rows)
    as_single = Order.from_counts(
        plan.counts, num_bytes=int(plan.group_bytes.sum()), global_batch_size=rows
    ).identity()
    settings: dict[str, Any] = {
        name: as_single[name] for name in ("grid", "window", "interleave", "chunk")
    }
    yield ", single rows", PackOrder.from_plan(plan, corpus, global_batch_size=rows, **settings)


def line(
    plan: PackPlan, order: PackOrder, lengths: IntArray, num_bytes: IntArray, ranks: int
) -> str:
    """Return the cells of an order."""
    identity = order.identity()
    ends = np.cumsum(num_bytes)
    per_gb, read = requests(order, ends - num_bytes, ends, ranks)
    rows_of_rank = order.global_batch_size * plan.members.size / plan.num_units / ranks
    rows = ranks << round(np.log2(max(1, rows_of_rank)))  # ranks divide the lanes
    plain = Order.from_counts(
        [shard.num_samples for shard in plan.shards],
        num_bytes=int(num_bytes.sum()),
        global_batch_size=rows,
    )
    without, _ = requests(plain, ends - num_bytes, ends, ranks)
    mean = plan.members.size / plan.num_units
    settings = [identity["grid"][1], *(identity[key] for key in ("window", "interleave", "chunk"))]
    mixing = " | ".join(f"{value:.0%}" for value in classes(order, lengths.size, plan))
    return (
        f"{num_bytes.sum() / plan.num_units / 1e6:.1f} MB, {mean:.1f} | {plan.spread} | "
        f"{plan.fill:.1%} | {' '.join(f'{value:,}' for value in settings)} | "
        f"{per_gb:,.0f}, {read - 1:+.0%} | {without:,.0f} | {mixing}"
    )


def requests(order: AnyOrder, starts: IntArray, stops: IntArray, ranks: int) -> tuple[float, float]:
    """Return the requests for 1 GB of samples, and the bytes read for each byte needed."""
    first = int(0.4 * order.steps_per_epoch)
    steps = range(first, min(first + 32, order.steps_per_epoch))
    numbers = np.unique(np.concatenate([order.windows(0, step) for step in steps]))
    bounds = np.arange(1, ranks) * order.global_batch_size // ranks
    num_requests = num_needed = num_read = 0
    for number in numbers[:: max(1, numbers.size // NUM_WINDOWS)].tolist():
        window = order.window(0, number)
        rank = np.searchsorted(bounds, window.row, side="right")
        ids = window.shard * PER_SHARD + window.index
        by_rank = np.lexsort((ids, rank))
        ids, shard = ids[by_rank], (window.shard + rank * (1 << 32))[by_rank]
        start, stop = starts[ids], stops[ids]
        gap = np.minimum(GAP_BYTES, stop - start)
        firsts = starts_of_ranges(shard, start, stop, gap, np.full(ids.size, MAX_RUN_BYTES))
        lasts = np.append(firsts[1:], ids.size) - 1
        num_requests += firsts.size
        num_read += int((stop[lasts] - start[firsts]).sum())
        num_needed += int((stop - start).sum())
    return num_requests / num_needed * 1e9, num_read / num_needed


def classes(order: PackOrder, num_samples: int, plan: PackPlan) -> Iterator[float]:
    """Yield the classes of 1, 16 and 64 steps, relative to those of random packs."""
    first = int(0.3 * order.steps_per_epoch)
    num_steps = min(NUM_STEPS, order.steps_per_epoch - first)
    shown = []
    for step in range(first, first + num_steps):
        shard, index, _ = order.refs(0, step)
        shown.append((shard * PER_SHARD + index) * NUM_CLASSES // num_samples)
    rng = np.random.default_rng(2)
    packs = rng.permutation(plan.num_units)[: num_steps * order.global_batch_size]
    shuffled = [
        (units.shard * PER_SHARD + units.index) * NUM_CLASSES // num_samples
        for units in map(plan.units, np.array_split(packs, num_steps))
    ]
    for number in (1, 16, 64):
        if number > num_steps:
            return
        yield distinct(shown, number) / distinct(shuffled, number)


def distinct(steps: list[IntArray], number: int) -> float:
    """Return the mean number of different classes in so many steps in a row."""
    whole = range(0, len(steps) // number * number, number)
    return float(np.mean([np.unique(np.concatenate(steps[i : i + number])).size for i in whole]))


if __name__ == "__main__":
    main()
