"""``mmstream train | demo | replay``: the reference loop, and the samples of any step of a run.

`train` and `demo` import torch, and only when they run. `replay` compares a run's logs with its
plan, too. It imports torch only where STATE is a checkpoint or a folder of `mmstream train`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import Any, TypeVar, get_args

import click

from mmstream.cli.select import OPTIONS, choosing, open_chosen
from mmstream.cli.shared import (
    AT_LEAST_0,
    AT_LEAST_1,
    PROBLEM,
    UNFINISHED,
    allow_foreign_urls,
    command,
    load_pipeline,
    parse_rows_per_rank,
    plan_beside,
    refuse_given,
    say,
    usage,
)
from mmstream.display.text import count_text
from mmstream.errors import StateError
from mmstream.state import order_of_state, parse_state
from mmstream.storage import join_url, open_store, split_url
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


MAX_STATE_BYTES = 64 << 20
"""Largest JSON file of a state."""


@command("mmstream replay s3://bucket/corpus --state run/ --step 120")
@click.argument("url")
@click.option(
    "--state",
    "state_file",
    required=True,
    metavar="STATE",
    help="JSON file of a loader's state_dict() (- reads standard input), a checkpoint, or the "
    "--out folder of `mmstream train`.",
)
@click.option(
    "--step",
    "steps",
    metavar="S|A:B",
    help="Step S, or steps A to B - 1.  [default: the step at which STATE resumes]",
)
@click.option(
    "--epoch",
    type=AT_LEAST_0,
    help="Any past or future epoch, from 0.  [default: the epoch of STATE]",
)
@click.option(
    "--rank", type=AT_LEAST_0, help="Show only the rows of this rank, from 0. Needs --world-size."
)
@click.option("--world-size", type=AT_LEAST_1, help="Number of data-parallel ranks.")
@click.option(
    "--rows-per-rank",
    metavar="N,N,...",
    help="Rows of each rank, if the run had --rows-per-rank.  [default: equal]",
)
@click.option("--keys", is_flag=True, help="Also show keys. Reads one tar header per sample.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per row.")
@click.option(
    "--check",
    "logs",
    multiple=True,
    metavar="LOG",
    help="Instead, compare training logs with the plan: the folder of the metrics of a run with "
    "--log-keys, or a metrics file. May be repeated.",
)
@choosing()
@allow_foreign_urls
def replay(
    url: str,
    state_file: str,
    steps: str | None,
    epoch: int | None,
    logs: tuple[str, ...],
    as_json: bool,
    keys: bool,
    allow_foreign_urls: bool,
    **options: Any,
) -> None:
    """Print the planned samples of a step: epoch, step, row, shard[index].

    URL is the run's dataset, or the JSON file of its mixture. Without --step, it is the step at
    which the run resumes from STATE. A row of a pack comes once for each of its samples.

    Only manifests are read, so any past or future step is known at once. The plan does not know bad
    samples. The training logs say which substitutes were shown; --check compares them with the
    plan. If the settings changed between two epochs, each epoch is compared with its own plan.
    """
    from mmstream.audit import replay as run

    choice = {name: options.pop(name) for name in OPTIONS}
    if logs and (keys or any(value is not None for value in options.values())):
        raise click.UsageError(
            "--check compares all ranks and no keys: leave out --keys and the options of ranks"
        )
    chosen_steps = None if steps is None else _parse_steps(steps)
    state = parse_state(sys.stdin.read(), "-") if state_file == "-" else read_state(state_file)
    dataset = open_chosen(url, allow_foreign_urls, choice)
    order, state_epoch, state_step = order_of_state(state, dataset, plan_beside(dataset, state))
    if logs:
        _check(dataset, order, logs, epoch, chosen_steps, as_json)
        return
    first, stop = chosen_steps or (state_step, state_step + 1)
    rows = _rows(order, **options)
    step_range = range(first, order.steps_per_epoch if stop is None else stop)
    if epoch is None and state_epoch and not state_step:
        say(
            f"the state is at the start of epoch {state_epoch}; for the epoch that was finished, "
            f"use --epoch {state_epoch - 1}",
            err=True,
        )
    if epoch is None:
        epoch = state_epoch
    if sys.stdout.isatty() and not as_json:
        say("epoch step row shard[index]" + " key" * keys)
    for row in run(dataset, order, epoch, step_range, rows, keys=keys):
        if as_json:
            say(json.dumps(row._asdict()))
            continue
        line = f"{row.epoch} {row.step} {row.row} {row.shard}[{row.index}]"
        line += f" {row.key or '?'}" if keys else ""
        say(line if row.valid else f"{line} (padding)")


def _check(
    dataset: Any,
    order: Any,
    logs: Sequence[str],
    epoch: int | None,
    steps: tuple[int, int | None] | None,
    as_json: bool,
) -> None:
    """Compare logs with the plan. Exit with code 1 if they differ."""
    from mmstream.audit import check_logs, log_files, orders_logged, read_lineage, steps_logged

    logged = read_lineage(log_files(logs))
    first, stop = steps or (0, None)

    def is_chosen(step: tuple[int, int]) -> bool:
        return epoch in (None, step[0]) and first <= step[1] and (stop is None or step[1] < stop)

    orders = orders_logged(order, logged, dataset)
    logged = {step: rows for step, rows in logged.items() if is_chosen(step)}
    if not logged:
        say("error: these logs have no such step; choose other --epoch or --step", err=True)
        sys.exit(PROBLEM)
    planned = filter(is_chosen, steps_logged(orders, logged))
    check = check_logs(orders, logged, planned, name_of=dataset.name_of)
    if as_json:
        say(json.dumps({**asdict(check), "holds": check.holds}))
    else:
        for fault in check.faults:
            say(f"bad: {fault}")
        first_epoch, first_step = min(logged)
        last_epoch, last_step = max(logged)
        say(
            f"{'ok' if check.holds else 'bad'}: epoch {first_epoch} step {first_step} to "
            f"epoch {last_epoch} step {last_step}, "
            f"{check.num_steps:,} steps, {check.num_samples:,} samples: {check.lost:,} lost, "
            f"{check.repeated:,} repeated, {check.unplanned:,} steps unlike the plan; "
            f"{check.substituted:,} rows substituted, {check.unfilled:,} left empty"
        )
    if not check.holds:
        sys.exit(PROBLEM)


def _parse_steps(text: str) -> tuple[int, int | None]:
    """Return [start, stop) for ``S`` or ``A:B``. A stop of None is the end of the epoch."""
    first, colon, last = text.partition(":")
    with usage(f"--step {text!r}: write S or A:B, counting from 0"):
        start = int(first or 0) if colon else int(first)
        stop = (int(last) if last else None) if colon else start + 1
        if start < 0 or (stop is not None and stop <= start):
            raise ValueError(text)
    return start, stop


def _rows(
    order: Any, rank: int | None, world_size: int | None, rows_per_rank: str | None
) -> tuple[int, int] | None:
    """Return [start, stop), the rows of the order of a rank. None stands for all rows."""
    from mmstream.ranks import RowsPerRank, World, rows_of_rank

    if rank is None and world_size is None and rows_per_rank is None:
        return None
    if rank is None or world_size is None:
        raise click.UsageError("--rank and --world-size: use both or neither")
    shares: RowsPerRank = (
        "balanced" if rows_per_rank is None else parse_rows_per_rank(rows_per_rank)
    )
    return rows_of_rank(order.global_batch_size, World(rank, world_size), shares, order.repeat)


def read_state(source: str) -> dict[str, Any]:
    """Return a loader's state from where it was saved, locally or at ``s3://``.

    Args:
        source: a JSON file, a checkpoint of ``mmstream train``, or the ``out`` folder of a run. A
            folder gives the state of its newest good checkpoint.

    Raises:
        StateError: there is no loader's state at `source`.
        FileNotFoundError: there is no such checkpoint.
        StorageError: the storage failed after retries.
    """
    folder, name = split_url(open_store(source).url)
    store = open_store(folder)
    if not name.endswith(".pt") and store.exists(name):
        return parse_state(store.read(name, max_bytes=MAX_STATE_BYTES), source)
    # These import torch.
    from mmstream.train.checkpoint import NAME, load_checkpoint, load_newest, loader_state

    if name.endswith(".pt"):
        match = NAME.fullmatch(name)
        if match is None:
            raise StateError(
                f"{name}: not a checkpoint of `mmstream train`, which are named step-NNNNNNNN.pt"
            )
        return loader_state(load_checkpoint(store, int(match[1])).content, name)
    for url in (join_url(source, "checkpoints"), source):
        checkpoint = load_newest(open_store(url))
        if checkpoint is not None:
            return loader_state(checkpoint.content, url)
    raise StateError(f"{source}: neither a state's JSON nor a folder with checkpoints")
