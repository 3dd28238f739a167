"""Steps of one shape beside the samplers of others: ``python -m tools.bench buckets``.

Each sampler deals the same samples to 8 ranks for 3 epochs, and nothing is decoded. The samples
have the shapes of the demo's photographs, or the seconds of the recordings in a folder. Beside
`mm.Buckets` are

    diffusers' scripts    batches of each bucket are drawn once, shuffled in each epoch, and dealt
                          by accelerate. Without --seed, each rank shuffles in its own way
    Lhotse                DynamicBucketingSampler, which is installed into ``build/peers`` first

A last table decodes the photographs in the shapes of their buckets, and in one shape.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import mmstream as mm
from mmstream.order import BucketOrder, Corpus
from mmstream.order.selection import Selection
from tools.bench.corpus import write_shaped
from tools.bench.decoded import installed

RANKS, EPOCHS, NUM_SAMPLES, ROWS = 8, 3, 10_000, 64
"""`ROWS` is those of a step of pictures, over all ranks."""
BATCH_SECONDS = 4.0
"""Most seconds of a rank's batch of recordings, with padding."""


Drawn: TypeAlias = tuple[Any, Sequence[int]]
"""A batch of one rank: its bucket, and the numbers of its samples without padding rows."""

Sampler: TypeAlias = Callable[[int], list[list[Drawn]]]
"""Returns the batches of each rank in an epoch."""


def compare(num_rounds: int, recordings: Path | None) -> None:
    """Print the tables. Without recordings, that of their seconds is left out."""
    draw, shapes = random.Random(0), mm.aspect_edges(512)
    with tempfile.TemporaryDirectory() as folder:
        ratios = write_shaped(Path(folder), 1_536)
        drawn = np.log(draw.choices(ratios, k=NUM_SAMPLES))
        numbers = np.abs(drawn[:, None] - np.log([w / h for h, w in shapes])).argmin(1)
        buckets = mm.Buckets("aspect", edges=tuple(shapes))
        samplers: dict[str, Sampler] = {
            "mm.Buckets": mmstream(buckets, numbers, ROWS),
            "mm.Buckets, drop_last=False": mmstream(buckets, numbers, ROWS, drop_last=False),
            "diffusers' scripts, --seed": diffusers(numbers.tolist(), is_seeded=True),
            "diffusers' scripts": diffusers(numbers.tolist(), is_seeded=False),
        }
        print_table(f"shapes of {len(ratios)} photographs", samplers, [1.0] * NUM_SAMPLES)
        if recordings is not None:
            compare_seconds(recordings, draw)
        compare_speed(folder, num_rounds)


def compare_seconds(folder: Path, draw: random.Random) -> None:
    """Print the table of recordings. Edges are their deciles, as Lhotse estimates them."""
    import soundfile

    seconds = [soundfile.info(path).duration for path in sorted(folder.glob("*.wav"))]
    drawn, longest = draw.choices(seconds, k=NUM_SAMPLES), max(seconds)
    edges = [*np.quantile(seconds, np.linspace(0.1, 0.9, 9)).round(2).tolist(), longest]
    numbers = np.searchsorted(edges, drawn)
    table = {edge: RANKS * int(BATCH_SECONDS / edge) for edge in edges}
    buckets = mm.Buckets("duration_s", edges=tuple(edges), rows=table)
    rows, whole = table[edges[0]], mm.Buckets("duration_s", edges=(longest,))
    samplers: dict[str, Sampler] = {
        "mm.Buckets": mmstream(buckets, numbers, rows),
        "mm.Buckets, drop_last=False": mmstream(buckets, numbers, rows, drop_last=False),
        "Lhotse": partial(lhotse, drawn, edges),
        "no buckets": mmstream(whole, 0 * numbers, table[longest]),
    }
    print_table(f"seconds of {len(seconds)} recordings", samplers, drawn)


def print_table(title: str, samplers: dict[str, Sampler], lengths: Sequence[float]) -> None:
    """Judge the batches of each sampler. `lengths`: what is padded to the longest of a batch."""
    print(f"\n{NUM_SAMPLES:,} samples with the {title}, {RANKS} ranks, {EPOCHS} epochs\n")
    print("| | steps an epoch | one bucket a step | left out | never shown | twice | padding |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, sampler in samplers.items():
        epochs = [sampler(epoch) for epoch in range(EPOCHS)]
        steps = sorted({len(batches) for ranks in epochs for batches in ranks})
        same = [
            len({bucket for bucket, _ in step}) == 1
            for ranks in epochs
            for step in zip(*ranks, strict=False)
        ]
        batches = [batch for ranks in epochs for of in ranks for _, batch in of]
        shown = [Counter(n for of in ranks for _, b in of for n in b) for ranks in epochs]
        left_out = statistics.mean(NUM_SAMPLES - len(counts) for counts in shown)
        twice = statistics.mean(counts.total() - len(counts) for counts in shown)
        never = NUM_SAMPLES - len(set().union(*shown))
        whole = sum(len(batch) * max(lengths[n] for n in batch) for batch in batches if batch)
        padding = 1 - sum(lengths[n] for batch in batches for n in batch) / whole
        print(
            f"| {name} | {'-'.join(map(str, dict.fromkeys((steps[0], steps[-1]))))} | "
            f"{statistics.mean(same):.0%} | {left_out / NUM_SAMPLES:.1%} | {never:,} | {twice:,.0f}"
            f" | {padding:.1%} |",
            flush=True,
        )


def mmstream(
    buckets: mm.Buckets, numbers: npt.NDArray[Any], rows: int, *, drop_last: bool = True
) -> Sampler:
    """Return the sampler of an order of buckets, from the number of each sample's bucket."""
    corpus = Corpus(np.array([numbers.size]))
    masks = ([numbers == number] for number in range(len(buckets.edges)))
    selections = [Selection.of_shards(mask, corpus.counts) for mask in masks]
    order = BucketOrder.from_corpus(
        corpus, buckets, selections, global_batch_size=rows, drop_last=drop_last
    )

    def of_rank(epoch: int, step: int, rank: int) -> Drawn:
        index, valid = (field.reshape(RANKS, -1)[rank] for field in order.refs(epoch, step)[1:])
        return order.edge(epoch, step), index[valid].tolist()

    steps = range(order.steps_per_epoch)
    return lambda epoch: [[of_rank(epoch, step, rank) for step in steps] for rank in range(RANKS)]


def diffusers(numbers: Sequence[int], *, is_seeded: bool) -> Sampler:
    """Return the sampler of the training scripts with ``--aspect_ratio_buckets``."""
    from accelerate.data_loader import BatchSamplerShard

    size = ROWS // RANKS

    class Batches(list[list[int]]):
        batch_size, drop_last = size, True

    draws = [random.Random(0 if is_seeded else rank) for rank in range(RANKS)]
    of_ranks = [Batches() for _ in draws]
    for draw, batches in zip(draws, of_ranks, strict=True):
        for number in sorted(set(numbers)):
            own = [n for n, bucket in enumerate(numbers) if bucket == number]
            draw.shuffle(own)
            batches += [own[i : i + size] for i in range(0, len(own) - size + 1, size)]

    def epoch_of(_: int) -> list[list[Drawn]]:
        for draw, batches in zip(draws, of_ranks, strict=True):
            draw.shuffle(batches)
        shards = (BatchSamplerShard(own, RANKS, rank) for rank, own in enumerate(of_ranks))
        return [[(numbers[batch[0]], batch) for batch in shard] for shard in shards]

    return epoch_of


def lhotse(seconds: Sequence[float], edges: Sequence[float], epoch: int) -> list[list[Drawn]]:
    """Return an epoch of Lhotse with the same edges and the same most seconds of a batch."""
    sys.path[:0] = [str(installed("Lhotse"))] * ("lhotse" not in sys.modules)
    from lhotse import CutSet, MonoCut
    from lhotse.dataset.sampling import DynamicBucketingSampler

    cuts = CutSet.from_cuts(MonoCut(str(n), 0, length, 0) for n, length in enumerate(seconds))
    ranks: list[list[Drawn]] = []
    for rank in range(RANKS):
        sampler = DynamicBucketingSampler(
            cuts,
            max_duration=BATCH_SECONDS,
            duration_bins=list(edges[:-1]),
            shuffle=True,
            world_size=RANKS,
            rank=rank,
        )
        sampler.set_epoch(epoch)
        batches = [[int(cut.id) for cut in batch] for batch in sampler]
        longest = (max(seconds[number] for number in batch) for batch in batches)
        buckets = np.searchsorted(edges, list(longest)).tolist()
        ranks.append(list(zip(buckets, batches, strict=True)))
    return ranks


def compare_speed(folder: str, num_rounds: int) -> None:
    """Print the processor time of pictures in the shapes of their buckets, and in one shape."""
    shapes = mm.aspect_edges(256, multiple_of=16, max_ratio=2)
    buckets = mm.Buckets("aspect", edges=tuple(shapes), min_steps=1)
    settings = {"one shape": (None, 256), f"{len(shapes)} shapes": (buckets, "bucket")}
    cpu_s: dict[str, list[float]] = {name: [] for name in settings}
    for number in range(num_rounds):
        for name, (batching, size) in list(settings.items())[:: -1 if number % 2 else 1]:
            pipeline = mm.Pipeline(
                mm.open_dataset(f"{folder}/shards"),
                global_batch_size=16,
                batching=batching,
                decode=mm.Decode(image=mm.ImageDecoder(size=size)),  # type: ignore[arg-type]
            )
            with closing(mm.Loader(pipeline, num_threads=1)) as loader:
                next(batches := iter(loader))
                begun = time.process_time()
                count = sum(len(batch["image"]) for batch in batches)
            cpu_s[name].append((time.process_time() - begun) / count * 1_000)
    print("\n| photographs of 576x432 | CPU s per 1,000 (min-max) |\n|---|---:|")
    for name, each in cpu_s.items():
        print(f"| {name} | {statistics.median(each):.3f} ({min(each):.3f}-{max(each):.3f}) |")
