"""Runs examples of docs/frameworks in ranks of their own, kills them, and starts them again.

    python -m tests.helpers.framework_ranks EXAMPLE,EXAMPLE SHARDS OUT \\
        WORLD_SIZE,NUM_WORKERS,DIES_AT ...

Ranks are forked from this process, which has imported all frameworks once; what each of them trains
on is a line of OUT/EXAMPLE/stage*-rank*.jsonl. At batch DIES_AT the last rank is killed, then the
others. What an example says is in OUT/EXAMPLE/log, and its exit code in OUT/EXAMPLE/code. The packs
of two epochs of TRL's example are in OUT/packs.json.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mmstream as mm
from mmstream.families.family import import_torchvision
from mmstream.train.demo import free_port
from tests.helpers.forked_ranks import fork, fork_rank
from tests.helpers.paths import DOCS


class Stage(NamedTuple):
    number: int
    world_size: int
    num_workers: int
    dies_at: int
    """The last rank is killed when it has this batch; 0: nobody is."""


def note_batches(file: Path, dies_at: int) -> None:
    """Let an example write down the batches that its model gets the inputs of."""
    trainer: Any = importlib.import_module("mmstream.train.trainer")
    model_inputs = mm.model_inputs
    count = 0

    def noting(batch: dict[str, Any], *args: Any, **settings: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        if count == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        lineage = batch["__lineage__"]
        line = [lineage.epoch, lineage.step, lineage.start, batch["__key__"]]
        with file.open("a") as log:
            log.write(json.dumps(line) + "\n")
        inputs = model_inputs(batch, *args, **settings)
        assert len(inputs["image_grid_thw"]) == len(batch["__key__"])  # a picture in each row
        return inputs

    mm.model_inputs = trainer.model_inputs = noting
    # A fork server, the default, would import torch once more for each run.
    mm.Loader = partial(mm.Loader, multiprocessing_context="fork")  # type: ignore[misc,assignment]


def run_rank(example: str, shards: str, out: Path, number: int, stage: Stage) -> None:
    """Be one rank, as under torchrun."""
    last = number == stage.world_size - 1
    log = out / f"stage{stage.number}-rank{number}.jsonl"
    module = importlib.import_module(example)
    note_batches(log, stage.dies_at if last else 0)
    module.train(shards, str(out / "checkpoints"), stage.num_workers)


def play(example: str, shards: str, out: Path, stage: Stage) -> None:
    """Run all ranks to their end, or until one is killed."""
    port = free_port()
    ranks = []
    for number in range(stage.world_size):
        run = partial(run_rank, example, shards, out, number, stage)
        ranks.append(fork_rank(number, stage.world_size, port, run))
    dying = ranks[-1]
    while ranks:
        child, status = os.wait()
        ranks.remove(child)
        if status and child == dying and stage.dies_at and os.WTERMSIG(status) == signal.SIGKILL:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
        elif status and not stage.dies_at:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"{stage}: a rank ended with {status}")
        elif not status and child == dying and stage.dies_at:
            sys.exit(f"{stage}: was to be killed, and was not")


def play_all(example: str, shards: str, out: Path, stages: Sequence[Stage]) -> None:
    """Play one stage after another, and log what all ranks say."""
    log = os.open(out / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for stage in stages:
        play(example, shards, out, stage)


def plan_packs(shards: str, file: Path) -> None:
    """Plan the packs of TRL's example, which several ranks may not, and write their keys."""
    pipeline = importlib.import_module("with_trl").make_packs(shards)
    mm.plan(pipeline, num_workers=0, progress=False)
    loader = mm.Loader(pipeline)
    batches = [batch for _ in range(2) for batch in loader]
    lineages = [(batch["__lineage__"], batch["__key__"]) for batch in batches]
    file.write_text(json.dumps([[at.epoch, at.step, keys] for at, keys in lineages]))


def main() -> None:
    examples, shards, out = sys.argv[1].split(","), sys.argv[2], Path(sys.argv[3])
    stages = [Stage(number, *map(int, each.split(","))) for number, each in enumerate(sys.argv[4:])]
    sys.path.insert(0, str(DOCS / "frameworks"))
    import_torchvision()  # before the frameworks do, where it does not load by itself
    for example in examples:
        importlib.import_module(example)
    if "with_trl" in examples:
        os.waitpid(fork(partial(plan_packs, shards, out / "packs.json")), 0)
    for example in examples:
        (out / example).mkdir()
        _, status = os.waitpid(fork(partial(play_all, example, shards, out / example, stages)), 0)
        (out / example / "code").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
