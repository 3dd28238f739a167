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

from mmstream.cli.shared import (
    AT_LEAST_0,
    AT_LEAST_1,
    PROBLEM,
    allow_foreign_urls,
    command,
    open_tokenizer,
    plan_beside,
    save_page,
    say,
)
from mmstream.display.markup import count_text
from mmstream.errors import SampleError, ShardError, escaped, where
from mmstream.types import SampleRef

__all__ = ["show"]

NUM_SAMPLES = 12
"""Samples that are shown where nothing is chosen."""


class _Choice(NamedTuple):
    """A sample to show."""

    ref: SampleRef
    note: str = ""
    problem: str = ""


@command("mmstream show s3://bucket/corpus --random 24 --html samples.html")
@click.argument("url")
@click.option("--key", "keys", multiple=True, metavar="KEY", help="The sample with this key.")
@click.option("--shard", metavar="NAME", help="With --index: the sample at this position.")
@click.option("--index", type=AT_LEAST_0, help="Position in --shard, from 0.")
@click.option(
    "--find",
    "lines",
    multiple=True,
    metavar="LINE",
    help="The sample that a line of a log names as shard[index].",
)
@click.option("--random", "num_random", type=AT_LEAST_1, metavar="N", help="N random samples.")
@click.option("--bad", is_flag=True, help="The samples on the bad list, with their reasons.")
@click.option(
    "--quarantine",
    type=click.Path(exists=True, dir_okay=False),
    help="The samples of a quarantine file, with their reasons.",
)
@click.option("--step", type=AT_LEAST_0, help="The planned samples of a step.")
@click.option("--epoch", type=AT_LEAST_0, help="With --step.  [default: 0]")
@click.option("--rank", type=AT_LEAST_0, help="With --step: only the rows of this rank.")
@click.option("--world-size", type=AT_LEAST_1, help="With --rank: number of data-parallel ranks.")
@click.option(
    "--global-batch-size",
    type=AT_LEAST_1,
    help="With --step: samples per step of the run. Window and grid are the defaults.",
)
@click.option(
    "--state",
    metavar="STATE",
    help="With --step, instead of --global-batch-size and --seed: a saved state of the run, as "
    "`mmstream replay` takes it.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of --random, or of the run of --step."
)
@click.option(
    "--padding-free",
    is_flag=True,
    help="With --step and --tokenizer or --model: draw the batch of a run with this option, row by "
    "row: documents, borders, learned tokens, pictures, positions.",
)
@click.option(
    "--pack",
    type=AT_LEAST_1,
    metavar="TOKENS",
    help="The same for a run with packs. --global-batch-size then counts rows.",
)
@click.option("--plan", metavar="NAME", help="With --pack: name, folder or URL of the plan.")
@click.option(
    "--weights-of",
    type=click.Choice(["samples", "tokens"]),
    help="With --pack and a mixture: what its weights are proportions of.",
)
@click.option(
    "--model",
    metavar="MODEL",
    help="With --padding-free or --pack, instead of --tokenizer: decode for this model, as "
    "`mmstream train --model` does.",
)
@click.option(
    "--tokenizer",
    metavar="FOLDER",
    help="Also show the tokens that a model gets, with those that it learns apart. `bytes` is a "
    "tokenizer of one token per byte.",
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
@allow_foreign_urls
def show(
    url: str,
    tokenizer: str | None,
    max_length: int,
    image_size: int | None,
    max_samples: int,
    html: str | None,
    allow_foreign_urls: bool,
    padding_free: bool,
    pack: int | None,
    plan: str | None,
    weights_of: str | None,
    model: str | None,
    **selection: Any,
) -> None:
    """Show samples of the dataset at URL: pictures, captions, conversations, recordings, JSON.

    URL may also be the JSON file of a mixture. Without a choice, it is 12 samples that are spread
    over the dataset.

    --html writes one file that needs no other and runs no script, so it is safe to open, whoever
    made the data. Recordings up to 8 MB are embedded and can be played.
    """
    from mmstream.dataset.mixture_file import open_data
    from mmstream.display import Card, card_lines, cards_html

    _check_selection(selection)
    if padding_free or pack is not None:
        _check_packed(selection, tokenizer, model)
        settings = {
            "url": url,
            "allow_foreign_urls": allow_foreign_urls,
            "model": model or "vlm",
            "tokenizer": tokenizer,
            "image_size": image_size,
            "max_length": None if pack is not None else max_length,
            "padding_free": padding_free,
            "pack": pack,
            "plan": plan,
            "weights_of": weights_of,
        }
        _show_packed(settings, selection, html)
        return
    if model is not None:
        raise click.UsageError("--model goes with --padding-free or --pack")
    if (plan, weights_of) != (None, None):
        raise click.UsageError("--plan and --weights-of go with --pack")
    text_tokenizer = None if tokenizer is None else open_tokenizer(tokenizer)
    decode = _decode_of(text_tokenizer, max_length, image_size, selection["bad"])
    data = open_data(url, allow_foreign_urls=allow_foreign_urls)
    head, choices = _choose(data, **selection)
    num_more = len(choices) - max_samples

    def cards() -> Iterator[Card]:
        for choice in islice(choices, max_samples):
            yield _card(data, choice, decode)

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


CHOICES = ("keys", "shard", "lines", "num_random", "bad", "quarantine", "step")


def _check_selection(selection: dict[str, Any]) -> None:
    """Raise a usage error where options exclude each other, or need another one."""
    chosen = [name for name in CHOICES if selection[name] not in (None, False, ())]
    if len(chosen) > 1:
        raise click.UsageError(
            "--key, --shard, --find, --random, --bad, --quarantine, --step: use one of them"
        )
    if (selection["shard"] is None) != (selection["index"] is None):
        raise click.UsageError("--shard and --index: use both or neither")
    if (selection["rank"] is None) != (selection["world_size"] is None):
        raise click.UsageError("--rank and --world-size: use both or neither")
    is_plan = selection["step"] is not None
    settings = [selection[name] for name in ("epoch", "rank", "global_batch_size", "state")]
    if not is_plan and any(value is not None for value in settings):
        raise click.UsageError("--epoch, --rank, --global-batch-size and --state go with --step")
    if is_plan and (selection["global_batch_size"] is None) == (selection["state"] is None):
        raise click.UsageError("--step needs --global-batch-size or --state, and not both")


def _check_packed(selection: dict[str, Any], tokenizer: str | None, model: str | None) -> None:
    """Raise a usage error where a batch without padding cannot be made."""
    if selection["step"] is None:
        raise click.UsageError(
            "--padding-free and --pack draw a step: give --step, and --global-batch-size or --state"
        )
    if tokenizer is None and model is None:
        raise click.UsageError("--padding-free and --pack need --tokenizer or --model")


def _show_packed(settings: dict[str, Any], selection: dict[str, Any], html: str | None) -> None:
    """Draw the batch that a run with these settings trains on, as text or as a page."""
    from mmstream.display import pack_html, pack_lines, rows_of_pack
    from mmstream.train import TrainConfig
    from mmstream.train.preview import step_batch
    from mmstream.train.saved_state import read_state
    from mmstream.world import World

    state = None if selection["state"] is None else read_state(selection["state"])
    order = selection if state is None else state["order"]
    settings |= {name: order[name] for name in ("global_batch_size", "seed")}
    if settings["tokenizer"] == "bytes":
        settings["tokenizer"] = None  # as in training
    epoch, step, rank = selection["epoch"] or 0, selection["step"], selection["rank"]
    world = World(rank or 0, selection["world_size"] or 1)
    batch, tokenizer = step_batch(
        TrainConfig(out="", **settings), epoch=epoch, step=step, world=world, state=state
    )
    of_rank = "" if rank is None else f", rank {rank} of {world.world_size}"
    head = f"{escaped(settings['url'])}: epoch {epoch}, step {step}{of_rank}"
    if html is None:
        say(head)
        for line in pack_lines(rows_of_pack(batch, settings["pack"]), tokenizer):
            say(line)
        return
    say(f"{head}; {save_page(pack_html(batch, tokenizer, settings['pack']), head, html)}")


def _choose(data: Any, **selection: Any) -> tuple[str, Sequence[_Choice]]:
    """Return which samples they are, in words, and their positions."""
    if selection["keys"]:
        choices = [_Choice(ref) for key in selection["keys"] for ref in _refs_of_key(data, key)]
        return count_text(len(choices), "sample"), choices
    if selection["shard"] is not None:
        return count_text(1, "sample"), [
            _Choice(data.ref_of(f"{selection['shard']}[{selection['index']}]"))
        ]
    if selection["lines"]:
        choices = [_Choice(data.ref_of(line), problem=line) for line in selection["lines"]]
        return count_text(len(choices), "sample"), choices
    if selection["quarantine"] is not None:
        text = Path(selection["quarantine"]).read_text("utf-8", "replace")
        lines = text.split("\n")[:-1]  # what follows the last line end was cut off by a kill
        choices = [_Choice(data.ref_of(line), problem=_reason(line)) for line in lines]
        return (
            f"{count_text(len(choices), 'sample')} of {escaped(selection['quarantine'])}",
            choices,
        )
    if selection["bad"]:
        return _bad_choices(data)
    if selection["step"] is not None:
        return _planned_choices(data, **selection)
    return _spread_choices(data, selection["num_random"], selection["seed"])


def _refs_of_key(data: Any, key: str) -> list[SampleRef]:
    """Return the sample with a key: one, or of a mixture one from each source that has it."""
    from mmstream.dataset.source import numbered_datasets

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
    from mmstream.dataset.source import numbered_datasets

    choices = [
        _Choice((first_shard + shard, index), "on the bad list")
        for first_shard, dataset in numbered_datasets(data)
        for shard, index in dataset.bad.tolist()
    ]
    hint = "" if choices else "; `mmstream verify URL --decode --write-bad` makes the list"
    return f"{count_text(len(choices), 'sample')} on the bad list{hint}", choices


def _planned_choices(data: Any, **selection: Any) -> tuple[str, list[_Choice]]:
    """Return the rows of a step as planned, without padding."""
    from mmstream.world import World, rows_of_rank

    epoch, step, rank = selection["epoch"] or 0, selection["step"], selection["rank"]
    if selection["state"] is not None:
        from mmstream.state import order_of_state
        from mmstream.train.saved_state import read_state

        state = read_state(selection["state"])
        order = order_of_state(state, data, plan_beside(data, state))[0]
    else:
        order = data.plan_order(
            global_batch_size=selection["global_batch_size"], seed=selection["seed"]
        )
    rows = (0, order.global_batch_size)
    if rank is not None:
        world = World(rank, selection["world_size"])
        rows = rows_of_rank(order.global_batch_size, world, "balanced")
    refs = order.refs(epoch, step, rows)
    counts = order.document_counts(epoch, step, rows)
    numbers = np.repeat(order.order_rows(epoch, step, rows), counts)
    planned = zip(*(column.tolist() for column in (*refs, numbers)), strict=True)
    choices = [
        _Choice((shard, index), f"row {row}") for shard, index, is_valid, row in planned if is_valid
    ]
    of_rank = "" if rank is None else f", rank {rank} of {selection['world_size']}"
    return (
        f"{count_text(len(choices), 'sample')} planned for epoch {epoch}, step {step}{of_rank}",
        choices,
    )


def _spread_choices(data: Any, count: int | None, seed: int) -> tuple[str, list[_Choice]]:
    """Return samples that are spread over all, in its order."""
    from mmstream.dataset.source import refs_of
    from mmstream.display.spread import spread

    positions = np.array(
        spread(len(data), count or NUM_SAMPLES, seed if count else None), dtype=np.int64
    )
    refs = refs_of(data, positions)
    how = f"random, seed {seed}" if count else "spread over all"
    return f"{count_text(len(positions), 'sample')} of {len(data):,}, {how}", [
        _Choice(ref) for ref in refs
    ]


def _reason(line: str) -> str:
    """Return the reason in a record of a quarantine file, or the line if it is none."""
    try:
        return str(json.loads(line)["reason"])
    except (ValueError, TypeError, KeyError):
        return line


def _decode_of(tokenizer: Any, max_length: int, image_size: int | None, bad: bool) -> Any:
    """Return the decoders that the options ask for, or None."""
    if tokenizer is None and image_size is None and not bad:
        return None
    from mmstream.decoding.decode import Decode
    from mmstream.decoding.image.decoder import ImageDecoder
    from mmstream.decoding.text.decoder import TextDecoder

    image = ImageDecoder(size=image_size) if image_size is not None or bad else None
    text = None
    if tokenizer is not None:
        text = TextDecoder(
            tokenizer, max_length=max_length, undecoded_parts="keep", unlabeled_texts="keep"
        )
    return Decode(image=image, text=text)


def _card(data: Any, choice: _Choice, decode: Any) -> Any:
    """Return a sample as it is shown: decoded where that succeeds."""
    from mmstream.dataset.source import read_sample
    from mmstream.display import Card

    shard, index = choice.ref
    address = where(data.name_of(shard), index)
    try:
        sample = read_sample(data, shard, index)
    except (SampleError, ShardError) as error:
        return Card(address, None, choice.note, choice.problem or str(error))
    if decode is None:
        return Card(address, sample, choice.note, choice.problem)
    from mmstream.decoding.sample import decode_sample

    try:
        return Card(address, decode_sample(sample, decode), choice.note, choice.problem)
    except SampleError as error:
        return Card(address, sample, choice.note, choice.problem or str(error))
