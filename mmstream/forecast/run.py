"""What a whole run asks of storage: its starts, its epochs, and what a node cache saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmstream.dataset.source import ShardSource, datasets_of
from mmstream.forecast.reads import ReadForecast, Reads
from mmstream.order import AnyOrder
from mmstream.order.checks import reshuffle_of
from mmstream.order.shared_lanes import kept_share

__all__ = ["RunForecast", "forecast_run", "hit_rate", "opening_reads", "price"]

OPENING_REQUESTS = 2
"""Requests of a rank that opens a dataset: for the manifest, and for the names of bad lists."""


@dataclass(frozen=True)
class RunForecast:
    """What all ranks of a run read together, from its start to its end."""

    reads: ReadForecast
    num_nodes: int
    num_epochs: int
    opening: Reads
    """What all ranks and machines read before the first sample: manifests and indexes."""
    hit_rate: float
    """Share of the bytes of later epochs that node caches hold, 0 to 1."""
    later_epoch: Reads
    """What each epoch after the first one reads."""
    total: Reads
    """What one start and all epochs read."""


def forecast_run(
    source: ShardSource,
    order: AnyOrder,
    reads: ReadForecast,
    row_bounds: Sequence[int],
    *,
    ranks_per_node: int = 8,
    num_epochs: int = 1,
    cache_bytes: int = 0,
) -> RunForecast:
    """Say what a whole run reads.

    Args:
        source: what is read.
        order: which samples, and when.
        reads: what an epoch reads.
        row_bounds: where the rows of each rank begin, and G at the end.
        ranks_per_node: ranks of a machine; the last one may have fewer.
        num_epochs: epochs of the run.
        cache_bytes: node cache of each machine.
    """
    node_bounds = [*row_bounds[:-1:ranks_per_node], row_bounds[-1]]
    num_nodes = len(node_bounds) - 1
    opening = opening_reads(source).times(reads.num_ranks)
    opening += reads.index.times(num_nodes) + reads.index_of_rank.times(reads.num_ranks)
    hits = hit_rate(order, reads.epoch.num_bytes, node_bounds, cache_bytes)
    hits *= checked_share(source)
    later = reads.epoch.times(1 - hits)
    total = opening + reads.start + reads.epoch + later.times(num_epochs - 1)
    return RunForecast(reads, num_nodes, num_epochs, opening, hits, later, total)


def opening_reads(source: ShardSource) -> Reads:
    """Return what a rank reads to open its datasets."""
    total = Reads()
    for dataset in datasets_of(source):
        total += Reads(OPENING_REQUESTS, len(dataset.manifest.to_bytes()))
    return total


def hit_rate(
    order: AnyOrder, epoch_bytes: float, node_bounds: Sequence[int], cache_bytes: int
) -> float:
    """Return the share of a later epoch that node caches hold, which are never emptied.

    With `reshuffle="lanes"`, a lane has the same samples in each epoch. A machine with all rows of
    a lane reads them all again. One with a part f of its rows reads the same sample again with
    probability f. Without it, a machine reads others in each epoch.

    Args:
        order: which samples, and when.
        epoch_bytes: bytes of an epoch, all machines together.
        node_bounds: where the rows of each machine begin, and G at the end.
        cache_bytes: of each machine.

    Examples:
        >>> dataset = mm.open_dataset("shards/")
        >>> order = dataset.plan_order(global_batch_size=32, grid=(1, 8), reshuffle="lanes")
        >>> hit_rate(order, 8e9, [0, 16, 32], cache_bytes=10**9)  # a quarter of 4 GB
        0.25
        >>> hit_rate(order, 8e9, [0, 2, 32], cache_bytes=10**10)  # the first lane has two machines
        0.9375
    """
    num_nodes = len(node_bounds) - 1
    room = cache_bytes / epoch_bytes if epoch_bytes else 0.0
    if num_nodes > 1 and reshuffle_of(order.identity()) == "global":
        return min(1.0, room)
    return min(1.0, room * num_nodes) * kept_share(order.grid[1], node_bounds)


def checked_share(source: ShardSource) -> float:
    """Return the share of the bytes of datasets with checksums. Caches hold no others."""
    datasets = datasets_of(source)
    sizes = [dataset.manifest.num_bytes for dataset in datasets]
    checked = [dataset.manifest.num_bytes for dataset in datasets if dataset.has_checksums]
    return sum(checked) / max(1, sum(sizes))


def price(reads: Reads, request_price: float, egress_price: float) -> float:
    """Return what reads cost, at a price for 1,000 requests and one for 1e9 bytes."""
    return reads.num_requests / 1e3 * request_price + reads.num_bytes / 1e9 * egress_price
