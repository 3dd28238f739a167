"""Random views of datasets, and which samples they show, by plain lists.

A view is a list of choices, each among the samples that those before it have left. `opened` asks
mmstream for it. `chosen` knows it without, from what is written of slices and random shares.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

import mmstream as mm
from mmstream.dataset.manifest import ShardInfo
from mmstream.order.selection import Selection
from tools.prove.random_runs.corpus import Corpus, Ref

Choice: TypeAlias = tuple[Any, ...]
"""A kind and its arguments: "slice" start, stop, step; "split" fraction, seed, part; "without"
other choices; "refs" the samples in place of all choices before it."""

MAX_CHOSEN = 150
"""Reading more takes long, and shows nothing new. Datasets may have more."""


def draw_view(draw: random.Random, corpus: Corpus) -> tuple[Choice, ...]:
    """Return the choices of a view that shows at least one sample which is not known to be bad."""
    while True:
        choices = tuple(_draw_choice(draw, corpus.shown) for _ in range(draw.randint(1, 3)))
        num_chosen = len(chosen(choices, corpus.shown))
        if num_chosen > MAX_CHOSEN:
            choices += (("split", MAX_CHOSEN / num_chosen, draw.randint(0, 9), 0),)
        if set(chosen(choices, corpus.shown)) - corpus.listed:
            return choices


def _draw_choice(draw: random.Random, shards: Sequence[ShardInfo]) -> Choice:
    whole, size = chosen((), shards), sum(shard.num_samples for shard in shards)
    kind = draw.choice(["slice", "split", "without", "refs"])
    if kind == "slice":
        ends = (draw.choice([None, draw.randint(-size, size)]) for _ in range(2))
        return kind, *ends, draw.choice([None, 1, 2, 3, size // 9 + 1])
    if kind == "without":
        return kind, (_draw_choice(draw, shards),)
    if kind == "refs":
        whole += [(len(shards) + n, i) for n in range(2) for i in range(24)]  # may be appended
        shares = [draw.choice([0, 0.1, 0.5, 0.9, 1]) for _ in range(len(shards) + 2)]
        return kind, frozenset(ref for ref in whole if draw.random() < shares[ref[0]])
    fractions = [0.1, 0.5, 0.9, draw.random()]
    return kind, draw.choice(fractions), draw.choice([0, -3, 1 << 70]), draw.randint(0, 1)


def chosen(choices: Sequence[Choice], shards: Sequence[ShardInfo]) -> list[Ref]:
    """Return the samples that a view shows, in the order of the shards."""
    refs = [(s, i) for s, shard in enumerate(shards) for i in range(shard.num_samples)]
    for kind, *arguments in choices:
        if kind == "slice":
            refs = refs[slice(*arguments)]
        elif kind == "refs":
            refs = [ref for ref in chosen((), shards) if ref in arguments[0]]
        elif kind == "without":
            left_out = set(chosen(arguments[0], shards))
            refs = [ref for ref in refs if ref not in left_out]
        else:
            draws = [_draws(shard, arguments[1]) for shard in shards]
            refs = [(s, i) for s, i in refs if (draws[s][i] >= arguments[0]) == arguments[2]]
    return refs


def _draws(shard: ShardInfo, seed: int) -> list[float]:
    """Return the random numbers of a shard's samples, by which it is split."""
    own_name = shard.name.rpartition("/")[2]  # a union draws as its folders do
    digest = hashlib.sha256(repr((seed, "sample", own_name)).encode()).digest()
    key = int.from_bytes(digest[:16], "little")
    words = np.random.Philox(key=key).random_raw(shard.num_samples).tolist()
    return [(word >> 11) / 2**53 for word in words]


def opened(dataset: mm.Dataset, choices: Sequence[Choice]) -> mm.Dataset:
    """Return the view of a dataset that shows what `chosen` says."""
    view = dataset
    for kind, *arguments in choices:
        if kind == "slice":
            view = view[slice(*arguments)]
        elif kind == "split":
            view = view.split(*arguments[:2])[arguments[2]]
        elif kind == "without":
            view = view.without(opened(dataset, arguments[0]))
        else:
            masks = [
                np.array([(shard, index) in arguments[0] for index in range(count)], dtype=np.bool_)
                for shard, count in enumerate(dataset.counts.tolist())
            ]
            view = view.with_selection(Selection.of_shards(masks, dataset.counts))
    return view
