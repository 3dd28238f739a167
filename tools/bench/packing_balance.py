"""How evenly are packs shared by ranks? ``python -m tools.bench.packing_balance [--quick]``.

Synthetic lengths are packed, ordered over epochs and dealt to ranks, as a loader does. The cost of
a pack is that of a model of 7 billion parameters (`mm.Cost.from_config`). The columns, each undealt
and dealt among all ranks, as means over steps:

    step    cost of the most costly rank over the mean: ranks that wait for each other once a step
    pack    the same where ranks wait after every pack, as FSDP does with a pack a micro-step
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

import mmstream as mm
from mmstream.dataset.manifest import ShardInfo
from mmstream.packing.deal import deal, imbalance, micro_imbalance
from mmstream.packing.measure_file import Measure
from mmstream.packing.planner import make_plan
from mmstream.packing.settings import PackLimits
from mmstream.types import IntArray

LLAMA = SimpleNamespace(
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    vocab_size=32000,
    vision_config=SimpleNamespace(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, model_type="clip"
    ),
)
"""Sizes of LLaVA-1.5-7B."""

QWEN = SimpleNamespace(
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    vision_config=SimpleNamespace(embed_dim=1280, depth=32, mlp_ratio=4, model_type="qwen2_vl"),
)
"""Sizes of Qwen2-VL-7B."""

SAMPLES_PER_SHARD = 2000


class Lengths(NamedTuple):
    """The lengths of a corpus, int64 [n] each."""

    num_tokens: IntArray
    patches: IntArray
    squared_patches: IntArray


def captions(random: np.random.Generator, count: int) -> Lengths:
    """Short texts alone, as COCO's captions: 8 to 50 tokens."""
    tokens = np.clip(random.lognormal(2.6, 0.25, count), 8, 50).astype(np.int64)
    return Lengths(tokens, np.zeros_like(tokens), np.zeros_like(tokens))


def llava(random: np.random.Generator, count: int) -> Lengths:
    """A picture of 576 tokens and a conversation; 6 % have no picture."""
    text = np.clip(random.lognormal(5.2, 0.7, count), 20, 2000).astype(np.int64)
    patches = np.where(random.random(count) < 0.06, 0, 576)
    return Lengths(text + patches, patches, patches**2)


def qwen(random: np.random.Generator, count: int) -> Lengths:
    """A picture in its own resolution, 4 patches a token, and a conversation."""
    text = np.clip(random.lognormal(5.2, 0.8, count), 20, 2000).astype(np.int64)
    patches = 4 * np.clip(random.lognormal(5.7, 0.7, count), 64, 2048).astype(np.int64)
    return Lengths(text + patches // 4, patches, patches**2)


def several_pictures(random: np.random.Generator, count: int) -> Lengths:
    """0 to 8 pictures in their own resolutions, and a text."""
    text = np.clip(random.lognormal(5.5, 0.8, count), 20, 2000).astype(np.int64)
    sizes = 4 * np.clip(random.lognormal(5.0, 0.6, (count, 8)), 64, 768).astype(np.int64)
    sizes[np.arange(8) >= random.integers(0, 9, count)[:, None]] = 0
    patches = sizes.sum(axis=1)
    return Lengths(text + patches // 4, patches, (sizes**2).sum(axis=1))


def documents(random: np.random.Generator, count: int) -> Lengths:
    """Texts alone, from 64 to 8,192 tokens: what differs is their attention."""
    tokens = np.clip(random.lognormal(6.5, 1.2, count), 64, 8192).astype(np.int64)
    return Lengths(tokens, np.zeros_like(tokens), np.zeros_like(tokens))


CORPORA = {
    "documents": (documents, LLAMA, 8),
    "captions": (captions, LLAMA, 400),
    "LLaVA-like": (llava, LLAMA, 12),
    "Qwen-like": (qwen, QWEN, 12),
    "0-8 images": (several_pictures, QWEN, 8),
}
"""Lengths, a model, and samples of a step for each pack: enough for eight steps."""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=12, help="of each epoch that are modelled")
    parser.add_argument("--quick", action="store_true", help="two numbers of ranks, two of packs")
    args = parser.parse_args()
    ranks, packs = ([8, 64], [1, 8]) if args.quick else ([2, 4, 8, 16, 32, 64], [1, 2, 4, 8])
    print(f"packs of {args.max_tokens} tokens")
    print(f"{'corpus':12} {'ranks':>5} {'packs':>5}  {'step':>6} {'dealt':>6}  ", end="")
    print(f"{'pack':>6} {'dealt':>6}  {'ms':>5}")
    for name, (lengths, model, samples) in CORPORA.items():
        count = samples * args.max_tokens // 8192 * max(ranks) * max(packs) * 4
        random = np.random.Generator(np.random.Philox(7))
        num_shards = -(-count // SAMPLES_PER_SHARD)
        shards = tuple(
            ShardInfo(f"{number:06d}.tar", SAMPLES_PER_SHARD, SAMPLES_PER_SHARD * 100_000)
            for number in range(num_shards)
        )
        columns = lengths(random, num_shards * SAMPLES_PER_SHARD)._asdict()
        columns["num_label_tokens"] = columns["num_tokens"]
        plan = make_plan(Measure(shards, columns), PackLimits(args.max_tokens))
        costs = mm.Cost.from_config(model).modelled(plan.sums(np.arange(plan.num_units)))
        for num_ranks in ranks:
            for num_packs in packs:
                rows = num_ranks * num_packs
                order = mm.Order.from_counts(
                    plan.counts, global_batch_size=rows, sizes=plan.group_bytes
                )
                values, started = [], 0.0
                last = min(args.steps, order.steps_per_epoch)
                for step in range(last):
                    refs = order.refs(0, step)
                    undealt = costs[plan.first_units[refs.shard] + refs.index]
                    begun = time.perf_counter()
                    dealt = undealt[deal(undealt, num_ranks)]
                    started += time.perf_counter() - begun
                    values.append(
                        [
                            measured(of_rows, num_ranks)
                            for measured in (imbalance, micro_imbalance)
                            for of_rows in (undealt, dealt)
                        ]
                    )
                step_undealt, step_dealt, pack_undealt, pack_dealt = np.mean(values, axis=0)
                print(
                    f"{name:12} {num_ranks:5} {num_packs:5}  {step_undealt:6.3f} {step_dealt:6.3f}"
                    f"  {pack_undealt:6.3f} {pack_dealt:6.3f}  {1000 * started / last:5.2f}"
                )


if __name__ == "__main__":
    main()
