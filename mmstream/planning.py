"""From a dataset or a mixture to the order of its epochs: as settings say, or a saved state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.mixture import Mixture
from mmstream.errors import StateError
from mmstream.order import AnyOrder, MixtureOrder, Order, Recipe
from mmstream.state import load_state

__all__ = ["order_of_state", "plan"]


def plan(
    dataset: Dataset | Mixture, *, shuffle: bool = True, drop_last: bool = True, **settings: Any
) -> AnyOrder:
    """Return the order of a dataset or a mixture.

    Settings and errors are those of `Order.from_counts`; of a mixture no step is partial, so
    `drop_last` says nothing.
    """
    settings["shuffle"] = shuffle
    if isinstance(dataset, Mixture):
        recipe = Recipe.of(
            dataset.corpora, dataset.weights, epoch_steps=dataset.epoch_steps, **settings
        )
        return MixtureOrder(recipe)
    corpus = dataset.corpus
    return Order.from_counts(
        corpus.counts,
        names=corpus.names,
        num_bytes=corpus.num_bytes,
        bad=corpus.bad,
        drop_last=drop_last,
        **settings,
    )


def order_of_state(
    state: Mapping[str, Any], dataset: Dataset | Mixture
) -> tuple[AnyOrder, int, int]:
    """Return the order that a state was saved with, and the state's epoch and step.

    Every epoch of a run has this order, unless its settings were changed where an epoch begins. Of
    a mixture only the datasets count here; the state knows the weights.

    Args:
        state: ``loader.state_dict()``.
        dataset: that of the run; shards may have been appended since, but not in a mixture.

    Raises:
        StateError: no state of a Loader, or one of another corpus.
    """
    identity = state.get("order")
    if not isinstance(identity, Mapping):
        raise StateError("not a state of a Loader: it holds no order")
    if ("sources" in identity) != isinstance(dataset, Mixture):
        ours, theirs = "a mixture: give its JSON file", "one dataset: give that"
        raise StateError(f"this state is of {ours if 'sources' in identity else theirs}")
    order: AnyOrder
    if isinstance(dataset, Mixture):
        order = MixtureOrder(Recipe.from_identity(identity, dataset.corpora))
        names, here = list(order.recipe.corpora), list(dataset.datasets)
        if names != here[: len(names)]:  # shards are numbered in this order
            raise StateError(
                f"the state's sources are {names}, and here {here}: put them in the state's order, "
                "new ones at the end"
            )
    else:
        corpus = dataset.corpus
        order = Order.from_identity(identity, corpus.counts, corpus.names, corpus.bad)
    return order, *load_state(order, state)
