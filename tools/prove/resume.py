"""Kill -9 a training run many times, and prove that no sample was lost or repeated.

    python -m tools.prove.resume --kills 50

A linear model is trained under DDP (gloo) on a small corpus with 3 % bad samples. The victim is a
random rank, a random worker of a loader, or every process. Some kills come at start-up, while
workers start, or while a checkpoint is written. After each kill the run continues with another
number of ranks and workers. At the end, the logs of all starts are compared with the order and with
an uninterrupted run (`tools.prove.history`).

The last line of output is JSON. The exit code is 1 if the proof fails. A kill takes a few seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from mmstream.storage import open_store
from mmstream.train.checkpoint import list_checkpoints, load_newest
from mmstream.train.distributed import leave_on_sigterm
from tools.prove.attempt import (
    Attempt,
    Limits,
    Outcome,
    draw_kill,
    draw_kinds,
    kill_and_watch,
    wait_until,
)
from tools.prove.corpus import open_pipeline, write_corpus, write_mixture
from tools.prove.history import FAULTS, History, Verdict, judge, read_start, with_fault
from tools.prove.trainer import Settings

GLOBAL_BATCH_SIZE = 16
STEPS_PER_KILL = 14
PACE_S = 0.02
RUN_S = 300
"""Longest time of a run without a kill."""

RESERVED_STEPS = 80
"""At the end, so that the run cannot end before its last kill."""

TOLERANCE = 1e-9
"""Of weights and losses, in float64: sums over two ranks are rounded differently."""


def main() -> None:
    """Run the proof and exit with 1 if it fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of kills and topologies")
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--bad", type=float, default=0.03, help="fraction of bad samples")
    parser.add_argument("--mixture", action="store_true", help="three sources, changing weights")
    parser.add_argument("--ranks", type=int, default=4, help="at most")
    parser.add_argument("--workers", type=int, default=2, help="at most, per rank")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder that keeps logs and checkpoints; default: a temporary folder, which is "
        "removed if the proof holds",
    )
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="mmstream-prove-"))
    with leave_on_sigterm():  # so that no process remains after a SIGTERM
        results = prove(folder, options)
    if options.out is None and results["holds"]:
        shutil.rmtree(folder)
    else:
        print(f"logs and checkpoints: {folder}")
    print(json.dumps(results))
    sys.exit(0 if results["holds"] else 1)


def prove(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the whole proof in a folder and return its results."""
    started = time.monotonic()
    draw = random.Random(options.seed)
    write = write_mixture if options.mixture else write_corpus
    corpus = write(folder / "corpus", options.samples, options.bad, options.seed)
    order = open_pipeline(corpus.url, GLOBAL_BATCH_SIZE, options.seed).order
    num_steps = options.kills * STEPS_PER_KILL + RESERVED_STEPS
    num_epochs = -(-num_steps // order.steps_per_epoch)
    uninterrupted, killed = (
        Settings(
            corpus.url,
            str(folder / name / "checkpoints"),
            str(folder / name),
            options.seed,
            save_seed=0,
            num_epochs=num_epochs,
            global_batch_size=GLOBAL_BATCH_SIZE,
            pace_s=pace_s,
        )
        for name, pace_s in (("uninterrupted", 0.0), ("killed", PACE_S))
    )
    print(
        f"{options.samples} samples, {len(corpus.bad)} of them bad; {num_epochs} epochs of "
        f"{order.steps_per_epoch} steps; the first run is uninterrupted",
        flush=True,
    )
    limits = Limits(options.ranks, options.workers, PACE_S, run_to_the_end(uninterrupted, 1))
    outcomes = kill_repeatedly(
        killed, options.kills, num_epochs * order.steps_per_epoch, limits, draw
    )
    if not any(outcome.failed for outcome in outcomes):
        run_to_the_end(killed, options.ranks, number=options.kills)

    history = read_history(killed)
    expected = read_history(uninterrupted)[0]

    def verdict_on(history: History) -> Verdict:
        return judge(history, expected, corpus, order, num_epochs)

    verdict = verdict_on(history)
    holds = proven(verdict)
    unnoticed = [
        fault for fault in FAULTS if holds and proven(verdict_on(with_fault(history, fault, draw)))
    ]
    difference = weight_difference(killed.checkpoints, uninterrupted.checkpoints)
    remains = [name for outcome in outcomes for name in outcome.remains]
    remains += [str(path) for path in Path(killed.checkpoints).glob(".*")]  # incomplete
    num_failed = sum(outcome.failed for outcome in outcomes)
    kills = [outcome.kill for outcome in outcomes]
    return {
        "kills": Counter(kill.victim for kill in kills),
        "moments": Counter(kill.moment for kill in kills),
        "num_torn_checkpoints": sum(outcome.torn for outcome in outcomes),
        "topologies": len({(kill.world_size, kill.num_workers) for kill in kills}),
        "num_epochs": num_epochs,
        **dataclasses.asdict(verdict),
        "weight_difference": difference,
        "left_behind": remains,
        "num_semaphores": sum(outcome.num_semaphores for outcome in outcomes),
        "num_failed": num_failed,
        "unnoticed_faults": unnoticed,
        "seconds": round(time.monotonic() - started),
        "holds": holds and difference <= TOLERANCE and not (remains or num_failed or unnoticed),
    }


def kill_repeatedly(
    settings: Settings, num_kills: int, num_steps: int, limits: Limits, draw: random.Random
) -> list[Outcome]:
    """Start the run and kill it, many times, and print a line for each start."""
    outcomes: list[Outcome] = []
    kinds = draw_kinds(draw)
    store = open_store(settings.checkpoints)
    print("  #  ranks x workers  from step  delivers  killed      when           others ended")
    for number in range(num_kills):
        remaining = num_steps - RESERVED_STEPS - max(list_checkpoints(store), default=0)
        max_steps = max(1, 2 * remaining // (num_kills - number + 1))
        kill = draw_kill(draw, next(kinds), limits, max_steps)
        seed = draw.getrandbits(32)
        attempt, logs = start(settings, number, kill.world_size, kill.num_workers, seed)
        try:
            outcomes.append(kill_and_watch(attempt, kill, Path(settings.checkpoints), draw))
        finally:
            attempt.clean()
        print(describe(outcomes[-1], logs), flush=True)
    return outcomes


def start(
    settings: Settings, number: int, world_size: int, num_workers: int = 0, save_seed: int = 0
) -> tuple[Attempt, Path]:
    """Start all ranks and return them with the new folder of their logs."""
    logs = Path(settings.logs, f"start-{number:03d}")
    logs.mkdir(parents=True)
    settings = dataclasses.replace(
        settings, logs=str(logs), num_workers=num_workers, save_seed=save_seed
    )
    return Attempt(settings.command(), world_size, logs), logs


def run_to_the_end(settings: Settings, world_size: int, number: int = 0) -> float:
    """Run without a kill and return the seconds until the first step.

    Raises:
        SystemExit: the run failed.
    """
    started = time.monotonic()
    attempt, logs = start(settings, number, world_size)
    try:
        wait_until(lambda: attempt.num_steps() or attempt.all_ended(), RUN_S)
        start_up_s = time.monotonic() - started
        wait_until(attempt.all_ended, RUN_S)
        if any(rank.poll() != 0 for rank in attempt.ranks):
            sys.exit(f"a run without a kill failed; see {logs}/rank*.err")
        return start_up_s
    finally:
        attempt.clean()


def read_history(settings: Settings) -> History:
    """Return the logs of all starts, in their order."""
    return [read_start(logs) for logs in sorted(Path(settings.logs).glob("start-*"))]


def proven(verdict: Verdict) -> bool:
    """Return whether data and losses are as expected."""
    return verdict.exact and verdict.loss_difference <= TOLERANCE


def describe(outcome: Outcome, logs: Path) -> str:
    """Return a line of the table."""
    kill = outcome.kill
    number = logs.name.removeprefix("start-")
    resumed = read_start(logs).resumed
    step = "-" if resumed is None else resumed
    marks = "  FAILED" * outcome.failed
    marks += f"  LEFT BEHIND {outcome.remains}" * bool(outcome.remains)
    return (
        f"{number}  {kill.world_size} x {kill.num_workers:<12} {step:>9}  {outcome.num_steps:>8}  "
        f"{kill.victim:10}  {kill.moment:13}  {outcome.end_of_others}{marks}"
    )


def weight_difference(checkpoints: str, expected_checkpoints: str) -> float:
    """Return the largest difference between the last weights of two runs, or infinity."""
    newest = load_newest(open_store(checkpoints))
    expected = load_newest(open_store(expected_checkpoints))
    if newest is None or expected is None or newest.num_steps != expected.num_steps:
        return float("inf")
    weights = newest.content["model"]
    return max(
        float(torch.max(torch.abs(weights[name] - tensor)))
        for name, tensor in expected.content["model"].items()
    )


if __name__ == "__main__":
    main()
