"""``mmstream bake``: what a pipeline makes of a dataset, as a dataset. It imports torch."""

from __future__ import annotations

from typing import Any

import click

from mmstream.cli.select import choosing
from mmstream.cli.shared import (
    AT_LEAST_0,
    AT_LEAST_1,
    allow_foreign_urls,
    command,
    load_pipeline,
    refuse_given,
    say,
    shows_infos_of,
)


@command("mmstream bake s3://bucket/corpus s3://bucket/baked --pipeline train:pipeline")
@click.argument("source")
@click.argument("dest")
@click.option(
    "--pipeline",
    "pipeline_name",
    metavar="MODULE:OBJECT",
    required=True,
    help="The pipeline of training, without random augmentation: a Pipeline, or a function from a "
    "dataset to one. It gets the dataset SOURCE.",
)
@click.option(
    "--batch-function",
    "batch_name",
    metavar="MODULE:FUNCTION",
    help="A function from a list of samples and a torch.device to as many samples, such as one "
    "that makes latents on a GPU.",
)
@click.option(
    "--batch-size",
    type=AT_LEAST_1,
    default=64,
    show_default=True,
    help="Samples of its calls. The last call of a shard gets fewer.",
)
@click.option("--device", default="cpu", show_default=True, help="The device that it gets.")
@click.option(
    "--epoch-of-draws",
    type=AT_LEAST_0,
    help="Where something draws at random: keep the draws of this epoch for all epochs.  [default: "
    "refuse it]",
)
@click.option(
    "--num-workers",
    type=AT_LEAST_0,
    default=1,
    show_default=True,
    help="Worker processes. The result is the same for any number.",
)
@click.option(
    "--dry-run",
    type=AT_LEAST_1,
    metavar="N",
    help="Only try N samples: show the fields and the size of the result. Nothing is written.",
)
@choosing()
@allow_foreign_urls
def bake(
    source: str,
    dest: str,
    pipeline_name: str,
    batch_name: str | None,
    batch_size: int,
    device: str,
    epoch_of_draws: int | None,
    num_workers: int,
    dry_run: int | None,
    allow_foreign_urls: bool,
    **choice: Any,
) -> None:
    """Write what a pipeline makes of the dataset SOURCE to DEST, once for all epochs.

    Keys, shards and bad samples stay. Read DEST with decode=mm.Decode.baked(): the steps and the
    batches are those of the pipeline. A call that was killed goes on when it is made again.
    """
    if batch_name is None:
        refuse_given(["batch_size", "device"], "with --batch-function")
    from mmstream.baking.bake import bake_into, baker_of, estimate
    from mmstream.converting.formats.formats import load_function
    from mmstream.dataset.open import open_dataset
    from mmstream.dataset.select import chosen

    dataset = chosen(open_dataset(source, allow_foreign_urls=allow_foreign_urls), **choice)
    pipeline = load_pipeline(pipeline_name, dataset)
    function: Any = None if batch_name is None else load_function(batch_name)
    baker = baker_of(pipeline, function, batch_size, device, epoch_of_draws)
    if dry_run is not None:
        for line in estimate(baker, dry_run, num_workers):
            say(line)
        return
    with shows_infos_of("mmstream.baking.bake"):  # how large the result will be
        report = bake_into(baker, dest, num_workers, True)
    if report.was_finished:
        say(f"{dest}: was finished already")
    say(report.summary())
    num_bad = report.num_bad - report.num_left_out
    if num_bad:
        say(f"{num_bad:,} of them are bad, as in the source; the first: {report.first_reason}")
    if report.num_left_out:
        say(f"{report.num_left_out:,} of them are left out by a filter, as in the source")
