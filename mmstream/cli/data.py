"""``mmstream convert | index | verify``: none of them needs torch."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from mmstream.cli.command import AT_LEAST_0, AT_LEAST_1, PROBLEM, command, usage

__all__ = ["convert", "index", "verify"]


@command(
    "mmstream convert rows.jsonl s3://bucket/corpus --media-root media/ --num-workers 8",
    format="--format", splits="--split",
)  # fmt: skip
@click.argument("rows")
@click.argument("dest")
@click.option(
    "--media-root", help="Folder that media paths in ROWS are relative to; else the folder of ROWS."
)
@click.option(
    "--samples-per-shard", type=AT_LEAST_1, default=5000, show_default=True, help="Rows of a tar."
)
@click.option(
    "--num-workers",
    type=AT_LEAST_0,
    default=os.cpu_count() or 1,
    show_default="cores",
    help="Processes; the output is the same for any number.",
)
@click.option(
    "--format",
    "row_format",
    metavar="NAME",
    help="Of all rows: captions, llava, messages, qwen-vl, instruction or text; else "
    "each row is recognised by its keys.",
)
@click.option(
    "--captions",
    type=click.Choice(["all", "each"]),
    default="all",
    show_default=True,
    help="All captions of a row in one sample, or a sample each.",
)
@click.option(
    "--shuffle-seed",
    type=int,
    help="Permute the rows first, by this number: for a corpus sorted by class.",
)
@click.option(
    "--split",
    "split",
    metavar="NAME=FRACTION,...",
    help="A dataset each at DEST/NAME, as train=0.98,val=0.02.",
)
@click.option("--overwrite", is_flag=True, help="Replace another conversion at DEST.")
def convert(
    rows: str, dest: str, row_format: str | None, split: str | None, **options: Any
) -> None:
    """Turn ROWS (JSONL, .gz, or a JSON array) and their media into tar shards at DEST.

    A conversion that was killed goes on when the same command runs again.
    """
    from mmstream.converting.convert import convert as run

    splits = _splits(split) if split else None
    report = run(rows, dest, format=row_format, splits=splits, **options)
    speed = f"in {report.seconds:.1f} s ({report.mb_per_s:.0f} MB/s)"
    click.echo(
        f"{report.num_rows:,} rows -> {report.num_samples:,} samples in {report.num_shards:,} "
        f"shards, {report.num_rejects:,} rejected; {report.num_bytes / 1e6:,.1f} MB "
        + ("stood there already: nothing was done (--overwrite does it anew)"
           if report.was_finished else speed)
    )  # fmt: skip
    for folder in [f"{dest}/{name}" for name in report.splits] or [dest]:
        _show_rejects(folder)


@command("mmstream index s3://bucket/tars --output indexes/")
@click.argument("url")
@click.option("--output", help="Where indexes and manifest go; else beside the tars.")
@click.option("--repack", is_flag=True, help="Unpack gzipped tars to plain ones.")
@click.option("--overwrite", is_flag=True, help="Build indexes anew that are there already.")
@click.option(
    "--num-threads",
    type=AT_LEAST_1,
    default=8,
    show_default=True,
    help="Tars indexed side by side.",
)
def index(url: str, **options: Any) -> None:
    """Index the tars at URL that others wrote, so that they open at once.

    Reads headers only: of a local tar with 1 MB images 2 %.
    """
    from mmstream.dataset.index_tars import index_tars

    report = index_tars(url, **options)
    click.echo(
        f"{report.num_shards:,} tars, {report.num_samples:,} samples; "
        f"{report.num_built:,} indexes built, {report.num_repacked:,} tars repacked"
    )


@command("mmstream verify s3://bucket/corpus --decode")
@click.argument("url")
@click.option("--decode", is_flag=True, help="Also decode every image and parse every json.")
@click.option(
    "--write-bad",
    is_flag=True,
    help="Write mmstream.bad.json beside the data: new runs leave out what it lists.",
)
@click.option(
    "--quarantine",
    multiple=True,
    metavar="FILE",
    help="quarantine-rank0.jsonl of a run: list its samples too. May come several times.",
)
@click.option(
    "--source", metavar="NAME", help="Of a run on a mixture: the name that URL has in it."
)
def verify(
    url: str, decode: bool, write_bad: bool, quarantine: tuple[str, ...], source: str | None
) -> None:
    """Read the whole dataset at URL: checksums, indexes, every sample. Exit code 1 on problems.

    --write-bad makes a new list beside the data, or none when nothing is bad any more. --quarantine
    without it adds to the list that is there, and reads no data.
    """
    from mmstream.bad_samples.quarantine import quarantined_refs
    from mmstream.dataset.bad_list import write_bad as write
    from mmstream.dataset.open import open_dataset
    from mmstream.dataset.verify import bad_samples
    from mmstream.dataset.verify import verify as run

    if source is not None and not quarantine:
        raise click.UsageError("--source says what --quarantine is of; give both")
    if quarantine and not write_bad:
        if decode:
            raise click.UsageError("--quarantine reads no data to decode; add --write-bad")
        dataset = open_dataset(url)
        known = quarantined_refs(quarantine, dataset, source)
        listed = write(dataset, [*dataset.bad.tolist(), *known.tolist()])
        click.echo(f"{len(listed):,} of {len(dataset):,} samples are left out of every epoch, "
                   f"{len(listed) - len(dataset.bad):,} of them from now on")  # fmt: skip
        return
    decoder = _decoder() if decode else None
    dataset = open_dataset(url, bad_list=not write_bad)  # one that is made anew may be damaged
    known = quarantined_refs(quarantine, dataset, source)
    problems = []
    if not len(dataset):
        click.echo("bad: the dataset has no samples")
    for problem in run(dataset, decode=decoder):
        problems.append(problem)
        click.echo(f"bad: {problem.reason}")
    if write_bad:
        listed = write(dataset, [*bad_samples(dataset, problems).tolist(), *known.tolist()])
        click.echo(f"{len(listed):,} of {len(dataset):,} samples are left out of every epoch")
    if problems or not len(dataset):
        cure = any(problem.bad for problem in problems) and not write_bad
        hint = "; --write-bad lists what is bad, and runs leave it out" if cure else ""
        click.echo(f"{len(problems) or 1:,} problems in {dataset!r}{hint}", err=True)
        sys.exit(PROBLEM)
    click.echo(f"ok: {len(dataset):,} samples in {dataset.num_shards:,} shards")


def _splits(text: str) -> dict[str, float]:
    splits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, fraction = part.partition("=")
        with usage(f"--split {text!r}: write NAME=FRACTION,NAME=FRACTION"):
            if not equals or not name or name in splits:
                raise ValueError(part)
            splits[name.strip()] = float(fraction)
    return splits


def _show_rejects(folder: str, most: int = 3) -> None:
    """Say where a conversion's rejects are listed, and the first of them."""
    from mmstream.converting.destination import REJECTS_NAME
    from mmstream.storage import open_store

    lines = open_store(folder).read(REJECTS_NAME).splitlines()
    if lines:
        click.echo(f"rejected rows are listed in {folder}/{REJECTS_NAME}, the first:")
    for line in lines[:most]:
        reject = json.loads(line)
        click.echo(f"  row {reject['row']}: {reject['reason']}")


def _decoder() -> Any:
    from mmstream.decoding.image.decoder import ImageDecoder
    from mmstream.decoding.sample import Decode, decode_sample

    decoders = Decode(image=ImageDecoder())
    return lambda sample: decode_sample(sample, decoders)
