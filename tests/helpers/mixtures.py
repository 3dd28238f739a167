"""A mixture of three sources: a small one, a tiny one, a large one."""

from __future__ import annotations

import numpy as np

import mmstream as mm
from tests.helpers.bad_corpus import policy

COUNTS = {"a": [40, 0, 31], "b": [7], "c": [400, 350, 500]}


def mixed(datasets, a=2.0, b=0.5, c=7.5, **given):
    given = given or {"epoch_steps": 40}
    weights = {"a": a, "b": b, "c": c}
    return mm.Mixture({n: (d, weights[n]) for n, d in datasets.items()}, **given)


def pipeline(mixture, **given):
    given = {"global_batch_size": 12, "seed": 5, "grid": (2, 3), "window": 24,
             "bad_samples": policy(), **given}  # fmt: skip
    return mm.Pipeline(mixture, **given)


def drawn(order, num_steps):
    """(source, shard, index) of each row of the first steps of a run, step by step."""
    first = np.cumsum([0, *map(len, COUNTS.values())])
    steps = []
    for at in range(num_steps):
        refs = order.refs(*divmod(at, order.steps_per_epoch))
        source = np.searchsorted(first, refs.shard, side="right") - 1
        steps.append(list(zip(source.tolist(), refs.shard.tolist(), refs.index.tolist())))
    return steps
