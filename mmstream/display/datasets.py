"""Datasets for notebooks: their size, their fields, and thumbnails of some samples.

`Dataset` in a notebook, `mm.show` -> datasets.py -> spread.py, samples.py
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from mmstream.display.contents import MAX_FIELDS
from mmstream.display.markup import QUIET, html_text, page, size_text, table
from mmstream.display.samples import MAX_TILES, samples_html
from mmstream.display.spread import preview
from mmstream.errors import MMStreamError

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
