"""The whole path on one page: order -> read -> decode -> batch, bound by one frozen value.

A `Pipeline` says what a batch is. It pickles, knows nothing of ranks, workers or positions, and
does no IO of its own; a `Loader` runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

from mmstream.bad_samples.policy import BadSamplePolicy
from mmstream.batching.collate import Batch, Collate, batch, collate
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.mixture import Mixture
from mmstream.decoding.sample import Decode
from mmstream.decoding.stage import DecodedStep, Transform, decode
from mmstream.errors import ConfigError
from mmstream.loader.batch_memory import Memory
from mmstream.order import AnyOrder
from mmstream.planning import plan
from mmstream.reading.reader import Job, Reader, read
from mmstream.types import Sample
from mmstream.world import World

__all__ = ["Pipeline"]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """What a training run sees, step by step; the same on every topology.

    Raises:
        ConfigError: impossible settings, before any shard is opened.
    """

    dataset: Dataset | Mixture
    _: KW_ONLY
    global_batch_size: int
    """G, samples of a step over all ranks."""
    seed: int = 0
    grid: tuple[int, int] | None = None
    """(P, Q) lanes; None: by the corpus and G. More than 8 ranks or workers fix a larger one."""
    window: int | None = None
    """M, samples of a lane that are permuted together; None: about 2 GiB over all lanes."""
    decode: Decode | None = None
    """Decoders of images and text; None: fields stay bytes, ``json`` is parsed."""
    zero_copy: bool = False
    """Fields are memoryviews of the mapped shards instead of bytes: nothing is copied, ``json`` is
    not parsed, no decoders and no workers. For shards on local disks that nobody cuts meanwhile."""
    transforms: tuple[Transform, ...] = ()
    """Functions from sample to sample, run after decoding; randomness from `mm.sample_rng`."""
    collate: Collate = collate
    shuffle: bool = True
    drop_last: bool = True
    bad_samples: BadSamplePolicy = field(default_factory=BadSamplePolicy)

    def __post_init__(self) -> None:
        if not isinstance(self.dataset, Dataset | Mixture):
            raise ConfigError(f"dataset: {self.dataset!r} is none; pass mm.open_dataset(...)")
        if not isinstance(self.decode, Decode | None):
            raise ConfigError("decode: pass mm.Decode(image=..., text=...)")
        if self.zero_copy and self.decode is not None:
            raise ConfigError("zero_copy=True: decoders take bytes; leave out one of the two")
        if type(self.global_batch_size) is not int:
            raise ConfigError(f"global_batch_size {self.global_batch_size!r}: needs an integer")
        if callable(self.transforms):
            raise ConfigError("transforms: pass a tuple of functions, (fn,)")
        object.__setattr__(self, "transforms", tuple(self.transforms))
        for transform in self.transforms:
            if not callable(transform):
                raise ConfigError(f"transforms: {transform!r} is not a function")
        _ = self.order  # refuses impossible settings here, not in a worker

    @cached_property
    def order(self) -> AnyOrder:
        """The order of all epochs."""
        return plan(
            self.dataset,
            global_batch_size=self.global_batch_size,
            seed=self.seed,
            grid=self.grid,
            window=self.window,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
        )

    def with_order(self, order: AnyOrder) -> Pipeline:
        """Return this pipeline with another order of the same dataset, such as a saved state's."""
        rows = order.global_batch_size
        other = replace(self, global_batch_size=rows, grid=None, window=None, drop_last=False)
        other.__dict__["order"] = order  # where cached_property keeps it
        return other

    def __repr__(self) -> str:
        steps = f"{self.order.steps_per_epoch:,} steps of {self.global_batch_size} an epoch"
        return f"<Pipeline: {steps}, seed {self.seed}, of {self.dataset!r}>"

    def _repr_html_(self) -> str:
        from mmstream.display import pipeline_html

        return pipeline_html(self)

    def batches(
        self,
        jobs: Iterable[Job],
        num_threads: int = 1,
        memory: Memory | None = None,
        *,
        ahead: bool = True,
    ) -> Iterator[Batch]:
        """Yield the batch of each job; errors as the stages `read`, `decode` and `batch`.

        Without `ahead` no window is read, each step takes its own samples alone.
        """
        with closing(
            Reader(self.dataset, self.order, zero_copy=self.zero_copy, ahead=ahead)
        ) as reader:
            yield from batch(self._decoded(jobs, reader, num_threads, memory), self._collate())

    def take(self, num_samples: int) -> list[Sample]:
        """Return the first samples of epoch 0 as they would enter a batch, without a Loader."""

        def samples() -> Iterator[Sample]:
            rows = min(num_samples, self.global_batch_size)
            jobs = (Job(0, step, 0, rows) for step in range(self.order.steps_per_epoch))
            with closing(Reader(self.dataset, self.order, zero_copy=self.zero_copy)) as reader:
                for step in self._decoded(jobs, reader):
                    yield from step.samples

        return list(islice(samples(), num_samples))

    def as_webdataset(self, epoch: int = 0, world: World | None = None) -> Any:
        """Return one epoch's raw samples as a stock `wds.DataPipeline`, for existing stages.

        Add stages with ``.compose(wds.decode("pil"), ...)``; runs in any DataLoader with
        ``batch_size=None``. Decoders and transforms of this pipeline are not applied, bad samples
        not substituted, and there is no state.
        """
        from webdataset import DataPipeline

        from mmstream.webdataset_stream import RawStream

        return DataPipeline(RawStream(self.dataset, self.order, epoch, world))

    def _decoded(
        self,
        jobs: Iterable[Job],
        reader: Reader,
        num_threads: int = 1,
        memory: Memory | None = None,
    ) -> Iterator[DecodedStep]:
        return decode(
            read(jobs, reader),
            reader,
            self.decode,
            self.transforms,
            substitute_shards=self.bad_samples.shards,
            action=self.bad_samples.action,
            num_threads=num_threads,
            memory=memory,
        )

    def _collate(self) -> Collate:
        text = self.decode.text if self.decode else None
        if self.collate is not collate or text is None:
            return self.collate
        return partial(
            collate,
            pad_token_id=text.pad_token_id,
            pad_to=text.pad_to,
            padding_side=text.padding_side,
        )
