"""Buckets: samples of about one length or shape, by the upper edges of a column.

`Pipeline(batching=)` takes the description, `Buckets`. Each bucket is the samples that fulfil a
condition on a column, and the samples of a step are of one bucket (see `BucketOrder`)::

    edges of duration_s    2, 4, 8                   a sample of 3 s is in the bucket of edge 4
    edges of aspect        (512, 512), (384, 640)    a picture of 600 x 500 is in that of (512, 512)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial, reduce
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mmstream.errors import ConfigError, StateError
from mmstream.order.any_order import AnyOrder, Refs, Window, cached
from mmstream.order.corpus import Corpus, SavedOrder, differing_keys, making
from mmstream.order.order import ORDER_VERSIONS, Order
from mmstream.order.permute import random_words
from mmstream.order.selection import Selection
from mmstream.order.settings import ChosenSettings, mixture_settings, require
from mmstream.settings import NonEmptyStr, PositiveFloat, PositiveInt, checked
from mmstream.types import IntArray, SampleRef

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


# -- the order of buckets: each step has samples of one bucket -------------------------------------
#
# The first stage of the flow where a pipeline has buckets, in the place of `order/order.py`. Each
# bucket is an `Order` over its samples of the corpus, so each of them comes once an epoch. A step
# is found in one more move::
#
#     step of the epoch  --table-->  (bucket, step of the bucket)  --`Order`-->  samples
#
# The table is made once an epoch. Step k of a bucket with n steps gets a random key between k / n
# and (k + 1) / n, and all steps are sorted by their keys. So each bucket is spread evenly over the
# epoch: of 50 equal buckets none is ever more than one step from its share, and where one of them
# has half of 10^6 steps, it is nine at most.
#
# Example: a bucket with 4 steps and one with 2::
#
#     keys of bucket 0    0.11  0.31  0.70  0.82        step            0  1  2  3  4  5
#     keys of bucket 1    0.23  0.95                    bucket          0  1  0  0  0  1
#                                                       its own step    0  0  1  2  3  1

BUCKET_VERSION = 1
"""Part of every saved state; a change of any rule of this order must raise it."""


class Bucket(NamedTuple):
    """A bucket of an order, after small ones were joined."""

    edge: Edge
    """Its largest value, or the (height, width) of its pictures."""
    order: Order
    """Of its samples."""
    selection: Selection
    joined: tuple[Edge, ...]
    """The edges of the buckets that it was joined of."""


class _Table(NamedTuple):
    """The steps of an epoch."""

    buckets: npt.NDArray[np.uint8]
    """[steps] bucket of each step."""
    steps: list[IntArray]
    """Of each bucket, [its steps]: the step of the epoch. They rise."""


class BucketOrder(AnyOrder):
    """The order of all epochs of a dataset with buckets. Build it with `from_corpus`.

    A window belongs to one bucket: its number is local * B + bucket, for B buckets.

    Attributes:
        corpus: the dataset.
        with_corpus: makes the order of the dataset of before. See `Order`.
        settings: what was asked for.
        buckets: those that there are, by their edges.
        steps_per_epoch: steps of every epoch, of all buckets.
        num_samples: samples of all buckets without those on the bad list.
        global_batch_size: G, the most rows of a step over all ranks.
        seed: the seed of all permutations.
        grid: (P, Q), groups of lanes and lanes of a group, of each bucket.
        stride: B * P * Q. Windows of one lane and bucket have numbers that differ by multiples.
        drop_last: whether the samples of a bucket that do not fill a step are left out.

    Examples:
        >>> from mmstream.order import Corpus
        >>> masks = [[True] * 6 + [False] * 4], [[False] * 6 + [True] * 4]
        >>> counts = np.array([10])
        >>> selections = [Selection.of_shards(map(np.array, mask), counts) for mask in masks]
        >>> order = BucketOrder.from_corpus(
        ...     Corpus(counts),
        ...     Buckets("duration_s", edges=[2, 4], min_steps=1),
        ...     selections,
        ...     global_batch_size=2,
        ... )
        >>> [order.refs(epoch=0, step=step).index.tolist() for step in range(5)]
        [[4, 3], [7, 9], [1, 2], [8, 6], [0, 5]]
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        corpus: Corpus,
        settings: Buckets,
        global_batch_size: int,
        seed: int,
        with_corpus: Callable[[Corpus], BucketOrder],
    ) -> None:
        self.settings, self.global_batch_size, self.seed = settings, global_batch_size, seed
        self.corpus = corpus
        self.with_corpus = with_corpus
        self._set_buckets(buckets)

    def _set_buckets(self, buckets: Sequence[Bucket]) -> None:
        first = buckets[0].order
        self.buckets = tuple(buckets)
        self.grid, self.drop_last = first.grid, first.drop_last
        self.stride = len(buckets) * first.stride
        self.steps_per_epoch = sum(bucket.order.steps_per_epoch for bucket in buckets)
        self.num_samples = sum(bucket.order.num_samples for bucket in buckets)
        self._tables: dict[int, _Table] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {}}

    @classmethod
    def from_corpus(
        cls,
        corpus: Corpus,
        buckets: Buckets,
        selections: Sequence[Selection],
        *,
        drop_last: bool = True,
        **settings: Any,
    ) -> BucketOrder:
        """Build the order of a corpus.

        Args:
            corpus: the dataset, with the selection of a view.
            buckets: their edges.
            selections: the stored samples of each bucket. Each sample is in one of them at most.
                Shards after those of the corpus are ignored.
            drop_last: False: each bucket has one more step with its left-over samples.
            settings: those of `Order.from_counts`. Windows are of all buckets together.

        Raises:
            ConfigError: impossible settings, or fewer samples than one step needs.
        """
        chosen = ChosenSettings.check(**settings)
        rows = buckets.rows_of(chosen.global_batch_size)
        bare = replace(corpus, names=None, checksums=None)  # which take long to hash
        selections = [selection.first_shards(corpus.counts.size) for selection in selections]
        if corpus.selection is not None:
            selections = [corpus.selection & selection for selection in selections]
        joined = _joined(bare, buckets, selections, rows)
        corpora = [replace(bare, selection=selection) for _, selection in joined.values()]
        sizes = [(of_bucket.chosen_bytes, of_bucket.num_samples) for of_bucket in corpora]
        shares = [num_samples for _, num_samples in sizes]
        planned = mixture_settings(
            shares,
            sizes,
            math.gcd(*(rows[number] for number in joined)),
            window_bytes=chosen.window_bytes,
            grid=chosen.grid,
            window=chosen.window,
        )
        ordered = [
            Bucket(
                buckets.edges[number],
                Order.from_corpus(
                    of_bucket,
                    global_batch_size=rows[number],
                    seed=int(random_words(1, chosen.seed, "bucket", number)[0] >> np.uint64(1)),
                    grid=planned.grid,
                    window=max(1, round(planned.window * share / sum(shares))),
                    interleave=planned.interleave,
                    chunk=planned.chunk,
                    shuffle=chosen.shuffle,
                    reshuffle=chosen.reshuffle,
                    drop_last=drop_last,
                    defaulted=chosen.defaulted,
                ),
                selection,
                edges,
            )
            for (number, (edges, selection)), of_bucket, share in zip(
                joined.items(), corpora, shares, strict=True
            )
        ]
        with_corpus = partial(
            cls.from_corpus,
            buckets=buckets,
            selections=selections,
            drop_last=drop_last,
            **settings,
        )
        return cls(ordered, corpus, buckets, chosen.global_batch_size, chosen.seed, with_corpus)

    @classmethod
    def from_saved(
        cls,
        identity: Mapping[str, Any],
        corpus: Corpus,
        buckets: Buckets,
        selections: Sequence[Selection],
    ) -> BucketOrder:
        """Rebuild the order of a saved state, even if shards were appended to the corpus since.

        Args:
            identity: ``state["order"]``.
            corpus: as it is now.
            buckets: what `buckets_of` says of the identity.
            selections: the samples of its buckets now.

        Raises:
            StateError: `identity` is malformed, or the corpus or its buckets are others now.
        """
        with making("an order of buckets"):
            saved = SavedOrder.parse(identity, step=1)
            names = ("global_batch_size", "seed", "shuffle", "drop_last", "reshuffle")
            settings = {name: saved.keys[name] for name in names}
            corpus = corpus.as_saved(saved.corpus)
            order = cls.from_corpus(corpus, buckets, selections, **settings)
            order = order.with_saved_defaults(saved)
        if differing := differing_keys(saved.keys, SavedOrder.parse(order.identity()).keys):
            raise StateError(
                f"the buckets of {buckets.column} are not those of the state, in "
                f"{', '.join(differing)}: its column has changed, or another version saved it; "
                "start over"
            )
        return order

    def __repr__(self) -> str:
        lines = [f"{'samples':>13} {'steps':>9}  {self.settings.column} up to"]
        if self.settings.has_shapes:
            lines = [f"{'samples':>13} {'steps':>9}  (height, width)"]
        for edge, order, _, joined in self.buckets:
            note = f", joined of {', '.join(map(str, joined))}" if joined != (edge,) else ""
            lines.append(f"{order.num_samples:>13,} {order.steps_per_epoch:>9,}  {edge}{note}")
        return "\n".join(lines)

    # -- what the order is ---------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Return everything the order depends on, in plain JSON types. States contain it.

        It has the keys of an order without buckets, and ``buckets``: their settings, and the
        samples and settings of each. ``window`` is of all together.
        """
        kept = ("window", "interleave", "chunk")
        identities = [bucket.order.identity() for bucket in self.buckets]
        buckets = [
            {
                "edge": _plain(bucket.edge),
                "rows": bucket.order.global_batch_size,
                "num_samples": bucket.selection.num_chosen,
                "digest": bucket.selection.digest,
                **{key: identity[key] for key in kept},
            }
            for bucket, identity in zip(self.buckets, identities, strict=True)
        ]
        same = ("grid", "shuffle", "drop_last", "reshuffle")
        rows = self.settings.rows
        return {
            "version": BUCKET_VERSION,
            **self.corpus.identity(),
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            **{key: value for key, value in identities[0].items() if key in same},
            "window": sum(identity["window"] for identity in identities),
            "buckets": {
                "column": self.settings.column,
                "edges": [_plain(edge) for edge in self.settings.edges],
                "min_steps": self.settings.min_steps,
                **({} if rows is None else {"rows": [[edge, rows[edge]] for edge in rows]}),
                "parts": buckets,
            },
        }

    def with_saved_defaults(self, saved: SavedOrder) -> BucketOrder:
        """Return this order with the defaults of a state: see `Order`."""
        if not saved.has_begun:
            return self
        same = {key: value for key, value in saved.keys.items() if key in ("grid", "reshuffle")}
        buckets = [
            bucket._replace(
                order=bucket.order.with_saved_defaults(SavedOrder.parse(same | part, step=1))
            )
            for bucket, part in zip(self.buckets, saved.keys["buckets"]["parts"], strict=True)
        ]
        if all(
            new.order is bucket.order for new, bucket in zip(buckets, self.buckets, strict=True)
        ):
            return self
        order = copy(self)
        order._set_buckets(buckets)
        return order

    # -- samples of steps and windows ----------------------------------------------------------

    def edge(self, epoch: int, step: int) -> Edge:
        """Return the edge of the bucket of a step."""
        return self.buckets[self._locate(epoch, step)[0]].edge

    def rows_of(self, epoch: int, step: int, rows: tuple[int, int]) -> tuple[int, int]:
        """Return the rows of a step that a rank delivers which has `rows` of G.

        Example: G is 64, and a step has 16 rows. Then rows 32 to 47 of G stand for rows 8 to 11.
        """
        size = self.buckets[self._locate(epoch, step)[0]].order.global_batch_size
        start, stop = rows
        return start * size // self.global_batch_size, -(-stop * size // self.global_batch_size)

    def require_equal_shares(self, num_ranks: int, shares: Any) -> None:
        """Raise a ConfigError where ranks would not have equal rows, and steps differ in rows."""
        rows = sorted({bucket.order.global_batch_size for bucket in self.buckets})
        most = math.gcd(*rows)
        are_equal = shares in (None, "balanced") or len(set(shares)) == 1
        if rows == [self.global_batch_size] or (most % num_ranks == 0 and are_equal):
            return
        sizes = ", ".join(str(size) for size in range(1, most + 1) if most % size == 0)
        raise ConfigError(
            f"Buckets(rows=...): steps have {', '.join(map(str, rows))} rows, which {num_ranks} "
            f"ranks do not share equally with rows_per_rank={shares!r}: run {sizes} ranks without "
            "rows_per_rank, or give other rows"
        )

    def refs(self, epoch: int, step: int, rows: tuple[int, int] | None = None) -> Refs:
        """Return the samples of a step. See `Order.refs`."""
        number, local = self._locate(epoch, step)
        return self.buckets[number].order.refs(epoch, local, rows)

    def windows(self, epoch: int, step: int, rows: tuple[int, int] | None = None) -> IntArray:
        """Return the number of the window of each row. See `Order.windows`."""
        number, local = self._locate(epoch, step)
        return self.buckets[number].order.windows(epoch, local, rows) * len(self.buckets) + number

    def window(self, epoch: int, number: int) -> Window:
        """Return the samples of a window. See `Order.window`."""
        local, bucket = divmod(number, len(self.buckets))
        window = self.buckets[bucket].order.window(epoch, local)
        return window._replace(step=self._table(epoch).steps[bucket][window.step])

    def substitute(self, epoch: int, step: int, row: int, attempt: int) -> SampleRef:
        """Return the sample of the same bucket that replaces a bad one. See `Order.substitute`."""
        number, local = self._locate(epoch, step)
        return self.buckets[number].order.substitute(epoch, local, row, attempt)

    def _locate(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the bucket of a step, and which step of the bucket it is."""
        self.require_step(epoch, step)
        table = self._table(epoch)
        number = int(table.buckets[step])
        return number, int(np.searchsorted(table.steps[number], step))

    def _table(self, epoch: int) -> _Table:
        return cached(self._tables, epoch, 2, lambda: self._lay_out(epoch))

    def _lay_out(self, epoch: int) -> _Table:
        sizes = [bucket.order.steps_per_epoch for bucket in self.buckets]
        is_shuffled = self.buckets[0].order.identity()["shuffle"]
        keys = []
        for number, size in enumerate(sizes):
            words = random_words(size, self.seed, epoch, "buckets", number) >> np.uint64(11)
            offsets = words.astype(np.float64) * 2.0**-53 if is_shuffled else 0.5
            keys.append((np.arange(size) + offsets) / size)
        by_key = np.argsort(np.concatenate(keys), kind="stable")
        buckets = np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes)[by_key]
        return _Table(buckets, [np.flatnonzero(buckets == number) for number in range(len(sizes))])


def _joined(
    corpus: Corpus, buckets: Buckets, selections: Sequence[Selection], rows: Sequence[int]
) -> dict[int, tuple[tuple[Edge, ...], Selection]]:
    """Return the edges and samples of the buckets that are left, by their numbers.

    Raises:
        ConfigError: no bucket has a sample.
    """
    corpora = (replace(corpus, selection=selection) for selection in selections)
    counts = [of_bucket.num_samples for of_bucket in corpora]
    require(
        any(counts),
        f"Buckets({buckets.column!r}): no sample is in a bucket: each is above the last edge, "
        f"{buckets.edges[-1]}, has no value (NULL) or is known to be bad",
    )
    targets = buckets.joined(counts, rows)
    joined = {}
    for target in sorted({targets[number] for number, count in enumerate(counts) if count}):
        members = [n for n, count in enumerate(counts) if count and targets[n] == target]
        chosen = reduce(Selection.__or__, (selections[number] for number in members))
        joined[target] = tuple(buckets.edges[number] for number in members), chosen
    return joined


def without_buckets(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of an order of the same dataset and settings without buckets.

    It says what the beginning of an epoch needs of a state, where other buckets may begin.

    Raises:
        StateError: it is malformed, or of another version.
    """
    _require_version(identity)
    with making("an order of buckets"):
        version = ORDER_VERSIONS[SavedOrder.parse(identity).reshuffle]
    kept = {key: value for key, value in identity.items() if key != "buckets"}
    return {**kept, "version": version, "interleave": 1, "chunk": 1}


def buckets_of(identity: Mapping[str, Any]) -> Buckets:
    """Return the buckets that an identity names.

    Raises:
        StateError: it is malformed, or of another version.
    """
    _require_version(identity)
    with making("an order of buckets"):
        saved = identity["buckets"]
        settings = {name: saved[name] for name in ("column", "edges", "min_steps")}
        settings["rows"] = dict(saved["rows"]) if "rows" in saved else None
        return Buckets(settings.pop("column"), **settings)


def _require_version(identity: Mapping[str, Any]) -> None:
    if identity.get("version") != BUCKET_VERSION:
        raise StateError(
            f"version {identity.get('version')!r} of buckets, this mmstream has {BUCKET_VERSION}"
        )


def _plain(edge: Edge) -> float | list[int]:
    return list(edge) if isinstance(edge, tuple) else edge
