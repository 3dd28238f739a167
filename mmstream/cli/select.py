"""``mmstream select``, and the options by which other commands choose samples."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from mmstream.cli.shared import AT_LEAST_1, allow_foreign_urls, command, refuse_given, say, usage
from mmstream.display.text import count_text
from mmstream.order import Buckets, aspect_edges
from mmstream.ranks import World

F = TypeVar("F", bound=Callable[..., None])

OPTIONS = {
    "select": click.option(
        "--select",
        metavar="NAME",
        default=None,
        help="Only the samples that `mmstream select --name` stored.",
    ),
    "keys_file": click.option(
        "--keys-file",
        metavar="FILE",
        default=None,
        help="Only the samples with these keys: one key a line.",
    ),
    "where": click.option(
        "--where",
        metavar="CONDITION",
        default=None,
        help="Only the samples that fulfil it: \"width >= 512 and lang = 'en'\".",
    ),
    "sample": click.option(
        "--sample",
        type=click.FloatRange(0, 1),
        metavar="SHARE",
        default=None,
        help="Only a random share of the samples, such as 0.1.",
    ),
    "limit": click.option(
        "--limit", type=AT_LEAST_1, metavar="N", default=None, help="Only the first N."
    ),
}
"""The options that choose samples, in the order in which they do."""


def choosing(*names: str) -> Callable[[F], F]:
    """Return a decorator that gives a command some of `OPTIONS`. Default: all of them."""

    def decorate(function: F) -> F:
        for name in reversed(names or tuple(OPTIONS)):
            function = OPTIONS[name](function)
        return function

    return decorate


def open_chosen(url: str, allow_foreign_urls: bool, choice: Mapping[str, Any]) -> Any:
    """Open a dataset or a mixture, and return what the options choose of it."""
    from mmstream.dataset.mixture import open_data
    from mmstream.dataset.select import chosen

    return chosen(open_data(url, allow_foreign_urls=allow_foreign_urls), **choice)


_BUCKET_OPTIONS = (
    click.option(
        "--buckets",
        metavar="COLUMN",
        help="With --edges or --resolution: the buckets of mm.Buckets(COLUMN, edges=...).",
    ),
    click.option(
        "--edges",
        metavar="N,... or HxW,...",
        help="With --buckets: upper edges that rise, or the (height, width) of pictures.",
    ),
    click.option(
        "--resolution",
        type=AT_LEAST_1,
        help="With --buckets aspect, in place of --edges: shapes of the area of this square.",
    ),
    click.option(
        "--multiple-of",
        type=AT_LEAST_1,
        default=64,
        show_default=True,
        help="With --resolution: both sides are multiples of it.",
    ),
)


def bucketing(function: F) -> F:
    """Give a command the options that `buckets_from` takes."""
    for option in reversed(_BUCKET_OPTIONS):
        function = option(function)
    return function


def buckets_from(
    buckets: str | None, edges: str | None, resolution: int | None, multiple_of: int
) -> Buckets | None:
    """Return the buckets that the options name. None: there are none."""
    if buckets is None:
        refuse_given(("edges", "resolution", "multiple_of"), "with --buckets")
        return None
    if (edges is None) == (resolution is None):
        raise click.UsageError("--buckets: give --edges, or --resolution, and not both")
    if resolution is not None:
        return Buckets(buckets, edges=tuple(aspect_edges(resolution, multiple_of=multiple_of)))
    refuse_given(("multiple_of",), "with --resolution")
    with usage(f"--edges {edges}: give 2,4,8 or 512x512,384x640"):
        texts = [text.split("x") for text in str(edges).split(",")]
        parsed: Any = (
            tuple(float(text) for (text,) in texts)
            if all(len(text) == 1 for text in texts)
            else tuple((int(height), int(width)) for height, width in texts)
        )
    return Buckets(buckets, edges=parsed)


def words_of(choice: Mapping[str, Any]) -> list[str]:
    """Return the options of a choice, for a command to copy."""
    return [
        word
        for name in OPTIONS
        if choice.get(name) is not None
        for word in (f"--{name.replace('_', '-')}", str(choice[name]))
    ]


@command("mmstream select s3://bucket/corpus --where \"width >= 512 and lang = 'zh'\" --name zh")
@click.argument("url")
@choosing()
@click.option("--seed", type=int, default=0, show_default=True, help="Of --sample.")
@click.option("--by", metavar="COLUMN", help="With --sample: choose samples of one value together.")
@click.option(
    "--by-media",
    is_flag=True,
    help="With --sample: store both parts of dataset.split(SHARE, by_media=True), without a common "
    "picture, video or recording. The second is NAME-rest.",
)
@click.option(
    "--columns",
    metavar="NAME,...",
    help="With --where MODULE:FUNCTION: the columns that the function gets. It needs --name.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="Name of the selection.  [default: none; --where finds that of its condition]",
)
@bucketing
@click.option("--overwrite", is_flag=True, help="Recompute, and replace another --name.")
@allow_foreign_urls
def select(
    url: str,
    where: str | None,
    seed: int,
    by: str | None,
    by_media: bool,
    columns: str | None,
    name: str | None,
    buckets: str | None,
    edges: str | None,
    resolution: int | None,
    multiple_of: int,
    overwrite: bool,
    allow_foreign_urls: bool,
    **choice: Any,
) -> None:
    """Store which samples of the dataset at URL take part, once for all processes and runs.

    `dataset.select(NAME)` and --select NAME use them, and so does every --where with this
    condition. They lie beside the index, in one file of a bit for each sample. The options choose
    one after the other: --select, --keys-file, --where, --sample, --limit.

    With --buckets, the samples of each bucket are stored, for mm.Buckets with this column and
    these edges.
    """
    from mmstream.converting.formats.formats import load_function
    from mmstream.dataset.manifest import require_name
    from mmstream.dataset.open import open_dataset
    from mmstream.dataset.select import chosen, rule_of, store_selection

    dataset = open_dataset(url, allow_foreign_urls=allow_foreign_urls)
    store, words = dataset.index_store, words_of({**choice, "where": where})
    wanted = buckets_from(buckets, edges, resolution, multiple_of)
    if wanted is not None:
        refuse_given(("seed", "by", "by_media", "columns"), "without --buckets")
        _store_buckets(dataset, wanted, [*words, *(["--name"] if name else [])], overwrite)
        return
    is_alone = where is not None and not columns and not words_of(choice)
    if choice["sample"] is None:
        refuse_given(("by", "by_media", "seed"), "with --sample")
    if where is None:
        refuse_given(("columns",), "with --where MODULE:FUNCTION")
    if name is not None:
        require_name(name)
    if by_media:
        refuse_given(("select", "keys_file", "where", "limit", "by"), "without --by-media")
        _store_parts(dataset, choice["sample"], seed, name, overwrite)
        return
    if not words or not (name or is_alone):
        raise click.UsageError("give --where, or --name and other options that choose samples")
    condition: Any = where
    if where is not None and re.fullmatch(r"[\w.]+:[\w.]+", where):
        if columns is None or name is None:
            raise click.UsageError("--where MODULE:FUNCTION: give --columns and --name too")
        condition = load_function(where)
    names = None if columns is None else columns.split(",")
    choice |= {"where": condition, "columns": names, "seed": seed, "by": by}
    view = chosen(dataset, **choice, world=World(), recompute=overwrite)
    words += ["--seed", str(seed)] if seed else []
    words += [] if by is None else ["--by", by]
    record = store_selection(
        view,
        shlex.join(words),
        text=rule_of(condition).text if is_alone else None,
        name=name,
        overwrite=overwrite,
    )
    _show(record, store)


def _show(record: Any, store: Any) -> None:
    from mmstream.dataset.select import PREFIX

    share = record.num_chosen / record.num_samples
    say(f"{record.num_chosen:,} of {count_text(record.num_samples, 'sample')} chosen, {share:.1%}")
    say(f"selection: {store.url_of(PREFIX + record.digest)}")


def _store_buckets(dataset: Any, buckets: Buckets, others: list[str], overwrite: bool) -> None:
    """Store the samples of each bucket, and print how many they are."""
    from mmstream.dataset.select import store_buckets

    if others:
        raise click.UsageError(
            f"{others[0]} does not go with --buckets, which are of the whole dataset: a view takes "
            "its own samples of them"
        )
    counts = store_buckets(dataset, buckets, overwrite=overwrite)
    for edge, count in zip(buckets.edges, counts, strict=True):
        shape = "x".join(map(str, edge)) if isinstance(edge, tuple) else f"up to {edge}"
        say(f"{count:>13,}  {shape}")
    num_outside = len(dataset) - sum(counts)
    say(f"{num_outside:>13,}  in no bucket: above the last edge, or NULL")


def _store_parts(dataset: Any, share: float, seed: int, name: str | None, overwrite: bool) -> None:
    """Store both parts of a split by media."""
    from mmstream.dataset.select import forget_split, split_texts, store_selection

    if overwrite:
        forget_split(dataset, share, seed)
    parts = dataset.split(share, seed, by_media=True, world=World())
    texts, names = split_texts(share, seed), (name, name and f"{name}-rest")
    for part, text, own_name in zip(parts, texts, names, strict=True):
        record = store_selection(part, text, text=text, name=own_name, overwrite=overwrite)
        _show(record, dataset.index_store)
