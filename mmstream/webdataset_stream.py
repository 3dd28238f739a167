"""A way out of the flow: the same stream of raw samples for stages written for `webdataset`.

    order -> read -> wds.DataPipeline(...)

Each rank and each DataLoader worker gets its own rows and steps, in order. No state is promised:
for that, and for substitutes of bad samples, use a `Loader`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from torch.utils.data import IterableDataset, get_worker_info

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.mixture import Mixture
from mmstream.errors import SampleError, ShardError
from mmstream.order import AnyOrder
from mmstream.reading.reader import Job, Reader, read
from mmstream.types import Sample
from mmstream.world import World, resolve_world, rows_of_rank

__all__ = ["RawStream"]


class RawStream(IterableDataset[Sample]):
    """One epoch of raw samples (dicts of bytes) of this rank and worker, in the order of steps.

    Padding rows of a last partial step are left out.

    Raises:
        SampleError, ShardError: a sample cannot be read; nothing takes its place here.
    """

    def __init__(
        self, dataset: Dataset | Mixture, order: AnyOrder, epoch: int, world: World | None
    ) -> None:
        self._dataset, self._order, self._epoch, self._world = dataset, order, epoch, world

    def __iter__(self) -> Iterator[Sample]:
        rows = rows_of_rank(self._order.global_batch_size, resolve_world(self._world), "balanced")
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        steps = range(first, self._order.steps_per_epoch, stride)
        with closing(Reader(self._dataset, self._order)) as reader:
            for step in read((Job(self._epoch, s, *rows, stride) for s in steps), reader):
                for sample, valid in zip(step.samples, step.valid, strict=True):
                    if isinstance(sample, SampleError | ShardError):
                        raise sample
                    if valid:
                        yield {k: v for k, v in sample.items() if k != "__lineage__"}
