"""The samples of each bucket of a dataset, and the order over them.

Each bucket is what `Dataset.where` says of its condition, and ``mmstream select URL --buckets``
stores it as such. The columns are read once for all buckets.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mmstream.dataset.select import each_of, rule_of, saved_corpus, store_selection
from mmstream.display.text import count_text
from mmstream.errors import ConfigError, StateError
from mmstream.order import BucketOrder, Buckets, buckets_of
from mmstream.order.selection import Selection
from mmstream.ranks import World, resolve_world

logger = logging.getLogger(__name__)


def bucket_selections(
    dataset: Any,
    buckets: Buckets,
    *,
    world: World | None = None,
    progress: bool = True,
    recompute: bool = False,
) -> list[Selection]:
    """Return the samples of each bucket of a dataset or view.

    Args:
        dataset: The dataset.
        buckets: Their column and edges.
        world: As `Dataset.where`.
        progress: Show a progress bar (on a terminal only).
        recompute: Ignore stored selections.

    Raises:
        ConfigError: There is no such column, it does not compare with the edges, or there are
            several ranks and nothing is stored.
        ManifestError: What is stored is damaged.
        ShardError, StorageError: Columns cannot be read.
    """
    rules = [rule_of(condition) for condition in buckets.conditions]
    if len(rules[0].names) != 1:
        raise ConfigError(f"Buckets({buckets.column!r}): name one column")
    shapes = ("x".join(map(str, edge)) for edge in buckets.edges if isinstance(edge, tuple))
    edges = shapes if buckets.has_shapes else map(str, buckets.edges)
    return each_of(
        dataset,
        rules,
        what=f"Buckets({buckets.column!r})",
        options=("--buckets", buckets.column, "--edges", ",".join(edges)),
        world=world,
        progress=progress,
        recompute=recompute,
    )


def store_buckets(dataset: Any, buckets: Buckets, *, overwrite: bool) -> list[int]:
    """Store the samples of each bucket beside the index. Return how many they are.

    Raises:
        ConfigError, ShardError, StorageError: As `bucket_selections`.
        LockedError: Another process writes there.
    """
    selections = bucket_selections(dataset, buckets, world=World(), recompute=overwrite)
    for condition, selection in zip(buckets.conditions, selections, strict=True):
        view = dataset.with_selection(selection)
        store_selection(
            view, condition, text=rule_of(condition).text, name=None, overwrite=overwrite
        )
    return [selection.num_chosen for selection in selections]


def bucket_order(dataset: Any, buckets: Buckets, **settings: Any) -> BucketOrder:
    """Return the order of a dataset or view with buckets. Rank 0 logs what takes no part.

    Settings are those of `Order.from_counts`.

    Raises:
        ConfigError: Impossible settings, or fewer samples than one step needs. As
            `bucket_selections`.
        ManifestError, ShardError, StorageError: As `bucket_selections`.
    """
    selections = bucket_selections(dataset, buckets)
    corpus = dataset.corpus
    order = BucketOrder.from_corpus(corpus, buckets, selections, **settings)
    if resolve_world(None).rank:
        return order
    num_outside = corpus.num_samples - order.num_samples
    if num_outside:
        limit = "" if buckets.has_shapes else f", or it is above {buckets.edges[-1]}"
        logger.warning(
            "buckets of %s: %s are in no bucket and left out, because the value is not known "
            "(NULL)%s",
            buckets.column,
            f"{num_outside:,} of {count_text(corpus.num_samples, 'sample')}",
            limit,
        )
    filled = [
        edge
        for edge, selection in zip(buckets.edges, selections, strict=True)
        if selection.num_chosen
    ]
    if len(filled) == 1 < len(selections) and not buckets.has_shapes:
        logger.warning(
            "buckets of %s: all samples are in that of %s; are edges in the unit of the column?",
            buckets.column,
            filled[0],
        )
    # Pictures of joined shapes are cropped to one of them.
    level = logging.WARNING if buckets.has_shapes else logging.INFO
    for edge, _, _, joined in order.buckets:
        if len(joined) > 1:
            logger.log(
                level,
                "buckets of %s: %s also takes the samples of %s, too few for min_steps=%d steps",
                buckets.column,
                edge,
                ", ".join(str(other) for other in joined if other != edge),
                buckets.min_steps,
            )
    return order


def saved_bucket_order(dataset: Any, identity: Mapping[str, Any]) -> BucketOrder:
    """Return the order with buckets that a saved state names.

    Raises:
        StateError: The state belongs to another dataset, or its buckets have other samples now.
        ManifestError, ShardError, StorageError: As `bucket_selections`.
    """
    buckets = buckets_of(identity)
    selections = bucket_selections(dataset.with_selection(None), buckets, world=World())
    try:
        return BucketOrder.from_saved(identity, dataset.corpus, buckets, selections)
    except StateError:
        corpus = saved_corpus(dataset, identity)  # of a view that is stored
        if corpus is None:
            raise
    return BucketOrder.from_saved(identity, corpus, buckets, selections)
