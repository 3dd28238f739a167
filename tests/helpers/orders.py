"""Orders without any data: of one dataset, and of a mixture of three sources."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mmstream.order import AnyOrder, Corpus, MixtureOrder, Recipe, Refs

COUNTS = {"a": [40, 0, 31], "b": [7], "c": [400, 350, 500]}
"""A small source, a tiny one, a large one."""


def pairs(refs: Refs) -> list[tuple[int, int]]:
    """(shard, index) of each row."""
    return list(zip(refs.shard.tolist(), refs.index.tolist(), strict=True))


def steps_of_epoch(order: AnyOrder, epoch: int) -> list[Refs]:
    return [order.refs(epoch, step) for step in range(order.steps_per_epoch)]


def recipe(
    counts: Mapping[str, Sequence[int]] = COUNTS,
    weights: Sequence[float] = (2.0, 0.5, 7.5),
    changes: Mapping[int, Sequence[float]] | None = None,
    **settings: Any,
) -> Recipe:
    """The recipe of a mixture; weights in the order of the sources."""
    defaults = {"epoch_steps": 40, "global_batch_size": 12, "seed": 5, "grid": (2, 3), "window": 24}
    return Recipe.from_weights(
        {name: Corpus(np.array(source)) for name, source in counts.items()},
        {
            step: dict(zip(counts, values, strict=True))
            for step, values in {0: weights, **(changes or {})}.items()
        },
        **{**defaults, **settings},
    )


def mixture_order(*args: Any, **settings: Any) -> MixtureOrder:
    """The order of a mixture; arguments as `recipe`."""
    return MixtureOrder(recipe(*args, **settings))


def rows_of_run(
    order: MixtureOrder, num_steps: int, counts: Mapping[str, Sequence[int]] = COUNTS
) -> list[list[tuple[int, int, int]]]:
    """(source, shard, index) of each row of the first steps of a run, step by step."""
    first_shards = np.cumsum([0, *map(len, counts.values())])
    steps = []
    for run_step in range(num_steps):
        refs = order.refs(*divmod(run_step, order.steps_per_epoch))
        sources = np.searchsorted(first_shards, refs.shard, side="right") - 1
        columns = (sources.tolist(), refs.shard.tolist(), refs.index.tolist())
        steps.append(list(zip(*columns, strict=True)))
    return steps


def digest(order: AnyOrder, epochs: Iterable[int], max_steps: int = 40) -> str:
    """A hash of all that an order says about the first and last steps of some epochs."""
    identity = order.identity()
    # The golden digests are of 0.1, whose identities said nothing about the shards' content.
    for corpus in (identity, *identity.get("sources", ())):
        assert corpus.pop("sizes", None) is corpus.pop("sha256", None) is None
    hashed = hashlib.sha256(json.dumps(identity).encode())
    half = max_steps // 2
    steps = list(range(order.steps_per_epoch))
    steps = steps if len(steps) <= max_steps else steps[:half] + steps[-half:]
    for epoch in epochs:
        for step in steps:
            numbers = order.windows(epoch, step)
            hashed.update(numbers.tobytes())
            for column in order.refs(epoch, step):
                hashed.update(column.tobytes())
            for number in np.unique(numbers[:2]):
                for column in order.window(epoch, int(number)):
                    hashed.update(column.tobytes())
            for attempt in (0, 7, 8, 15):
                hashed.update(repr(order.substitute(epoch, step, 0, attempt)).encode())
            hashed.update(repr(order.stream(epoch, step, 0)).encode())
    return hashed.hexdigest()[:16]
