"""Shared by the runners of `tools.bench.compare_grid`: cells and the batches of their ranks.

A runner defines ``batches(corpus, cell) -> Iterator[Delivered]`` for the rank in the variables RANK
and WORLD_SIZE, and calls `serve`. Standard input is a JSON list of (corpus, cell). The commands:

    simulate      run the ranks of each cell one after another in this process
    train         run one rank of one cell, with gloo, DDP and an all-reduce in every step

Standard output has one line of JSON per cell: ``{"ranks": ...}`` or ``{"error": ...}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

GLOBAL_BATCH = 24
TIMEOUT_S = 60


class Cell(NamedTuple):
    """One point of the grid."""

    num_shards: int
    world_size: int
    num_workers: int
    bad_percent: int


class Delivered(NamedTuple):
    """A batch of one rank."""

    keys: list[str]
    """Without padding and without substitutes of bad samples."""
    logged: Sequence[str] = ()
    """Bad samples that the loader logged, ``SHARD[INDEX]``."""


Batches = Callable[[str, Cell], Iterator[Delivered]]


def serve(batches: Batches) -> None:
    """Run the command of the command line."""
    cells = [(corpus, Cell(*cell)) for corpus, cell in json.load(sys.stdin)]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that prints of a library do not mix with the answers
    run = simulate if sys.argv[1] == "simulate" else train
    for corpus, cell in cells:
        print(json.dumps(run(batches, corpus, cell)), file=answers, flush=True)


def simulate(batches: Batches, corpus: str, cell: Cell) -> dict[str, Any]:
    """Run all ranks of a cell one after another; an error of a rank is the cell's answer."""
    ranks = []
    for rank in range(cell.world_size):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(cell.world_size), LOCAL_RANK=str(rank))
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(TIMEOUT_S)
        try:
            ranks.append(list(batches(corpus, cell)))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {str(error).strip()[-300:]}"}
        finally:
            signal.alarm(0)
    return {"ranks": ranks}


def train(batches: Batches, corpus: str, cell: Cell) -> dict[str, Any]:
    """Train a small model as one rank of a cell and return the batches of this rank.

    Every step all-reduces the gradients (DDP) and a count. If a rank has fewer steps, the others
    wait in the all-reduce, as they do in training, until gloo's timeout.
    """
    import torch
    from torch import distributed

    distributed.init_process_group(
        "gloo",
        init_method=os.environ["GRID_INIT"],
        rank=int(os.environ["RANK"]),
        world_size=cell.world_size,
        timeout=timedelta(seconds=20),
    )
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    delivered: list[Delivered] = []
    try:
        for batch in batches(corpus, cell):
            delivered.append(batch)
            model(torch.ones(1, 1)).sum().backward()
            distributed.all_reduce(torch.tensor(len(batch.keys)))
        distributed.barrier()
    except RuntimeError as error:
        return {"error": f"out of step: {str(error)[:200]}"}
    finally:
        with contextlib.suppress(RuntimeError):
            distributed.destroy_process_group()
    return {"ranks": [delivered]}


def _give_up(*_: object) -> None:
    raise TimeoutError(f"no answer in {TIMEOUT_S} s")
