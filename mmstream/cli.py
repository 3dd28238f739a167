"""The command line: parse, call the library, print a summary.

Exit codes: 0 ok, 1 a problem of the data or the storage, 2 usage, 130 interrupted. Nothing else in
the package prints.
"""

from __future__ import annotations

import inspect
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NoReturn

import click

from mmstream.errors import ConfigError, MMStreamError, SampleError

__all__ = ["main"]

PROBLEM, USAGE, INTERRUPTED = 1, 2, 130
_AT_LEAST_0, _AT_LEAST_1 = click.IntRange(min=0), click.IntRange(min=1)


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    logging.basicConfig(
        level=logging.WARNING,
        format=f"%(levelname).1s [rank {os.environ.get('RANK', '0')}] %(message)s",
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names in a tar may be any bytes
    try:
        cli.main(prog_name="mmstream", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except ConfigError as error:
        click.echo(f"usage: {error}", err=True)
        sys.exit(USAGE)
    except (MMStreamError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(PROBLEM)
    sys.exit(0)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="mmstream")
def cli() -> None:
    """Multimodal training data on plain WebDataset tars."""


def _command(example: str) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function a command whose help starts with an example to copy."""

    def wrap(function: Callable[..., None]) -> click.Command:
        text = inspect.getdoc(function) or ""
        make = cli.command(help=f"\b\n{example}\n\n{text}", short_help=text.partition("\n")[0])
        return make(function)

    return wrap


@_command("mmstream convert rows.jsonl s3://bucket/corpus --media-root media/ --num-workers 8")
@click.argument("rows")
@click.argument("dest")
@click.option("--media-root", help="Folder that media paths are relative to; else that of ROWS.")
@click.option("--samples-per-shard", type=_AT_LEAST_1, default=5000, show_default=True)
@click.option("--num-workers", type=_AT_LEAST_0, default=os.cpu_count() or 1, show_default="cores")
@click.option("--format", "row_format", help="Of all rows; else each row is recognised.")
@click.option("--captions", type=click.Choice(["all", "each"]), default="all", show_default=True)
@click.option("--shuffle-seed", type=int, help="Permute the rows first: for a sorted corpus.")
@click.option("--split", "split", metavar="NAME=FRACTION,...", help="train=0.98,val=0.02")
@click.option("--overwrite", is_flag=True, help="Replace another conversion at DEST.")
def convert(
    rows: str, dest: str, row_format: str | None, split: str | None, **options: Any
) -> None:
    """Turn ROWS (JSONL, .gz, or a JSON array) and their media into tar shards at DEST.

    A conversion that was killed goes on when the same command runs again.
    """
    from mmstream.converting import convert as run

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
    if not report.num_samples:
        click.echo("error: no row became a sample; is --media-root right?", err=True)
        sys.exit(PROBLEM)


@_command("mmstream index s3://bucket/tars --output indexes/")
@click.argument("url")
@click.option("--output", help="Where indexes and manifest go; else beside the tars.")
@click.option("--repack", is_flag=True, help="Unpack gzipped tars to plain ones.")
@click.option("--overwrite", is_flag=True, help="Build indexes anew that are there already.")
@click.option("--num-threads", type=_AT_LEAST_1, default=8, show_default=True)
def index(url: str, **options: Any) -> None:
    """Index the tars at URL that others wrote, so that they open at once.

    Reads headers only: of a local tar with 1 MB images 2 %.
    """
    from mmstream.indexing import index_tars

    report = index_tars(url, **options)
    click.echo(
        f"{report.num_shards:,} tars, {report.num_samples:,} samples; "
        f"{report.num_built:,} indexes built, {report.num_repacked:,} tars repacked"
    )


@_command("mmstream info s3://bucket/corpus")
@click.argument("url")
@click.option(
    "--keys", "num_keys", type=_AT_LEAST_0, default=5, show_default=True, help="First keys to show."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(url: str, num_keys: int, as_json: bool) -> None:
    """Say what the dataset at URL holds: shards, samples, fields, bytes, first keys."""
    from mmstream.opening import open_dataset

    dataset = open_dataset(url)
    manifest = dataset.manifest
    first = _first_samples(dataset, num_keys)
    seen = dict.fromkeys(name for sample in first for name in sample if name[:2] != "__")
    fields: dict[str, int | None] = {**(manifest.fields or seen)}
    keys = [sample["__key__"] for sample in first]
    if as_json:
        about = {
            "url": dataset.store.url,
            "num_samples": len(dataset),
            "num_shards": dataset.num_shards,
            "num_bytes": manifest.num_bytes,
            "fields": fields,
            "keys": keys,
            "source": manifest.source,
        }
        click.echo(json.dumps(about))
        return
    click.echo(dataset)
    if dataset.num_shards:
        sizes = dataset.counts
        click.echo(f"  samples a shard: {sizes.min():,} to {sizes.max():,}")
    if not manifest.fields and dataset.num_shards:
        click.echo(f"  fields of the first {len(first)} samples:")
    for name, count in fields.items():
        click.echo(f"  .{name}" + (f": {count:,}" if count is not None else ""))
    click.echo(f"  first keys: {', '.join(keys)}")
    for name, value in manifest.source.items():
        click.echo(f"  {name}: {value}")


@_command("mmstream verify s3://bucket/corpus --decode")
@click.argument("url")
@click.option("--decode", is_flag=True, help="Also decode every image and parse every json.")
def verify(url: str, decode: bool) -> None:
    """Read the whole dataset at URL: checksums, indexes, every sample. Exit code 1 on problems."""
    from mmstream.opening import open_dataset
    from mmstream.verifying import verify as run

    decoder = _decoder() if decode else None
    dataset = open_dataset(url)
    problems = 0
    if not len(dataset):
        click.echo("bad: the dataset has no samples")
        problems = 1
    for problem in run(dataset, decode=decoder):
        problems += 1
        click.echo(f"bad: {problem.reason}")
    if problems:
        click.echo(f"{problems:,} problems in {dataset!r}", err=True)
        sys.exit(PROBLEM)
    click.echo(f"ok: {len(dataset):,} samples in {dataset.num_shards:,} shards")


@_command(
    "torchrun --standalone --nproc-per-node 2 -m mmstream train shards/ --out run/ --epochs 2"
)
@click.argument("url")
@click.option("--out", required=True, help="Folder or s3:// prefix of checkpoints.")
@click.option("--log-dir", help="Local folder of metrics; else OUT.")
@click.option("--model", help="clip, vlm, or a folder of transformers; else clip.")
@click.option("--tokenizer", help="Folder of a tokenizer; else the model's, or one token a byte.")
@click.option("--image-size", type=int, help="Pixels a side, a multiple of 16.")
@click.option("--max-length", type=int, help="Longest text in tokens.")
@click.option("--freeze", multiple=True, metavar="PATTERN", help="Parameters not to train.")
@click.option("--epochs", type=int)
@click.option("--max-steps", type=int, help="Stop after so many optimizer steps in all.")
@click.option("--global-batch-size", type=int, help="Samples a loader step over all ranks.")
@click.option("--accumulate", type=int, help="Loader steps that make one optimizer step.")
@click.option("--micro-batches", type=int, help="Parts that a rank cuts its batches into.")
@click.option("--rows-per-rank", metavar="N,N,...", help="For devices of different size.")
@click.option("--num-workers", type=int, help="Loader processes of each rank.")
@click.option("--seed", type=int)
@click.option("--lr", type=float, help="Highest learning rate.")
@click.option("--lr-schedule", type=click.Choice(["constant", "cosine"]))
@click.option("--warmup-steps", type=int)
@click.option("--decay-steps", type=int, help="End of the cosine; else that of all epochs.")
@click.option("--final-lr-fraction", type=float, help="Of LR, at the cosine's end.")
@click.option("--weight-decay", type=float)
@click.option("--max-grad-norm", type=float, help="Clip longer gradients; else at 1.")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="Else bf16 on CUDA.")
@click.option("--activation-checkpointing", is_flag=True, help="Less memory, more time.")
@click.option("--compile", is_flag=True, help="Run the model through torch.compile.")
@click.option("--deterministic", is_flag=True, help="Only deterministic algorithms.")
@click.option("--checkpoint-every", type=int, help="Optimizer steps.")
@click.option("--keep-checkpoints", type=int)
@click.option("--validation", metavar="URL", help="A second dataset.")
@click.option("--validate-every", type=int, help="Optimizer steps.")
@click.option("--log-every", type=int, help="Optimizer steps.")
@click.option("--log-keys", is_flag=True, help="Write each step's sample keys to the metrics.")
@click.option("--progress/--no-progress", default=True, help="A bar, in a terminal.")
@click.option("--profile", type=int, metavar="STEPS", help="Trace so many steps.")
@click.option("--device", help="cpu, cuda, cuda:N; else CUDA where there is one.")
def train(url: str, out: str, rows_per_rank: str | None, **options: Any) -> None:
    """Train a small CLIP or VLM on URL; alone, or in each process of torchrun. Resumes by itself.

    SIGTERM and Ctrl-C save what was done; a second Ctrl-C leaves at once.
    """
    from mmstream.train import TrainConfig
    from mmstream.train import train as run

    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("mmstream").setLevel(logging.INFO)  # a line a step, of one rank

    given = {name: value for name, value in options.items() if value is not None}
    if rows_per_rank is not None:
        with _usage(f"--rows-per-rank {rows_per_rank!r}: write N,N,..."):
            given["rows_per_rank"] = tuple(int(rows) for rows in rows_per_rank.split(","))
    result = run(TrainConfig(url=url, out=out, **given))
    if os.environ.get("RANK", "0") == "0":
        loss = "none: nothing was left to do" if result.final_loss is None else result.final_loss
        stopped = f"stopped by {result.stopped_by}: " if result.stopped_by else ""
        click.echo(f"{stopped}{result.num_steps:,} steps, last loss {loss}; checkpoints in {out}")


@_command("mmstream demo --out quickstart-out")
@click.option("--out", default="quickstart-out", show_default=True, help="Folder of all results.")
@click.option("--shards", help="Where the shards and checkpoints go, e.g. s3://bucket/x; else OUT.")
def demo(out: str, shards: str | None) -> None:
    """Run the main job on the embedded corpus: convert, train, kill -9, resume, prove."""
    from mmstream.demo import run_demo

    if not run_demo(out, shards, say=click.echo):
        sys.exit(PROBLEM)


def _splits(text: str) -> dict[str, float]:
    splits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, fraction = part.partition("=")
        with _usage(f"--split {text!r}: write NAME=FRACTION,NAME=FRACTION"):
            if not equals or not name or name in splits:
                raise ValueError(part)
            splits[name.strip()] = float(fraction)
    return splits


@contextmanager
def _usage(message: str) -> Iterator[None]:
    try:
        yield
    except ValueError:
        raise click.UsageError(message) from None


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


def _first_samples(dataset: Any, count: int) -> list[dict[str, Any]]:
    found = []
    for sample in islice(range(len(dataset)), count):
        try:
            found.append(dataset[sample])
        except SampleError as error:
            click.echo(f"bad: {error}", err=True)
    return found


def _decoder() -> Any:
    from mmstream.decoding import Decode, ImageDecoder, decode_sample

    decoders = Decode(image=ImageDecoder())
    return lambda sample: decode_sample(sample, decoders)
