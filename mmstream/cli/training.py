"""``mmstream train | demo``: the reference loop. They import torch, and only when they run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar, get_args

import click

from mmstream.cli.select import choosing
from mmstream.cli.shared import (
    PROBLEM,
    UNFINISHED,
    allow_foreign_urls,
    command,
    load_pipeline,
    parse_rows_per_rank,
    refuse_given,
    say,
)
from mmstream.display.text import count_text
from mmstream.train import TrainConfig
from mmstream.train.config import Logger

F = TypeVar("F", bound=Callable[..., None])

_DEFAULTS = {field.name: field.default for field in fields(TrainConfig)}


def _option(flag: str, **settings: Any) -> Callable[[F], F]:
    """Return the option of a field of `TrainConfig`, with the default of the field."""
    default = _DEFAULTS[flag.partition("/")[0].removeprefix("--").replace("-", "_")]
    settings |= {"default": default, "show_default": True, "is_flag": isinstance(default, bool)}
    return click.option(flag, **settings)


def _logger_names(_context: Any, _parameter: Any, text: str | None) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text else ()
    unknown = [name for name in names if name not in get_args(Logger)]
    if unknown:
        raise click.BadParameter(f"{unknown[0]}: give {', '.join(get_args(Logger))}")
    return names


@command(
    "torchrun --standalone --nproc-per-node 2 -m mmstream train shards/ --out run/ --epochs 2",
)
@click.argument("url")
@click.option("--out", required=True, help="Folder or URL prefix for the checkpoints.")
@_option(
    "--log-dir",
    help="Local folder for metrics and logs.  [default: --out, if that is a local folder; else "
    "none]",
)
@_option(
    "--model",
    help="clip (for captions), vlm (for conversations), or a folder with a model that transformers "
    "saved: CLIP, Llava, Qwen-VL (also for videos) or Whisper (for speech).",
)
@click.option(
    "--pipeline",
    "pipeline_name",
    metavar="MODULE:OBJECT",
    help="For everything particular: a mm.Pipeline, or a function from the dataset to one, such as "
    "my_train:pipeline.  [default: what the model needs]",
)
@_option(
    "--image-size",
    type=int,
    help="Of clip and vlm: side of the square images in pixels, a multiple of 16.  [default: 64]",
)
@_option(
    "--max-length",
    type=int,
    help="Longest text in tokens.  [default: 64 for clip, 512 for vlm, 4096 for Qwen-VL, the "
    "model's for Whisper]",
)
@_option(
    "--epochs",
    type=int,
    help="Passes over the data, counted from the start of the run.  [default: as many as "
    "--max-steps needs, otherwise 1]",
)
@_option(
    "--max-steps",
    type=int,
    help="Optimizer steps, counted from the start of the run. With --epochs too, the run ends at "
    "whichever comes first.  [default: those of --epochs]",
)
@_option("--global-batch-size", help="Samples per loader step, over all ranks.")
@_option("--accumulate", help="Loader steps per optimizer step, each of --global-batch-size rows.")
@_option("--micro-batches", help="Parts into which each rank cuts a batch, to save memory.")
@_option(
    "--rows-per-rank",
    metavar="N,N,...",
    help="Rows of each rank, for devices of different size.  [default: equal]",
)
@_option("--num-workers", help="Worker processes per rank. With 0, the main process loads.")
@_option(
    "--on-change",
    type=click.Choice(["refuse", "finish_epoch"]),
    help="If the checkpoint is inside an epoch and settings or shards have changed: refuse, or "
    "finish the epoch with the old ones first.",
)
@_option("--seed", help="Seed of the order, of the first weights, and of what a model draws.")
@_option("--lr", help="Learning rate after the warm-up.")
@_option("--warmup-steps", help="Optimizer steps of linear warm-up to --lr.")
@_option(
    "--precision",
    type=click.Choice(["fp32", "bf16"]),
    help="[default: bf16 on CUDA, fp32 on a CPU]",
)
@_option(
    "--activation-checkpointing",
    help="Recompute activations in the backward pass: less memory, more time.",
)
@_option("--checkpoint-every", help="Optimizer steps between two checkpoints.")
@_option(
    "--validation",
    metavar="URL",
    help="Dataset on which to measure the validation loss, with each checkpoint.",
)
@_option("--log-every", help="Optimizer steps between two lines of metrics.")
@click.option(
    "--log",
    type=click.UNPROCESSED,
    default=(),
    metavar="NAME,...",
    callback=_logger_names,
    help="What else gets the metrics: tensorboard, wandb, prometheus.  [default: none]",
)
@_option("--log-keys", help="Log the samples of every step, for `mmstream replay --check`.")
@_option("--device", help="cpu, cuda or cuda:N.  [default: cuda if there is one]")
@choosing()
@allow_foreign_urls
def train(
    url: str, out: str, rows_per_rank: str | None, pipeline_name: str | None, **options: Any
) -> None:
    """Train a small CLIP or VLM, or the model of a folder, on the dataset at URL.

    It runs in one process or under torchrun.

    URL may also be the JSON file of a mixture. To resume, run the same command again. SIGTERM and
    Ctrl-C save a checkpoint first; a second Ctrl-C exits at once. After SIGTERM to some ranks
    only, the exit code of all is 75, so that torchrun --max-restarts starts them again.
    """
    from mmstream.train import train as run

    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("mmstream").setLevel(logging.INFO)  # a line per step, from one rank only
    if pipeline_name is not None:
        refuse_given(["global_batch_size"], "without --pipeline")
    rows = None if rows_per_rank is None else tuple(parse_rows_per_rank(rows_per_rank))
    config = TrainConfig(url=url, out=out, rows_per_rank=rows, **options)
    pipeline = None if pipeline_name is None else partial(load_pipeline, pipeline_name)
    result = run(config, pipeline=pipeline)
    if os.environ.get("RANK", "0") == "0":
        outcome = "no step was trained"
        if result.final_loss is not None:
            outcome = f"last loss {result.final_loss:.4f}"  # the metrics have all digits
        elif not result.stopped_by:
            outcome = "nothing left to do; to train on, raise --max-steps or --epochs"
        stopped = f"stopped by {result.stopped_by}: " if result.stopped_by else ""
        say(f"{stopped}{count_text(result.num_steps, 'step')}, {outcome}; checkpoints in {out}")
    if result.stopped_by is not None and not result.all_received_signal:
        sys.exit(UNFINISHED)


@command("mmstream demo --out quickstart-out")
@click.option("--out", default="quickstart-out", show_default=True, help="Folder for all results.")
@click.option(
    "--shards",
    metavar="URL",
    help="Folder or URL prefix for shards and checkpoints.  [default: --out]",
)
def demo(out: str, shards: str | None) -> None:
    """Convert, train, kill -9, resume, and prove the result, on an embedded corpus of 96 images."""
    from mmstream.train.demo import run_demo

    if not run_demo(out, shards, say=click.echo):
        sys.exit(PROBLEM)
