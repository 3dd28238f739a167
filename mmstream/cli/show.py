"""``mmstream show``: look at samples, in the terminal or as a page for a browser.

It imports torch only to decode: with --bad, --tokenizer or --image-size.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from mmstream.cli.select import choosing
from mmstream.cli.shared import (
    AT_LEAST_1,
    PROBLEM,
    allow_foreign_urls,
    command,
    save_page,
    say,
    text_counter,
)
from mmstream.dataset.mixture import open_data
from mmstream.dataset.select import chosen
from mmstream.dataset.source import numbered_datasets, read_sample, refs_of
from mmstream.display.contents import spread, uncounted
from mmstream.display.samples import Card, card_lines, cards_html
from mmstream.display.text import count_text
from mmstream.errors import SampleError, ShardError, escaped, where
from mmstream.media.fields import FIELDS_OF
from mmstream.types import SampleRef

NUM_SAMPLES = 12
"""Samples that are shown where nothing is chosen."""


class _Choice(NamedTuple):
    """A sample to show, why it is bad, and what else to say of it."""

    ref: SampleRef
    problem: str = ""
    note: str = ""


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
@click.option("--bad", is_flag=True, help="The samples on the bad list, with their reasons.")
@click.option(
    "--quarantine",
    type=click.Path(exists=True, dir_okay=False),
    help="The samples of a quarantine file, with their reasons, or what `mmstream replay` prints.",
)
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
    "--image-size", type=AT_LEAST_1, help="Show images as ImageDecoder(size=) makes them."
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
    image_size: int | None,
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
    decode = _decode_of(image_size, selection["bad"])
    data = open_data(url, allow_foreign_urls=allow_foreign_urls)
    data = chosen(data, select=select, where=where)
    head, choices = _choose(data, **selection)
    num_more = len(choices) - max_samples

    def cards() -> Iterator[Card]:
        for choice in islice(choices, max_samples):
            yield _card(data, choice, decode, text)

    head = f"{escaped(url)}: {head}"
    if num_more > 0:
        head += f"; the first {max_samples:,} are shown (--max-samples)"
    if html is None:
        say(head)
        for card in cards():
            for line in card_lines(card, text_tokenizer):
                say(line)
        return
    say(f"{head}; {save_page(cards_html(head, cards(), text_tokenizer), head, html)}")


CHOICES = ("keys", "lines", "num_random", "bad", "quarantine")


def _choose(data: Any, **selection: Any) -> tuple[str, Sequence[_Choice]]:
    """Return which samples they are, in words, and their positions."""
    if sum(selection[name] not in (None, False, ()) for name in CHOICES) > 1:
        raise click.UsageError("--key, --find, --random, --bad, --quarantine: use one of them")
    of_file = ""
    if selection["keys"]:
        choices = [_Choice(ref) for key in selection["keys"] for ref in _refs_of_key(data, key)]
    elif selection["lines"]:
        choices = [_Choice(data.ref_of(line), line) for line in selection["lines"]]
    elif selection["quarantine"] is not None:
        text = Path(selection["quarantine"]).read_text("utf-8", "replace")
        *lines, last = text.split("\n")
        if not last.startswith("{"):  # else it is half a record, which a kill cut off
            lines.append(last)
        lines = [line for line in lines if line.strip()]
        choices = [_Choice(data.ref_of(line), _reason(line)) for line in lines]
        of_file = f" of {escaped(selection['quarantine'])}"
    elif selection["bad"]:
        return _bad_choices(data)
    else:
        return _spread_choices(data, selection["num_random"], selection["seed"])
    return count_text(len(choices), "sample") + of_file, choices


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


def _bad_choices(data: Any) -> tuple[str, list[_Choice]]:
    choices = [
        _Choice((first_shard + shard, index), note="on the bad list")
        for first_shard, dataset in numbered_datasets(data)
        for shard, index in dataset.bad.tolist()
        if dataset.shows((shard, index))
    ]
    hint = "" if choices else "; `mmstream verify URL --decode --write-bad` makes the list"
    return f"{count_text(len(choices), 'sample')} on the bad list{hint}", choices


def _spread_choices(data: Any, count: int | None, seed: int) -> tuple[str, list[_Choice]]:
    """Return samples that are spread over all, in its order."""
    positions = spread(len(data), count or NUM_SAMPLES, seed if count else None)
    refs = refs_of(data, np.array(positions, dtype=np.int64))
    how = f"random, seed {seed}" if count else "spread over all"
    text = f"{count_text(len(positions), 'sample')} of {len(data):,}, {how}"
    return text, [_Choice(ref) for ref in refs]


def _reason(line: str) -> str:
    """Return the reason in a record of a quarantine file, or the line if it is none."""
    try:
        return str(json.loads(line)["reason"])
    except (ValueError, TypeError, KeyError):
        return line


def _decode_of(image_size: int | None, bad: bool) -> Any:
    """Return the decoders that the options ask for, or None."""
    if image_size is None and not bad:
        return None
    from mmstream.decoding.decode import Decode
    from mmstream.decoding.image.decoder import ImageDecoder

    return Decode(image=ImageDecoder(size=image_size))


def _card(data: Any, choice: _Choice, decode: Any, text: Any) -> Card:
    """Return a sample as it is shown: decoded where that succeeds, with the tokens of `text`."""
    shard, index = choice.ref
    address = where(data.name_of(shard), index)
    sample = None
    try:
        sample = read_sample(data, shard, index)
        if decode is None and text is None:
            return Card(address, sample, choice.note, choice.problem)
        decoded, missing = _decoded(sample, decode, text)
        note = "; ".join(filter(None, (choice.note, missing)))
        return Card(address, decoded, note, choice.problem)
    except (SampleError, ShardError) as error:
        return Card(address, sample, choice.note, choice.problem or str(error))


def _decoded(sample: Any, decode: Any, text: Any) -> tuple[Any, str]:
    """Return a decoded sample with its tokens, and which media they leave out."""
    from mmstream.decoding.sample import decode_sample

    decoded = decode_sample(sample, decode)
    if text is None:
        return decoded, ""
    decoded |= text.tokens_of(sample).tokens
    kinds = [kind for kind in FIELDS_OF if FIELDS_OF[kind](sample)]
    others = [kind for kind in kinds if kind not in text.counted_media]
    return decoded, uncounted(others) if others else ""
