"""Datasets, mixtures, pipelines and loaders for notebooks: what they hold, and how far they are.

`Dataset`, `Mixture`, `Pipeline`, `Loader` in a notebook -> overviews.py -> samples.py, html.py

It imports none of these classes, but reads the attributes that it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def _sources(mixture: Any, order: Any = None) -> list[list[str]]:
    """Return a row for each source, below the names of the columns.

    Args:
        mixture: The `Mixture`.
        order: Its order in a pipeline. With it, the table says how often the first weights
            deliver each source per epoch of the mixture.
    """
    paces = [] if order is None else ["once in", "times per epoch"]
    rows = [["source", "part", "samples", "shards", "bytes", *paces, "where"]]
    fractions = mixture.fractions[0]
    for name, dataset in islice(mixture.datasets.items(), MAX_SOURCES):
        row = [name, f"{100 * fractions[name]:.3g} %", f"{len(dataset):,}"]
        row += [f"{dataset.num_shards:,}", size_text(dataset.num_bytes)]
        if order is not None:
            row += _pace(name, dataset, fractions[name], order)
        rows.append([*row, dataset.store.url])
    if len(mixture.datasets) > MAX_SOURCES:
        rows.append([f"... {len(mixture.datasets) - MAX_SOURCES:,} more"])
    return rows


def _pace(name: str, dataset: Any, fraction: float, order: Any) -> list[str]:
    """Return the steps in which a source is seen once, and how often per epoch of the mixture."""
    num_rows = dataset.corpus.num_samples
    if order.is_packed:
        recipe = order.inner.recipe
        share = dict(zip(recipe.corpora, recipe.shares[0], strict=True))[name]
        num_rows, fraction = recipe.corpora[name].num_samples, share / sum(recipe.shares[0])
    if not fraction:
        return ["not at first", ""]
    steps = num_rows / (order.global_batch_size * fraction)
    return [f"{max(1, round(steps)):,} steps", f"{order.steps_per_epoch / steps:.3g}"]


# -- pipelines and loaders -------------------------------------------------------------------------


def pipeline_html(pipeline: Any) -> str:
    """Return a table with a row for each stage of a `Pipeline`. Nothing is read."""
    rows = [
        ("dataset", repr(pipeline.dataset)),
        ("order", _order_text(pipeline)),
        ("before", _names(pipeline.before)),
        ("decode", _decode_text(pipeline.decode)),
        ("transforms", _names(pipeline.transforms)),
        ("batch", _batch_text(pipeline)),
        ("bad samples", _bad_samples_text(pipeline.bad_samples)),
    ]
    mixed = hasattr(pipeline.dataset, "datasets")
    sources = _sources(pipeline.dataset, pipeline.order) if mixed else ()
    return overview("Pipeline", rows, sources=sources)


def _names(functions: Iterable[Any]) -> str:
    names = (getattr(function, "__name__", type(function).__name__) for function in functions)
    return ", ".join(names) or "none"


def _order_text(pipeline: Any) -> str:
    order, identity = pipeline.order, pipeline.order.identity()
    rows = f"{order.global_batch_size}{' packs' if order.is_packed else ''}"
    rows += f" samples, {order.repeat} rows of each," if order.repeat > 1 else ""
    mixing = "in the order of the dataset"
    if pipeline.shuffle:
        groups, lanes = order.grid
        kept = " that keep their samples" if "reshuffle" in identity else ""
        sources = identity.get("sources", [{**identity, "name": ""}])
        windows = ", ".join(f"{source['window']:,} {source['name']}".strip() for source in sources)
        mixing = f"shuffled, {groups} x {lanes} lanes{kept}, windows of {windows}"
    text = f"{order.steps_per_epoch:,} steps of {rows} per epoch, {mixing}, seed {pipeline.seed}"
    if "sources" in identity:
        return text
    remainder = "left out" if pipeline.drop_last else "one more step, with padding"
    return f"{text}; samples that do not fill a batch: {remainder}"


def _batch_text(pipeline: Any) -> str:
    """Return what a batch is made by: the plan of its packs, or a function."""
    if pipeline.order.is_packed:
        return f"{pipeline.batching.layout}: {pipeline.order.plan!r}"
    if pipeline.flat is not None:
        return f"{pipeline.flat.layout}: documents without padding"
    return getattr(pipeline.collate, "__name__", "collate")


def _bad_samples_text(policy: Any) -> str:
    action = {"substitute": "substituted", "mask": "masked"}.get(policy.action)
    if action is None:
        return "the first one stops the run"
    limits = f"{100 * policy.max_fraction:g} % or {policy.max_consecutive} in a row"
    return f"{action}; the run stops above {limits}"


def _decode_text(decode: Any) -> str:
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
    state, stats, transfers = loader.state_dict(), loader.stats, loader.stats.transfers
    bad = ", ".join(f"{count} {kind}" for kind, count in stats.bad.items())
    rows = [
        ("position", f"epoch {state['epoch']}, step {state['step']:,} of {len(loader):,}"),
        ("workers", str(loader.num_workers)),
        ("delivered", f"{stats.num_steps:,} steps, {stats.num_samples:,} samples of this rank"),
        ("read", f"{size_text(stats.num_bytes)} in {stats.num_requests:,} ranges"),
        ("reads that came wrong", f"{stats.num_wrong_reads:,}"),
        ("waited for", f"{stats.wait_s:.1f} s; 99 % of batches {stats.wait_p99_s:.2f} s at most"),
        ("bad samples", bad or "none"),
    ]
    last = state["order"].get("weights", [{}])[-1]
    if last.get("live"):
        shares = ", ".join(f"{share} {name}" for name, share in last["shares"].items())
        rows.append(("weights", f"{shares}; set at step {last['step']:,} of the run"))
    if stats.num_documents:
        rows.append(("documents", _documents_text(stats)))
    if transfers.num_requests:
        text = (
            f"{stats.mb_per_s:.0f} MB/s, {transfers.num_index_requests:,} requests for indexes, "
            f"{transfers.num_retries:,} sent again, {transfers.num_stalls:,} of them late, "
            f"{transfers.num_throttled:,} refused for now"
        )
        rows.append(("object storage", text))
    if stats.num_cached_bytes or stats.num_cache_hit_bytes:
        text = (
            f"{stats.cache_hit_fraction:.1%} of the bytes came from it; "
            f"{size_text(stats.num_cached_bytes)} were written"
        )
        rows.append(("node cache", text))
    return overview("Loader", rows)


def _documents_text(stats: Any) -> str:
    text = (
        f"{stats.num_documents:,} of {stats.num_tokens:,} tokens, "
        f"{stats.num_label_tokens:,} with a label; rows {stats.fill:.1%} full"
    )
    if stats.num_planned_tokens:
        text += f", planned {stats.planned_fill:.1%}"
    if stats.num_modelled_steps:
        text += f"; the dearest rank costs {stats.modelled_imbalance:.2f} times the mean"
    return text
