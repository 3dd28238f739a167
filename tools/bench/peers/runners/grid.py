"""What the runners of `tools.bench.compare_grid` share: cells in, what each rank delivered out.

A runner defines ``batches(corpus, cell) -> Iterator[Delivered]`` for the rank that RANK and
WORLD_SIZE name, and calls `serve`. Standard input is a JSON list of cells, each with its corpus.

    simulate      one line a cell: the ranks' deliveries, one rank after another in this process
    train         one cell in this process as a real rank: gloo, DDP, an all-reduce every step
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
    """Samples that count: not padding, not a substitute for a bad one."""
    logged: Sequence[str] = ()
    """Bad samples that the loader named, ``SHARD[INDEX]``."""


Batches = Callable[[str, Cell], Iterator[Delivered]]


def serve(batches: Batches) -> None:
    """Do what the command line asks; one line of JSON a cell on standard output."""
    cells = [(corpus, Cell(*cell)) for corpus, cell in json.load(sys.stdin)]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    for corpus, cell in cells:
        found = simulate(batches, corpus, cell) if sys.argv[1] == "simulate" else None
        print(json.dumps(found or train(batches, corpus, cell)), file=answers, flush=True)


def simulate(batches: Batches, corpus: str, cell: Cell) -> dict[str, Any]:
    """Run all ranks of a cell, one after another; an error of one is the cell's."""
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
    """Train a toy model on a cell as one rank of many, and return what this rank was given.

    Every step all-reduces the gradients (DDP) and a count. Ranks that fall out of step show as they
    do in training: the others wait in the all-reduce, here until gloo's timeout.
    """
    import torch
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=os.environ["GRID_INIT"], rank=int(os.environ["RANK"]),
        world_size=cell.world_size, timeout=timedelta(seconds=20),
    )  # fmt: skip
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
