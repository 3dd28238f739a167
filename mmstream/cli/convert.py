"""``mmstream convert | finalize | reshard``: from rows and media to shards, without torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any, get_args

import click

from mmstream.cli.select import OPTIONS, bucketing, buckets_from, choosing
from mmstream.cli.shared import (
    AT_LEAST_0,
    AT_LEAST_1,
    PROBLEM,
    allow_foreign_urls,
    command,
    refuse_given,
    save_page,
    say,
    usage,
)
from mmstream.converting.options import FLAGS, GROUPS, Action, ImageFormat
from mmstream.converting.rows.detect import RowKind
from mmstream.display.text import count_text
from mmstream.errors import escaped

MAX_REASONS = 20
"""Reasons of rejects that are printed, the most frequent first."""

max_rejects_option = click.option(
    "--max-rejects",
    metavar="NUMBER",
    default="1%",
    show_default=True,
    help="The exit code is 1 if more rows are rejected: a percentage (0.5%) or a number of rows.",
)


def show_end(report: Any, dest: str, max_rejects: str) -> None:
    """Print what a conversion did, and exit with 1 if it rejected too much.

    Args:
        report: A `ConvertReport`.
        dest: Where it wrote to.
        max_rejects: The option.
    """
    limit = max_rejects_of(max_rejects)
    show_summary(report)
    for name, split in report.splits.items():
        say(f"  {name}: {split.summary()}")
    if report.num_pairs:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in report.num_pairs.items())
        say(f"duplicates: {counts}; the pairs are in duplicates.jsonl")
    if report.num_dropped:
        say(
            f"{report.num_dropped:,} of {report.num_samples:,} samples are left out of epochs as "
            "duplicates"
        )
    if len(report.formats) > 1:  # a picture without its text is another format
        formats = (f"{name} ({count_text(n, 'row')})" for name, n in report.formats.items())
        say(f"rows were read as: {', '.join(formats)}")
    _show_unread(report)
    _show_rejects(report, dest)
    if report.has_more_rejects_than(limit):
        say(
            f"the dataset at {dest} is complete; the exit code is {PROBLEM} because "
            f"{report.num_rejects - report.num_left_out:,} of {count_text(report.num_rows, 'row')} "
            f"were rejected, and --max-rejects {max_rejects} allows fewer",
            err=True,
        )
        sys.exit(PROBLEM)


def max_rejects_of(text: str) -> float:
    """Return the fraction of ``1%``, or the number of ``50``."""
    from mmstream.converting.convert import check_max_rejects

    with usage(f"--max-rejects {text!r}: write a percentage such as 1%, or a number of rows"):
        limit = float(text.removesuffix("%")) / 100 if text.endswith("%") else int(text)
    check_max_rejects(limit)
    return limit


def show_summary(report: Any) -> None:
    """Print the counts, the bytes and the time."""
    summary = f"{report.summary()}; {report.num_bytes / 1e6:,.1f} MB"
    if report.was_finished and report.num_repaired:
        say(f"{summary}, converted before; {report.num_repaired:,} damaged shards written again")
    elif report.was_finished:
        say(f"{summary}, all converted before; to convert again, use --overwrite")
    else:
        say(f"{summary} in {report.seconds:.1f} s ({report.mb_per_s:.0f} MB/s)")


def _show_unread(report: Any) -> None:
    """Print the keys that nothing read, if there are some."""
    if not report.unread_keys:
        return
    keys = [
        f"{escaped(key)} ({count_text(n, 'row')})"
        for key, n in islice(report.unread_keys.items(), 12)
    ]
    if len(report.unread_keys) > len(keys):
        keys.append(f"{len(report.unread_keys) - len(keys):,} others")
    say(f"keys that nothing read (kept in json): {', '.join(keys)}")


def _show_rejects(report: Any, dest: str) -> None:
    """Print where a conversion lists its rejects, and their reasons with one example each."""
    from mmstream.converting.report import REJECTS_NAME, REPORT_NAME

    groups = report.reject_kinds
    if not groups:
        return
    folder = dest.rstrip("/") + "/NAME" * bool(report.splits)
    place = f"all rejected rows are in {folder}/{REJECTS_NAME}"
    if not report.num_samples:  # of an append: nothing was written
        place = "no row was added"
    say(f"{place}. The reasons, with one example each:")
    for group in groups[:MAX_REASONS]:
        row, reason = group.example.row, escaped(group.example.reason)
        say(f"  {count_text(group.num_rows, 'row')}: row {row}: {reason}")
    num_others = report.num_rejects - sum(group.num_rows for group in groups[:MAX_REASONS])
    if num_others:
        say(f"  {count_text(num_others, 'row')}: other reasons; see {folder}/{REPORT_NAME}")


BY_HAND = ("columns", "splits", "honor_robots")
"""Settings with an option that has another form than the setting."""


@command(
    "mmstream convert rows.jsonl s3://bucket/corpus --media-root media/ --num-workers 8",
    **{name: flag for flags in FLAGS.values() for name, flag in flags.items()},
)
@click.argument("rows", nargs=-1)
@click.argument("dest")
@click.option(
    "--media-root",
    metavar="FOLDER",
    help="Folder that media paths in ROWS are relative to, or a URL such as s3://bucket/media.  "
    "[default: the folder of ROWS]",
)
@click.option(
    "--num-workers",
    type=AT_LEAST_0,
    help="Worker processes, or tasks of Ray at a time. The output is the same for any number.  "
    "[default: cores of this machine, or two tasks for each CPU of the Ray cluster]",
)
@click.option(
    "--format",
    "reading_format",
    metavar="NAME",
    help="Format of all rows: captions, laion, speech, webvid, labels, text, llava, messages, "
    "instruction, qwen-vl, texts, vqa, preference, obelics, mmc4, mmc4-after, mmc4-files, "
    "mmc4-files-after, spans or lhotse. Or a function of yours as module:function, from a row to a "
    "row of any of them.  [default: each row is recognised by its keys]",
)
@click.option(
    "--dry-run",
    type=AT_LEAST_1,
    metavar="N",
    help="Show what the first N rows become, and write nothing. DEST may be left out.",
)
@click.option("--html", metavar="FILE", help="With --dry-run: a page with the pictures.")
@max_rejects_option
@click.option(
    "--rows-as",
    "reading_rows_as",
    type=click.Choice(get_args(RowKind)),
    help="What the rows lie in.  [default: their content says it]",
)
@click.option(
    "--encoding",
    "reading_encoding",
    metavar="NAME",
    help="Encoding of files of text that are not UTF-8, such as gb18030, shift_jis or utf-16. A "
    "guess is never made.",
)
@click.option(
    "--limit", "reading_limit", type=AT_LEAST_1, help="Convert the first so many rows only."
)
@click.option(
    "--map",
    "columns",
    metavar="NAME=COLUMN,...",
    multiple=True,
    help="Read COLUMN of the rows as NAME, such as image=photo,text=alt.",
)
@click.option(
    "--dataset-info",
    "reading_dataset_info",
    metavar="FILE",
    help="LLaMA-Factory's dataset_info.json, which says what columns and tags the rows have. The "
    "entry is the one with their file name; FILE#NAME names another.",
)
@click.option(
    "--captions",
    "reading_captions",
    type=click.Choice(["all", "each"]),
    help="all: one sample with all captions of a row. each: one sample per caption.  [default: "
    "all]",
)
@click.option(
    "--samples-per-shard",
    type=AT_LEAST_1,
    default=5000,
    show_default=True,
    help="Rows per shard; a shard is one tar.",
)
@click.option(
    "--shuffle-seed",
    type=int,
    help="Shuffle the rows with this seed first. Useful when they are sorted by class.",
)
@click.option(
    "--split",
    metavar="NAME=FRACTION,...",
    help="Write one dataset per split at DEST/NAME, for example train=0.98,val=0.02.",
)
@click.option(
    "--split-by",
    "splitting_split_by",
    metavar="KEY",
    help="Rows with the same value of KEY, such as speaker, go to one split.",
)
@click.option(
    "--split-by-media",
    "splitting_by_media",
    is_flag=True,
    help="Rows that name the same image, audio or video go to one split, also where other rows "
    "connect them.",
)
@click.option(
    "--duplicates",
    "duplicates_exact",
    type=click.Choice(get_args(Action)),
    help="Look for samples with equal media or text: report lists them, drop leaves those out of "
    "epochs that come twice as a whole.",
)
@click.option(
    "--overwrite",
    "rerun_overwrite",
    is_flag=True,
    help="Replace another conversion, or an unfinished one.",
)
@click.option(
    "--check",
    "rerun_check",
    is_flag=True,
    help="Also read the shards that an earlier call wrote, and compare their checksums. Damaged "
    "ones are written again.",
)
@click.option(
    "--retry-rejects",
    "rerun_retry_rejects",
    is_flag=True,
    help="Try the rejected rows of a finished conversion again. What becomes a sample goes into "
    "extra shards after the last one. The other shards are not touched.",
)
@click.option(
    "--append",
    "rerun_append",
    is_flag=True,
    help="Add the rows to a finished dataset that was converted with the same options, as shards "
    "after the last one. Rows that it has already are rejects.",
)
@click.option(
    "--engine",
    default="processes",
    show_default=True,
    metavar="NAME",
    help="processes: of this machine. ray: tasks of a Ray cluster.",
)
@click.option(
    "--shard-range",
    metavar="A:B",
    help="Write only the shards from A up to B, without B, counted from 0 over all splits. Other "
    "machines may write other ranges at the same time. Then run `mmstream finalize DEST`.",
)
@click.option(
    "--media-check",
    "media_check",
    type=click.Choice(["none", "header", "full"]),
    help="How much of a file is read. none: its first bytes, for its type. header: also its size, "
    "duration and so on, without decoding it. full: everything is decoded once, as strictly as in "
    "training.  [default: header]",
)
@click.option(
    "--max-image-side",
    "media_max_image_side",
    type=AT_LEAST_1,
    metavar="PIXELS",
    help="Make images smaller whose longer side is longer. Others stay byte for byte.",
)
@click.option(
    "--image-format",
    "media_image_format",
    type=click.Choice(get_args(ImageFormat)),
    help="Store all images in this format.  [default: as they are]",
)
@click.option(
    "--allow-url",
    "allow_urls",
    multiple=True,
    metavar="PREFIX",
    help="Rows may name media under this URL prefix, such as s3://bucket/photos/. May be repeated.",
)
@click.option(
    "--num-connections",
    "downloads_num_connections",
    type=AT_LEAST_1,
    help="Downloads that run at the same time, over all worker processes of this machine. Each "
    "worker has one at least.  [default: 64]",
)
@click.option(
    "--allow-host",
    "downloads_allow_hosts",
    multiple=True,
    metavar="NAME[:PORT]",
    help="URLs may name this host, although its address is private. May be repeated.",
)
@click.option(
    "--ignore-robots",
    is_flag=True,
    help="Also take media whose servers say noai, noimageai, noindex or noimageindex.",
)
def convert(
    rows: tuple[str, ...],
    dest: str,
    columns: tuple[str, ...],
    split: str | None,
    max_rejects: str,
    shard_range: str | None,
    ignore_robots: bool,
    dry_run: int | None,
    html: str | None,
    **options: Any,
) -> None:
    """Convert ROWS and their media to tar shards at DEST.

    ROWS may be JSONL, JSON, csv, tsv, Parquet (each also as .gz, .zst, .bz2), COCO's annotations,
    tars of samples, or a folder of pictures: one or several files, patterns, folders, URLs, or -
    for standard input. The content decides, not the name.

    To continue an interrupted conversion, or to mend missing shards of a finished one, run the same
    command again. Rows that cannot be used are listed in DEST/rejects.jsonl, and counted by their
    reasons in DEST/report.json. The exit code is 1 if they are more than --max-rejects.

    Begin with --dry-run 10: it shows what the first rows become, and writes nothing.
    """
    from mmstream.converting.convert import convert as run

    if not rows and dry_run is None:
        raise click.UsageError("name ROWS and DEST")
    if html is not None and dry_run is None:
        raise click.UsageError("--html shows a dry run; give --dry-run too")
    settings = {
        argument: {name: options.pop(f"{argument}_{name}") for name in flags if name not in BY_HAND}
        for argument, flags in FLAGS.items()
    }
    settings["reading"]["columns"] = _pairs(
        columns, "--map {}: write NAME=COLUMN, each NAME once, such as image=photo"
    )
    settings["downloads"]["honor_robots"] = not ignore_robots
    if split:
        splits = _pairs(
            (split,), "--split {}: write NAME=FRACTION,NAME=FRACTION, each NAME once", float
        )
        settings["splitting"]["splits"] = splits
    else:
        refuse_given(["splitting_split_by", "splitting_by_media"], "with --split")
        del settings["splitting"]
    options |= {
        argument: GROUPS[argument](**_given(values)) for argument, values in settings.items()
    }
    options["shard_range"] = _shard_range(shard_range) if shard_range else None
    if options["num_workers"] is None and options["engine"] == "processes":
        options["num_workers"] = os.cpu_count() or 1
    max_rejects_of(max_rejects)  # a wrong one is an error before the first shard
    source: Any = list(rows) if len(rows) > 1 else (*rows, dest)[0]
    if dry_run is not None:
        _dry_run(source, dry_run, html, options)
        return
    # The limit is judged below, in the words of the command line.
    report = run(source, dest, max_rejects=1.0, **options)
    if options["rerun"].retry_rejects:
        retried = f"{report.num_recovered:,} of {report.num_retried:,} rejected rows became samples"
        say(retried if report.num_retried else "nothing to retry: no row was rejected")
    if options["shard_range"] is None or report.was_finished:
        show_end(report, dest, max_rejects)
    else:
        show_summary(report)
        say(f"when all shards are written, run: mmstream finalize {dest}")


def _dry_run(rows: Any, num_rows: int, html: str | None, options: dict[str, Any]) -> None:
    """Show what the first rows become, in the terminal or on a page."""
    from mmstream.converting.convert import dry_run
    from mmstream.display.samples import Card, card_lines, cards_html

    cards: list[Card] = []
    dry_rows = dry_run(rows, num_rows, **options)
    for row in dry_rows:
        address = f"row {row.number}"
        if row.reject is not None:
            note = f"rejected; {row.reject.file} row {row.reject.row}"
            cards.append(Card(address, None, note, row.reject.reason))
        label = f"{address}, format {row.format}" if row.format else address
        if row.unread:
            label += f", keys that nothing read: {', '.join(row.unread)}"
        # A page shows the note of a sample, a terminal its address.
        note = label if html is not None else ""
        cards += [Card(label, sample, note) for sample in row.samples]
    num_rejects = sum(row.reject is not None for row in dry_rows)
    head = (
        f"dry run: {count_text(len(dry_rows), 'row')}, {num_rejects:,} rejected; "
        "nothing was written"
    )
    if html is not None:
        say(f"{head}; {save_page(cards_html(head, cards), head, html)}")
        return
    say(head)
    for card in cards:
        for line in card_lines(card):
            say(line)
    if any(row.reject is not None and "no such file" in row.reject.reason for row in dry_rows):
        say("media paths are relative to --media-root, by default the folder of the rows")


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that were given. click has None, or nothing, for the others."""
    return {name: value for name, value in values.items() if value is not None and value != ()}


def _pairs(texts: tuple[str, ...], advice: str, value_of: Callable[[str], Any] = str) -> Any:
    """Return {name: value} of texts such as ``image=photo,text=alt``."""
    pairs: dict[str, Any] = {}
    for pair in (item for text in texts for item in text.split(",")):
        name, value = pair.partition("=")[0].strip(), pair.partition("=")[2]
        with usage(advice.format(repr(pair))):
            if not name or not value or name in pairs:
                raise ValueError(pair)
            pairs[name] = value_of(value)
    return pairs


def _shard_range(text: str) -> tuple[int, int]:
    start, _, stop = text.partition(":")
    with usage(f"--shard-range {text!r}: write A:B, such as 0:100"):
        return int(start), int(stop)


@command("mmstream finalize s3://bucket/corpus", splits="--split", shard_range="--shard-range")
@click.argument("dest")
@click.option(
    "--split",
    "split",
    metavar="NAME,...",
    help="Names of all splits, if there are some. The option of convert works, too.",
)
@max_rejects_option
def finalize(dest: str, split: str | None, max_rejects: str) -> None:
    """Make a dataset of the shards at DEST that `mmstream convert --shard-range` wrote.

    All shards must be there. The exit code is that of `mmstream convert`.
    """
    from mmstream.converting.convert import finalize as run

    max_rejects_of(max_rejects)  # a wrong one is refused before the dataset is finished
    names = [name.partition("=")[0].strip() for name in split.split(",")] if split else None
    show_end(run(dest, splits=names, max_rejects=1.0), dest, max_rejects)


@command("mmstream reshard s3://bucket/corpus s3://bucket/packs --plan 8192-3f0a9c51e2b7")
@click.argument("source")
@click.argument("dest")
@click.option(
    "--plan", metavar="NAME", help="Name of the plan, or its folder.  [default: no packs]"
)
@click.option(
    "--shuffle-seed",
    type=int,
    default=0,
    show_default=True,
    help="Shuffle all samples by this seed, then pack them.",
)
@click.option("--no-shuffle", is_flag=True, help="Keep the packs of the plan, in its order.")
@click.option(
    "--samples-per-shard",
    type=AT_LEAST_1,
    help="Samples of a shard, or some more.  [default: as in SOURCE]",
)
@click.option(
    "--num-workers", type=AT_LEAST_0, default=1, show_default=True, help="Worker processes."
)
@bucketing
@choosing()
@allow_foreign_urls
def reshard(
    source: str,
    dest: str,
    shuffle_seed: int,
    no_shuffle: bool,
    buckets: str | None,
    edges: str | None,
    resolution: int | None,
    multiple_of: int,
    allow_foreign_urls: bool,
    **options: Any,
) -> None:
    """Rewrite the dataset SOURCE as DEST, so that each pack is one range of a shard.

    The bytes of samples stay as they are. The lengths and the plan are written too. Samples that
    the plan leaves out are not written. Without --plan, the samples alone are written, side by
    side; with --buckets, those of one bucket in each shard. A call that was killed goes on when it
    is made again.
    """
    from mmstream.converting.reshard import reshard as run
    from mmstream.dataset.open import open_dataset
    from mmstream.dataset.select import chosen

    choice = {name: options.pop(name) for name in OPTIONS}
    dataset = chosen(open_dataset(source, allow_foreign_urls=allow_foreign_urls), **choice)
    seed = None if no_shuffle else shuffle_seed
    wanted = buckets_from(buckets, edges, resolution, multiple_of)
    plan = run(dataset, dest, buckets=wanted, shuffle_seed=seed, **options)
    if plan is None:
        say(f"{open_dataset(dest)!r}")
        return
    say(
        f"{plan.members.size:,} samples in {plan.num_units:,} packs, {plan.fill:.1%} full, in "
        f"{len(plan.shards):,} shards"
    )
    if plan.members.size < len(dataset):
        say(f"{len(dataset) - plan.members.size:,} samples that the plan leaves out stayed behind")
    say(f"plan: {plan.url}")
