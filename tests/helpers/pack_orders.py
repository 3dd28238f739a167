"""Orders of packs: what their steps hold, and how rows may be dealt to ranks."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from mmstream.packing.order import MixturePackOrder, PackOrder
from mmstream.packing.plan import UnitSums
from mmstream.ranks import World, rows_of_rank
from mmstream.state import make_state
from mmstream.types import IntArray
from tests.helpers.states import load_state


def packs_of_step(
    order: PackOrder | MixturePackOrder, epoch: int, step: int, rows: tuple[int, int] | None = None
) -> list[list[tuple[int, int]]]:
    """The samples of each row, in the order of positions."""
    shards, indexes, _ = order.refs(epoch, step, rows)
    refs = list(zip(shards.tolist(), indexes.tolist(), strict=True))
    ends = np.cumsum(order.document_counts(epoch, step, rows)).tolist()
    return [refs[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def packs_of_ranks(
    order: PackOrder | MixturePackOrder, epoch: int, step: int, num_ranks: int
) -> list[list[tuple[int, int]]]:
    """The samples of each row of the order, as all ranks together have them."""
    packs: dict[int, list[tuple[int, int]]] = {}
    for rank in range(num_ranks):
        span = rows_of_rank(order.global_batch_size, World(rank, num_ranks), None)
        numbers = order.order_rows(epoch, step, span).tolist()
        packs |= dict(zip(numbers, packs_of_step(order, epoch, step, span), strict=True))
    return [packs[row] for row in range(order.global_batch_size)]


def packs_of_windows(
    order: PackOrder | MixturePackOrder, epoch: int
) -> dict[int, dict[int, list[tuple[int, int]]]]:
    """The samples of each row of each step of an epoch, as its windows hold them."""
    steps = range(order.steps_per_epoch)
    packs: dict[int, dict[int, list[tuple[int, int]]]] = {step: {} for step in steps}
    for number in {number for step in steps for number in order.windows(epoch, step).tolist()}:
        for step, row, *ref in zip(*(c.tolist() for c in order.window(epoch, number)), strict=True):
            packs[step].setdefault(row, []).append(tuple(ref))
    return packs


def by_square(sums: UnitSums) -> IntArray:
    return sums.squared_tokens


def dealt(costs: IntArray, num_ranks: int) -> IntArray:
    """A deal that leaves no row where it is."""
    del num_ranks
    return np.argsort(-costs, kind="stable")


def walk(
    order: PackOrder | MixturePackOrder, legs: Sequence[tuple[int, bool, int]], num_epochs: int
) -> Iterator[tuple[int, int, list[list[tuple[int, int]]]]]:
    """Walk some epochs on a chain of topologies; yield epoch, step, and the samples of each row.

    Args:
        order: each leg gets a copy of it, and the state of the leg before.
        legs: ranks, whether rows are dealt to them, and steps until the next leg; again and again.
        num_epochs: the walk ends before this epoch.
    """
    state = make_state(order, 0, 0)
    for num_ranks, is_dealt, num_steps in cycle(legs):
        leg = pickle.loads(pickle.dumps(order))
        epoch, first = load_state(leg, state)
        if epoch == num_epochs:
            return
        if is_dealt:
            leg = leg.with_ranks(num_ranks, dealt, by_square)
        for step in range(first, min(first + num_steps, order.steps_per_epoch)):
            packs = packs_of_ranks(leg, epoch, step, num_ranks)
            assert packs == packs_of_step(order, epoch, step)
            yield epoch, step, packs
            state = saved(leg, epoch, step + 1)


def saved(order: PackOrder | MixturePackOrder, epoch: int, step: int) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(make_state(order, epoch, step)))
    return state
