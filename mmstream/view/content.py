"""What all pages show: the data, a pipeline, its order, and the folder of a run.

Each is opened when a page first needs it. Where that fails, the page says why, and the next one
tries again: a store may come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.source import numbered_datasets, read_sample
from mmstream.display.text import count_text
from mmstream.errors import ConfigError, MMStreamError, escaped, where
from mmstream.order import AnyOrder
from mmstream.order.corpus import differing_keys
from mmstream.types import Sample

MAX_CACHED_SAMPLES = 2
"""Samples that are kept: a browser asks for a recording piece by piece."""


class Source(NamedTuple):
    """A dataset, or one of a mixture."""

    name: str
    first_shard: int
    """Position of its first shard among those of the mixture."""
    dataset: Dataset


class Content:
    """What the pages show.

    Args:
        url: Of the data, for people.
        open_data: Returns the Dataset or Mixture.
        open_pipeline: Returns the Pipeline of the data. None: there is none.
        open_order: Returns the order of the run. None: there is none.
        run: Folder of metrics and quarantine files of a run. None: there is none.
        others: Other datasets, of which pages show what they share with this one.
        path: Where the pages of its samples lie, such as ``("against", 0)`` of another dataset.
    """

    def __init__(
        self,
        url: str,
        open_data: Callable[[], Any],
        open_pipeline: Callable[[Any], Any] | None = None,
        open_order: Callable[[Any], AnyOrder] | None = None,
        run: Path | None = None,
        *,
        others: Sequence[Content] = (),
        path: tuple[str | int, ...] = (),
    ) -> None:
        self.url, self.run, self.others, self.path = url, run, others, path
        self._open_data = open_data
        self._open_pipeline = open_pipeline
        self._open_order = open_order
        self.read = lru_cache(MAX_CACHED_SAMPLES)(self._read)

    @cached_property
    def data(self) -> Any:
        """The Dataset or Mixture."""
        return self._open_data()

    @cached_property
    def pipeline(self) -> Any:
        """The Pipeline. None: there is none."""
        return None if self._open_pipeline is None else self._open_pipeline(self.data)

    @cached_property
    def order(self) -> AnyOrder:
        """The order of the pipeline, or else that of the run.

        Raises:
            ConfigError: There is neither.
        """
        if self.pipeline is None:
            return self.run_order
        order: AnyOrder = self.pipeline.order
        return order

    @cached_property
    def run_order(self) -> AnyOrder:
        """The order of the run's newest checkpoint.

        Raises:
            ConfigError: There is none.
        """
        if self._open_order is None:
            raise ConfigError(
                "the order is not known: start `mmstream view` with --pipeline module:object, or "
                "with --run FOLDER of a run that has saved a checkpoint"
            )
        return self._open_order(self.data)

    def unlike_run(self) -> str:
        """Return how the run's order differs from that of the pipeline; "" where it does not."""
        if self.pipeline is None or self._open_order is None:
            return ""
        try:
            of_run = self.run_order.identity()
        except (MMStreamError, OSError):
            return ""  # a run without a checkpoint has no order to compare
        names = ", ".join(differing_keys(of_run, self.order.identity()))
        return names and f"this is not the order of the run, which differs in {names}"

    @cached_property
    def sources(self) -> dict[str, Source]:
        """The datasets by their names in a mixture. One dataset has the name ""."""
        return {
            name: Source(name, first_shard, dataset)
            for first_shard, dataset in numbered_datasets(self.data)
            for name in (self.data.locate(first_shard).source,)
        }

    def source(self, name: str) -> Source:
        """Return a source by its name, or the first one where no name is given.

        Raises:
            ConfigError: There is none.
        """
        if not self.sources:
            raise ConfigError("the dataset has no shards")
        first = next(iter(self.sources))
        if (name or first) not in self.sources:
            raise ConfigError(f"{escaped(name)}: no such source of the mixture")
        return self.sources[name or first]

    def other(self, number: int) -> Content:
        """Return another dataset by its number.

        Raises:
            ConfigError: There is none.
        """
        if number >= len(self.others):
            raise ConfigError(f"dataset {number}: start `mmstream view` with --against URL")
        return self.others[number]

    def locate(self, shard: int, index: int) -> tuple[Dataset, int]:
        """Return the dataset of a sample, and its shard there.

        Raises:
            ConfigError: There is none at this place.
        """
        if not 0 <= shard < self.data.num_shards:
            num_shards = count_text(self.data.num_shards, "shard")
            raise ConfigError(f"shard {shard}: the data has {num_shards}")
        _, dataset, own_shard = self.data.locate(shard)
        if not 0 <= index < dataset.counts[own_shard]:
            raise ConfigError(f"{where(self.data.name_of(shard), index)}: no such sample")
        return dataset, own_shard

    def _read(self, shard: int, index: int) -> Sample:
        """Return a raw sample; raises what `locate` and `read_sample` raise."""
        self.locate(shard, index)
        return read_sample(self.data, shard, index)
