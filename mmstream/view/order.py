"""The page of the order: what each rank gets in a step, and which step shows a sample."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mmstream.errors import ConfigError
from mmstream.order import AnyOrder, BucketOrder
from mmstream.ranks import World, rows_of_rank
from mmstream.reading.step import Job
from mmstream.types import IntArray, SampleRef
from mmstream.view.content import Content
from mmstream.view.pages import number_of, show
from mmstream.view.shares import shares_of
from mmstream.view.tiles import Tile, tiles_of

MAX_SEARCHED = 4_000_000
"""Samples of an epoch among which one is looked for. That takes some seconds, once."""

MAX_PLACES = 20
"""Places of a sample that are shown: a mixture may show it often."""

MAX_TILES = 48
"""Samples of a step that are shown."""

MAX_RANKS = 4096


class Place(NamedTuple):
    """Where an epoch shows a sample."""

    step: int
    rank: int
    row: int
    """Row of the global batch."""
    job: Job
    """What makes this row alone."""


class RankRows(NamedTuple):
    """What a rank gets in a step."""

    rank: int
    num_rows: int
    num_samples: int
    tiles: list[Tile]


def rows_of(order: AnyOrder, epoch: int, step: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return [start, stop), the rows of a step that a rank delivers."""
    rows = rows_of_rank(order.global_batch_size, World(rank, ranks), "balanced")
    return order.rows_of(epoch, step, rows)


@lru_cache(1)
def _epoch(order: Any, epoch: int) -> tuple[IntArray, IntArray]:
    """Return a number for each sample of an epoch, in its order, and where each step ends."""
    numbers, num_samples = [np.zeros(0, dtype=np.int64)], 0
    for step in range(order.steps_per_epoch):
        shards, indexes, valid = order.refs(epoch, step)
        numbers.append(np.where(valid, (shards << 32) | indexes, -1))
        num_samples += len(shards)
        if num_samples > MAX_SEARCHED:
            break
    return np.concatenate(numbers), np.cumsum([len(of_step) for of_step in numbers[1:]])


def places_of(content: Content, ref: SampleRef, epoch: int, ranks: int) -> list[Place]:
    """Return where an epoch shows a sample.

    Raises:
        ConfigError: The order is not known.
    """
    order: Any = content.order
    _require_ranks(order, ranks)
    numbers, ends = _epoch(order, epoch)
    positions = np.flatnonzero(numbers == (ref[0] << 32) | ref[1])[:MAX_PLACES]
    places = []
    for position in positions.tolist():
        step = int(np.searchsorted(ends, position, side="right"))
        start = int(ends[step - 1]) if step else 0
        num_rows = rows_of(order, epoch, step, 0, 1)[1]
        counts = order.document_counts(epoch, step, (0, num_rows))
        at = int(np.repeat(np.arange(num_rows), counts)[position - start])
        bounds = (rows_of(order, epoch, step, rank, ranks) for rank in range(ranks))
        rank = next(rank for rank, (first, stop) in enumerate(bounds) if first <= at < stop)
        # A step of few rows, such as of a bucket: a job has their share of G.
        size = order.global_batch_size
        job = Job(epoch, step, -(-at * size // num_rows), (at + 1) * size // num_rows)
        row = int(order.order_rows(epoch, step, (at, at + 1))[0])
        places.append(Place(step, rank, row, job))
    return places


def is_searched_whole(content: Content, epoch: int) -> bool:
    """Tell whether `places_of` looks at all steps of an epoch."""
    order: Any = content.order
    return len(_epoch(order, epoch)[1]) == int(order.steps_per_epoch)


def _require_ranks(order: AnyOrder, ranks: int) -> None:
    if ranks > min(MAX_RANKS, order.global_batch_size):
        raise ConfigError(
            f"ranks {ranks:,}: a step has {order.global_batch_size:,} rows; give fewer"
        )


def step_page(request: Request) -> Response:
    """Return what a step holds on each rank."""
    content, query = request.app.state.content, request.query_params
    order: AnyOrder = content.order
    epoch, step = number_of(query, "epoch"), number_of(query, "step")
    ranks = number_of(query, "ranks", default=1, least=1)
    _require_ranks(order, ranks)
    if step >= order.steps_per_epoch:
        problem = f"step {step:,}: an epoch has {order.steps_per_epoch:,} steps"
        raise ConfigError("; ".join(filter(None, [problem, content.unlike_run()])))
    wanted = range(ranks)
    if query.get("rank"):
        rank = number_of(query, "rank")
        if rank >= ranks:
            raise ConfigError(f"rank {rank}: there are {ranks} ranks, from 0")
        wanted = range(rank, rank + 1)
    facts = []
    if isinstance(order, BucketOrder):
        facts.append(f"bucket: {order.edge(epoch, step)}")
    return show(
        request,
        "order.html",
        order=order,
        is_bucketed=isinstance(order, BucketOrder),
        epoch=epoch,
        step=step,
        ranks=ranks,
        rank=query.get("rank", ""),
        facts=facts,
        shares=shares_of(order, epoch, step),
        unlike_run=content.unlike_run(),
        of_ranks=list(_of_ranks(content, epoch, step, ranks, wanted)),
    )


def _of_ranks(
    content: Content, epoch: int, step: int, ranks: int, wanted: range
) -> Iterator[RankRows]:
    """Yield the rows of some ranks, with tiles of the first samples of each."""
    order = content.order
    most = max(1, MAX_TILES // len(wanted))
    for number, rank in enumerate(wanted):
        rows = rows_of(order, epoch, step, rank, ranks)
        shards, indexes, valid = (column.tolist() for column in order.refs(epoch, step, rows))
        counts = order.document_counts(epoch, step, rows)
        row_of_sample = np.repeat(order.order_rows(epoch, step, rows), counts).tolist()
        tokens = order.document_tokens(epoch, step, rows).tolist()
        notes = [
            f"row {row}" + f", {num_tokens:,} tokens" * (num_tokens > 0) + ", padding" * (not good)
            for row, num_tokens, good in zip(row_of_sample, tokens, valid, strict=True)
        ]
        shown = most if number < MAX_TILES else 0
        refs = list(zip(shards, indexes, strict=True))[:shown]
        tiles = tiles_of(content, refs, notes[:shown])
        yield RankRows(rank, len(counts), len(shards), tiles)
