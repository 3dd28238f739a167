"""The page of the order: what each rank gets in a step, and which step shows a sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mmstream.errors import ConfigError, escaped
from mmstream.order import AnyOrder, BucketOrder, MixtureOrder
from mmstream.order.buckets import Edge
from mmstream.ranks import World, rows_of_rank
from mmstream.reading.step import Job
from mmstream.types import IntArray, SampleRef
from mmstream.view.content import Content
from mmstream.view.pages import number_of, show, tiles_of

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
    return show(
        request,
        "order.html",
        order=order,
        bucket=order.edge(epoch, step) if isinstance(order, BucketOrder) else None,
        epoch=epoch,
        step=step,
        ranks=ranks,
        rank=query.get("rank", ""),
        shares=shares_of(order, epoch, step),
        unlike_run=content.unlike_run(),
        of_ranks=list(_of_ranks(content, epoch, step, ranks, wanted)),
    )


def _of_ranks(
    content: Content, epoch: int, step: int, ranks: int, wanted: range
) -> Iterator[dict[str, Any]]:
    """Yield how many rows and samples some ranks have, with tiles of the first samples of each."""
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
        yield {
            "rank": rank,
            "num_rows": len(counts),
            "num_samples": len(shards),
            "tiles": tiles,
        }


# -- shares ----------------------------------------------------------------------------------------
#
# What the steps of a run are made of: the sources of a mixture, or buckets. The shares of sources
# are those that were asked for, in steps of the run. Those of buckets are counted, in steps of one
# epoch.

WIDTH, HEIGHT = 560, 120
"""Pixels of the picture."""

MAX_PARTS = 112
"""Parts of the picture, from left to right."""

MAX_COUNTED = 4096
"""Steps of an epoch whose buckets are counted, spread over all."""

MAX_BANDS = 40
"""Sources that the picture names. The others are one band."""


def shares_of(order: AnyOrder, epoch: int, step: int) -> dict[str, Any] | None:
    """Return the picture of the shares over time, as the template of the page draws it.

    Returns:
        None: the order has neither sources nor buckets. Else a dict:

        - title; noun: what a band is; of: what the shares of the bands are of
        - bands: as of `_bands`
        - last: the step at the right end, where the one at the left is 0
        - at: the step of the page, in pixels from the left
    """
    own = getattr(order, "inner", order)  # of packs
    if isinstance(own, MixtureOrder):
        rows = "packs" if order.is_packed else "samples"
        return _of_sources(own, epoch, step, f"{rows}, at this step")
    if isinstance(own, BucketOrder):
        return _of_buckets(own, epoch, step)
    return None


def _of_sources(order: MixtureOrder, epoch: int, step: int, of: str) -> dict[str, Any]:
    run_step = epoch * order.steps_per_epoch + step
    changes = sorted(order.recipe.shares)
    last = max((epoch + 1) * order.steps_per_epoch, changes[-1] + changes[-1] // 8)
    if len(changes) > MAX_PARTS:
        changes = [*range(0, last, -(-last // MAX_PARTS))]
    names = list(order.recipe.corpora)
    parts = [dict(zip(names, _shares_at(order, start), strict=True)) for start in changes]
    now = dict(zip(names, _shares_at(order, run_step), strict=True))
    return {
        "title": "Shares of the sources, over the steps of the run",
        "noun": "source",
        "of": of,
        "bands": _bands(parts, [*changes, last], now),
        "last": last,
        "at": WIDTH * run_step / last,
    }


def _shares_at(order: MixtureOrder, run_step: int) -> list[float]:
    """Return the share of each source that was asked for at a step of the run."""
    start = max(change for change in order.recipe.shares if change <= run_step)
    shares = order.recipe.shares[start]
    return [share / sum(shares) for share in shares]


def _of_buckets(order: BucketOrder, epoch: int, step: int) -> dict[str, Any]:
    num_steps = order.steps_per_epoch
    num_parts = min(MAX_PARTS // 2, num_steps)
    ends = [num_steps * part // num_parts for part in range(num_parts + 1)]
    stride = -(-num_steps // MAX_COUNTED)
    edges = [_text(bucket.edge) for bucket in order.buckets]
    parts = []
    for start, stop in pairwise(ends):
        steps = range(start, stop, stride)
        counts = Counter(_text(order.edge(epoch, counted)) for counted in steps)
        parts.append({edge: counts[edge] / len(steps) for edge in edges})
    of_all = {
        _text(bucket.edge): bucket.order.steps_per_epoch / num_steps for bucket in order.buckets
    }
    return {
        "title": f"Shares of the buckets, over the steps of epoch {epoch}",
        "noun": "bucket",
        "of": "the steps",
        "bands": _bands(parts, ends, of_all),
        "last": num_steps,
        "at": WIDTH * step / num_steps,
    }


def _text(edge: Edge) -> str:
    """Return the edge of a bucket: ``up to 640``, or ``512 x 384`` of pictures."""
    return " x ".join(map(str, edge)) if isinstance(edge, tuple) else f"up to {edge:,}"


def _bands(
    parts: Sequence[Mapping[str, float]], ends: Sequence[int], shown: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return the bands of a picture, one on top of the other.

    Args:
        parts: The share of each band, from left to right.
        ends: The step at which each part begins, and the end of the last one.
        shown: The share of each band to name.

    Returns:
        Of each band its name, the share to name, its colour, and bars: x, y, width and height of
        rectangles in pixels.
    """
    names = list(shown)
    bottoms = [float(HEIGHT)] * len(parts)
    bands = []
    for number, name in enumerate(names[:MAX_BANDS]):
        is_rest = number == MAX_BANDS - 1 and len(names) > MAX_BANDS
        members = names[number:] if is_rest else [name]
        bars = []
        for position, part in enumerate(parts):
            height = HEIGHT * sum(part[member] for member in members)
            bottoms[position] -= height
            left, right = (WIDTH * end / ends[-1] for end in ends[position : position + 2])
            values = (left, bottoms[position], right - left, height)
            if height:
                bars.append(tuple(round(value, 2) for value in values))
        text = f"{len(members):,} others" if is_rest else escaped(name)
        # Hues that follow each other are far apart; the lightness fits both themes.
        colour = f"hsl({(210 + number * 137) % 360}, 55%, {58 if number % 2 else 48}%)"
        share = sum(shown[member] for member in members)
        bands.append({"name": text, "share": share, "colour": colour, "bars": bars})
    return bands
