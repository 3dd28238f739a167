"""The same stream of raw samples for stages written for `webdataset`.

    order -> read -> wds.DataPipeline(...)

Each rank and each DataLoader worker gets its own rows and steps, in order. There is no state, and
bad samples have no substitutes: for both use a `Loader`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from types import FrameType

from torch.utils.data import IterableDataset, get_worker_info

from mmstream.dataset.source import ShardSource
from mmstream.errors import ChecksumError, ConfigError, SampleError, ShardError
from mmstream.order import AnyOrder
from mmstream.reading.reader import Reader
from mmstream.reading.step import Job
from mmstream.types import Sample
from mmstream.world import World, resolve_world, rows_of_rank

SPLITTERS = ("split_by_node", "split_by_worker")


class RawStream(IterableDataset[Sample]):
    """One epoch of raw samples (dicts of bytes) of this rank and worker, in the order of steps.

    Padding rows of a last partial step are left out.

    Raises:
        SampleError, ShardError: a sample cannot be read.
        ConfigError: a later stage would split the stream again, and lose samples.
    """

    def __init__(
        self, source: ShardSource, order: AnyOrder, epoch: int, world: World | None
    ) -> None:
        self._source = source
        self._order = order
        self._epoch = epoch
        self._world = world

    def __iter__(self) -> Iterator[Sample]:
        _refuse_splitters(sys._getframe(1))
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


def _refuse_splitters(consumer: FrameType | None) -> None:
    """Refuse stages of webdataset that give each rank or worker a part of what it gets.

    Args:
        consumer: the frame that asks for the first sample. The stages behind it ask each other, so
            they all stand above it.

    Raises:
        ConfigError: there is one of them.
    """
    while consumer is not None:
        name = consumer.f_code.co_name
        if name in SPLITTERS and consumer.f_globals.get("__name__", "").startswith("webdataset"):
            raise ConfigError(
                f"as_webdataset: wds.{name} behind it would split the samples a second time; leave "
                "it out, each rank and worker has its own samples already"
            )
        consumer = consumer.f_back
