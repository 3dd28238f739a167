"""The source of all stages: one dataset, or several as a mixture.

`ShardSource` is all that order, read and state ask for. Everything else about a shard is asked of
the dataset that `locate` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from mmstream.dataset.dataset import Dataset, ShardLocation
from mmstream.display.sample_dict import SampleDict
from mmstream.order import AnyOrder
from mmstream.storage import SharedStore, is_remote
from mmstream.types import IntArray, Sample, SampleRef

ShardRange: TypeAlias = tuple[int, int, int]
"""(shard, start, stop): bytes [start, stop) of one shard."""


@runtime_checkable
class ShardSource(Protocol):
    """Shards numbered 0, 1, 2, ... over one or more datasets: `Dataset` and `Mixture`."""

    can_finish_epoch: bool
    """Whether an old epoch can be finished before new settings begin (``on_change``)."""

    def __len__(self) -> int: ...

    @property
    def num_shards(self) -> int:
        """Number of shards."""

    def name_of(self, shard: int) -> str:
        """Return the name of a shard, as messages and logs show it."""

    def ref_of(self, text: str) -> SampleRef:
        """Return (shard, index) of the sample that a line of a log names."""

    def locate(self, shard: int) -> ShardLocation:
        """Return the dataset of a shard, and its position there."""

    def plan_order(self, *, drop_last: bool = True, **settings: Any) -> AnyOrder:
        """Return the order with these settings. Raises ConfigError: impossible ones."""

    def order_from_identity(self, identity: Mapping[str, Any]) -> AnyOrder:
        """Return the order of a saved state. Raises StateError: it is of another source."""


def datasets_of(source: ShardSource) -> list[Dataset]:
    """Return the datasets of a source, in the order of their shards."""
    return [dataset for _, dataset in numbered_datasets(source)]


def numbered_datasets(source: ShardSource) -> Iterator[tuple[int, Dataset]]:
    """Yield (position of its first shard, dataset) for each dataset of a source, in order."""
    shard = 0
    while shard < source.num_shards:
        _, dataset, local_shard = source.locate(shard)
        yield shard, dataset
        shard += dataset.num_shards - local_shard


def is_behind_network(dataset: Dataset) -> bool:
    """Tell whether reads of a dataset mostly wait for a network."""
    store = dataset.store
    return isinstance(store, SharedStore) or (store.access.concurrent and is_remote(store.url))


class DatasetItems(NamedTuple):
    """The items whose shards belong to one dataset."""

    source: str
    """Name of the dataset in a mixture; "" for a single dataset."""
    dataset: Dataset
    numbers: list[int]
    """Positions of the items among all."""
    shards: list[int]
    """The shard of each of them, in the manifest of `dataset`."""


def by_dataset(source: ShardSource, shards: Iterable[int]) -> list[DatasetItems]:
    """Group items by the dataset in which their shards lie.

    Args:
        source: Numbers the shards.
        shards: The shard of each item.
    """
    groups: dict[str, DatasetItems] = {}
    for number, shard in enumerate(shards):
        name, dataset, local_shard = source.locate(shard)
        group = groups.setdefault(name, DatasetItems(name, dataset, [], []))
        group.numbers.append(number)
        group.shards.append(local_shard)
    return list(groups.values())


def load_indexes(source: ShardSource, shards: Iterable[int]) -> int:
    """Fetch the indexes of shards, all of a dataset side by side.

    See `ShardReader.load_indexes`.
    """
    return sum(
        group.dataset.shards.load_indexes(group.shards) for group in by_dataset(source, shards)
    )


def refs_of(source: ShardSource, positions: IntArray) -> list[SampleRef]:
    """Return (shard, index) of the samples at these positions of all samples, int64 [n]."""
    refs: dict[int, SampleRef] = {}
    start = 0
    for first_shard, dataset in numbered_datasets(source):
        stop = start + len(dataset)
        numbers = np.flatnonzero((start <= positions) & (positions < stop))
        of_dataset = dataset.refs(positions[numbers] - start)
        shifted = ((first_shard + shard, index) for shard, index in of_dataset)
        refs |= zip(numbers.tolist(), shifted, strict=True)
        start = stop
    return [refs[number] for number in range(positions.size)]


def read_sample(source: ShardSource, shard: int, index: int) -> Sample:
    """Return one raw sample, with its source in a mixture; raises what ``dataset[i]`` raises."""
    name, dataset, local_shard = source.locate(shard)
    sample = SampleDict(dataset.read(local_shard, index))
    if name:
        sample["__source__"] = name
    return sample


def read_ranges(source: ShardSource, ranges: Sequence[ShardRange]) -> list[bytes | OSError]:
    """Return the bytes of each range, or in its place the error that it met.

    Remote ranges travel side by side, also those of different stores.
    """
    groups = by_dataset(source, [shard for shard, _, _ in ranges])

    def read_one_dataset(group: DatasetItems) -> list[bytes | OSError]:
        numbered = zip(group.numbers, group.shards, strict=True)
        return group.dataset.shards.read_ranges(
            [(shard, *ranges[number][1:]) for number, shard in numbered]
        )

    if sum(group.dataset.store.access.concurrent for group in groups) > 1:
        with ThreadPoolExecutor(len(groups)) as pool:
            responses = list(pool.map(read_one_dataset, groups))
    else:
        responses = list(map(read_one_dataset, groups))
    results: dict[int, bytes | OSError] = {}
    for group, of_group in zip(groups, responses, strict=True):
        results |= zip(group.numbers, of_group, strict=True)
    return [results[number] for number in range(len(ranges))]
