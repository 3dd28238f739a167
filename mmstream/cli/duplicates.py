"""``mmstream duplicates | leakcheck``: what a dataset holds twice, what two share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import islice

import click
import msgspec

from mmstream.cli.shared import AT_LEAST_1, PROBLEM, allow_foreign_urls, command, save_page, say
from mmstream.converting.duplicates import (
    LEAK_KINDS,
    Duplicates,
    SampleName,
    drop_duplicates,
    find_duplicates,
    find_leaks,
    pair_of,
)
from mmstream.dataset.bad_list import read_listed, write_bad
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.open import open_dataset
from mmstream.display.samples import Card, pairs_html
from mmstream.errors import SampleError, ShardError, escaped, where
from mmstream.storage import open_store
from mmstream.storage.store import split_url
from mmstream.storage.write_lock import write_lock

_num_threads = click.option(
    "--num-threads",
    type=AT_LEAST_1,
    default=os.cpu_count() or 1,
    show_default="cores",
    help="Threads that read samples of shards without a sidecar.",
)
_pairs = click.option("--pairs", "pairs_file", metavar="FILE", help="Write all pairs as JSONL.")
_html = click.option("--html", metavar="FILE", help="Write a page with the samples side by side.")
_max_pairs = click.option(
    "--max-pairs",
    type=AT_LEAST_1,
    default=100,
    show_default=True,
    help="With --html: show no more pairs than this of each kind.",
)

_WORDS = {
    "media": "have a medium that an earlier sample has",
    "text": "have the text of an earlier sample",
    "pair": "are an earlier sample again: same media, same text",
    "near": "have an image that looks like one of an earlier sample",
}
_LEAKS = {
    "media": "media of B are in A",
    "near": "images of B look like one of A",
    "text": "texts of B are in A",
    "id": "ids of B are in A",
}


@command("mmstream duplicates s3://bucket/corpus --near --html duplicates.html")
@click.argument("url")
@click.option(
    "--kind",
    "kinds",
    default="media,text,pair",
    show_default=True,
    metavar="KIND,...",
    help="What to compare: media, text, pair (all media and the text).",
)
@click.option("--near", is_flag=True, help="Also find images that look alike.")
@click.option(
    "--drop",
    metavar="KIND,...",
    help="List these duplicates in mmstream.bad.json: pair, text, media or near. New runs leave "
    "them out. The first of each stays.",
)
@click.option("--undo", is_flag=True, help="Take all duplicates off mmstream.bad.json.")
@_pairs
@_html
@_max_pairs
@_num_threads
@allow_foreign_urls
def duplicates(
    url: str,
    kinds: str,
    near: bool,
    drop: str | None,
    undo: bool,
    pairs_file: str | None,
    html: str | None,
    max_pairs: int,
    num_threads: int,
    allow_foreign_urls: bool,
) -> None:
    """Find samples of the dataset at URL that come twice, and images that look alike.

    The sidecars that convert wrote are read, and no media. Shards without one are read whole; with
    --near, so are those that were converted without mm.Duplicates(near=).

    --drop changes no shard. `mmstream verify --write-bad` keeps what it lists.
    """
    dataset = open_dataset(url, allow_foreign_urls=allow_foreign_urls)
    if undo:
        with write_lock(dataset.index_store, "duplicates"):
            count = len(read_listed(dataset, "duplicates"))
            write_bad(dataset, read_listed(dataset, "bad"), dataset.bad[:0])
        say(f"{count:,} duplicates taken off the list; new runs show them again")
        return
    asked = _words_of(kinds, ("media", "text", "pair"), "--kind")
    dropped = _words_of(drop, ("media", "text", "pair", "near"), "--drop") if drop else []
    near = near or "near" in dropped
    asked += [kind for kind in dropped if kind not in asked and kind != "near"]
    report = find_duplicates(dataset, kinds=asked, near=near, num_threads=num_threads)
    num_samples = len(dataset)
    for kind in report.num_pairs:
        count = len(report.refs([kind])[""])
        say(f"{kind}: {count:,} of {num_samples:,} samples {_WORDS[kind]}")
    _write(report, f"{escaped(url)}: duplicates", pairs_file, html, max_pairs)
    if dropped:
        with write_lock(dataset.index_store, "duplicates"):
            count = drop_duplicates(report, dropped, [""])[""]
        say(f"{count:,} of {num_samples:,} samples are left out of new runs as duplicates")


@command("mmstream leakcheck s3://bucket/train benchmark/ --html leaks.html")
@click.argument("a")
@click.argument("b")
@click.option(
    "--kind",
    "kinds",
    default="media,near,text,id",
    show_default=True,
    metavar="KIND,...",
    help="What to compare: media, near (images that look alike), text, id.",
)
@_pairs
@_html
@_max_pairs
@_num_threads
@allow_foreign_urls
def leakcheck(
    a: str,
    b: str,
    kinds: str,
    pairs_file: str | None,
    html: str | None,
    max_pairs: int,
    num_threads: int,
    allow_foreign_urls: bool,
) -> None:
    """Find what the datasets A and B share, such as a training set and a benchmark.

    The sidecars that convert wrote are read. Shards without one are read whole; with near, so are
    those that were converted without mm.Duplicates(near=).

    The exit code is 1 if they share anything of these kinds.
    """
    datasets = [open_dataset(url, allow_foreign_urls=allow_foreign_urls) for url in (a, b)]
    asked = _words_of(kinds, LEAK_KINDS, "--kind")
    report = find_leaks(*datasets, kinds=asked, num_threads=num_threads)
    for kind, count in report.num_pairs.items():
        say(f"{kind}: {count:,} {_LEAKS[kind]}")
    _write(report, f"{escaped(a)} and {escaped(b)}: shared", pairs_file, html, max_pairs)
    if any(report.num_pairs.values()):
        say(f"{escaped(b)} shares samples with {escaped(a)}", err=True)
        sys.exit(PROBLEM)
    say(f"ok: nothing of {len(datasets[1]):,} samples is in {escaped(a)}")


def _words_of(text: str, choices: tuple[str, ...], option: str) -> list[str]:
    values = [value.strip() for value in text.split(",")]
    for value in values:
        if value not in choices:
            raise click.UsageError(f"{option} {value!r}: must be among {', '.join(choices)}")
    return list(dict.fromkeys(values))


def _write(
    report: Duplicates, head: str, pairs_file: str | None, html: str | None, max_pairs: int
) -> None:
    """Write all pairs as JSONL, and the first of each kind as a page, where they are asked for."""
    if pairs_file is not None:
        folder, name = split_url(pairs_file)
        with open_store(folder).create(name) as file:
            for pair in report.pairs():
                file.write(msgspec.json.encode(pair_of(pair)) + b"\n")
        say(f"all pairs are in {pairs_file}")
    if html is not None:
        say(save_page(pairs_html(head, _shown_pairs(report, max_pairs)), head, html))


def _shown_pairs(report: Duplicates, max_pairs: int) -> Iterator[tuple[str, Card, Card]]:
    for kind in report.num_pairs:
        for pair in islice(report.pairs([kind]), max_pairs):
            note = f"{kind}, distance {pair.distance} of 256" if kind == "near" else kind
            datasets = report.corpus.datasets
            cards = [_card(datasets[name.dataset], name) for name in (pair.first, pair.again)]
            yield note, cards[0], cards[1]


def _card(dataset: Dataset, name: SampleName) -> Card:
    address = where(name.shard, name.index)
    try:
        return Card(address, dataset.find(address), name.dataset)
    except (SampleError, ShardError) as error:
        return Card(address, None, name.dataset, str(error))
