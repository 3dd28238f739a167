"""Datasets and mixtures for notebooks: what they hold.

`Dataset`, `Mixture` in a notebook -> overviews.py -> samples.py, html.py

It imports none of these classes, but reads the attributes that it shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from markupsafe import Markup

from mmstream.display.contents import spread
from mmstream.display.html import element, page
from mmstream.display.samples import MAX_SOURCES, MAX_TILES, samples_part
from mmstream.display.text import MAX_FIELDS, size_text
from mmstream.errors import MMStreamError

MAX_CHANGES = 8
"""Changes of the weights of a mixture that are listed."""

PREVIEW_SAMPLES = 6
MAX_PREVIEW_BYTES = 32 * 2**20
"""What showing a dataset may read. A dataset of long videos gets no thumbnails."""

Rows = Sequence[Sequence[str]]


def overview(
    title: str,
    rows: Rows = (),
    *,
    note: str = "",
    sources: Rows = (),
    tiles: Markup | None = None,
    num_more: int = 0,
    noun: str = "",
) -> str:
    """Return a title, a table of facts, and what there is of sources and samples."""
    return page(
        element("head", title, [note]),
        element("table", rows),
        element("table", sources[1:], sources[0]) if sources else Markup(),
        tiles or Markup(),
        element("more", num_more, noun),
    )


# -- datasets --------------------------------------------------------------------------------------


def dataset_html(dataset: Any) -> str:
    """Return what a `Dataset` holds, and thumbnails of samples that are spread over it.

    Of a view, the first samples.
    """
    if dataset.selection is not None:
        return view_html(dataset)
    manifest, counts = dataset.manifest, dataset.counts
    per_shard = f"{counts.min():,} to {counts.max():,} samples" if counts.size else "none"
    num_bad, num_removed = dataset.num_left_out
    bad = f", of these {num_bad:,} known to be bad" if num_bad else ""
    bad += f", {num_removed:,} taken down" if num_removed else ""
    fields = islice(manifest.fields.items(), MAX_FIELDS)
    rows = [
        ("where", dataset.store.url),
        ("samples", f"{len(dataset):,}{bad}"),
        ("shards", f"{dataset.num_shards:,} of {per_shard}"),
        ("bytes", size_text(manifest.num_bytes)),
        ("fields", ", ".join(f"{name} ({count:,})" for name, count in fields) or "not counted"),
    ]
    num_samples = _num_affordable(dataset, PREVIEW_SAMPLES)
    positions = spread(len(dataset), num_samples) if num_samples else ()
    return overview(
        "Dataset",
        rows,
        tiles=samples_part(_sample_or_error(dataset, position) for position in positions),
        num_more=len(dataset) - num_samples if num_samples else 0,
        noun="samples",
    )


def view_html(view: Any) -> str:
    """Return the first samples of a view as thumbnails."""
    num_samples = _num_affordable(view, MAX_TILES)
    return overview(
        f"{len(view):,} samples",
        note=repr(view),
        tiles=samples_part(_sample_or_error(view, index) for index in range(num_samples)),
        num_more=len(view) - num_samples,
        noun="samples",
    )


def _sample_or_error(samples: Sequence[Any], index: int) -> Any:
    """Return a sample, or the error where it cannot be read."""
    try:
        return samples[index]
    except (MMStreamError, OSError) as error:
        return error


def _num_affordable(dataset: Any, max_samples: int) -> int:
    """Return how many samples to show within `MAX_PREVIEW_BYTES`."""
    mean_bytes: int = max(1, dataset.num_bytes // max(1, len(dataset)))
    return min(max_samples, MAX_PREVIEW_BYTES // mean_bytes, len(dataset))


# -- mixtures --------------------------------------------------------------------------------------


def mixture_html(mixture: Any) -> str:
    """Return the sources of a `Mixture` and the changes of its weights. Nothing is read."""
    rows = [("epoch", mixture.epoch_text), ("samples", f"{len(mixture):,}")]
    changes = list(mixture.fractions.items())[1:]
    rows += [(f"from step {step:,}", _fractions_text(f)) for step, f in changes[:MAX_CHANGES]]
    if len(changes) > MAX_CHANGES:
        rows.append(("...", f"{len(changes) - MAX_CHANGES:,} more changes"))
    return overview("Mixture", rows, sources=_sources(mixture))


def _fractions_text(fractions: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {100 * fraction:.3g} %" for name, fraction in fractions.items())


def _sources(mixture: Any) -> list[list[str]]:
    """Return a row for each source, below the names of the columns."""
    rows = [["source", "part", "samples", "shards", "bytes", "where"]]
    fractions = mixture.fractions[0]
    for name, dataset in islice(mixture.datasets.items(), MAX_SOURCES):
        row = [name, f"{100 * fractions[name]:.3g} %", f"{len(dataset):,}"]
        row += [f"{dataset.num_shards:,}", size_text(dataset.num_bytes), dataset.store.url]
        rows.append(row)
    if len(mixture.datasets) > MAX_SOURCES:
        rows.append([f"... {len(mixture.datasets) - MAX_SOURCES:,} more"])
    return rows
