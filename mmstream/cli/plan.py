"""``mmstream plan | bake``: what a pipeline makes of all samples, once. They import torch.

`plan`: lengths of all samples, which form packs, and how full these are. `bake`: a dataset.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import click

from mmstream.cli.select import choosing, open_chosen
from mmstream.cli.shared import (
    AT_LEAST_0,
    AT_LEAST_1,
    allow_foreign_urls,
    command,
    load_pipeline,
    open_tokenizer,
    refuse_given,
    say,
    shows_infos_of,
)
from mmstream.errors import ConfigError
from mmstream.packing.settings import Overlong, PackLimits

PACK_LIMITS = (
    "max_documents",
    "max_images",
    "max_patches",
    "max_seconds",
    "document_multiple_of",
    "where",
    "overlong",
)
"""Options that are settings of `PackLimits`."""


@command("mmstream plan s3://bucket/corpus --max-tokens 8192 --pipeline train:pipeline")
@click.argument("url")
@click.option("--max-tokens", type=AT_LEAST_1, required=True, help="Tokens of a pack.")
@click.option(
    "--pipeline",
    "pipeline_name",
    metavar="MODULE:OBJECT",
    help="The pipeline of training: a Pipeline, or a function from a dataset to one. Its decoders, "
    "functions before decoding and seed count.",
)
@click.option(
    "--processor",
    metavar="FOLDER",
    help="Instead: the folder of a Qwen-VL model with its tokenizer and processor.",
)
@click.option(
    "--tokenizer",
    metavar="FOLDER",
    help="Instead, for text alone: the folder of a tokenizer. `bytes` is one of one token per "
    "byte.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="Name of the plan.  [default: a digest, which mm.Pack finds by itself]",
)
@click.option(
    "--output",
    "folder",
    metavar="FOLDER",
    help="Folder or URL that gets the folders of lengths and plan.  [default: beside the index]",
)
@click.option("--max-documents", type=AT_LEAST_1, help="Documents of a pack.")
@click.option("--max-images", type=AT_LEAST_1, help="Images of a pack.")
@click.option(
    "--max-patches", type=AT_LEAST_1, help="Patches of all pictures and frames of a pack."
)
@click.option("--max-seconds", type=AT_LEAST_1, help="Seconds of sound of a pack.")
@click.option(
    "--document-multiple-of",
    type=AT_LEAST_1,
    default=1,
    show_default=True,
    help="Each document takes a multiple of so many tokens: 2 * CP * TP with context parallelism.",
)
@click.option(
    "--where",
    metavar="CONDITION",
    default="",
    help='Pack only these samples: "num_tokens >= 16 and num_label_tokens > 8".',
)
@click.option(
    "--overlong",
    type=click.Choice(get_args(Overlong)),
    default="reject",
    show_default=True,
    help="Leave out samples that are longer than a pack, or cut plain text.",
)
@click.option(
    "--epochs",
    metavar="A-B",
    help="Where lengths depend on random draws: the epochs that are measured, such as 0-2. The "
    "longest length counts.",
)
@click.option(
    "--room",
    type=AT_LEAST_0,
    default=0,
    show_default=True,
    help="Tokens that each sample gets more, in place of --epochs.",
)
@click.option(
    "--patch-size",
    type=AT_LEAST_1,
    default=14,
    show_default=True,
    metavar="PIXELS",
    help="Side of a patch of the vision tower.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Plan all shards again, and measure them again where lengths have changed. Without it, "
    "packs of an earlier plan stay, and appended shards form new ones.",
)
@click.option(
    "--num-workers",
    type=AT_LEAST_0,
    help="Processes. The plan is the same for any number.  [default: one per core, or one for "
    "little work]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@allow_foreign_urls
def plan(
    url: str,
    max_tokens: int,
    pipeline_name: str | None,
    processor: str | None,
    tokenizer: str | None,
    epochs: str | None,
    as_json: bool,
    allow_foreign_urls: bool,
    **options: Any,
) -> None:
    """Measure all samples of the dataset at URL, and plan packs of at most --max-tokens tokens.

    URL may be a mixture's file: each source is planned by itself.

    The samples go through the decoders of training up to the tokenizer. No pixel is decoded. To
    continue an interrupted call, run the same command again. Samples are not measured again for
    other limits.

    The lines say how full the packs are, and what is left out.
    """
    from mmstream.dataset.mixture import open_data
    from mmstream.measuring.plan import plan_sources
    from mmstream.packing.plan_report import plan_report
    from mmstream.pipeline import Pipeline

    if sum(option is not None for option in (pipeline_name, processor, tokenizer)) != 1:
        raise click.UsageError("give one of --pipeline, --processor and --tokenizer")
    limits = PackLimits(max_tokens, **{limit: options.pop(limit) for limit in PACK_LIMITS})
    measured_epochs = None if epochs is None else _epochs(epochs)
    data = open_data(url, allow_foreign_urls=allow_foreign_urls)
    if pipeline_name is not None:
        pipeline = load_pipeline(pipeline_name, data)
    else:
        decode = _of_tokenizer(str(tokenizer)) if processor is None else _of_processor(processor)
        pipeline = Pipeline(data, global_batch_size=1, decode=decode)
    with shows_infos_of("mmstream.measuring.plan"):  # how much is read
        for source in plan_sources(pipeline, limits, epochs=measured_epochs, **options):
            assert source.plan is not None
            report = plan_report(source.plan)
            if as_json:
                name = {"source": source.name} if source.name else {}
                say(json.dumps({**name, "folder": source.plan.url, **asdict(report)}))
                continue
            for line in report.lines(limits.max_tokens):
                say(line)
            say(f"plan: {source.plan.url}")


def _of_processor(folder: str) -> Any:
    """Return the decoders of a model's folder."""
    from mmstream.train import tokenizer
    from mmstream.train.models import CHAT_FAMILIES, chat_decode
    from mmstream.train.tokenizer import read_json

    family = read_json(Path(folder, "config.json")).get("model_type")
    if family not in CHAT_FAMILIES:
        raise ConfigError(
            f"{folder}: is a model of {family}, and --processor knows {', '.join(CHAT_FAMILIES)}: "
            "give --pipeline module:object"
        )
    return chat_decode(tokenizer.open_tokenizer(folder, chat=True), folder, 1 << 20)


def _of_tokenizer(folder: str) -> Any:
    """Return the decoders of a tokenizer."""
    from mmstream.decoding.decode import Decode
    from mmstream.decoding.text.decoder import TextDecoder

    return Decode(text=TextDecoder(open_tokenizer(folder)))


def _epochs(text: str) -> list[int]:
    """Return the epochs of ``A-B``, both included, or of one number."""
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) < int(first):
        raise click.UsageError(f"--epochs {text}: give numbers such as 0-2, or one such as 0")
    return list(range(int(first), int(last or first) + 1))


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

    dataset = open_chosen(source, allow_foreign_urls, choice)
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
