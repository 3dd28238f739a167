"""From a dataset to the order of its epochs: as settings say, or as a saved state does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmstream.dataset import Dataset
from mmstream.errors import StateError
from mmstream.order import Order
from mmstream.state import load_state

__all__ = ["order_of_state", "plan"]


def plan(dataset: Dataset, **settings: Any) -> Order:
    """Return the order of a dataset; `settings` and errors are those of `Order.from_counts`."""
    return Order.from_counts(
        dataset.counts,
        names=[shard.name for shard in dataset.manifest.shards],
        num_bytes=dataset.manifest.num_bytes,
        bad=dataset.bad,
        **settings,
    )


def order_of_state(state: Mapping[str, Any], dataset: Dataset) -> tuple[Order, int, int]:
    """Return the order that a state was saved with, and the state's epoch and step.

    Every epoch of a run has this order, unless its settings were changed where an epoch begins.

    Args:
        state: ``loader.state_dict()``.
        dataset: the corpus of that run; shards may have been appended since.

    Raises:
        StateError: no state of a Loader, or one of another corpus.
    """
    identity = state.get("order")
    if not isinstance(identity, Mapping):
        raise StateError("not a state of a Loader: it holds no order")
    names = [shard.name for shard in dataset.manifest.shards]
    order = Order.from_identity(identity, dataset.counts, names, dataset.bad)
    return order, *load_state(order, state)
