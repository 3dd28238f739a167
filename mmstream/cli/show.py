"""``mmstream show | view``: look at samples, in the terminal or in a browser.

`show` writes text or a page, `view` serves pages about a corpus, what a model gets of it, and what
a run did. They import torch only to make tokens, and for a pipeline.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np

from mmstream.cli.select import choosing, open_chosen
from mmstream.cli.shared import (
    AT_LEAST_1,
    PROBLEM,
    allow_foreign_urls,
    command,
    load_pipeline,
    plan_beside,
    save_page,
    say,
    text_counter,
)
from mmstream.dataset.mixture import open_data
from mmstream.dataset.open import open_dataset
from mmstream.dataset.source import numbered_datasets, read_sample, refs_of
from mmstream.display.contents import spread, uncounted
from mmstream.display.samples import Card, card_lines, cards_html
from mmstream.display.text import count_text
from mmstream.errors import (
    ConfigError,
    SampleError,
    ShardError,
    StorageError,
    escaped,
    where,
)
from mmstream.media.fields import FIELDS_OF
from mmstream.types import SampleRef

logger = logging.getLogger(__name__)

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
