"""Check that a dataset is whole, by reading all of it.

`verify` compares shards with the manifest and indexes with the headers of the tars, and parses (or
decodes) every sample. Samples that cannot be used can go to the bad list of the dataset. Later runs
then leave them out (see `mmstream.dataset.bad_list`).
"""

from __future__ import annotations

import hashlib
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from tqdm import tqdm

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index import build_index, index_name
from mmstream.errors import SampleError, ShardError
from mmstream.types import IntArray

__all__ = ["Problem", "bad_samples", "verify"]

Check: TypeAlias = Callable[[dict[str, object]], object]
"""Called with a raw sample; raises SampleError when something is wrong with it."""

CHECKSUM_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Problem:
    """One thing that `verify` found to be wrong."""

    shard: str
    reason: str
    bad: Sequence[int] = ()
    """Indexes of the samples that no run can use because of it. Empty where the samples can still
    be read, or could be with a new index."""


def verify(
    dataset: Dataset, *, decode: Check | None = None, progress: bool = True
) -> Iterator[Problem]:
    """Read a whole dataset, and yield what is wrong with it.

    These are checked:

    - the size of each shard, and its sha256 where the manifest has one;
    - the index of each shard, against the headers of the tar;
    - that every sample can be parsed, and decoded where `decode` is given;
    - that no key comes twice in a shard.

    A bad sample is read a second time before it counts. Where only the index is missing or wrong,
    samples are read by the index that `mmstream index` would build. The index of one shard and one
    sample are in memory at a time. Shards with a checksum are read twice.

    Args:
        dataset: The dataset to check. Samples on its bad list are checked too.
        decode: Called with every sample. The SampleErrors that it raises become problems.
        progress: Show a progress bar (on a terminal only).

    Yields:
        Problems in the order of the shards; none when the dataset is whole.

    Raises:
        StorageError: The storage failed after retries.
    """
    shards = range(dataset.num_shards)
    for shard in tqdm(shards, unit="shard", disable=None if progress else True):
        yield from _check(dataset, shard, decode)


def bad_samples(dataset: Dataset, problems: Iterable[Problem]) -> IntArray:
    """Return the samples that problems make unusable: int64 [n, 2] (shard, index)."""
    shards = {info.name: number for number, info in enumerate(dataset.manifest.shards)}
    refs = [(shards[problem.shard], index) for problem in problems for index in problem.bad]
    return np.array(refs, dtype=np.int64).reshape(-1, 2)


def _check(dataset: Dataset, shard: int, decode: Check | None) -> Iterator[Problem]:
    name, store = dataset.name_of(shard), dataset.store
    all_samples = range(int(dataset.counts[shard]))
    try:
        size = store.size(name)
    except FileNotFoundError:
        yield Problem(name, f"{name}: no such shard in {store.url}", all_samples)
        return
    yield from _check_bytes(dataset, shard, size)
    offsets: IntArray | None = None  # as stored
    built: IntArray | None = None  # as the headers of the tar say
    index_error = ""
    try:
        offsets = dataset.offsets(shard)
    except ShardError as error:
        index_error = str(error)
    try:
        built = build_index(store, name)
    except ShardError as error:
        # A damaged header. Without an index, the error of the index is reported below instead.
        if offsets is not None:
            yield Problem(name, str(error))
    if built is not None and built.size == len(all_samples) + 1:
        if offsets is None or not np.array_equal(built, offsets):
            yield Problem(name, _wrong_index(dataset, name, offsets, built, index_error))
            dataset = Dataset(dataset.manifest, store, offsets={name: built})
        yield from _check_samples(dataset, shard, decode)
    elif offsets is None:
        yield Problem(name, index_error, all_samples)
    elif built is None:
        yield from _check_samples(dataset, shard, decode)
    else:
        problems = list(_check_samples(dataset, shard, decode))
        yield _index_of_other_tar(dataset, shard, built, problems)


def _wrong_index(
    dataset: Dataset, name: str, offsets: IntArray | None, built: IntArray, index_error: str
) -> str:
    """Say what is wrong with the index of a tar that has as many samples as the manifest says."""
    command = _index_command(dataset, name)
    if offsets is None:
        return f"{index_error.partition('; run ')[0]}; the tar is there: run `{command}`"
    num_different = np.count_nonzero(offsets != built)
    return (
        f"{index_name(name)}: the index is not this tar's: {num_different:,} of {built.size:,} "
        f"offsets differ; run `{command}`"
    )


def _index_of_other_tar(
    dataset: Dataset, shard: int, built: IntArray, problems: list[Problem]
) -> Problem:
    """Make one problem of an index whose number of samples is not that of the tar."""
    name, count = dataset.name_of(shard), dataset.counts[shard]
    bad = sorted({index for problem in problems for index in problem.bad})
    first = f" ({len(bad):,} cannot be read, the first: {problems[0].reason})" if bad else ""
    reason = (
        f"{index_name(name)}: the index is not this tar's: {count:,} samples, the tar has "
        f"{built.size - 1:,}{first}; run `{_index_command(dataset, name)}`"
    )
    return Problem(name, reason, bad)


def _index_command(dataset: Dataset, name: str) -> str:
    """Return the command that builds the index of a shard."""
    index_store = dataset.index_store
    words = ["mmstream", "index", dataset.store.url]
    if index_store.url != dataset.store.url:
        words += ["--output", index_store.url]
    if index_store.exists(index_name(name)):
        words += ["--overwrite"]
    return shlex.join(words)


def _check_bytes(dataset: Dataset, shard: int, size: int) -> Iterator[Problem]:
    info = dataset.manifest.shards[shard]
    if size != info.num_bytes:
        yield Problem(info.name, f"{info.name}: {size} bytes, the manifest says {info.num_bytes}")
    if info.sha256 is not None:
        digest = hashlib.sha256()
        for start in range(0, size, CHECKSUM_READ_BYTES):
            stop = min(size, start + CHECKSUM_READ_BYTES)
            digest.update(dataset.store.read_range(info.name, start, stop))
        if digest.hexdigest() != info.sha256:
            yield Problem(info.name, f"{info.name}: checksum differs; convert or fetch it again")


def _check_samples(dataset: Dataset, shard: int, decode: Check | None) -> Iterator[Problem]:
    name, count = dataset.name_of(shard), int(dataset.counts[shard])
    keys = Counter[object]()
    for index in range(count):
        try:
            try:
                key = _check_sample(dataset, shard, index, decode)
            except SampleError:
                key = _check_sample(dataset, shard, index, decode)
            keys[key] += 1
        except SampleError as error:
            yield Problem(name, str(error), range(index, index + 1))
        except ShardError as error:  # the tar is gone or cut off: so are all later samples
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
