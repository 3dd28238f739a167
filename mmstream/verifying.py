"""Around the flow: prove that a dataset is whole, by reading all of it.

`verify` compares shards with the manifest, indexes with the tars' headers, and parses (or decodes)
every sample.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from mmstream.dataset import Dataset
from mmstream.errors import SampleError, ShardError
from mmstream.index import build_index, index_name

__all__ = ["Problem", "verify"]


@dataclass(frozen=True)
class Problem:
    """One thing that `verify` found wrong."""

    shard: str
    reason: str


def verify(
    dataset: Dataset,
    *,
    decode: Callable[[dict[str, object]], object] | None = None,
    progress: bool = True,
) -> Iterator[Problem]:
    """Read a whole dataset and yield what is wrong with it; nothing when all is well.

    Checks each shard's size and sha256 (where the manifest has one), its index against the tar's
    headers, that every sample parses, and that no key comes twice in a shard. Holds one shard's
    index and one sample in memory; reads each shard twice where there is a checksum.

    Args:
        dataset: what to check.
        decode: also run this on every sample; what it raises as SampleError is a problem.
        progress: show a progress bar (on a terminal only).

    Raises:
        StorageError: storage failed after retries.
    """
    shards = range(dataset.num_shards)
    for shard in tqdm(shards, unit="shard", disable=None if progress else True):
        name = dataset.name_of(shard)
        try:
            yield from _check_shard(dataset, shard)
            yield from _check_samples(dataset, shard, decode)
        except FileNotFoundError:
            yield Problem(name, f"{name}: no such shard in {dataset.store.url}")
        except ShardError as error:
            yield Problem(name, str(error))


def _check_shard(dataset: Dataset, shard: int) -> Iterator[Problem]:
    info, store = dataset.manifest.shards[shard], dataset.store
    size = store.size(info.name)
    if size != info.num_bytes:
        yield Problem(info.name, f"{info.name}: {size} bytes, the manifest says {info.num_bytes}")
    if info.sha256 is not None:
        digest = hashlib.sha256()
        for start in range(0, size, 8 << 20):
            digest.update(store.read_range(info.name, start, min(size, start + (8 << 20))))
        if digest.hexdigest() != info.sha256:
            yield Problem(info.name, f"{info.name}: checksum differs; convert or fetch it again")
    if not np.array_equal(build_index(store, info.name), dataset.offsets(shard)):
        reason = "the index is not this tar's; run `mmstream index --overwrite`"
        yield Problem(info.name, f"{index_name(info.name)}: {reason}")


def _check_samples(
    dataset: Dataset, shard: int, decode: Callable[[dict[str, object]], object] | None
) -> Iterator[Problem]:
    name, keys = dataset.name_of(shard), Counter[str]()
    for index in range(len(dataset.offsets(shard)) - 1):
        try:
            sample = dataset.read(shard, index)
            keys[sample["__key__"]] += 1
            if decode is not None:
                decode(sample)
        except SampleError as error:
            yield Problem(name, str(error))
    for key, count in keys.items():
        if count > 1:
            yield Problem(name, f"{name}: key {key!r} comes {count} times, not in one piece")
