"""Part of the loader: where a saved state puts a run, also one whose settings have changed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from mmstream.dataset.mixture import Mixture
from mmstream.errors import StateError
from mmstream.pipeline import Pipeline
from mmstream.planning import order_of_state
from mmstream.state import load_state

__all__ = ["OnChange", "load_state_into"]

logger = logging.getLogger(__name__)

OnChange: TypeAlias = Literal["refuse", "finish_epoch"]
"""What to do with a state of mid-epoch that is not of this pipeline's order."""


def load_state_into(
    pipeline: Pipeline, state: Mapping[str, Any], on_change: OnChange
) -> tuple[tuple[int, int], Pipeline]:
    """Return where a run goes on, (epoch, step), and the pipeline to go on with in that epoch.

    "refuse": that is `pipeline` itself. "finish_epoch": one that ends the epoch exactly as it was
    planned. The state holds all settings of its order, and a corpus that has grown begins with the
    shards that it had, so each sample of that epoch comes once; the next epoch is `pipeline`'s. A
    mixture's sources do not end with its epochs: there it is as "refuse".

    Raises:
        StateError: the state cannot be applied exactly; with "finish_epoch" this means another
            corpus than one with more shards at its end.
    """
    try:
        return load_state(pipeline.order, state), pipeline
    except StateError:
        if on_change == "refuse" or isinstance(pipeline.dataset, Mixture):
            raise
    order, epoch, step = order_of_state(_planned(state), pipeline.dataset)
    if step:
        rows, ends = order.global_batch_size, order.steps_per_epoch
        logger.info("steps %d to %d of epoch %d go on as the state says, %d rows each; then the "
                    "settings of now begin", step, ends - 1, epoch, rows)  # fmt: skip
        pipeline = pipeline.with_order(order)
    return (epoch, step), pipeline


def _planned(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state without its bad list where that no longer matters: at an epoch's begin."""
    identity = state.get("order")
    if state.get("step") != 0 or not isinstance(identity, Mapping):
        return state
    return {**state, "order": {**identity, "bad": None}}
