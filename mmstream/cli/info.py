"""``mmstream info | show | view``: what a dataset or a mixture holds, and looks at its samples.

`info` prints counts, `show` writes text or a page, `view` serves pages about a corpus, what a model
gets of it, and what a run did. They import torch only for statistics, tokens and a pipeline.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np

from mmstream.cli.select import bucketing, buckets_from, choosing, open_chosen
from mmstream.cli.shared import (
    AT_LEAST_0,
    AT_LEAST_1,
    PROBLEM,
    allow_foreign_urls,
    command,
    load_pipeline,
    plan_beside,
    refuse_given,
    save_page,
    say,
    text_counter,
)
from mmstream.dataset.dataset import numbered_datasets, read_sample, refs_of
from mmstream.dataset.mixture import Mixture, open_data
from mmstream.dataset.open import open_dataset
from mmstream.dataset.select import bucket_order, stored_names
from mmstream.display.contents import spread, uncounted
from mmstream.display.samples import (
    Card,
    card_lines,
    cards_html,
    statistics_html,
    statistics_lines,
)
from mmstream.display.text import count_text, size_text
from mmstream.errors import ConfigError, SampleError, ShardError, StorageError, escaped, where
from mmstream.measuring.statistics import statistics
from mmstream.media.fields import FIELDS_OF, undecoded_media
from mmstream.order import Buckets
from mmstream.ranks import World, rows_of_rank
from mmstream.reading.plan import epoch_reads, window_bytes
from mmstream.storage.transfers import MAX_PREFIX_RATE
from mmstream.types import SampleRef

logger = logging.getLogger(__name__)

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
    from mmstream.dataset.columns import column_names, read_columns

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


# -- show and view ---------------------------------------------------------------------------------

NUM_SAMPLES = 12
"""Samples that are shown where nothing is chosen."""


_Choice = tuple[SampleRef, str]
"""A sample to show, and why it is bad."""


@command("mmstream show s3://bucket/corpus --random 24 --html samples.html")
@click.argument("url")
@click.option("--key", "keys", multiple=True, metavar="KEY", help="The sample with this key.")
@click.option(
    "--find",
    "lines",
    multiple=True,
    metavar="LINE",
    help="The sample that is named as SHARD[INDEX], such as a line of a log names it.",
)
@click.option("--random", "num_random", type=AT_LEAST_1, metavar="N", help="N random samples.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of --random.")
@click.option(
    "--tokenizer",
    metavar="FOLDER",
    help="Also show the tokens that a model gets, with those that it learns apart. Those of media "
    "are shown where it is the folder of a whole Qwen-VL model. `bytes` is a tokenizer of one "
    "token per byte.",
)
@click.option(
    "--max-length",
    type=AT_LEAST_1,
    default=2048,
    show_default=True,
    help="With --tokenizer: longest text in tokens.",
)
@click.option(
    "--max-samples",
    type=AT_LEAST_1,
    default=100,
    show_default=True,
    help="Show no more samples than this.",
)
@click.option("--html", metavar="FILE", help="Write a page for a browser instead of text.")
@choosing("select", "where")
@allow_foreign_urls
def show(
    url: str,
    tokenizer: str | None,
    max_length: int,
    max_samples: int,
    html: str | None,
    allow_foreign_urls: bool,
    select: str | None,
    where: str | None,
    **selection: Any,
) -> None:
    """Show samples of the dataset at URL: pictures, captions, conversations, recordings, JSON.

    URL may also be the JSON file of a mixture. Without a choice, it is 12 samples that are spread
    over the dataset.

    --html writes one file that needs no other and runs no script, so it is safe to open, whoever
    made the data. Recordings up to 8 MB are embedded and can be played.
    """
    text = None if tokenizer is None else text_counter(tokenizer, max_length)
    text_tokenizer = None if text is None else text.decoder.tokenizer
    data = open_chosen(url, allow_foreign_urls, {"select": select, "where": where})
    head, choices = _choose(data, **selection)
    num_more = len(choices) - max_samples

    cards = (_card(data, ref, problem, text) for ref, problem in islice(choices, max_samples))
    head = f"{escaped(url)}: {head}"
    if num_more > 0:
        head += f"; the first {max_samples:,} are shown (--max-samples)"
    if html is None:
        say(head)
        for card in cards:
            for line in card_lines(card, text_tokenizer):
                say(line)
        return
    say(f"{head}; {save_page(cards_html(head, cards, text_tokenizer), head, html)}")


def _choose(
    data: Any, keys: Sequence[str], lines: Sequence[str], num_random: int | None, seed: int
) -> tuple[str, Sequence[_Choice]]:
    """Return which samples they are, in words, and their positions."""
    if bool(keys) + bool(lines) + bool(num_random) > 1:
        raise click.UsageError("--key, --find, --random: use one of them")
    if not keys and not lines:
        return _spread_choices(data, num_random, seed)
    choices = [(ref, "") for key in keys for ref in _refs_of_key(data, key)]
    choices += [(data.ref_of(line), line) for line in lines]
    return count_text(len(choices), "sample"), choices


def _refs_of_key(data: Any, key: str) -> list[SampleRef]:
    """Return the sample with a key: one, or of a mixture one from each source that has it."""
    refs = []
    errors = []
    for first_shard, dataset in numbered_datasets(data):
        try:
            shard, index = dataset.ref_of_key(key)
        except KeyError as error:
            errors.append(error.args[0])
        else:
            refs.append((first_shard + shard, index))
    if not refs:
        say(f"error: {errors[0]}", err=True)
        sys.exit(PROBLEM)
    return refs


def _spread_choices(data: Any, count: int | None, seed: int) -> tuple[str, list[_Choice]]:
    """Return samples that are spread over all, in its order."""
    positions = spread(len(data), count or NUM_SAMPLES, seed if count else None)
    refs = refs_of(data, np.array(positions, dtype=np.int64))
    how = f"random, seed {seed}" if count else "spread over all"
    text = f"{count_text(len(positions), 'sample')} of {len(data):,}, {how}"
    return text, [(ref, "") for ref in refs]


def _card(data: Any, ref: SampleRef, problem: str, text: Any) -> Card:
    """Return a sample as it is shown: with the tokens of `text`, where it can be decoded."""
    address = where(data.name_of(ref[0]), ref[1])
    sample = None
    try:
        sample = read_sample(data, *ref)
        decoded, missing = (sample, "") if text is None else _decoded(sample, text)
        return Card(address, decoded, missing, problem)
    except (SampleError, ShardError) as error:
        return Card(address, sample, "", problem or str(error))


def _decoded(sample: Any, text: Any) -> tuple[Any, str]:
    """Return a decoded sample with its tokens, and which media they leave out."""
    from mmstream.decoding.sample import decode_sample

    decoded = decode_sample(sample, None) | text.tokens_of(sample).tokens
    kinds = [kind for kind in FIELDS_OF if FIELDS_OF[kind](sample)]
    others = [kind for kind in kinds if kind not in text.counted_media]
    return decoded, uncounted(others) if others else ""


@command("mmstream view s3://bucket/corpus --pipeline train:pipeline --run run/")
@click.argument("url")
@click.option(
    "--pipeline",
    metavar="MODULE:OBJECT",
    help="A mm.Pipeline, or a function from the data to one: shows what the model gets, and when.",
)
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The --out folder of `mmstream train`: its metrics, its quarantine files and its order.",
)
@click.option(
    "--against",
    "others",
    metavar="URL",
    multiple=True,
    help="Another dataset, such as a benchmark: shows what both hold. Repeatable.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8600,
    show_default=True,
    help="On 127.0.0.1. 0: a free one.",
)
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@allow_foreign_urls
def view(
    url: str,
    pipeline: str | None,
    run: Path | None,
    others: tuple[str, ...],
    port: int,
    no_browser: bool,
    allow_foreign_urls: bool,
) -> None:
    """Look at the dataset at URL, or at a mixture, in a browser of this machine.

    Pages show samples, what a model gets of each, the steps of each rank, what was rejected or
    replaced, statistics, and the metrics of a run. It answers on loopback only, to whoever knows
    the address that it prints. Ctrl-C ends it. It writes only selections and the bad list, after a
    question.
    """
    if run is not None and not run.is_dir():
        raise click.UsageError(f"--run {run}: no such folder")
    try:
        from mmstream.view.app import serve
        from mmstream.view.content import Content
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise ConfigError(
            f"`mmstream view` needs {error.name}: pip install 'mmstream[view]'"
        ) from None

    def run_order(data: Any) -> Any:
        from mmstream.cli.training import read_state
        from mmstream.state import order_of_state

        state = read_state(str(run))
        return order_of_state(state, data, plan_beside(data, state))[0]

    content = Content(
        url,
        lambda: open_data(url, allow_foreign_urls=allow_foreign_urls),
        None if pipeline is None else lambda data: load_pipeline(pipeline, data),
        None if run is None else run_order,
        run,
        others=[
            Content(
                other,
                partial(open_dataset, other, allow_foreign_urls=allow_foreign_urls),
                path=("against", number),
            )
            for number, other in enumerate(others)
        ],
    )
    try:
        _ = content.data, content.pipeline, [other.data for other in content.others]
    except StorageError as error:  # it may come back, and the pages of the run need no store
        logger.warning("%s", error)
    serve(content, port, opens=not no_browser, say=say)
