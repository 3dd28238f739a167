"""``mmstream train | demo``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from mmstream.cli.command import PROBLEM, command, usage
from mmstream.train import TrainConfig

__all__ = ["demo", "train"]

F = TypeVar("F", bound=Callable[..., None])

_DEFAULTS = {field.name: field.default for field in fields(TrainConfig)}


def _option(flag: str, **settings: Any) -> Callable[[F], F]:
    """Return the option of a field of `TrainConfig`, whose default it has and shows."""
    default = _DEFAULTS[flag.partition("/")[0].removeprefix("--").replace("-", "_")]
    settings |= {"default": default, "show_default": True, "is_flag": isinstance(default, bool)}
    return click.option(flag, **settings)


@command(
    "torchrun --standalone --nproc-per-node 2 -m mmstream train shards/ --out run/ --epochs 2",
    max_fraction="--max-bad-fraction",
)
@click.argument("url")
@click.option("--out", required=True, help="Folder or s3:// prefix of checkpoints.")
@_option("--log-dir", help="Local folder of metrics and logs; else --out.")
@_option(
    "--model", help="clip (captions), vlm (chats), or a folder that transformers saved one to."
)
@_option("--tokenizer", help="Folder of a tokenizer; else that of --model, or one token a byte.")
@_option("--image-size", type=int, help="Pixels a side, a multiple of 16; else the model's, or 64.")
@_option("--max-length", type=int, help="Longest text in tokens; else 64 for clip, 512 for vlm.")
@_option("--freeze", multiple=True, metavar="PATTERN",
         help="Parameters not to train, as 'clip.vision_model.*'; several times.")  # fmt: skip
@_option("--epochs", help="Passes over the data, from the very first start.")
@_option("--max-steps", type=int, help="Optimizer steps in all; else those of --epochs.")
@_option("--global-batch-size", help="Samples a loader step over all ranks.")
@_option("--accumulate", help="Loader steps that make one optimizer step.")
@_option("--micro-batches", help="Parts that a rank cuts its batches into.")
@_option("--rows-per-rank", metavar="N,N,...", help="For devices of different size; else equal.")
@_option("--num-workers", help="Loader processes of each rank; 0: none.")
@_option("--bad-samples", type=click.Choice(["substitute", "mask", "raise"]),
         help="Show another sample in a bad one's place, leave it out, or stop.")  # fmt: skip
@_option("--max-bad-fraction", help="Share of bad samples that stops the run.")
@_option(
    "--substitute-bad-shards", help="An unreadable shard is so many bad samples; else it stops."
)
@_option("--on-change", type=click.Choice(["refuse", "finish_epoch"]),
         help="In mid-epoch, with other settings or more shards than the checkpoint: refuse, or "
         "finish that epoch as it was planned and change then.")  # fmt: skip
@_option("--seed", help="Of the order, the first weights and what a model draws.")
@_option("--lr", help="Highest learning rate.")
@_option("--lr-schedule", type=click.Choice(["constant", "cosine"]), help="After the warm-up.")
@_option("--warmup-steps", help="Optimizer steps until --lr is reached.")
@_option("--decay-steps", type=int, help="Step at which the cosine ends; else that of --epochs.")
@_option("--final-lr-fraction", help="Share of --lr at the cosine's end.")
@_option("--weight-decay", help="AdamW's, of matrices only.")
@_option("--max-grad-norm", help="Longer gradients are scaled down to it.")
@_option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]),
         help="Else bf16 on CUDA, fp32 on a CPU.")  # fmt: skip
@_option("--activation-checkpointing", help="Less memory, more time.")
@_option("--compile", help="Run the model through torch.compile.")
@_option("--deterministic", help="Only deterministic algorithms.")
@_option("--checkpoint-every", help="Optimizer steps between two checkpoints.")
@_option("--keep-checkpoints", help="Newest checkpoints that stay.")
@_option("--validation", metavar="URL", help="A second dataset, to measure the loss on.")
@_option("--validate-every", help="Optimizer steps between two passes over --validation.")
@_option("--log-every", help="Optimizer steps between two lines of metrics.")
@_option("--log-keys", help="Keys and lineage into the metrics, for `mmstream replay --check`.")
@_option("--progress/--no-progress", help="A bar, in a terminal.")
@_option("--profile", metavar="STEPS", help="Trace so many with torch.profiler; 0: none.")
@_option("--device", help="cpu, cuda, cuda:N; else CUDA where there is one.")
def train(url: str, out: str, rows_per_rank: str | None, **options: Any) -> None:
    """Train a small CLIP or VLM on URL; alone, or in each process of torchrun. Resumes by itself.

    URL is a dataset, or a mixture's JSON file. SIGTERM and Ctrl-C save what was done; a second
    Ctrl-C leaves at once.
    """
    from mmstream.train import train as run

    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("mmstream").setLevel(logging.INFO)  # a line a step, of one rank

    rows = None
    if rows_per_rank is not None:
        with usage(f"--rows-per-rank {rows_per_rank!r}: write N,N,..."):
            rows = tuple(int(part) for part in rows_per_rank.split(","))
    result = run(TrainConfig(url=url, out=out, rows_per_rank=rows, **options))
    if os.environ.get("RANK", "0") == "0":
        done = f"last loss {result.final_loss}"
        if result.final_loss is None:
            least = "--max-steps or " * (options["max_steps"] == result.num_steps)
            done = f"nothing was left to do: raise {least}--epochs ({options['epochs']})"
        stopped = f"stopped by {result.stopped_by}: " if result.stopped_by else ""
        click.echo(f"{stopped}{result.num_steps:,} steps, {done}; checkpoints in {out}")


@command("mmstream demo --out quickstart-out")
@click.option("--out", default="quickstart-out", show_default=True, help="Folder of all results.")
@click.option("--shards", help="Where the shards and checkpoints go, e.g. s3://bucket/x; else OUT.")
def demo(out: str, shards: str | None) -> None:
    """Run the main job on the embedded corpus: convert, train, kill -9, resume, prove."""
    from mmstream.demo.demo import run_demo

    if not run_demo(out, shards, say=click.echo):
        sys.exit(PROBLEM)
