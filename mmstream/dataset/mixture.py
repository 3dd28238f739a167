"""Several datasets as one stream: what a `Pipeline` takes in the place of a dataset.

A mixture says which datasets, in which proportions and for how long. Which sample comes when is the
order's business (`order.mixture`). To the stages that read, it is one long list of shards,
those of all sources end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from mmap import mmap
from typing import get_args

import numpy as np

from mmstream.dataset.dataset import Dataset
from mmstream.errors import ConfigError, ShardError
from mmstream.order import Corpus, Stop
from mmstream.order.checks import integer
from mmstream.storage import LocalFile, Store
from mmstream.types import IntArray, Sample

__all__ = ["Mixture"]


class Mixture:
    """Datasets with weights; deterministic, exact, and of no more state than one dataset.

    Each source comes round in epochs of its own, each sample once in each of them. After any number
    of steps a source has given its part of all samples, to less than two samples in each lane.

    Args:
        sources: by name, (dataset, weight). Weights are proportions of samples, as whole numbers or
            decimals: 0.1 and 0.9 are exactly 1 and 9 of 10.
        stop: when an epoch of the mixture ends: "first" or "all": when the first, or the last,
            source has been seen once.
        epoch_steps: or after how many steps.
        changes: weights of all sources that hold from a step of the run on; needs `epoch_steps`. A
            weight may be 0, so a source can come later or end early.

    Raises:
        ConfigError: neither or both of `stop` and `epoch_steps`, or impossible weights or names.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[Dataset, float]],
        *,
        stop: Stop | None = None,
        epoch_steps: int | None = None,
        changes: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        _check(sources, stop, epoch_steps)
        if changes and epoch_steps is None:
            raise ConfigError("Mixture: weights that change need epoch_steps=n")
        self.datasets = {name: dataset for name, (dataset, _) in sources.items()}
        self.epoch_steps: int | Stop = stop or epoch_steps or 0
        self.weights = {0: {name: weight for name, (_, weight) in sources.items()}}
        for step, weights in (changes or {}).items():
            if type(step) is not int or step < 1:
                raise ConfigError(f"Mixture: changes at step {step!r}; steps count from 1")
            if weights.keys() != self.datasets.keys():
                raise ConfigError(
                    f"Mixture: changes at step {step} name {sorted(weights)}, the sources are "
                    f"{sorted(self.datasets)}"
                )
            self.weights[step] = dict(weights)
        self._names = list(self.datasets)
        counts = [dataset.num_shards for dataset in self.datasets.values()]
        self._first = np.cumsum([0, *counts])

    def __len__(self) -> int:
        """Samples of all sources together."""
        return sum(map(len, self.datasets.values()))

    def __repr__(self) -> str:
        parts = [
            f"{name} ({len(dataset):,} samples, weight {float(self.weights[0][name]):g})"
            for name, dataset in self.datasets.items()
        ]
        changes = f", weights change at step {', '.join(map(str, list(self.weights)[1:]))}"
        return f"<Mixture: {', '.join(parts)}{changes * (len(self.weights) > 1)}>"

    def _repr_html_(self) -> str:
        from mmstream.display.mixtures import mixture_html

        return mixture_html(self)

    @property
    def num_shards(self) -> int:
        """Shards of all sources."""
        return int(self._first[-1])

    @property
    def fractions(self) -> dict[int, dict[str, float]]:
        """Part of all samples that each source gives, by the step from which it holds."""
        return {
            step: {name: weight / (sum(weights.values()) or 1) for name, weight in weights.items()}
            for step, weights in self.weights.items()
        }

    @property
    def epoch_text(self) -> str:
        """What an epoch is, in words."""
        if isinstance(self.epoch_steps, int):
            return f"an epoch is {self.epoch_steps:,} steps"
        which = {"first": "the first", "all": "the last"}[self.epoch_steps]
        return f"an epoch ends when {which} source has been seen once"

    @property
    def corpora(self) -> dict[str, Corpus]:
        """What the order knows of the sources."""
        return {name: dataset.corpus for name, dataset in self.datasets.items()}

    def locate(self, shard: int) -> tuple[str, Dataset, int]:
        """Return the name of a shard's source, its dataset, and the shard's number in that."""
        of = int(np.searchsorted(self._first, shard, side="right")) - 1
        name = self._names[of]
        return name, self.datasets[name], shard - int(self._first[of])

    def name_of(self, shard: int) -> str:
        """Return a shard's name, after that of its source."""
        name, dataset, local = self.locate(shard)
        return f"{name}/{dataset.name_of(local)}"

    def store_of(self, shard: int) -> Store:
        """Return where a shard lies."""
        return self.locate(shard)[1].store

    def offsets(self, shard: int) -> IntArray:
        """Return a shard's index; as `Dataset.offsets`."""
        _, dataset, local = self.locate(shard)
        return dataset.offsets(local)

    def forget_index(self, shard: int) -> None:
        """Read a shard's index anew when it is next used."""
        _, dataset, local = self.locate(shard)
        dataset.forget_index(local)

    def read_ranges(self, ranges: Sequence[tuple[int, int, int]]) -> list[bytes | OSError]:
        """Return the bytes of (shard, start, stop) ranges; as `Dataset.read_ranges`."""
        found: dict[int, bytes | OSError] = {}
        located = [self.locate(shard) for shard, _, _ in ranges]
        for name, dataset in self.datasets.items():
            mine = [number for number, (of, _, _) in enumerate(located) if of == name]
            wanted = [(located[number][2], *ranges[number][1:]) for number in mine]
            found |= zip(mine, dataset.read_ranges(wanted) if wanted else (), strict=True)
        return [found[number] for number in range(len(ranges))]

    def map_shard(self, shard: int) -> mmap:
        """Return a local shard as a map of its file; as `Dataset.map_shard`."""
        _, dataset, local = self.locate(shard)
        return dataset.map_shard(local)

    def open_shard(self, shard: int) -> LocalFile:
        """Return a local shard held open; as `Dataset.open_shard`."""
        _, dataset, local = self.locate(shard)
        return dataset.open_shard(local)

    def parse(
        self, data: bytes | memoryview, shard: int, index: int, *, zero_copy: bool = False
    ) -> Sample:
        """Return a sample, with its ``__source__``; as `Dataset.parse`."""
        name, dataset, local = self.locate(shard)
        return dataset.parse(data, local, index, zero_copy=zero_copy) | {"__source__": name}

    def explain(self, error: OSError, shard: int, stop: int) -> OSError | ShardError:
        """Tell a shard that is gone or too short from storage that fails."""
        _, dataset, local = self.locate(shard)
        return dataset.explain(error, local, stop)


def _check(
    sources: Mapping[str, tuple[Dataset, float]], stop: Stop | None, epoch_steps: int | None
) -> None:
    if not sources:
        raise ConfigError("Mixture: name at least one source, {name: (dataset, weight)}")
    for name, value in sources.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"Mixture: {name!r} is no name")
        if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Dataset)):
            raise ConfigError(f"Mixture: source {name!r} needs (mm.open_dataset(...), weight)")
    if stop not in (None, *get_args(Stop)):
        raise ConfigError(f"Mixture: stop is {stop!r}; first or all")
    if (stop is None) == (epoch_steps is None):
        raise ConfigError(
            'Mixture: say when an epoch ends: stop="first", stop="all" or epoch_steps=n'
        )
    if epoch_steps is not None:
        integer("Mixture: epoch_steps", epoch_steps)  # a word would be taken for `stop`
