"""The same stream of raw samples for stages written for `webdataset`.

    order -> read -> wds.DataPipeline(...)

Each rank and each DataLoader worker gets its own rows and steps, in order. There is no state, and
bad samples have no substitutes: for both use a `Loader`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from torch.utils.data import IterableDataset, get_worker_info

from mmstream.dataset.source import ShardSource
from mmstream.errors import ChecksumError, SampleError, ShardError
from mmstream.order import AnyOrder
from mmstream.reading.reader import Reader
from mmstream.reading.step import Job
from mmstream.types import Sample
from mmstream.world import World, resolve_world, rows_of_rank

__all__ = ["RawStream"]


class RawStream(IterableDataset[Sample]):
    """One epoch of raw samples (dicts of bytes) of this rank and worker, in the order of steps.

    Padding rows of a last partial step are left out.

    Raises:
        SampleError, ShardError: a sample cannot be read.
    """

    def __init__(
        self, source: ShardSource, order: AnyOrder, epoch: int, world: World | None
    ) -> None:
        self._source = source
        self._order = order
        self._epoch = epoch
        self._world = world

    def __iter__(self) -> Iterator[Sample]:
        rows = rows_of_rank(self._order.global_batch_size, resolve_world(self._world), "balanced")
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        with closing(Reader(self._source, self._order)) as reader:
            for step in range(first, self._order.steps_per_epoch, stride):
                lineage, outcomes, _ = reader.step(Job(self._epoch, step, *rows, stride))
                for ref, outcome, valid in zip(
                    lineage.planned, outcomes, lineage.valid, strict=True
                ):
                    if isinstance(outcome, ChecksumError):
                        outcome = reader.lookup.read_until_right(ref)
                    if isinstance(outcome, SampleError | ShardError):
                        raise outcome
                    if valid:
                        yield {
                            name: value for name, value in outcome.items() if name != "__lineage__"
                        }
