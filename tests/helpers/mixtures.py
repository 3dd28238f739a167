"""Mixtures of real datasets: the three sources of `orders.COUNTS`, as tars."""

from __future__ import annotations

import mmstream as mm
from tests.helpers.bad_corpus import policy


def mixed(datasets, a=2.0, b=0.5, c=7.5, **given):
    given = given or {"epoch_steps": 40}
    weights = {"a": a, "b": b, "c": c}
    return mm.Mixture({n: (d, weights[n]) for n, d in datasets.items()}, **given)


def make_pipeline(mixture, **given):
    defaults = {"global_batch_size": 12, "seed": 5, "grid": (2, 3), "window": 24}
    return mm.Pipeline(mixture, **{**defaults, "bad_samples": policy(), **given})
