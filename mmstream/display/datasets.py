"""Datasets for notebooks: their size, their fields, and thumbnails of some samples.

`Dataset` in a notebook, `mm.show` -> datasets.py -> samples.py
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

from mmstream.display.contents import MAX_FIELDS, pictures_of
from mmstream.display.markup import QUIET, html_text, page, size_text, table
from mmstream.display.samples import MAX_TILES, samples_html
from mmstream.errors import MMStreamError

CANDIDATES = 3
"""Samples that are read for each one that is shown, at most."""


def spread(num_samples: int, count: int, seed: int | None = None) -> list[int]:
    """Return positions that cut a dataset into equal parts, one from each part.

    Args:
        num_samples: Of the dataset.
        count: Positions to return, at most.
        seed: Draws a position from each part. None: the middle of each.

    Examples:
        >>> spread(1000, 4), spread(3, 4)
        ([125, 375, 625, 875], [0, 1, 2])
    """
    if num_samples <= count:
        return list(range(num_samples))
    if seed is None:
        return [(2 * i + 1) * num_samples // (2 * count) for i in range(count)]
    draw = random.Random(seed).random  # the same numbers in every version of Python
    bounds = [i * num_samples // count for i in range(count + 1)]
    return [start + int(draw() * (stop - start)) for start, stop in pairwise(bounds)]


def preview(read: Callable[[int], Any], num_samples: int, count: int) -> Iterator[Any]:
    """Yield samples that are spread over a dataset, in its order.

    Neighbours may share a picture, one with each caption of it. So a sample whose first picture was
    taken already is left out, if there are others.

    Args:
        read: Returns the sample of a position.
        num_samples: Of the dataset.
        count: Samples to yield.

    Yields:
        Samples, and in place of one that cannot be read its error.
    """
    positions = spread(num_samples, count)
    if num_samples > count:
        positions = list(dict.fromkeys([*positions, *spread(num_samples, CANDIDATES * count)]))
    taken: dict[int, Any] = {}
    pictures: set[bytes] = set()
    for position in positions:
        if len(taken) == count:
            break
        try:
            sample = read(position)
        except (MMStreamError, OSError) as error:
            taken[position] = error
            continue
        first = next(iter(pictures_of(sample).values()), None)
        if not isinstance(first, bytes) or first not in pictures or num_samples <= count:
            taken[position] = sample
            pictures |= {first} if isinstance(first, bytes) else set()
    yield from (taken[position] for position in sorted(taken))


PREVIEW_SAMPLES = 6
MAX_PREVIEW_BYTES = 32 * 2**20
"""What showing a dataset may read. A dataset of long videos gets no thumbnails."""


def dataset_html(dataset: Any) -> str:
    """Return what a `Dataset` holds, and thumbnails of samples that are spread over it."""
    manifest = dataset.manifest
    counts = dataset.counts
    per_shard = f"{counts.min():,} to {counts.max():,} samples" if counts.size else "none"
    bad = f", of these {len(dataset.bad):,} known to be bad" if len(dataset.bad) else ""
    rows = [
        ("where", html_text(dataset.store.url)),
        ("samples", f"{len(dataset):,}{bad}"),
        ("shards", f"{dataset.num_shards:,} of {per_shard}"),
        ("bytes", size_text(manifest.num_bytes)),
    ]
    fields = ", ".join(f"{n} ({c:,})" for n, c in islice(manifest.fields.items(), MAX_FIELDS))
    if fields:
        rows.append(("fields", html_text(fields)))
    num_samples = _num_shown(dataset, dataset, PREVIEW_SAMPLES)
    samples = preview(dataset.__getitem__, len(dataset), num_samples) if num_samples else []
    shown = samples_html(samples)
    is_part = shown and num_samples < len(dataset)
    note = f'<div style="{QUIET}">some samples, spread over all:</div>' if is_part else ""
    return page("<b>Dataset</b>", table(rows), note, shown)


def view_html(view: Any) -> str:
    """Return the first samples of a slice of a dataset as thumbnails."""
    head = f"<b>{len(view):,} samples</b> of {html_text(repr(view.dataset))}"
    num_more = max(0, len(view) - MAX_TILES)
    more = f'<div style="{QUIET}">... {num_more:,} more</div>' if num_more else ""
    return page(head, _first(view, view.dataset, MAX_TILES), more)


def _num_shown(samples: Sequence[Any], dataset: Any, max_samples: int) -> int:
    """Return how many samples to show within `MAX_PREVIEW_BYTES`."""
    mean_bytes: int = max(1, dataset.manifest.num_bytes // max(1, len(dataset)))
    return min(max_samples, MAX_PREVIEW_BYTES // mean_bytes, len(samples))


def _first(samples: Sequence[Any], dataset: Any, max_samples: int) -> str:
    """Return the first samples as tiles. The tile of one that cannot be read holds the reason."""

    def read(index: int) -> Any:
        try:
            return samples[index]
        except (MMStreamError, OSError) as error:
            return error

    return samples_html(map(read, range(_num_shown(samples, dataset, max_samples))))
