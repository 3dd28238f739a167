"""The flow's first stage: ORDER -> read -> decode -> batch -> loader -> device.

The order of an epoch is a pure function of integers, computed before any byte is read:
``order(epoch, step, row) -> (shard, index)``. Who asks (which rank, which worker, after which
crash) is no argument of it, so every topology sees the same global batches.

    order.py     steps of one corpus;  mixture/: of several
    corpus.py    what an order knows of a dataset
    chunks.py    N slots of an epoch: chunks of each shard, permuted, end to end, rotated
    lanes.py     steps of G rows: slots cut into lanes, drawn from window by window
    permute.py   the keyed permutations behind both
    defaults.py  grid, window and chunk of a corpus

A reader that owns whole lanes reads each from front to back. `shuffle=False` is one lane without
permutations: slot = step*G + row. Set-up costs O(chunks) an epoch, a step O(rows + its windows).
"""

from typing import TypeAlias

from mmstream.order.corpus import Corpus
from mmstream.order.mixture.order import MixtureOrder
from mmstream.order.mixture.recipe import Recipe, Stop
from mmstream.order.order import Order
from mmstream.order.refs import MAX_ATTEMPTS, NEAR_ATTEMPTS, Refs, Window

AnyOrder: TypeAlias = Order | MixtureOrder
"""They answer the same questions: which samples make a step, in which windows."""

__all__ = [
    "MAX_ATTEMPTS",
    "NEAR_ATTEMPTS",
    "AnyOrder",
    "Corpus",
    "MixtureOrder",
    "Order",
    "Recipe",
    "Refs",
    "Stop",
    "Window",
]
