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


@command("torchrun --standalone --nproc-per-node 2 -m mmstream train shards/ --out run/ --epochs 2")
@click.argument("url")
@click.option("--out", required=True, help="Folder or s3:// prefix of checkpoints.")
@_option("--log-dir", help="Local folder of metrics; else OUT.")
@_option("--model", help="clip, vlm, or a folder of transformers.")
@_option("--tokenizer", help="Folder of a tokenizer; else the model's, or one token a byte.")
@_option("--image-size", type=int, help="Pixels a side, a multiple of 16.")
@_option("--max-length", type=int, help="Longest text in tokens.")
@_option("--freeze", multiple=True, metavar="PATTERN", help="Parameters not to train.")
@_option("--epochs", help="Passes over the data.")
@_option("--max-steps", type=int, help="Stop after so many optimizer steps in all.")
@_option("--global-batch-size", help="Samples a loader step over all ranks.")
@_option("--accumulate", help="Loader steps that make one optimizer step.")
@_option("--micro-batches", help="Parts that a rank cuts its batches into.")
@_option("--rows-per-rank", metavar="N,N,...", help="For devices of different size.")
@_option("--num-workers", help="Loader processes of each rank.")
@_option("--on-bad", type=click.Choice(["substitute", "mask", "raise"]), help="For a bad sample.")
@_option("--max-bad-fraction", help="More bad samples stop the run.")
@_option("--skip-bad-shards", help="An unreadable shard is so many bad samples.")
@_option("--on-change", type=click.Choice(["refuse", "finish_epoch"]),
         help="For a state of other settings or fewer shards, in mid-epoch.")  # fmt: skip
@_option("--seed", help="Of the order, the first weights and what a model draws.")
@_option("--lr", help="Highest learning rate.")
@_option("--lr-schedule", type=click.Choice(["constant", "cosine"]), help="After the warm-up.")
@_option("--warmup-steps", help="Optimizer steps.")
@_option("--decay-steps", type=int, help="End of the cosine; else that of all epochs.")
@_option("--final-lr-fraction", help="Of LR, at the cosine's end.")
@_option("--weight-decay", help="AdamW's.")
@_option("--max-grad-norm", help="Clip longer gradients.")
@_option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="Else bf16 on CUDA.")
@_option("--activation-checkpointing", help="Less memory, more time.")
@_option("--compile", help="Run the model through torch.compile.")
@_option("--deterministic", help="Only deterministic algorithms.")
@_option("--checkpoint-every", help="Optimizer steps.")
@_option("--keep-checkpoints", help="Newest ones that stay.")
@_option("--validation", metavar="URL", help="A second dataset.")
@_option("--validate-every", help="Optimizer steps.")
@_option("--log-every", help="Optimizer steps.")
@_option("--log-keys", help="Write each step's keys and lineage to the metrics.")
@_option("--progress/--no-progress", help="A bar, in a terminal.")
@_option("--profile", metavar="STEPS", help="Trace so many steps.")
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
        loss = "none: nothing was left to do" if result.final_loss is None else result.final_loss
        stopped = f"stopped by {result.stopped_by}: " if result.stopped_by else ""
        click.echo(f"{stopped}{result.num_steps:,} steps, last loss {loss}; checkpoints in {out}")


@command("mmstream demo --out quickstart-out")
@click.option("--out", default="quickstart-out", show_default=True, help="Folder of all results.")
@click.option("--shards", help="Where the shards and checkpoints go, e.g. s3://bucket/x; else OUT.")
def demo(out: str, shards: str | None) -> None:
    """Run the main job on the embedded corpus: convert, train, kill -9, resume, prove."""
    from mmstream.demo import run_demo

    if not run_demo(out, shards, say=click.echo):
        sys.exit(PROBLEM)
