"""Orders of packs: what their steps hold, and how rows may be dealt to ranks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from mmstream.packing.mixture_order import MixturePackOrder
from mmstream.packing.order import PackOrder
from mmstream.packing.plan import UnitSums
from mmstream.state import make_state
from mmstream.types import IntArray

__all__ = ["by_square", "dealt", "packs_of_step", "saved"]


def packs_of_step(
    order: PackOrder | MixturePackOrder, epoch: int, step: int, rows: tuple[int, int] | None = None
) -> list[list[tuple[int, int]]]:
    """The samples of each row, in the order of positions."""
    shards, indexes, _ = order.refs(epoch, step, rows)
    refs = list(zip(shards.tolist(), indexes.tolist(), strict=True))
    ends = np.cumsum(order.document_counts(epoch, step, rows)).tolist()
    return [refs[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def by_square(sums: UnitSums) -> IntArray:
    return sums.squared_tokens


def dealt(costs: IntArray, num_ranks: int) -> IntArray:
    """A deal that leaves no row where it is."""
    del num_ranks
    return np.argsort(-costs, kind="stable")


def saved(order: PackOrder | MixturePackOrder, epoch: int, step: int) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(make_state(order, epoch, step)))
    return state
