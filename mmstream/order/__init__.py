"""The first stage of the flow: ORDER -> read -> decode -> batch -> loader -> device.

An order says which sample is in which row of which step: ``(epoch, step, row) -> (shard, index)``.
It is a pure function of integers, computed before any byte is read. It does not know which rank or
worker asks, or whether a run has crashed before. So the global batches are the same on every
topology, and after every resume.

    order.py     the order of one dataset
    mixture/     the order of several datasets, mixed by weights
    corpus.py    what an order knows about a dataset
    lanes.py     (step, row) -> slot of the epoch, by lanes and windows
    chunks.py    slot of the epoch -> (shard, index), by permuted chunks
    permute.py   the permutations of both
    lane_lists.py    lanes that keep their samples
    shared_lanes.py  what it costs when ranks or nodes share lanes
    defaults.py  default grid, window and chunk size
    refs.py      the answers: `Refs` of a step, `Window`, `Unit`
    any_order.py what the later stages ask of every order
    checks.py    argument checks;  cache.py: small caches

A rank that owns whole lanes reads each of them from front to back. With ``shuffle=False`` there
is one lane and no permutation: slot = step * G + row.
"""

from mmstream.order.any_order import AnyOrder
from mmstream.order.corpus import Corpus
from mmstream.order.mixture.order import MixtureOrder
from mmstream.order.mixture.recipe import Recipe, Stop
from mmstream.order.order import Order
from mmstream.order.refs import MAX_ATTEMPTS, NEAR_ATTEMPTS, Refs, Unit, Window

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
    "Unit",
    "Window",
]
