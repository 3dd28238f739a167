"""``mmstream replay``: the samples of any step, and a run's logs compared with its plan.

It does not import torch, unless STATE is a checkpoint or a folder of `mmstream train`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from mmstream.cli.select import OPTIONS, choosing, open_chosen
from mmstream.cli.shared import (
    AT_LEAST_0,
    AT_LEAST_1,
    PROBLEM,
    allow_foreign_urls,
    command,
    parse_rows_per_rank,
    plan_beside,
    say,
    usage,
)
from mmstream.errors import StateError
from mmstream.state import order_of_state, parse_state
from mmstream.storage import join_url, open_store, split_url

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
    from mmstream.audit.replay import replay as run

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
    from mmstream.audit.check_log import check_logs, orders_logged, steps_logged
    from mmstream.audit.training_log import log_files, read_lineage

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
