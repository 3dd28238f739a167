"""Around the flow: prove that a dataset is whole, by reading all of it.

`verify` compares shards with the manifest, indexes with the tars' headers, and parses (or decodes)
every sample. What cannot be used can go to the dataset's bad list (see `badlist`), which later runs
leave out of their order.
"""

from __future__ import annotations

import hashlib
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index import build_index, index_name
from mmstream.errors import SampleError, ShardError
from mmstream.types import IntArray

__all__ = ["Problem", "bad_samples", "verify"]

Check = Callable[[dict[str, object]], object]


@dataclass(frozen=True)
class Problem:
    """One thing that `verify` found wrong."""

    shard: str
    reason: str
    bad: Sequence[int] = ()
    """Indexes of the samples that no run can use for it; none where they can still be read, or
    could with a new index."""


def verify(
    dataset: Dataset, *, decode: Check | None = None, progress: bool = True
) -> Iterator[Problem]:
    """Read a whole dataset and yield what is wrong with it; nothing when all is well.

    Checks each shard's size and sha256 (where the manifest has one), its index against the tar's
    headers, that every sample parses, and that no key comes twice in a shard. Where only the index
    is missing or wrong, samples are read by the one that `mmstream index` would build. Looks twice
    at a bad sample. Holds one shard's index and one sample in memory; reads each shard twice where
    there is a checksum.

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


def bad_samples(dataset: Dataset, problems: Iterable[Problem]) -> IntArray:
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
    offsets: IntArray | None = None
    built: IntArray | None = None
    no_index = ""
    try:
        offsets = dataset.offsets(shard)
    except ShardError as error:
        no_index = str(error)
    try:
        built = build_index(store, name)
    except ShardError as error:  # of the headers on the way; samples have their own
        if offsets is not None:
            yield Problem(name, str(error))
    if built is not None and built.size == len(whole) + 1:
        if offsets is None or not np.array_equal(built, offsets):
            yield Problem(name, _wrong_index(dataset, name, offsets, built, no_index))
            dataset = Dataset(dataset.manifest, store, offsets={name: built})
        yield from _check_samples(dataset, shard, decode)
    elif offsets is None:
        yield Problem(name, no_index, whole)
    elif built is None:
        yield from _check_samples(dataset, shard, decode)
    else:
        yield _other_tar(dataset, shard, built, list(_check_samples(dataset, shard, decode)))


def _wrong_index(
    dataset: Dataset, name: str, offsets: IntArray | None, built: IntArray, no_index: str
) -> str:
    """Say what is wrong with the index of a tar that is itself as the manifest says."""
    if offsets is not None:
        found = f"{index_name(name)}: the index is not this tar's"
        found += f": {np.count_nonzero(offsets != built):,} of {built.size:,} offsets differ"
        return f"{found}; run `{_command(dataset, name)}`"
    return f"{no_index.partition('; run ')[0]}; the tar is there: run `{_command(dataset, name)}`"


def _other_tar(dataset: Dataset, shard: int, built: IntArray, problems: list[Problem]) -> Problem:
    """Make one problem of an index that counts other samples than the tar has."""
    bad = sorted({index for problem in problems for index in problem.bad})
    first = f" ({len(bad):,} cannot be read, the first: {problems[0].reason})" if bad else ""
    name, count = dataset.name_of(shard), dataset.counts[shard]
    counts = f"{count:,} samples, the tar has {built.size - 1:,}"
    command = _command(dataset, name)
    reason = f"{index_name(name)}: the index is not this tar's: {counts}{first}; run `{command}`"
    return Problem(name, reason, bad)


def _command(dataset: Dataset, name: str) -> str:
    """Return the command that builds the index of a shard."""
    there, elsewhere = dataset.index_store, dataset.index_store.url != dataset.store.url
    words = ["mmstream", "index", dataset.store.url, *(["--output", there.url] * elsewhere)]
    return shlex.join(words + ["--overwrite"] * there.exists(index_name(name)))


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
