"""``mmstream replay``: any step of a run, and its logs set beside the plan; without torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from mmstream.cli.command import AT_LEAST_0, AT_LEAST_1, PROBLEM, command, usage

__all__ = ["replay"]


@command("mmstream replay s3://bucket/corpus --state run/ --step 120")
@click.argument("url")
@click.option(
    "--state", "source", required=True, metavar="STATE",
    help="JSON of a loader's state_dict(), - for standard input, a checkpoint, or the folder that "
    "`mmstream train` wrote to.",
)  # fmt: skip
@click.option(
    "--step",
    "steps",
    metavar="S|A:B",
    help="One step, or A to B - 1; else the state's, which comes next.",
)
@click.option("--epoch", type=AT_LEAST_0, help="From 0, past or future; else the state's.")
@click.option("--rank", type=AT_LEAST_0, help="Only this rank's rows, from 0; with --world-size.")
@click.option("--world-size", type=AT_LEAST_1, help="Number of data-parallel ranks.")
@click.option(
    "--rows-per-rank", metavar="N,N,...", help="Rows of each rank, where they are not equal."
)
@click.option("--keys", is_flag=True, help="Read the samples' keys: one tar header each.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a row.")
@click.option(
    "--check", "logs", multiple=True, metavar="LOG...",
    help="Instead: compare training logs (--log-keys) with the plan; files, or their folder.",
)  # fmt: skip
@click.argument("more_logs", metavar="", nargs=-1)
def replay(
    url: str, source: str, steps: str | None, epoch: int | None, logs: tuple[str, ...],
    more_logs: tuple[str, ...], as_json: bool, keys: bool, **whose: Any,
) -> None:  # fmt: skip
    """Print which samples a step of a run on URL has: epoch, step, row, shard[index].

    URL is a dataset, or a mixture's JSON file. Without --step, it is the step that the run goes on
    with from STATE. In a terminal the columns have a header.

    Only manifests are read, so any past or future step of any rank is told at once. Where a bad
    sample is planned, what was shown instead stands in the logs, which --check compares; where the
    run's settings changed between two epochs, each is set beside its own plan.
    """
    from mmstream.audit.replay import replay as run
    from mmstream.dataset.mixture_file import open_data
    from mmstream.state import order_of_state
    from mmstream.train.saved_state import parse_state, read_state

    if more_logs and not logs:
        raise click.UsageError(f"unexpected {' '.join(more_logs)}: logs come after --check")
    if logs and (keys or any(value is not None for value in whose.values())):
        raise click.UsageError("--check looks at all ranks, and at no keys")
    wanted = None if steps is None else _steps(steps)
    state = parse_state(sys.stdin.read(), "-") if source == "-" else read_state(source)
    dataset = open_data(url)
    order, at_epoch, at_step = order_of_state(state, dataset)
    if logs:
        _check(dataset, order, [*logs, *more_logs], epoch, wanted, as_json)
        return
    first, stop = wanted or (at_step, at_step + 1)
    rows = _rows(order.global_batch_size, **whose)
    chosen = range(first, order.steps_per_epoch if stop is None else stop)
    if epoch is None and at_epoch and not at_step:
        click.echo(f"epoch {at_epoch} is the state's, of which no step was done yet; --epoch "
                   f"{at_epoch - 1} is the one before", err=True)  # fmt: skip
    if sys.stdout.isatty() and not as_json:
        click.echo("epoch step row shard[index]" + " key" * keys)
    for row in run(dataset, order, at_epoch if epoch is None else epoch, chosen, rows, keys=keys):
        if as_json:
            click.echo(json.dumps(row._asdict()))
            continue
        line = f"{row.epoch} {row.step} {row.row} {row.shard}[{row.index}]"
        line += f" {row.key or '?'}" if keys else ""
        click.echo(line if row.valid else f"{line} (padding)")


def _check(
    dataset: Any,
    order: Any,
    logs: Sequence[str],
    epoch: int | None,
    steps: tuple[int, int | None] | None,
    as_json: bool,
) -> None:
    """Compare logs with the plan; exit code 1 where they differ."""
    from mmstream.audit.check_log import check_logs, orders_logged, steps_logged
    from mmstream.audit.training_log import log_files, read_lineage

    logged = read_lineage(log_files(logs))
    first, stop = steps or (0, None)

    def is_wanted(at: tuple[int, int]) -> bool:
        return epoch in (None, at[0]) and first <= at[1] and (stop is None or at[1] < stop)

    orders = orders_logged(order, logged, dataset)
    logged = {at: rows for at, rows in logged.items() if is_wanted(at)}
    if not logged:
        click.echo("error: these logs have no such step", err=True)
        sys.exit(PROBLEM)
    planned = filter(is_wanted, steps_logged(orders, logged))
    found = check_logs(orders, logged, planned, name_of=dataset.name_of)
    if as_json:
        click.echo(json.dumps({**asdict(found), "holds": found.holds}))
    else:
        for fault in found.faults:
            click.echo(f"bad: {fault}")
        (e0, s0), (e1, s1) = min(logged), max(logged)
        click.echo(
            f"{'ok' if found.holds else 'bad'}: epoch {e0} step {s0} to epoch {e1} step {s1}, "
            f"{found.num_steps:,} steps, {found.num_samples:,} samples: {found.lost:,} lost, "
            f"{found.repeated:,} repeated, {found.unplanned:,} steps unlike the plan; "
            f"{found.substituted:,} rows substituted, {found.unfilled:,} left empty"
        )
    if not found.holds:
        sys.exit(PROBLEM)


def _steps(text: str) -> tuple[int, int | None]:
    """Return [start, stop) of ``S`` or ``A:B``; None: to the epoch's end."""
    first, colon, last = text.partition(":")
    with usage(f"--step {text!r}: write S or A:B, counting from 0"):
        start = int(first or 0) if colon else int(first)
        stop = (int(last) if last else None) if colon else start + 1
        if start < 0 or (stop is not None and stop <= start):
            raise ValueError(text)
    return start, stop


def _rows(
    global_batch_size: int, rank: int | None, world_size: int | None, rows_per_rank: str | None
) -> tuple[int, int] | None:
    """Return [start, stop): a rank's rows of every step; None: all."""
    from mmstream.world import World, rows_of_rank

    if rank is None and world_size is None and rows_per_rank is None:
        return None
    if rank is None or world_size is None:
        raise click.UsageError("--rank and --world-size go together")
    if rows_per_rank is None:
        return rows_of_rank(global_batch_size, World(rank, world_size), "balanced")
    with usage(f"--rows-per-rank {rows_per_rank!r}: write N,N,..."):
        numbers = [int(part) for part in rows_per_rank.split(",")]
    return rows_of_rank(global_batch_size, World(rank, world_size), numbers)
