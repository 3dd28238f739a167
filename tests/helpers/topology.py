"""Who delivers what: global batches put together from any ranks and workers, and exact resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch

import mmstream as mm
from mmstream.pipeline import PipelineRunner
from mmstream.ranks import World, rows_of_rank
from mmstream.reading.step import Job
from mmstream.types import BadSample, Batch, Sample


class Step(NamedTuple):
    """One global batch, in the order of rows; compares whole."""

    epoch: int
    step: int
    keys: list[str]
    valid: list[bool]
    planned: list[tuple[int, int]]
    shown: list[tuple[int, int]]
    bad: tuple[BadSample, ...]


def collate_in_workers(samples: list[Sample]) -> Batch:
    """The default collate as a function of the user."""
    return mm.collate(samples)


def described(batch: dict[str, Any]) -> Step:
    lineage = batch["__lineage__"]
    return Step(
        lineage.epoch,
        lineage.step,
        batch["__key__"],
        batch["__valid__"].tolist(),
        lineage.planned,
        lineage.shown,
        lineage.bad,
    )


def joined(parts: Sequence[Step]) -> Step:
    """The ranks' parts of one step, put together."""
    assert len({(part.epoch, part.step) for part in parts}) == 1
    columns = (sum(column, type(column[0])()) for column in list(zip(*parts))[2:])
    return Step(parts[0].epoch, parts[0].step, *columns)


def small_loader(url: str, num_workers: int = 0, **settings: Any) -> mm.Loader:
    """A loader of raw samples in small batches out of small windows."""
    settings = {"global_batch_size": 4, "seed": 3, "window": 8, **settings}
    return mm.Loader(mm.Pipeline(mm.open_dataset(url), **settings), num_workers=num_workers)


def epochs(loader: mm.Loader, num_epochs: int = 4) -> Iterator[Batch]:
    """Yield some epochs: this one and the next may have been read before a change."""
    for _ in range(num_epochs):
        yield from loader


def batches_around(batches: Iterable[Batch], change: Callable[[], object]) -> Iterator[Batch]:
    """Yield batches; call `change` after the second one."""
    for number, batch in enumerate(batches, start=1):
        yield batch
        if number == 2:
            change()


class Run(NamedTuple):
    steps: list[Step]
    num_bytes: int


def run(
    pipeline: mm.Pipeline,
    size: int = 1,
    num_workers: int = 1,
    steps: range | None = None,
    epoch: int = 0,
    num_threads: int = 1,
) -> Run:
    """Global batches of some steps, and the bytes read for them; workers without processes."""
    steps = range(pipeline.order.steps_per_epoch) if steps is None else steps
    delivered: dict[int, list[Step]] = {step: [] for step in steps}
    num_bytes = 0
    for rank in range(size):
        rows = rows_of_rank(pipeline.order.global_batch_size, World(rank, size), "balanced")
        for worker in range(num_workers):
            jobs = [Job(epoch, step, *rows, num_workers) for step in steps[worker::num_workers]]
            with closing(PipelineRunner(pipeline, num_threads=num_threads)) as runner:
                for job in jobs:
                    batch = runner.batch(job)
                    delivered[job.step].append(described(batch))
                    num_bytes += batch["__lineage__"].num_bytes
    return Run([joined(parts) for parts in delivered.values()], num_bytes)


def assert_resumes_exactly(
    make_loader: Callable[[], Any], images: bool = False, fresh: bool = True, every: int = 1
) -> list[Step]:
    """Walk two epochs; from the state after each step of the first, the rest must come again.

    Args:
        make_loader: a Loader, or `to_device` of one.
        images: compare the pixels too.
        fresh: a new loader for each resume; False: one that is loaded again and again.
        every: number of steps between two resumes.

    Returns:
        The steps of both epochs.
    """

    def rest(loader: Any) -> list[tuple[Step, Any]]:
        ahead = loader.state_dict()["epoch"]
        delivered = []
        while loader.state_dict()["epoch"] < 2:
            delivered += [(described(b), b["image"] if images else None) for b in loader]
            assert loader.state_dict()["epoch"] == ahead + 1
            ahead += 1
        return delivered

    walker = make_loader()
    states = [walker.state_dict()]
    whole = []
    for batch in walker:
        states.append(json.loads(json.dumps(walker.state_dict())))
        whole.append((described(batch), batch["image"] if images else None))
        assert states[-1]["epoch"] * len(walker) + states[-1]["step"] == len(whole)
    assert len(whole) == len(walker)
    whole += rest(walker)
    close(walker)
    other = make_loader()
    for step, state in list(enumerate(states))[::every]:
        if fresh and step:
            close(other)
            other = make_loader()
        other.load_state_dict(state)
        for (expected, pixels), (delivered, others) in zip(whole[step:], rest(other), strict=True):
            assert delivered == expected
            assert pixels is None or torch.equal(pixels, others)
    close(other)
    return [step for step, _ in whole]


def close(loader: Any) -> None:
    getattr(loader, "loader", loader).close()
