"""Kill -9 a training run again and again, and prove that it lost and repeated nothing.

    python -m tools.prove.resume --kills 50

A linear model is trained under DDP (gloo) on a small corpus, 3 % of it bad. Some rank, some loader
worker or everything is killed at random moments, also at start-up, while workers start and while a
checkpoint is written; each time the run goes on with another number of ranks and workers. Then the
raw logs of all starts are set beside the plan and an undisturbed run (see `tools.prove.history`).
The last line is JSON; exit code 1 when the proof fails. A few seconds a kill.
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
from tools.prove.attempt import Attempt, wait_until
from tools.prove.corpus import open_pipeline, write_corpus, write_mixture
from tools.prove.faults import FAULTS, with_fault
from tools.prove.history import History, Verdict, judge, read_start
from tools.prove.kill import Limits, Told, all_kinds, draw_kill, kill_and_watch
from tools.prove.trainer import Settings

GLOBAL_BATCH_SIZE, STEPS_A_KILL, PACE_S, RUN_S = 16, 14, 0.02, 300
RESERVED_STEPS = 80
"""For the end, so that the run cannot get there before its last kill."""

TOLERANCE = 1e-9
"""Of weights and losses, in float64: sums over two ranks round otherwise than those of one."""


def main() -> None:
    """Prove, print, and exit with 1 if the proof fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of kills and topologies")
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--bad", type=float, default=0.03, help="fraction of bad samples")
    parser.add_argument("--mixture", action="store_true", help="three sources, changing weights")
    parser.add_argument("--ranks", type=int, default=4, help="the most")
    parser.add_argument("--workers", type=int, default=2, help="the most a rank")
    parser.add_argument("--out", type=Path, help="keeps logs and checkpoints; default: a new "
                        "temporary folder, removed when the proof holds")  # fmt: skip
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="mmstream-prove-"))
    with leave_on_sigterm():  # also then, no process is left behind
        found = prove(folder, options)
    if options.out is None and found["holds"]:
        shutil.rmtree(folder)
    else:
        print(f"logs and checkpoints: {folder}")
    print(json.dumps(found))
    sys.exit(0 if found["holds"] else 1)


def prove(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run all of it in a folder; return the figures."""
    began, draw = time.monotonic(), random.Random(options.seed)
    write = write_mixture if options.mixture else write_corpus
    corpus = write(folder / "corpus", options.samples, options.bad, options.seed)
    order = open_pipeline(corpus.url, GLOBAL_BATCH_SIZE, options.seed).order
    num_steps = options.kills * STEPS_A_KILL + RESERVED_STEPS
    num_epochs = -(-num_steps // order.steps_per_epoch)
    quiet, killed = (
        Settings(
            corpus.url, str(folder / name / "checkpoints"), str(folder / name),
            options.seed, 0, num_epochs, GLOBAL_BATCH_SIZE, pace_s=pace_s,
        )
        for name, pace_s in (("quiet", 0.0), ("killed", PACE_S))
    )  # fmt: skip
    print(f"{options.samples} samples, {len(corpus.bad)} of them bad; {num_epochs} epochs of "
          f"{order.steps_per_epoch} steps; first without a kill", flush=True)  # fmt: skip
    limits = Limits(options.ranks, options.workers, PACE_S, run_to_the_end(quiet, 1))
    told = disturb(killed, options.kills, num_epochs * order.steps_per_epoch, limits, draw)
    if not any(start.failed for start in told):
        run_to_the_end(killed, options.ranks, number=options.kills)

    history, undisturbed = read_history(killed), read_history(quiet)[0]

    def judged(history: History) -> Verdict:
        return judge(history, undisturbed, corpus, order, num_epochs)

    verdict = judged(history)
    holds = proven(verdict)
    unnoticed = [
        fault for fault in FAULTS if holds and proven(judged(with_fault(history, fault, draw)))
    ]
    difference = weight_difference(killed.checkpoints, quiet.checkpoints)
    left = [item for start in told for item in start.left]
    left += [str(path) for path in Path(killed.checkpoints).glob(".*")]  # half written
    num_failed = sum(start.failed for start in told)
    return {
        "kills": Counter(start.kill.victim for start in told),
        "moments": Counter(start.kill.moment for start in told),
        "num_torn_checkpoints": sum(start.torn for start in told),
        "topologies": len({(start.kill.world_size, start.kill.num_workers) for start in told}),
        "num_epochs": num_epochs,
        **dataclasses.asdict(verdict),
        "weight_difference": difference,
        "left_behind": left,
        "num_semaphores": sum(start.num_semaphores for start in told),
        "num_failed": num_failed,
        "unnoticed_faults": unnoticed,
        "seconds": round(time.monotonic() - began),
        "holds": holds and difference <= TOLERANCE and not (left or num_failed or unnoticed),
    }


def disturb(
    settings: Settings, num_kills: int, num_steps: int, limits: Limits, draw: random.Random
) -> list[Told]:
    """Start the run and kill it, again and again; print a line each time."""
    told, kinds, store = list[Told](), all_kinds(draw), open_store(settings.checkpoints)
    print("  #  ranks x workers  from step  delivers  killed      when           others ended")
    for number in range(num_kills):
        remaining = num_steps - RESERVED_STEPS - max(list_checkpoints(store), default=0)
        most = max(1, 2 * remaining // (num_kills - number + 1))
        kill = draw_kill(draw, next(kinds), limits, most)
        seed = draw.getrandbits(32)
        attempt, logs = start(settings, number, kill.world_size, kill.num_workers, seed)
        try:
            told.append(kill_and_watch(attempt, kill, Path(settings.checkpoints), draw))
        finally:
            attempt.clean()
        print(describe(told[-1], logs), flush=True)
    return told


def start(
    settings: Settings, number: int, world_size: int, num_workers: int = 0, save_seed: int = 0
) -> tuple[Attempt, Path]:
    """Start all ranks, with logs in a folder of their own."""
    logs = Path(settings.logs, f"start-{number:03d}")
    logs.mkdir(parents=True)
    told = dataclasses.replace(
        settings, logs=str(logs), num_workers=num_workers, save_seed=save_seed
    )
    return Attempt(told.command(), world_size, logs), logs


def run_to_the_end(settings: Settings, world_size: int, number: int = 0) -> float:
    """Run without a kill; return the seconds until the first step.

    Raises:
        SystemExit: it failed.
    """
    began = time.monotonic()
    attempt, logs = start(settings, number, world_size)
    try:
        wait_until(lambda: attempt.num_steps() or attempt.ended(), RUN_S)
        start_up_s = time.monotonic() - began
        wait_until(attempt.ended, RUN_S)
        if any(rank.poll() != 0 for rank in attempt.ranks):
            sys.exit(f"a run that nobody killed failed; see {logs}/rank*.err")
        return start_up_s
    finally:
        attempt.clean()


def read_history(settings: Settings) -> History:
    """Return what all starts logged, in their order."""
    return [read_start(logs) for logs in sorted(Path(settings.logs).glob("start-*"))]


def proven(verdict: Verdict) -> bool:
    """Tell whether data and losses are those of the plan."""
    return verdict.exact and verdict.loss_difference <= TOLERANCE


def describe(told: Told, logs: Path) -> str:
    """Return one line of the table."""
    kill, resumed = told.kill, read_start(logs).resumed
    number, place = logs.name.removeprefix("start-"), "-" if resumed is None else resumed
    marks = "  FAILED" * told.failed + f"  LEFT {told.left}" * bool(told.left)
    return (
        f"{number}  {kill.world_size} x {kill.num_workers:<12} {place:>9}  {told.num_steps:>8}  "
        f"{kill.victim:10}  {kill.moment:13}  {told.rest}{marks}"
    )


def weight_difference(one: str, other: str) -> float:
    """Return the largest difference between two runs' last weights; infinite without them."""
    found, model = load_newest(open_store(one)), load_newest(open_store(other))
    if found is None or model is None or found.num_steps != model.num_steps:
        return float("inf")
    weights, others = found.content["model"], model.content["model"]
    return max(float(torch.max(torch.abs(weights[name] - others[name]))) for name in others)


if __name__ == "__main__":
    main()
