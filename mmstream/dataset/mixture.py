"""Several datasets as one stream: what a `Pipeline` takes in place of a dataset.

A mixture says which datasets, in which proportions and for how long. ``order/mixture/`` says which
sample comes when. The stages that read see one long list of shards, all sources end to end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmstream.dataset.addresses import parse_address, require_own
from mmstream.dataset.dataset import Dataset, ShardLocation
from mmstream.dataset.source import read_sample
from mmstream.errors import ConfigError, StateError
from mmstream.order import Corpus, MixtureOrder, Recipe, Stop
from mmstream.types import Sample, SampleRef
from mmstream.wrong_arguments import NonEmptyStr, NonNegativeFloat, PositiveInt, checked


@checked(
    {
        "sources": "give {name: (mm.open_dataset(...), weight)}",
        "changes": "give {step: {name: weight}}, with steps from 1 up",
    }
)
class Mixture:
    """Several datasets as one, in the proportions that weights give.

    Each source has epochs of its own, with each sample once. After any number of steps, a source
    has given its share of all samples, to less than two samples in each lane.

    Args:
        sources: by name, (dataset, weight). Weights are proportions of samples, as whole numbers or
            decimals: 0.1 and 0.9 are exactly 1 and 9 of 10.
        stop: when an epoch of the mixture ends. "first": when the first source has been seen once.
            "all": when all sources have. Give this or `epoch_steps`.
        epoch_steps: steps of an epoch of the mixture.
        changes: weights of all sources that hold from a step of the run on; needs `epoch_steps`. A
            weight may be 0, so a source can come later or end early.

    Raises:
        ConfigError: neither or both of `stop` and `epoch_steps`, or impossible weights or names.
    """

    can_finish_epoch = False  # its sources do not end where its epochs do

    def __init__(
        self,
        sources: Mapping[NonEmptyStr, tuple[Dataset, NonNegativeFloat]],
        *,
        stop: Stop | None = None,
        epoch_steps: PositiveInt | None = None,
        changes: Mapping[PositiveInt, Mapping[str, NonNegativeFloat]] | None = None,
    ) -> None:
        _check(sources, stop, epoch_steps)
        if changes and epoch_steps is None:
            raise ConfigError("Mixture: weights that change need epoch_steps=n")
        self.datasets = {name: dataset for name, (dataset, _) in sources.items()}
        self.epoch_steps: int | Stop = stop or epoch_steps or 0
        self.weights = {0: {name: weight for name, (_, weight) in sources.items()}}
        for step, weights in (changes or {}).items():
            if weights.keys() != self.datasets.keys():
                raise ConfigError(
                    f"Mixture: changes at step {step} name {sorted(weights)}, the sources are "
                    f"{sorted(self.datasets)}"
                )
            self.weights[step] = dict(weights)
        self._names = list(self.datasets)
        counts = [dataset.num_shards for dataset in self.datasets.values()]
        self._first_shards = np.cumsum([0, *counts])

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
        from mmstream.display.pipelines import mixture_html

        return mixture_html(self)

    @property
    def num_shards(self) -> int:
        """Shards of all sources."""
        return int(self._first_shards[-1])

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

    def locate(self, shard: int) -> ShardLocation:
        """Return the source of a shard, its dataset, and its position there."""
        number = int(np.searchsorted(self._first_shards, shard, side="right")) - 1
        name = self._names[number]
        return ShardLocation(name, self.datasets[name], shard - int(self._first_shards[number]))

    def name_of(self, shard: int) -> str:
        """Return ``source/shard`` of a shard."""
        name, dataset, local_shard = self.locate(shard)
        return f"{name}/{dataset.name_of(local_shard)}"

    @checked()
    def find(self, text: str) -> Sample:
        """Return the sample that a line of a log names, as ``source/shard[index]``.

        Raises:
            ConfigError: the text names no sample, or none of this mixture.
            SampleError, ShardError, StorageError: it cannot be read.
        """
        return read_sample(self, *self.ref_of(text))

    def ref_of(self, text: str) -> SampleRef:
        """Return (shard, index) of the sample that a line of a log names; errors as `find`."""
        shards = {self.name_of(shard): shard for shard in range(self.num_shards)}
        counts = np.concatenate([dataset.counts for dataset in self.datasets.values()])
        shard, index = parse_address(text, shards, counts)
        _, dataset, own = self.locate(shard)
        require_own(text, self.name_of(shard), (own, index), dataset.store.url, dataset)
        return shard, index

    def plan_order(self, *, drop_last: bool = True, **settings: Any) -> MixtureOrder:
        """Return the order of the mixture. No step of it is partial, so `drop_last` has no effect.

        Raises:
            ConfigError: impossible settings.
        """
        del drop_last
        return MixtureOrder(
            Recipe.from_weights(
                self.corpora, self.weights, epoch_steps=self.epoch_steps, **settings
            )
        )

    def order_from_identity(self, identity: Mapping[str, Any]) -> MixtureOrder:
        """Return the order that a saved state names. Only its datasets count; it knows the weights.

        Raises:
            StateError: the state belongs to a single dataset or to other sources.
        """
        if "sources" not in identity:
            raise StateError("this state is of one dataset: give that")
        order = MixtureOrder(Recipe.from_identity(identity, self.corpora))
        saved_names, names = list(order.recipe.corpora), list(self.datasets)
        if saved_names != names[: len(saved_names)]:  # shards are numbered in this order
            raise StateError(
                f"the state's sources are {saved_names}, and here {names}: put them in the state's "
                "order, new ones at the end"
            )
        return order


def _check(
    sources: Mapping[str, tuple[Dataset, float]], stop: Stop | None, epoch_steps: int | None
) -> None:
    if not sources:
        raise ConfigError("Mixture: name at least one source, {name: (dataset, weight)}")
    if (stop is None) == (epoch_steps is None):
        raise ConfigError(
            'Mixture: say when an epoch ends: stop="first", stop="all" or epoch_steps=n'
        )
