"""Buckets: samples of about one length or shape, by the upper edges of a column.

`Pipeline(batching=)` takes the description, `Buckets`. Each bucket is the samples that fulfil a
condition on a column, and the samples of a step are of one bucket (see ``bucket_order.py``)::

    edges of duration_s    2, 4, 8                   a sample of 3 s is in the bucket of edge 4
    edges of aspect        (512, 512), (384, 640)    a picture of 600 x 500 is in that of (512, 512)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np

from mmstream.order.settings import require
from mmstream.settings import NonEmptyStr, PositiveFloat, PositiveInt, checked

Edge: TypeAlias = float | tuple[int, int]
"""The largest value of a bucket, or the (height, width) of its pictures."""

MAX_BUCKETS = 255
"""Most edges. Each bucket has windows of its own."""

_ADVICE = {
    "rows": "give rows by upper edge, {30: 64, 8: 128}",
    "edges": "give rising numbers, [2, 4, 8], or for aspect pairs of (height, width), such as "
    "mm.aspect_edges(resolution=512)",
}


@checked(_ADVICE)
@dataclass(frozen=True)
class Buckets:
    """Steps of one shape: each global batch has samples of one bucket, the same on all ranks.

    With numbers as edges, a bucket takes the values above the previous edge, up to and including
    its own. With pairs of (height, width), a picture is in the bucket of the nearest ratio. Samples
    without a value, and those above the last edge, are in no bucket: a warning counts them.

    Each bucket has an epoch of its own, with each of its samples once. An epoch mixes the steps of
    all buckets evenly.

    Attributes:
        column: A column of the dataset, as in conditions: ``aspect``, ``duration_s``,
            ``json.num_words``.
        edges: Upper edges that rise, or pairs of (height, width) in pixels for ``aspect``. To sort
            by another picture, take a ``json`` key that holds its width / height as the column.
        rows: Rows of a step by upper edge, such as ``{30: 64, 8: 128}``. A bucket uses the lowest
            key that is not below its own edge. The most rows must equal `global_batch_size` of the
            pipeline, and the number of ranks must divide each. None: all have `global_batch_size`.
        min_steps: A bucket that has fewer full steps an epoch is joined with another one: with the
            next larger one, the last with the one below it, and pictures with the nearest ratio.
        pad_to: "edge": all batches of a bucket have one shape, which compiled models need. Of
            ``duration_s``, recordings are padded to the edge. Of other columns, edges are numbers
            of tokens, and these are padded. A longer row makes its batch longer. "longest":
            batches are as long as their longest row.

    Raises:
        ConfigError: The edges do not rise, or are of another kind.

    Examples:
        >>> mm.Buckets("duration_s", edges=[2, 4]).conditions
        ('duration_s <= 2', 'duration_s > 2 and duration_s <= 4')
        >>> pipeline = mm.Pipeline(
        ...     mm.open_dataset("shards/"),
        ...     global_batch_size=8,
        ...     batching=mm.Buckets("aspect", edges=mm.aspect_edges(resolution=512)),
        ... )
    """

    column: NonEmptyStr
    _: KW_ONLY
    edges: tuple[float, ...] | tuple[tuple[PositiveInt, PositiveInt], ...]
    rows: Mapping[float, PositiveInt] | None = field(default=None, hash=False)
    min_steps: PositiveInt = 4
    pad_to: Literal["longest", "edge"] = "longest"

    def __post_init__(self) -> None:
        begin = f"Buckets({self.column!r}, edges=...)"
        require(
            0 < len(self.edges) <= MAX_BUCKETS,
            f"{begin}: {len(self.edges)} edges; give from 1 to {MAX_BUCKETS}",
        )
        edges: Sequence[Edge] = self.edges
        if self.has_shapes:
            require(
                (self.column == "aspect" or self.column.startswith("json."))
                and self.pad_to == "longest",
                f"{begin}: pairs of (height, width) are for aspect, or a json.KEY that says it, "
                'and have no padding; give rising numbers, or leave out pad_to="edge"',
            )
            edges = sorted(edges, key=_value)
        else:
            edges = [int(edge) if edge == int(edge) else edge for edge in map(_value, edges)]
        for edge, later in pairwise(edges):
            require(
                _value(edge) < _value(later),
                f"{begin}: {later} after {edge}: "
                + ("two of one ratio" if self.has_shapes else "edges must rise"),
            )
        object.__setattr__(self, "edges", tuple(edges))
        if self.rows is not None:
            require(
                not self.has_shapes and bool(self.rows) and max(self.rows) >= _value(edges[-1]),
                f"Buckets({self.column!r}, rows={dict(self.rows)}): give rows up to the last edge, "
                f"{edges[-1]}; buckets of (height, width) have one area, and no rows",
            )
            object.__setattr__(self, "rows", dict(sorted(self.rows.items())))  # states have them

    def rows_of(self, global_batch_size: int) -> list[int]:
        """Return the rows of a step of each bucket.

        Raises:
            ConfigError: `global_batch_size` is not the largest of `rows`.

        Examples:
            >>> buckets = mm.Buckets("duration_s", edges=[2, 4, 8], rows={2: 64, 8: 16})
            >>> buckets.rows_of(64)
            [64, 16, 16]
        """
        if self.rows is None:
            return [global_batch_size] * len(self.edges)
        keys = [min(key for key in self.rows if key >= _value(edge)) for edge in self.edges]
        rows = [self.rows[key] for key in keys]
        require(
            max(rows) == global_batch_size,
            f"global_batch_size {global_batch_size}: give {max(rows)}, the most rows of a step by "
            f"Buckets({self.column!r}, rows={dict(self.rows)})",
        )
        return rows

    @property
    def has_shapes(self) -> bool:
        """Whether edges are (height, width)."""
        return isinstance(self.edges[0], tuple)

    @property
    def conditions(self) -> tuple[str, ...]:
        """The condition that the samples of each bucket fulfil, in the order of edges."""
        uppers: list[float | None] = [_value(edge) for edge in self.edges]
        if self.has_shapes:  # the border lies at the mean of both ratios by their logarithms
            ratios = [_value(edge) for edge in self.edges]
            uppers = [*(math.sqrt(low * high) for low, high in pairwise(ratios)), None]
        lowers = [0 if self.has_shapes else None, *uppers[:-1]]
        return tuple(
            " and ".join(
                f"{self.column} {sign} {edge!r}"
                for sign, edge in ((">", low), ("<=", high))
                if edge is not None
            )
            for low, high in zip(lowers, uppers, strict=True)
        )

    def joined(self, num_samples: Sequence[int], rows: Sequence[int]) -> list[int]:
        """Return the bucket that each bucket is a part of, by their numbers.

        Args:
            num_samples: Samples of each bucket.
            rows: Rows of a step of each bucket.

        Examples:
            >>> buckets = mm.Buckets("duration_s", edges=[2, 4, 8, 16])
            >>> buckets.joined([5, 90, 90, 7], [8, 8, 8, 8])  # the last keeps its own edge
            [1, 1, 3, 3]
        """
        counts, target = list(num_samples), list(range(len(num_samples)))
        alive = [number for number, count in enumerate(counts) if count]

        def is_small(number: int) -> bool:
            return counts[number] < self.min_steps * rows[number]

        def join(number: int, into: int) -> None:
            counts[into] += counts[number]
            alive.remove(number)
            target[:] = [into if of == number else of for of in target]

        if not self.has_shapes:
            for number, larger in pairwise(tuple(alive)):
                if is_small(number):
                    join(number, larger)
            while len(alive) > 1 and is_small(alive[-1]):
                join(alive[-2], alive[-1])
            return target
        ratios = [math.log(_value(edge)) for edge in self.edges]
        while len(alive) > 1 and (small := [number for number in alive if is_small(number)]):
            fewest = min(small, key=counts.__getitem__)
            others = [number for number in alive if number != fewest]
            join(fewest, min(others, key=lambda other: abs(ratios[other] - ratios[fewest])))
        return target


def _value(edge: Edge) -> float:
    """Return an edge as a number; of a shape its width / height."""
    value = edge[1] / edge[0] if isinstance(edge, tuple) else edge
    require(math.isfinite(value), f"edges: {value} is not an edge")
    return value


@checked()
def aspect_edges(
    resolution: PositiveInt = 512, *, multiple_of: PositiveInt = 64, max_ratio: PositiveFloat = 4
) -> list[tuple[int, int]]:
    """Return shapes of about one area, for the edges of ``Buckets("aspect")``.

    Both sides are multiples, and none has more pixels than the square. For each shorter side it is
    the longest one that fits.

    Args:
        resolution: Side of the square in pixels.
        multiple_of: Both sides are multiples of it: 64 for models of latent diffusion.
        max_ratio: Largest ratio of both sides.

    Returns:
        Pairs of (height, width), from the highest to the widest.

    Raises:
        ConfigError: No side fits.

    Examples:
        >>> mm.aspect_edges(512)[3:6]
        [(576, 448), (512, 512), (448, 576)]
        >>> len(mm.aspect_edges(1024))
        17
    """
    require(
        resolution >= multiple_of and max_ratio >= 1,
        f"aspect_edges: resolution={resolution}, multiple_of={multiple_of}, max_ratio={max_ratio}: "
        "the resolution is at least the multiple, and the ratio at least 1",
    )
    shorts = np.arange(multiple_of, resolution + 1, multiple_of)
    longs = resolution**2 // shorts // multiple_of * multiple_of
    wide = [
        (int(short), int(long))
        for short, long in zip(shorts, longs, strict=True)
        if long <= max_ratio * short
    ]
    return [(long, short) for short, long in wide if short < long] + wide[::-1]
