"""Mixtures for notebooks: their sources side by side, and how often a run sees each.

`Mixture` in a notebook, pipelines.py -> mixtures.py -> markup.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from mmstream.display.markup import html_text, page, size_text, table

MAX_SOURCES = 40
MAX_CHANGES = 8


def is_mixture(dataset: Any) -> bool:
    """Return whether a dataset has sources of its own."""
    return hasattr(dataset, "datasets")


def mixture_html(mixture: Any) -> str:
    """Return the sources of a `Mixture` and the changes of its weights. Nothing is read."""
    rows = [("epoch", mixture.epoch_text), ("samples", f"{len(mixture):,}")]
    return page("<b>Mixture</b>", table([*rows, *_changes(mixture)]), sources_table(mixture))


def sources_table(mixture: Any, order: Any = None) -> str:
    """Return a table with a row for each source.

    Args:
        mixture: the `Mixture`.
        order: its order in a pipeline. With it, the table says how often the first weights
            deliver each source per epoch of the mixture.
    """
    fractions = mixture.fractions[0]
    head = ["source", "part", "samples", "shards", "bytes"]
    head += [] if order is None else ["once in", "times per epoch"]
    rows = []
    for name, dataset in list(mixture.datasets.items())[:MAX_SOURCES]:
        row = [
            html_text(name, 60),
            f"{100 * fractions[name]:.3g} %",
            f"{len(dataset):,}",
            f"{dataset.num_shards:,}",
            size_text(dataset.manifest.num_bytes),
        ]
        if order is not None:
            row += _pace(*_rows_of_source(name, dataset, fractions[name], order), order)
        rows.append([*row, html_text(dataset.store.url, 120)])
    num_more = len(mixture.datasets) - len(rows)
    if num_more:
        rows.append([f"... {num_more:,} more"])
    return table(rows, [*head, "where"])


def key_text(fields: Mapping[str, Any], row: int | None = None) -> str:
    """Return ``key``, or ``source: key`` in a mixture, of a sample or of a batch's row."""
    key = fields["__key__"]
    source = fields.get("__source__")
    if row is not None:
        key = key[row]
        source = source and source[row]
    return f"{source}: {key}" if source else str(key)


def rows_of_sources(batch: Mapping[str, Any]) -> str:
    """Return how many rows of a batch come from which source; nothing for one dataset."""
    counts = Counter(batch.get("__source__", ()))
    rows = ", ".join(f"{count} {name}" for name, count in counts.most_common(MAX_SOURCES))
    return f": {rows}" if rows else ""


def _rows_of_source(name: str, dataset: Any, fraction: float, order: Any) -> tuple[int, float]:
    """Return how many rows show a source once, samples or packs, and its part of all rows."""
    if not order.is_packed:
        return len(dataset) - len(dataset.bad), fraction
    recipe = order.inner.recipe
    share = dict(zip(recipe.corpora, recipe.shares[0], strict=True))[name]
    return recipe.corpora[name].num_samples, share / sum(recipe.shares[0])


def _pace(num_rows: int, fraction: float, order: Any) -> list[str]:
    """Return the steps in which a source is seen once, and how often per epoch of the mixture."""
    if not fraction:
        return ["not at first", ""]
    steps = num_rows / (order.global_batch_size * fraction)
    return [f"{max(1, round(steps)):,} steps", f"{order.steps_per_epoch / steps:.3g}"]


def _changes(mixture: Any) -> list[tuple[str, str]]:
    """Return a row for each change of weights: its step, and the fractions from there on."""
    changes = list(mixture.fractions.items())[1:]
    rows = [(f"from step {step:,}", _fractions_text(f)) for step, f in changes[:MAX_CHANGES]]
    num_more = len(changes) - len(rows)
    return [*rows, ("...", f"{num_more:,} more changes")] if num_more else rows


def _fractions_text(fractions: Mapping[str, float]) -> str:
    return html_text(", ".join(f"{name} {100 * part:.3g} %" for name, part in fractions.items()))
