"""The ranges of a reader process in the node cache: which files have their samples.

    RankReader -> `RangeCache` -> mmstream.storage.node_cache

A file has some samples of a shard that follow one another: about `FILE_BYTES`, whatever the order
of the run is. So all runs over a dataset share what they have read.

Only samples with a checksum are kept. Each is compared with the one of the present index whenever
it is read, so a shard that was replaced is fetched again. Large samples are read by ranges, which
have no checksums, so they always come from storage.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from mmstream.dataset.dataset import Dataset, ShardSource, datasets_of, is_behind_network
from mmstream.errors import escaped
from mmstream.order import AnyOrder, MixtureOrder
from mmstream.reading.fetcher import NO_CHECKSUM, SampleRange
from mmstream.storage.node_cache import CachedSamples, CacheFile, CacheLocation, NodeCache
from mmstream.types import IntArray

logger = logging.getLogger(__name__)

FILE_BYTES = 16 << 20
"""Samples that a file has room for take about so much at most, and half of it at least. Runs have 4
MiB on average, so few of them lie in two files."""

MAX_FILE_SAMPLES = 1024
"""Samples of a file. Its table has 8 bytes for each, and is read with each range."""

NUM_THREADS = 4
"""Ranges that are read side by side. A disk answers in less than a millisecond."""


class NodeCacheSettings(NamedTuple):
    """What a reader process is told of the node cache."""

    root: str
    """Its folder, as `open_cache_dir` returned it."""
    max_bytes: int | None
    """Most bytes that it may take. None: 80 % of what is free."""
    node_share: float
    """Part of all rows that the ranks of this machine have."""


class RangeCache:
    """Reads and writes ranges. It lives in the event loop of a reader process.

    Args:
        source: what is read.
        cache: where the files are.

    Attributes:
        node_cache: the same.
    """

    def __init__(self, source: ShardSource, cache: NodeCache) -> None:
        self._source, self.node_cache = source, cache
        self._samples_of_file = {
            id(dataset): _samples_of_file(dataset)
            for dataset in datasets_of(source)
            if is_cached(dataset)
        }
        self._has_warned = False
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="mmstream-cache-read")

    async def find(self, samples: SampleRange) -> dict[int, CacheLocation]:
        """Return where the cache has samples of a range, by position. None is compared yet."""
        files = list(self._files(samples))
        if not files:
            return {}
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._find, samples, files)

    async def read_samples(self, places: Sequence[tuple[CacheLocation, memoryview]]) -> list[bool]:
        """Read samples that `find` has found, each to its place. Return which of them are right."""

        def read() -> list[bool]:
            return [self.node_cache.read(location, view) for location, view in places]

        return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    def write(self, samples: SampleRange, data: memoryview) -> None:
        """Keep the samples of a range, whose bytes were compared with their checksums."""
        first, view = int(samples.start[0]), memoryview(data)
        for file, cached, _ in self._files(samples):
            start, stop = int(cached.start[0]), int(cached.stop[-1])
            self.node_cache.write(file, cached, view[start - first : stop - first], start)

    def close(self) -> None:
        """Stop reading, and write for a moment what waits to be written."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.node_cache.close()

    def _find(
        self, samples: SampleRange, files: Sequence[tuple[CacheFile, CachedSamples, IntArray]]
    ) -> dict[int, CacheLocation]:
        locations: dict[int, CacheLocation] = {}
        for file, cached, numbers in files:
            positions = samples.position[numbers].tolist()
            for number, location in self.node_cache.find(file, cached).items():
                locations[positions[number]] = location
        return locations

    def _files(self, samples: SampleRange) -> Iterator[tuple[CacheFile, CachedSamples, IntArray]]:
        """Yield the files of a range, which samples of it they have, and their numbers in it.

        Nothing is yielded of shards of this machine, and of samples without checksums.
        """
        _, dataset, shard = self._source.locate(samples.shard)
        size = self._samples_of_file.get(id(dataset))
        if size is None:
            return
        has_checksum = samples.checksum != NO_CHECKSUM
        if not (has_checksum.all() or self._has_warned):
            self._has_warned = True
            logger.warning(
                "large samples are read by ranges, which the node cache does not keep: with "
                "Decode(min_lazy_bytes=None), samples of up to 256 MiB are read whole, and kept"
            )
        numbers = np.flatnonzero(has_checksum)
        file_numbers = samples.index[numbers] // size
        info = dataset.manifest.shards[shard]
        for group in np.split(numbers, np.flatnonzero(np.diff(file_numbers)) + 1):
            if not group.size:
                continue
            number = int(samples.index[group[0]]) // size
            key = (info.name, str(info.num_bytes), str(size), str(number))
            file = CacheFile(
                _folder_of(dataset),
                hashlib.sha256("\0".join(key).encode("utf-8", "surrogateescape")).hexdigest()[:40],
                min(size, info.num_samples - number * size),
                info.num_bytes,
            )
            cached = CachedSamples(
                samples.index[group] - number * size,
                samples.start[group],
                samples.stop[group],
                samples.checksum[group],
            )
            yield file, cached, group


def is_cached(dataset: Dataset) -> bool:
    """Tell whether the cache keeps samples of a dataset."""
    return dataset.has_checksums and is_behind_network(dataset)


def log_what_is_cached(source: ShardSource) -> None:
    """Say which datasets the cache keeps nothing of, and why."""
    for dataset in datasets_of(source):
        beginning = f"the node cache keeps nothing of {escaped(dataset.store.url)}"
        if not is_behind_network(dataset):
            logger.info("%s: its shards are on this machine", beginning)
        elif not dataset.has_checksums:
            logger.warning(
                "%s: its samples have no checksums; see `mmstream index --checksums`", beginning
            )


def needs_of(source: ShardSource, order: AnyOrder, node_share: float) -> dict[str, int]:
    """Return how many bytes a machine needs of each dataset, by its folder.

    The dataset whose samples come again soonest is the first: a byte of it that is cached saves
    most.

    Args:
        source: what is read.
        order: which samples, and when.
        node_share: part of all rows that the ranks of this machine have.
    """
    datasets = datasets_of(source)
    shares: Sequence[float] = [1.0] * len(datasets)
    if isinstance(order, MixtureOrder):
        shares = order.recipe.shares[0]
    steps_of_a_pass = [
        len(dataset) / share if share else float("inf")
        for dataset, share in zip(datasets, shares, strict=True)
    ]
    if order.identity().get("reshuffle") != "lanes":
        node_share = 1.0  # each epoch needs other samples here, so in time all of them
    needs: dict[str, int] = {}
    for number in sorted(range(len(datasets)), key=steps_of_a_pass.__getitem__):
        if is_cached(dataset := datasets[number]):
            folder = _folder_of(dataset)  # views of a dataset share it
            more = needs.get(folder, 0) + int(node_share * dataset.num_bytes)
            needs[folder] = min(dataset.manifest.num_bytes, more)
    return needs


def _folder_of(dataset: Dataset) -> str:
    return hashlib.sha256(dataset.store.url.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _samples_of_file(dataset: Dataset) -> int:
    """Return how many samples a file has room for.

    It is a power of two, so that shards may be appended: the mean moves, and the files stay. All
    views of a dataset have the same files.
    """
    mean_bytes = dataset.manifest.num_bytes / max(1, int(dataset.counts.sum()))
    number = max(1, min(MAX_FILE_SAMPLES, int(FILE_BYTES / max(1.0, mean_bytes))))
    return 1 << (number.bit_length() - 1)
