"""``mmstream info``: what a dataset or a mixture holds. --stats imports torch."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import click

from mmstream.cli.select import bucketing, buckets_from, choosing, open_chosen
from mmstream.cli.shared import (
    AT_LEAST_0,
    AT_LEAST_1,
    allow_foreign_urls,
    command,
    refuse_given,
    save_page,
    say,
    text_counter,
)
from mmstream.dataset.buckets import bucket_order
from mmstream.dataset.columns import column_names, read_columns
from mmstream.dataset.mixture import Mixture
from mmstream.dataset.select import stored_names
from mmstream.display.contents import spread
from mmstream.display.samples import statistics_html, statistics_lines
from mmstream.display.text import count_text, size_text
from mmstream.errors import SampleError, escaped
from mmstream.measuring.statistics import statistics
from mmstream.media.fields import undecoded_media
from mmstream.order import Buckets
from mmstream.ranks import World, rows_of_rank
from mmstream.reading.plan import epoch_reads, window_bytes
from mmstream.storage.transfers import MAX_PREFIX_RATE

KINDS = {
    "string": "text",
    "int64": "whole number",
    "double": "decimal number",
    "bool": "true or false",
    "null": "",
}
"""Words for the types of columns."""


@command("mmstream info s3://bucket/corpus", global_batch_size="--plan")
@click.argument("url")
@click.option(
    "--keys",
    "num_keys",
    type=AT_LEAST_0,
    default=5,
    show_default=True,
    help="Number of keys to show, of samples that are spread over the dataset.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--columns",
    is_flag=True,
    help="Instead, list the columns that --where may name, and the selections that are stored.",
)
@click.option(
    "--stats",
    is_flag=True,
    help="Instead, read some samples and measure them: sizes of pictures, bytes, words, turns, "
    "classes.",
)
@click.option(
    "--samples",
    "num_samples",
    type=AT_LEAST_1,
    help="With --stats: samples to read, spread over the dataset.  [default: 1000]",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="With --stats: draws these samples.",
)
@click.option(
    "--tokenizer",
    metavar="FOLDER",
    help="With --stats: also count tokens. Those of media count where it is the folder of a whole "
    "Qwen-VL model. `bytes` is a tokenizer of one token per byte.",
)
@click.option("--html", metavar="FILE", help="With --stats: also write a page with the numbers.")
@click.option(
    "--plan",
    type=AT_LEAST_1,
    metavar="G",
    help="Instead, say about what a run with batches of G rows over all ranks asks of object "
    "storage.",
)
@click.option(
    "--ranks", type=AT_LEAST_1, default=1, show_default=True, help="With --plan: ranks of the run."
)
@bucketing
@choosing()
@allow_foreign_urls
def info(
    url: str,
    num_keys: int,
    as_json: bool,
    columns: bool,
    stats: bool,
    num_samples: int | None,
    seed: int,
    tokenizer: str | None,
    html: str | None,
    allow_foreign_urls: bool,
    plan: int | None,
    ranks: int,
    buckets: str | None,
    edges: str | None,
    resolution: int | None,
    multiple_of: int,
    **choice: Any,
) -> None:
    """Show what the dataset at URL holds: shards, samples, fields, bytes, some keys.

    If URL is the JSON file of a mixture: its weights, the end of an epoch, and the same of each
    source.
    """
    open_it = partial(open_chosen, url, allow_foreign_urls, choice)
    if plan is None:
        refuse_given(["ranks", "buckets", "edges", "resolution", "multiple_of"], "with --plan")
    if not stats:
        refuse_given(["num_samples", "seed", "tokenizer", "html"], "with --stats")
    if plan is not None:
        refuse_given(["num_keys", "as_json", "stats", "columns"], "without --plan")
        wanted = buckets_from(buckets, edges, resolution, multiple_of)
        _show_reads(open_it(), plan, ranks, wanted)
    elif stats:
        refuse_given(["num_keys", "columns"], "without --stats")
        _show_statistics(open_it(), url, num_samples or 1000, seed, tokenizer, html, as_json)
    elif columns:
        refuse_given(["num_keys", "as_json"], "without --columns")
        _show_columns(open_it())
    else:
        _show(open_it(), num_keys, as_json)


def _show(data: Any, num_keys: int, as_json: bool) -> None:
    """Print what a dataset or a mixture holds."""
    if not isinstance(data, Mixture):
        about = _about(data, num_keys)
        if as_json:
            say(json.dumps(about))
        else:
            _print_dataset(data, about)
        return
    sources = {name: _about(dataset, num_keys) for name, dataset in data.datasets.items()}
    if as_json:
        epoch = "stop" if isinstance(data.epoch_steps, str) else "epoch_steps"
        sizes = {"num_samples": len(data), "num_shards": data.num_shards}
        settings = {epoch: data.epoch_steps, "weights": data.weights}
        say(json.dumps({**sizes, **settings, "sources": sources}))
        return
    say(f"mixture of {len(sources)} sources, {len(data):,} samples; {data.epoch_text}")
    for step, fractions in data.fractions.items():
        weights = ", ".join(f"{name} {fraction:.4g}" for name, fraction in fractions.items())
        say(f"  {f'from step {step:,}' if step else 'weights'}: {weights}")
    for name, dataset in data.datasets.items():
        say(f"{name}: ", nl=False)
        _print_dataset(dataset, sources[name])


def _show_columns(dataset: Any) -> None:
    """Print the columns of a dataset as its first shard has them, and the stored selections."""
    if isinstance(dataset, Mixture):
        raise click.UsageError("--columns is for one dataset: ask it for each source of a mixture")
    names = column_names(dataset)
    columns = read_columns(dataset, 0, names) if dataset.num_shards else {}
    say("columns, of json those of the first, a middle and the last shard")
    say(f"  {'name':<24} {'type':<15} NULL  example, of the first shard")
    for name, column in columns.items():
        share = column.null_count / max(1, len(column))
        kind = KINDS.get(str(column.type), str(column.type))
        example = next((value for value in column.to_pylist() if value is not None), "")
        say(f"  {escaped(name):<24} {kind:<15} {share:>4.0%}  {escaped(example, 60)}")
    for name, record in stored_names(dataset).items():
        say(
            f"selection {escaped(name)}: {record.num_chosen:,} of {record.num_samples:,} samples, "
            f"{escaped(record.chosen_by)}"
        )


def _show_reads(data: Any, num_rows: int, num_ranks: int, buckets: Buckets | None) -> None:
    """Print about what an epoch over a dataset asks of object storage."""
    if isinstance(data, Mixture):
        raise click.UsageError("--plan is for one dataset: ask it for each source of a mixture")
    if buckets is None:
        order = data.plan_order(global_batch_size=num_rows)
    else:
        order = bucket_order(data, buckets, global_batch_size=num_rows)
        for line in repr(order).splitlines():
            say(line)
    ranks = (World(rank, num_ranks) for rank in range(num_ranks))
    row_bounds = [*(rows_of_rank(num_rows, rank, "balanced")[0] for rank in ranks), num_rows]
    reads = epoch_reads(data, order, row_bounds)
    assert reads is not None  # an order has samples, and these rows are not packs
    held = size_text(window_bytes(data, order, -(-num_rows // num_ranks)))
    say(
        f"plan: {count_text(order.steps_per_epoch, 'step')} of {count_text(num_rows, 'row')} per "
        f"epoch; grid {order.grid}, {count_text(num_ranks, 'rank')}"
    )
    say(f"bytes: {size_text(reads.num_bytes)} an epoch")
    say(f"requests: about {reads.num_requests:,.0f} an epoch, {reads.requests_per_gb:,.0f} a GB")
    say(f"memory: up to {held} of windows on a rank, beside what is read ahead")
    say(
        f"S3: a prefix answers {MAX_PREFIX_RATE:,} requests/s, which is about "
        f"{MAX_PREFIX_RATE * reads.num_samples / reads.num_requests:,.0f} samples/s"
    )


def _show_statistics(
    data: Any,
    url: str,
    num_samples: int,
    seed: int,
    tokenizer: str | None,
    html: str | None,
    as_json: bool,
) -> None:
    """Measure some samples. Print a table, and write a page if one is wanted."""
    text = None if tokenizer is None else text_counter(tokenizer, 1 << 30)
    stats = statistics(data, num_samples, seed=seed, text=text, progress=True)
    if as_json:
        say(json.dumps({"url": url, **stats.summary()}))
    else:
        for line in statistics_lines(stats):
            say(line)
    if html is not None:
        say(save_page(statistics_html(stats), f"{escaped(url)}: statistics", html), err=as_json)


def _about(dataset: Any, num_keys: int) -> dict[str, Any]:
    """Return what `--json` prints for a dataset."""
    manifest = dataset.manifest
    samples = _some_samples(dataset, num_keys)
    names = dict.fromkeys(name for sample in samples for name in sample if name[:2] != "__")
    return {
        "url": dataset.store.url,
        "num_samples": len(dataset),
        "num_stored_samples": int(dataset.counts.sum()),
        "num_bad": dataset.num_left_out[0],
        "num_taken_down": dataset.num_left_out[1],
        "num_shards": dataset.num_shards,
        "num_bytes": dataset.num_bytes,
        "checksums": manifest.checksums,
        "fields": manifest.fields or names,
        "keys": [sample["__key__"] for sample in samples],
        "source": manifest.source,
    }


def _print_dataset(dataset: Any, about: dict[str, Any]) -> None:
    say(dataset)
    if dataset.num_shards:
        sizes = dataset.shown_counts
        most = f" to {sizes.max():,}" if sizes.max() > sizes.min() else ""
        say(f"  samples per shard: {sizes.min():,}{most}")
    say(f"  checksums of samples: {about['checksums'] or 'none'}")
    if about["num_bad"]:
        say(f"  on the bad list, left out of every epoch: {about['num_bad']:,} samples")
    if not dataset.manifest.fields and dataset.num_shards:
        say(f"  fields of {count_text(len(about['keys']), 'sample')}; --stats counts them in more:")
    if dataset.selection is not None and dataset.manifest.fields:
        say("  fields of all stored samples:")
    for name, count in about["fields"].items():
        say(f"  .{escaped(name)}" + (f": {count:,}" if count is not None else ""))
    if media := undecoded_media(about["fields"]):
        say(f"  videos and recordings: {media}; mm.Decode(video=, audio=) decodes them")
    which = "some keys" if len(about["keys"]) < len(dataset) else "keys"
    say(f"  {which}: {', '.join(map(escaped, about['keys']))}")
    for line in json.dumps(about["source"], indent=2, ensure_ascii=False).split("\n")[1:-1]:
        say(escaped(line, 300))


def _some_samples(dataset: Any, count: int) -> list[dict[str, Any]]:
    """Return samples that are spread over a dataset. Print those that are bad."""
    samples = []
    for index in spread(len(dataset), count) if count else []:
        try:
            samples.append(dataset[index])
        except SampleError as error:
            say(f"bad: {error}", err=True)
    return samples
