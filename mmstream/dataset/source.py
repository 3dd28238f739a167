"""What the stages read from: one dataset, or several as a mixture.

`ShardSource` is all that order, read and state ask for. Everything else about a shard is asked of
the dataset that `locate` names. `shard_samples` reads a shard from front to back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from mmstream.dataset.checksums import sample_checksum
from mmstream.dataset.dataset import Dataset, ShardLocation
from mmstream.dataset.keys import refs_at
from mmstream.display.sample_dict import SampleDict
from mmstream.errors import SampleError
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


def load_indexes(source: ShardSource, shards: Iterable[int]) -> int:
    """Fetch the indexes of shards, all of a dataset side by side. See `Dataset.load_indexes`."""
    by_dataset: dict[int, tuple[Dataset, list[int]]] = {}
    for shard in shards:
        _, dataset, local_shard = source.locate(shard)
        by_dataset.setdefault(id(dataset), (dataset, []))[1].append(local_shard)
    return sum(dataset.load_indexes(local) for dataset, local in by_dataset.values())


def refs_of(source: ShardSource, positions: IntArray) -> list[SampleRef]:
    """Return (shard, index) of the samples at these positions of all samples, int64 [n]."""
    no_shards = np.zeros(0, dtype=np.int64)
    counts = [dataset.counts for dataset in datasets_of(source)]
    return refs_at(np.cumsum(np.concatenate([no_shards, *counts])), positions)


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
    by_dataset: dict[int, list[int]] = {}
    locations = [source.locate(shard) for shard, _, _ in ranges]
    for number, location in enumerate(locations):
        by_dataset.setdefault(id(location.dataset), []).append(number)

    def read_one_dataset(numbers: list[int]) -> list[bytes | OSError]:
        dataset = locations[numbers[0]].dataset
        return dataset.read_ranges([(locations[i].shard, *ranges[i][1:]) for i in numbers])

    groups = list(by_dataset.values())
    if sum(locations[numbers[0]].dataset.store.access.concurrent for numbers in groups) > 1:
        with ThreadPoolExecutor(len(groups)) as pool:
            answers = list(pool.map(read_one_dataset, groups))
    else:
        answers = list(map(read_one_dataset, groups))
    results: dict[int, bytes | OSError] = {}
    for numbers, answer in zip(groups, answers, strict=True):
        results |= zip(numbers, answer, strict=True)
    return [results[number] for number in range(len(ranges))]


# -- the samples of a shard, in order, in long ranges ----------------------------------------------

BLOCK_BYTES = 32 << 20
"""Bytes of a shard that are read together."""

RANGE_BYTES = 8 << 20
"""Ranges of a block. They are requested side by side."""


def shard_samples(dataset: Dataset, shard: int) -> Iterator[Sample | SampleError]:
    """Yield the samples of a shard. A damaged one is its SampleError.

    A block of samples is in memory: 32 MiB, or one larger sample.

    Raises:
        ShardError: The shard is absent, cut, or was replaced.
        StorageError: The storage failed after retries.
    """
    index = dataset.index_of(shard)
    offsets = index.offsets
    start = 0
    while start < len(offsets) - 1:
        stop = _block_end(offsets, start)
        data = _read(dataset, shard, int(offsets[start]), int(offsets[stop]))
        base = int(offsets[start])
        for number in range(start, stop):
            sample_bytes = data[int(offsets[number]) - base : int(offsets[number + 1]) - base]
            try:
                checksum = None if index.checksums is None else index.checksums[number]
                if checksum is not None and sample_checksum(sample_bytes) != checksum:
                    yield dataset.read(shard, number)  # again, past what this machine holds
                else:
                    yield dataset.parse(sample_bytes, shard, number)
            except SampleError as error:
                yield error
        start = stop


def _block_end(offsets: IntArray, start: int) -> int:
    """Return the sample before which a block ends that begins with sample `start`."""
    stop = int(np.searchsorted(offsets, offsets[start] + BLOCK_BYTES, side="right")) - 1
    return max(stop, start + 1)


def _read(dataset: Dataset, shard: int, start: int, stop: int) -> memoryview:
    ranges = [
        (shard, first, min(stop, first + RANGE_BYTES)) for first in range(start, stop, RANGE_BYTES)
    ]
    pieces = []
    for piece in dataset.read_ranges(ranges):
        if isinstance(piece, OSError):
            raise dataset.explain(piece, shard, stop) from piece
        pieces.append(piece)
    return memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))
