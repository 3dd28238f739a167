"""The first stage of the flow: ORDER -> read -> decode -> batch -> loader -> device.

An order says which sample is in which row of which step: ``(epoch, step, row) -> (shard, index)``.
It is a pure function of integers, computed before any byte is read. It does not know which rank or
worker asks, or whether a run has crashed before. So the global batches are the same on every
topology, and after every resume.

    order.py     the order of one dataset
    mixture/     the order of several datasets, mixed by weights
    buckets.py   which buckets there are, by the edges of a column, and the order of a dataset
                 whose steps have samples of one bucket
    corpus.py    what an order knows about a dataset, and what a saved state says of its order
    lanes.py     (step, row) -> slot of the epoch, by lanes and windows; what shared lanes cost
    chunks.py    slot of the epoch -> (shard, index), by permuted chunks; lanes that keep samples
    permute.py   the permutations of both
    settings.py  checks and defaults of grid, window, chunk size and the like
    any_order.py what the later stages ask of every order, and small caches

A rank that owns whole lanes reads each of them from front to back. With ``shuffle=False`` there
is one lane and no permutation: slot = step * G + row.
"""

from mmstream.order.any_order import MAX_ATTEMPTS, NEAR_ATTEMPTS, AnyOrder, Refs, Unit, Window
from mmstream.order.buckets import BucketOrder, Buckets, aspect_edges, buckets_of, without_buckets
from mmstream.order.corpus import Corpus
from mmstream.order.mixture.order import MixtureOrder, Recipe, Stop
from mmstream.order.order import Order

__all__ = [
    "MAX_ATTEMPTS",
    "NEAR_ATTEMPTS",
    "AnyOrder",
    "BucketOrder",
    "Buckets",
    "Corpus",
    "MixtureOrder",
    "Order",
    "Recipe",
    "Refs",
    "Stop",
    "Unit",
    "Window",
    "aspect_edges",
    "buckets_of",
    "without_buckets",
]
