"""Around the flow: prove that a dataset is whole, by reading all of it.

`verify` compares shards with the manifest, indexes with the tars' headers, and parses (or decodes)
every sample. What cannot be used can go to the dataset's bad list (see `badlist`), which later runs
leave out of their order.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from mmstream.dataset import Dataset
from mmstream.errors import SampleError, ShardError
from mmstream.index import build_index, index_name

__all__ = ["Problem", "bad_samples", "verify"]

Check = Callable[[dict[str, object]], object]


@dataclass(frozen=True)
class Problem:
    """One thing that `verify` found wrong."""

    shard: str
    reason: str
    bad: range = range(0)
    """Indexes of the samples that no run can use for it; none where they can still be read."""


def verify(
    dataset: Dataset, *, decode: Check | None = None, progress: bool = True
) -> Iterator[Problem]:
    """Read a whole dataset and yield what is wrong with it; nothing when all is well.

    Checks each shard's size and sha256 (where the manifest has one), its index against the tar's
    headers, that every sample parses, and that no key comes twice in a shard. Looks twice at a bad
    sample. Holds one shard's index and one sample in memory; reads each shard twice where there is
    a checksum.

    Args:
        dataset: what to check; samples on its bad list too.
        decode: also run this on every sample; what it raises as SampleError is a problem.
        progress: show a progress bar (on a terminal only).

    Raises:
        StorageError: storage failed after retries.
    """
    shards = range(dataset.num_shards)
    for shard in tqdm(shards, unit="shard", disable=None if progress else True):
        yield from _check(dataset, shard, decode)


def bad_samples(dataset: Dataset, problems: Iterable[Problem]) -> npt.NDArray[np.int64]:
    """Return int64 [n, 2], the (shard, index) of all samples that problems make unusable."""
    shards = {info.name: number for number, info in enumerate(dataset.manifest.shards)}
    refs = [(shards[problem.shard], index) for problem in problems for index in problem.bad]
    return np.array(refs, dtype=np.int64).reshape(-1, 2)


def _check(dataset: Dataset, shard: int, decode: Check | None) -> Iterator[Problem]:
    name, store = dataset.name_of(shard), dataset.store
    whole = range(int(dataset.counts[shard]))
    try:
        size = store.size(name)
    except FileNotFoundError:
        yield Problem(name, f"{name}: no such shard in {store.url}", whole)
        return
    yield from _check_bytes(dataset, shard, size)
    try:
        offsets = dataset.offsets(shard)
    except ShardError as error:
        yield Problem(name, str(error), whole)
        return
    try:
        if not np.array_equal(build_index(store, name), offsets):
            reason = "the index is not this tar's; run `mmstream index --overwrite`"
            yield Problem(name, f"{index_name(name)}: {reason}")
    except ShardError as error:  # of the headers on the way; samples have their own
        yield Problem(name, str(error))
    yield from _check_samples(dataset, shard, decode)


def _check_bytes(dataset: Dataset, shard: int, size: int) -> Iterator[Problem]:
    info = dataset.manifest.shards[shard]
    if size != info.num_bytes:
        yield Problem(info.name, f"{info.name}: {size} bytes, the manifest says {info.num_bytes}")
    if info.sha256 is not None:
        digest = hashlib.sha256()
        for start in range(0, size, 8 << 20):
            part = dataset.store.read_range(info.name, start, min(size, start + (8 << 20)))
            digest.update(part)
        if digest.hexdigest() != info.sha256:
            yield Problem(info.name, f"{info.name}: checksum differs; convert or fetch it again")


def _check_samples(dataset: Dataset, shard: int, decode: Check | None) -> Iterator[Problem]:
    name, keys = dataset.name_of(shard), Counter[object]()
    count = int(dataset.counts[shard])
    for index in range(count):
        try:
            try:
                key = _check_sample(dataset, shard, index, decode)
            except SampleError:
                key = _check_sample(dataset, shard, index, decode)
            keys[key] += 1
        except SampleError as error:
            yield Problem(name, str(error), range(index, index + 1))
        except ShardError as error:  # gone or cut off here, and so are all samples behind
            yield Problem(name, str(error), range(index, count))
            break
    for key, times in keys.items():
        if times > 1:
            yield Problem(name, f"{name}: key {key!r} comes {times} times, not in one piece")


def _check_sample(dataset: Dataset, shard: int, index: int, decode: Check | None) -> object:
    sample = dataset.read(shard, index)
    if decode is not None:
        decode(sample)
    return sample["__key__"]
