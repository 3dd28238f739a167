"""Pipelines and loaders for notebooks: what they do, and how far they have come.

`Pipeline`, `Loader` in a notebook -> pipelines.py -> markup.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from mmstream.display.markup import html_text, page, size_text, table


def pipeline_html(pipeline: Any) -> str:
    """Return a table with a row for each stage of a `Pipeline`. Nothing is read."""
    rows = [
        ("dataset", html_text(repr(pipeline.dataset))),
        ("order", html_text(_order_text(pipeline))),
        *([("before", html_text(_names(pipeline.before)))] if pipeline.before else []),
        ("decode", html_text(decode_text(pipeline.decode))),
        ("transforms", html_text(_names(pipeline.transforms) or "none")),
        ("batch", html_text(_batch_text(pipeline))),
        ("bad samples", _bad_samples_text(pipeline.bad_samples)),
    ]
    mixed = is_mixture(pipeline.dataset)
    sources = sources_table(pipeline.dataset, pipeline.order) if mixed else ""
    return page("<b>Pipeline</b>", table(rows), sources)


def _names(functions: Any) -> str:
    return ", ".join(getattr(each, "__name__", type(each).__name__) for each in functions)


def _order_text(pipeline: Any) -> str:
    order = pipeline.order
    groups, lanes = order.grid
    rows = f"{order.global_batch_size}{' packs' if order.is_packed else ''}"
    steps = f"{order.steps_per_epoch:,} steps of {rows} per epoch"
    kept = " that keep their samples" if "reshuffle" in order.identity() else ""
    mixing = f"shuffled, {groups} x {lanes} lanes{kept}, {_windows_text(order)}"
    mixing = mixing if pipeline.shuffle else "in the order of the dataset"
    text = f"{steps}, {mixing}, seed {pipeline.seed}"
    if is_mixture(pipeline.dataset):
        return text
    rest = "left out" if pipeline.drop_last else "one more step, with padding"
    return f"{text}; samples that do not fill a batch: {rest}"


def _batch_text(pipeline: Any) -> str:
    """Return what a batch is made by: the plan of its packs, or a function."""
    if pipeline.order.is_packed:
        return f"{pipeline.batching.layout}: {pipeline.order.plan!r}"
    if pipeline.batching is not None:
        return f"{pipeline.batching.layout}: documents without padding"
    return getattr(pipeline.collate, "__name__", "collate")


def _windows_text(order: Any) -> str:
    identity = order.identity()
    if "sources" not in identity:
        return f"windows of {identity['window']:,}"
    return "windows of " + ", ".join(f"{s['window']:,} ({s['name']})" for s in identity["sources"])


def _bad_samples_text(policy: Any) -> str:
    action = {"substitute": "substituted", "mask": "masked"}.get(policy.action)
    if action is None:
        return "the first one stops the run"
    limits = f"{100 * policy.max_fraction:g} % or {policy.max_consecutive} in a row"
    return f"{action}; the run stops above {limits}"


def decode_text(decode: Any) -> str:
    """Return which decoders a pipeline has, in words."""
    decoders = []
    if decode is not None and decode.fields:
        decoders.append(f"by field: {', '.join(decode.fields)}")
    if decode is not None and decode.image is not None:
        decoders.append(f"images to {decode.image.size or 'their own size'}")
    if decode is not None and decode.text is not None:
        text = decode.text
        decoders.append(f"text to at most {text.max_length} tokens, padded to {text.padding}")
    return "; ".join(decoders) or "json is parsed, other fields stay bytes"


def loader_html(loader: Any) -> str:
    """Return the position of a `Loader` in its epoch, and what it has delivered."""
    state = loader.state_dict()
    stats = loader.stats
    epoch = state["epoch"]
    step = state["step"]
    num_steps = len(loader)
    bar = f'<progress max="{num_steps}" value="{step}" style="width:18em"></progress>'
    bad = ", ".join(f"{count} {kind}" for kind, count in stats.bad.items()) or "none"
    rows = [
        ("position", f"epoch {epoch}, step {step:,} of {num_steps:,} {bar}"),
        ("workers", str(loader.num_workers)),
        ("delivered", f"{stats.num_steps:,} steps, {stats.num_samples:,} samples of this rank"),
        ("read", f"{size_text(stats.num_bytes)} in {stats.num_requests:,} ranges"),
        ("reads that came wrong", f"{stats.num_wrong_reads:,}"),
        ("waited for", f"{stats.wait_s:.1f} s; 99 % of batches {stats.wait_p99_s:.2f} s at most"),
        ("bad samples", html_text(bad)),
    ]
    if stats.num_documents:
        words = (
            f"{stats.num_documents:,} of {stats.num_tokens:,} tokens, "
            f"{stats.num_label_tokens:,} with a label; rows {stats.fill:.1%} full"
        )
        if stats.num_planned_tokens:
            words += f", planned {stats.planned_fill:.1%}"
        if stats.num_modelled_steps:
            words += f"; the dearest rank costs {stats.modelled_imbalance:.2f} times the mean"
        rows.insert(3, ("documents", words))
    counts = stats.transfers
    if counts.num_requests:
        words = (
            f"{stats.mb_per_s:.0f} MB/s, {counts.num_index_requests:,} requests for indexes, "
            f"{counts.num_retries:,} sent again, {counts.num_stalls:,} of them late, "
            f"{counts.num_throttled:,} refused for now"
        )
        rows.append(("object storage", words))
    if stats.num_cached_bytes or stats.num_cache_hit_bytes:
        words = (
            f"{stats.cache_hit_fraction:.1%} of the bytes came from it; "
            f"{size_text(stats.num_cached_bytes)} were written"
        )
        rows.append(("node cache", words))
    return page("<b>Loader</b>", table(rows))


# -- mixtures --------------------------------------------------------------------------------------

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
