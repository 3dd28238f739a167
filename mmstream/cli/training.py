"""``mmstream train | demo``: the reference loop. They import torch, and only when they run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from mmstream.cli.shared import (
    PROBLEM,
    UNFINISHED,
    allow_foreign_urls,
    command,
    parse_rows_per_rank,
    say,
)
from mmstream.display.markup import count_text
from mmstream.train import TrainConfig

__all__ = ["demo", "train"]

F = TypeVar("F", bound=Callable[..., None])

_DEFAULTS = {field.name: field.default for field in fields(TrainConfig)}


def _option(flag: str, **settings: Any) -> Callable[[F], F]:
    """Return the option of a field of `TrainConfig`, with the default of the field."""
    default = _DEFAULTS[flag.partition("/")[0].removeprefix("--").replace("-", "_")]
    settings |= {"default": default, "show_default": True, "is_flag": isinstance(default, bool)}
    return click.option(flag, **settings)


@command(
    "torchrun --standalone --nproc-per-node 2 -m mmstream train shards/ --out run/ --epochs 2",
    max_fraction="--max-bad-fraction",
    field="--text-field",  # TextDecoder(field=...)
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
@_option(
    "--tokenizer",
    help="Folder of a tokenizer.  [default: that of --model, otherwise one token per byte]",
)
@_option(
    "--image-size",
    type=int,
    help="Side of the square images in pixels, a multiple of 16.  [default: the model's, or 64; a "
    "Qwen-VL's processor says it for each image and video]",
)
@_option(
    "--max-length",
    type=int,
    help="Longest text in tokens.  [default: 64 for clip, 512 for vlm, 4096 for Qwen-VL, the "
    "model's for Whisper]",
)
@_option(
    "--text-field",
    metavar="NAME",
    help="Where the text is, for example json.caption.  [default: messages in json, else txt]",
)
@_option(
    "--freeze",
    multiple=True,
    metavar="PATTERN",
    help="Parameters not to train, for example 'clip.vision_model.*'. Can be given several times.",
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
@_option("--global-batch-size", help="Samples per loader step, over all ranks; rows with --pack.")
@_option("--accumulate", help="Loader steps per optimizer step (gradient accumulation).")
@_option("--micro-batches", help="Parts into which each rank cuts a batch, to save memory.")
@_option(
    "--padding-free",
    help="Lay the samples of a rank one behind the other, without padding: the same loss in less "
    "time.",
)
@_option(
    "--pack",
    type=int,
    metavar="TOKENS",
    help="Fill rows of at most so many tokens with whole samples, by a plan (see `mmstream plan`). "
    "--global-batch-size then counts rows.",
)
@_option(
    "--plan",
    metavar="NAME",
    help="With --pack: name, folder or URL of the plan.  [default: the one that fits]",
)
@_option(
    "--weights-of",
    type=click.Choice(["samples", "tokens"]),
    help="With --pack and a mixture: what its weights are proportions of.",
)
@_option(
    "--micro-batch-tokens",
    type=int,
    metavar="TOKENS",
    help="Cut batches without padding into parts of at most so many tokens, instead of "
    "--micro-batches.  [default: --pack or 4096 with sdpa attention, otherwise all at once]",
)
@_option(
    "--attn-implementation",
    metavar="NAME",
    help="Attention of a vlm or chat model, such as flash_attention_2.  [default: sdpa]",
)
@_option(
    "--rows-per-rank",
    metavar="N,N,...",
    help="Rows of each rank, for devices of different size.  [default: equal]",
)
@_option("--num-workers", help="Worker processes per rank. With 0, the main process loads.")
@_option(
    "--bad-samples",
    type=click.Choice(["substitute", "mask", "raise"]),
    help="For a bad sample: show another one, mask its row, or stop.",
)
@_option("--max-bad-fraction", help="Stop when a larger fraction of the samples is bad.")
@_option(
    "--substitute-bad-shards",
    help="Count the samples of an unreadable shard as bad, instead of stopping.",
)
@_option(
    "--on-change",
    type=click.Choice(["refuse", "finish_epoch"]),
    help="If the checkpoint is inside an epoch and settings or shards have changed: refuse, or "
    "finish the epoch with the old ones first.",
)
@_option(
    "--reshuffle",
    type=click.Choice(["global", "lanes"]),
    help="Where a later epoch may put a sample: anywhere, or with the ranks that had it in the "
    "first one.  [default: lanes with --cache-dir, else global]",
)
@_option(
    "--cache-dir",
    metavar="FOLDER",
    help="Local folder in which each node keeps what it reads from object storage, for the next "
    "epochs.  [default: none]",
)
@_option(
    "--max-cache-bytes",
    type=int,
    help="Most bytes in --cache-dir.  [default: 80 % of what is free]",
)
@_option("--seed", help="Seed of the order, of the first weights, and of what a model draws.")
@_option("--lr", help="Highest learning rate.")
@_option(
    "--lr-schedule",
    type=click.Choice(["constant", "cosine"]),
    help="Learning rate after the warm-up.",
)
@_option("--warmup-steps", help="Optimizer steps of linear warm-up to --lr.")
@_option(
    "--decay-steps",
    type=int,
    help="Optimizer step at which the cosine ends.  [default: the last one of --epochs, or of "
    "--max-steps without it]",
)
@_option("--final-lr-fraction", help="Learning rate at the end of the cosine, divided by --lr.")
@_option("--weight-decay", help="Weight decay of AdamW, for matrices only.")
@_option("--max-grad-norm", help="Clip gradients to this norm.")
@_option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="[default: bf16 on CUDA, fp32 on a CPU]",
)
@_option(
    "--activation-checkpointing",
    help="Recompute activations in the backward pass: less memory, more time.",
)
@_option("--compile", help="Run the model through torch.compile.")
@_option("--deterministic", help="Use deterministic algorithms only.")
@_option("--checkpoint-every", help="Optimizer steps between two checkpoints.")
@_option("--keep-checkpoints", help="Number of newest checkpoints to keep.")
@_option("--validation", metavar="URL", help="Dataset on which to measure the validation loss.")
@_option("--validate-every", help="Optimizer steps between two passes over --validation.")
@_option("--log-every", help="Optimizer steps between two lines of metrics.")
@_option("--log-keys", help="Log the samples of every step, for `mmstream replay --check`.")
@_option("--progress/--no-progress", help="Show a progress bar (on a terminal only).")
@_option(
    "--profile", metavar="STEPS", help="Trace this many steps with torch.profiler. 0 means none."
)
@_option("--device", help="cpu, cuda or cuda:N.  [default: cuda if there is one]")
@allow_foreign_urls
def train(url: str, out: str, rows_per_rank: str | None, **options: Any) -> None:
    """Train a small CLIP or VLM, or the model of a folder, on the dataset at URL.

    It runs in one process or under torchrun.

    URL may also be the JSON file of a mixture. To resume, run the same command again. SIGTERM and
    Ctrl-C save a checkpoint first; a second Ctrl-C exits at once. After SIGTERM to some ranks
    only, the exit code of all is 75, so that torchrun --max-restarts starts them again.
    """
    from mmstream.train import train as run

    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("mmstream").setLevel(logging.INFO)  # a line per step, from one rank only
    rows = None if rows_per_rank is None else tuple(parse_rows_per_rank(rows_per_rank))
    config = TrainConfig(url=url, out=out, rows_per_rank=rows, **options)
    result = run(config)
    if os.environ.get("RANK", "0") == "0":
        if result.final_loss is not None:
            outcome = f"last loss {result.final_loss:.4f}"  # the metrics have all digits
        else:
            limits = (
                ("--max-steps", config.max_steps, result.num_steps),
                ("--epochs", config.num_epochs, result.state["epoch"]),
            )
            reached = [
                f"{name} ({limit})"
                for name, limit, done in limits
                if limit is not None and done >= limit
            ]
            outcome = "no step was trained"
            if reached:
                outcome = f"nothing left to do; to train on, raise {' and '.join(reached)}"
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
    from mmstream.demo.demo import run_demo

    if not run_demo(out, shards, say=click.echo):
        sys.exit(PROBLEM)
