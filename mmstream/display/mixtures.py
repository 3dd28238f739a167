"""What notebooks show of mixtures: their sources side by side, and how often a run sees each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from mmstream.display.markup import html_text, page, size_text, table

__all__ = ["mixture_html", "named", "rows_of_sources", "sources_table"]

MAX_SOURCES = 40
MAX_CHANGES = 8


def mixture_html(mixture: Any) -> str:
    """Return what a mixture is made of; nothing is read."""
    rows = [("epoch", mixture.epoch_text), ("samples", f"{len(mixture):,}")]
    return page("<b>Mixture</b>", table([*rows, *_changes(mixture)]), sources_table(mixture))


def sources_table(mixture: Any, order: Any = None) -> str:
    """Return a table of a mixture's sources.

    Args:
        mixture: of it.
        order: of a pipeline of it: how far a source comes in its steps is then told too, by the
            weights of the beginning.
    """
    fractions, head = mixture.fractions[0], ["source", "part", "samples", "shards", "bytes"]
    head += [] if order is None else ["once in", "times an epoch"]
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
            row += _pace(len(dataset) - len(dataset.bad), fractions[name], order)
        rows.append([*row, html_text(dataset.store.url, 120)])
    left = len(mixture.datasets) - len(rows)
    return table([*rows, [f"... {left:,} more"]] if left else rows, [*head, "where"])


def named(fields: Mapping[str, Any], row: int | None = None) -> str:
    """Return the key of a sample, or of a batch's row, after the name of a mixture's source."""
    key, source = fields["__key__"], fields.get("__source__")
    if row is not None:
        key, source = key[row], source and source[row]
    return f"{source}: {key}" if source else str(key)


def rows_of_sources(batch: Mapping[str, Any]) -> str:
    """Return how many rows of a batch are of which source; nothing for one dataset."""
    counts = Counter(batch.get("__source__", ()))
    parts = ", ".join(f"{count} {name}" for name, count in counts.most_common(MAX_SOURCES))
    return f": {parts}" if parts else ""


def _pace(num_samples: int, fraction: float, order: Any) -> list[str]:
    """Return in how many steps a source is seen once, and how often in an epoch of the mixture."""
    if not fraction:
        return ["not at first", ""]
    steps = num_samples / (order.global_batch_size * fraction)
    return [f"{max(1, round(steps)):,} steps", f"{order.steps_per_epoch / steps:.3g}"]


def _changes(mixture: Any) -> list[tuple[str, str]]:
    later = list(mixture.fractions.items())[1:]
    rows = [(f"from step {step:,}", _parts(parts)) for step, parts in later[:MAX_CHANGES]]
    left = len(later) - len(rows)
    return [*rows, ("...", f"{left:,} more changes")] if left else rows


def _parts(fractions: Mapping[str, float]) -> str:
    parts = [f"{name} {100 * part:.3g} %" for name, part in fractions.items()]
    return html_text(", ".join(parts))
