"""What the steps of a run are made of: the shares of a mixture's sources, or of buckets.

The shares of sources are those that were asked for, in steps of the run. Those of buckets are
counted, in steps of one epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from mmstream.errors import escaped
from mmstream.order import AnyOrder, BucketOrder, MixtureOrder
from mmstream.order.buckets import Edge

WIDTH, HEIGHT = 560, 120
"""Pixels of the picture."""

MAX_PARTS = 112
"""Parts of the picture, from left to right."""

MAX_COUNTED = 4096
"""Steps of an epoch whose buckets are counted, spread over all."""

MAX_BANDS = 40
"""Sources that the picture names. The others are one band."""


class Bar(NamedTuple):
    """A rectangle of a band, in pixels."""

    x: float
    y: float
    width: float
    height: float


class Band(NamedTuple):
    """A source or a bucket."""

    name: str
    share: float
    """At the step of the page; of a bucket, of all steps."""
    colour: str
    bars: list[Bar]


class Shares(NamedTuple):
    """The picture, and what it says in words."""

    title: str
    noun: str
    """What a band is."""
    of: str
    """What their shares are of."""
    bands: list[Band]
    first: int
    last: int
    """Steps at the left and right end."""
    at: float
    """The step of the page, in pixels from the left."""


def shares_of(order: AnyOrder, epoch: int, step: int) -> Shares | None:
    """Return the shares over time. None: the order has neither sources nor buckets."""
    own = getattr(order, "inner", order)  # of packs
    if isinstance(own, MixtureOrder):
        rows = "packs" if order.is_packed else "samples"
        return _of_sources(own, epoch, step, f"{rows}, at this step")
    if isinstance(own, BucketOrder):
        return _of_buckets(own, epoch, step)
    return None


def _of_sources(order: MixtureOrder, epoch: int, step: int, of: str) -> Shares:
    run_step = epoch * order.steps_per_epoch + step
    changes = sorted(order.recipe.shares)
    last = max((epoch + 1) * order.steps_per_epoch, changes[-1] + changes[-1] // 8)
    if len(changes) > MAX_PARTS:
        changes = [*range(0, last, -(-last // MAX_PARTS))]
    names = list(order.recipe.corpora)
    parts = [dict(zip(names, _shares_at(order, start), strict=True)) for start in changes]
    now = dict(zip(names, _shares_at(order, run_step), strict=True))
    return Shares(
        "Shares of the sources, over the steps of the run",
        "source",
        of,
        _bands(parts, [*changes, last], now),
        0,
        last,
        WIDTH * run_step / last,
    )


def _shares_at(order: MixtureOrder, run_step: int) -> list[float]:
    """Return the share of each source that was asked for at a step of the run."""
    start = max(change for change in order.recipe.shares if change <= run_step)
    shares = order.recipe.shares[start]
    return [share / sum(shares) for share in shares]


def _of_buckets(order: BucketOrder, epoch: int, step: int) -> Shares:
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
    at = WIDTH * step / num_steps
    title = f"Shares of the buckets, over the steps of epoch {epoch}"
    return Shares(title, "bucket", "the steps", _bands(parts, ends, of_all), 0, num_steps, at)


def _text(edge: Edge) -> str:
    """Return the edge of a bucket: ``up to 640``, or ``512 x 384`` of pictures."""
    return " x ".join(map(str, edge)) if isinstance(edge, tuple) else f"up to {edge:,}"


def _bands(
    parts: Sequence[Mapping[str, float]], ends: Sequence[int], shown: Mapping[str, float]
) -> list[Band]:
    """Return the bands of a picture, one on top of the other.

    Args:
        parts: The share of each band, from left to right.
        ends: The step at which each part begins, and the end of the last one.
        shown: The share of each band to name.
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
                bars.append(Bar(*(round(value, 2) for value in values)))
        text = f"{len(members):,} others" if is_rest else escaped(name)
        # Hues that follow each other are far apart; the lightness fits both themes.
        colour = f"hsl({(210 + number * 137) % 360}, 55%, {58 if number % 2 else 48}%)"
        bands.append(Band(text, sum(shown[member] for member in members), colour, bars))
    return bands
