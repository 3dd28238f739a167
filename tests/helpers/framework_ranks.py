"""Runs an example of docs/frameworks in ranks of its own, kills it, and starts it again.

    python -m tests.helpers.framework_ranks EXAMPLE SHARDS OUT WORLD_SIZE,NUM_WORKERS,DIES_AT ...

Ranks are forked from this process, which has imported the framework once; what each of them trains
on is a line of OUT/stage*-rank*.jsonl. At batch DIES_AT the last rank is killed, then the others.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mmstream as mm
from mmstream.families.family import import_torchvision
from mmstream.train.demo import free_port
from tests.helpers.forked_ranks import fork_rank
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


def main() -> None:
    example, shards, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    sys.path.insert(0, str(DOCS / "frameworks"))
    import_torchvision()  # before the frameworks do, where it does not load by itself
    importlib.import_module(example)
    for number, stage in enumerate(sys.argv[4:]):
        play(example, shards, out, Stage(number, *map(int, stage.split(","))))


if __name__ == "__main__":
    main()
