"""Check that a dataset is whole, by reading all of it.

`verify` compares shards with the manifest, indexes with the headers of the tars, and samples with
their checksums, and parses (or decodes) every sample. Samples that cannot be used can go to the bad
list of the dataset. Later runs then leave them out (see `mmstream.dataset.bad_list`).
"""

from __future__ import annotations

import hashlib
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from tqdm import tqdm

from mmstream.dataset.bad_list import read_removed
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index import (
    NO_SAMPLES,
    Checksums,
    build_index,
    checksums_name,
    checksums_size,
    encode_index,
    index_name,
    index_size,
    object_sha256,
    read_checksums,
    read_samples,
    sample_checksum,
)
from mmstream.dataset.manifest import IndexPart, ShardInfo
from mmstream.dataset.shards import MAX_SAMPLE_READS
from mmstream.errors import ChecksumError, SampleError, ShardError
from mmstream.types import IntArray

Check: TypeAlias = Callable[[dict[str, object]], object]
"""Called with a raw sample; raises SampleError when something is wrong with it."""


@dataclass(frozen=True)
class Problem:
    """One thing that `verify` found to be wrong."""

    shard: str
    reason: str
    bad: Sequence[int] = ()
    """Indexes of the samples that no run can use because of it. Empty where the samples can still
    be read, or could be with a new index."""


def verify(
    dataset: Dataset, *, decode: Check | None = None, quick: bool = False, progress: bool = True
) -> Iterator[Problem]:
    """Read a whole dataset, and yield what is wrong with it.

    Of a view too, all stored samples are checked: this is about shards.

    These are checked:

    - the size of each shard, and its sha256 where the manifest has one;
    - the index of each shard, against the headers of the tar;
    - the parts of the index, against their sha256, the headers and the files beside the tars;
    - the checksum of every sample, where the manifest says that there are checksums;
    - that every sample can be parsed, and decoded where `decode` is given;
    - that no key comes twice in a shard, and that what was to be erased is.

    Of samples that were taken down, only the bytes of the whole shard are compared.

    A bad sample is read a second time before it counts, and one that does not fit its checksum
    `MAX_SAMPLE_READS` times. Where only the index is missing or wrong, samples are read by the
    index that `mmstream index` would build. The index of one shard and one sample are in memory at
    a time. Each shard is read once, and its headers once more.

    Args:
        dataset: The dataset to check. Samples on its bad list are checked too.
        decode: Called with every sample. The SampleErrors that it raises become problems.
        quick: Only compare sizes: of shards, indexes and checksums. No sample is read.
        progress: Show a progress bar (on a terminal only).

    Yields:
        Problems in the order of the shards; none when the dataset is whole.

    Raises:
        StorageError: The storage failed after retries.
    """
    first = 0
    for own in dataset.folders:  # there the commands are of one folder
        problems = verify(own, decode=decode, quick=quick, progress=progress)
        prefix = dataset.name_of(first).partition("/")[0] if own.num_shards else ""
        yield from (replace(item, shard=f"{prefix}/{item.shard}") for item in problems)
        first += own.num_shards
    if dataset.folders:
        return
    for name in read_removed(dataset.index_store).unfinished:
        cure = "run the same `mmstream takedown --erase` again"
        yield Problem(name, f"{name}: samples were not erased to the end; {cure}")
    for part in dataset.manifest.index_parts:
        yield from _check_part(dataset, part, quick)
    shards = range(dataset.num_shards)
    for shard in tqdm(shards, unit="shard", disable=None if progress else True):
        yield from _check_sizes(dataset, shard) if quick else _check(dataset, shard, decode)


def bad_samples(dataset: Dataset, problems: Iterable[Problem]) -> IntArray:
    """Return the samples that problems make unusable: int64 [n, 2] (shard, index)."""
    shards = {info.name: number for number, info in enumerate(dataset.manifest.shards)}
    refs = [(shards[problem.shard], index) for problem in problems for index in problem.bad]
    return np.array(refs, dtype=np.int64).reshape(-1, 2)


def _check_part(dataset: Dataset, part: IndexPart, quick: bool) -> Iterator[Problem]:
    """Compare a part of the index with the manifest."""
    store, name = dataset.index_store, part.name
    cure = f"run `{_index_command(dataset, '')}`"
    try:
        size = store.size(name)
    except FileNotFoundError:
        yield Problem(name, f"{name}: no such part of the index in {store.url}; {cure}")
        return
    if size != part.num_bytes:
        yield Problem(name, f"{name}: {size} bytes, the manifest says {part.num_bytes}; {cure}")
    elif not quick and object_sha256(store, name, size) != part.sha256:
        yield Problem(name, f"{name}: its bytes are not those of its sha256; {cure}")
    else:
        try:
            dataset.shards.indexes.part_columns(part.first_shard)
        except ShardError as error:  # it is of other shards
            yield Problem(name, f"{error}; {cure}")


def _check_columns(dataset: Dataset, shard: int, offsets: IntArray) -> Iterator[Problem]:
    """Compare a shard's part of the index with its tar, and with the files beside it."""
    name = dataset.name_of(shard)
    has_checksums = dataset.manifest.checksums is not None
    try:
        columns = dataset.shards.indexes.part_columns(shard)
        files = dataset.shards.indexes.file_columns(shard, has_checksums=has_checksums)
    except (ShardError, FileNotFoundError):  # of a lost or damaged file, which is reported
        return
    if columns is None:
        return
    cure = f"run `{_index_command(dataset, '', overwrite=True)}`"
    if not np.array_equal(columns.offsets(), offsets):
        yield Problem(name, f"{name}: its part of the index is not this tar's; {cure}")
    elif has_checksums and not np.array_equal(columns.checksums, files.checksums):  # type: ignore[arg-type]
        reason = "its part of the index has other checksums than its file of checksums"
        yield Problem(name, f"{name}: {reason}; {cure}")


def _check_sizes(dataset: Dataset, shard: int) -> Iterator[Problem]:
    """Compare the sizes of a shard's files with the manifest."""
    info = dataset.manifest.shards[shard]
    files = [(dataset.index_store, index_name(info.name), index_size(info.num_samples), "")]
    if dataset.manifest.checksums:
        num_bytes = checksums_size(info.num_samples)
        command = f"; run `{_index_command(dataset, info.name, checksums=True)}`"
        files.append((dataset.index_store, checksums_name(info.name), num_bytes, command))
    for store, name, num_bytes, command in [
        (dataset.store, info.name, info.num_bytes, ""),
        *files,
    ]:
        try:
            size = store.size(name)
        except FileNotFoundError:
            yield Problem(info.name, f"{name}: no such file in {store.url}{command}")
        else:
            if size != num_bytes:
                reason = f"{name}: {size} bytes, the manifest says {num_bytes}{command}"
                yield Problem(info.name, reason)


def _check(dataset: Dataset, shard: int, decode: Check | None) -> Iterator[Problem]:
    info, store = dataset.manifest.shards[shard], dataset.store
    name, count = info.name, info.num_samples
    try:
        size = store.size(name)
    except FileNotFoundError:
        yield Problem(name, f"{name}: no such shard in {store.url}", range(count))
        return
    if size != info.num_bytes:
        yield Problem(name, f"{name}: {size} bytes, the manifest says {info.num_bytes}")
    offsets, built, index_error, header_error = _indexes(dataset, shard)
    if offsets is not None and _is_other_tar(info, size, offsets, built):
        command = _index_command(dataset, name)
        yield Problem(
            name,
            f"{name}: another tar lies there, and no run reads it right; convert or fetch it "
            f"again; if it was replaced on purpose, run `{command}`",
            range(count),
        )
        return
    if header_error and offsets is not None:  # else the error of the index is reported, below
        yield Problem(name, header_error)
    is_other_tar = offsets is not None and built is not None and built.size != count + 1
    if built is not None and built.size == count + 1:
        if offsets is None or not np.array_equal(built, offsets):
            yield Problem(name, _wrong_index(dataset, name, offsets, built, index_error))
        else:
            yield from _check_columns(dataset, shard, built)
        offsets = built
    reader = _SampleReader(dataset, shard, NO_SAMPLES if offsets is None else offsets, decode)
    yield from reader.read_checksums()
    digest = hashlib.sha256()
    problems = list(reader.problems(size, digest.update))
    yield from _wrong_sha256(dataset, shard, size, digest.hexdigest())
    if offsets is None:
        yield Problem(name, index_error, range(count))
    elif built is not None and is_other_tar:
        yield _index_of_other_tar(dataset, shard, built, problems)
    else:
        yield from problems


def _wrong_sha256(dataset: Dataset, shard: int, size: int, sha256: str) -> Iterator[Problem]:
    info = dataset.manifest.shards[shard]
    expected = dataset.manifest.erased.get(info.name, info.sha256)
    if expected not in (None, sha256):
        dataset.store.drop_cache(info.name, 0, size)  # the bytes may have come wrong only once
        if object_sha256(dataset.store, info.name, size) != expected:
            yield Problem(info.name, f"{info.name}: checksum differs; convert or fetch it again")


def _is_other_tar(info: ShardInfo, size: int, offsets: IntArray, built: IntArray | None) -> bool:
    """Tell whether a tar has as many samples as the indexed one, and is not this one."""
    return (
        built is not None
        and built.size == offsets.size
        and size != info.num_bytes
        and not np.array_equal(built, offsets)
    )


def _indexes(dataset: Dataset, shard: int) -> tuple[IntArray | None, IntArray | None, str, str]:
    """Return a shard's index as stored and as the headers of the tar say, and what is wrong."""
    stored, built, index_error, header_error = None, None, "", ""
    try:
        stored = dataset.shards.indexes.file_columns(shard, has_checksums=False).offsets()
    except ShardError as error:
        index_error = str(error)
    try:
        built = build_index(dataset.store, dataset.name_of(shard))
    except ShardError as error:  # a damaged header
        header_error = str(error)
    return stored, built, index_error, header_error


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


def _index_command(
    dataset: Dataset, name: str, *, checksums: bool = False, overwrite: bool = False
) -> str:
    """Return the command that builds the index of a shard ("": the parts), or its checksums."""
    index_store = dataset.index_store
    arguments = ["mmstream", "index", dataset.store.url]
    if index_store.url != dataset.store.url:
        arguments += ["--output", index_store.url]
    if checksums:
        arguments += ["--checksums"]
    elif overwrite or (name and index_store.exists(index_name(name))):
        arguments += ["--overwrite"]
    return shlex.join(arguments)


@dataclass
class _SampleReader:
    """Reads the samples of one tar, from front to back."""

    dataset: Dataset
    shard: int
    offsets: IntArray
    decode: Check | None
    checksums: Checksums | None = None

    def read_checksums(self) -> Iterator[Problem]:
        """Read the checksums of the samples. Yields a problem if they cannot be used."""
        dataset, shard_name = self.dataset, self.dataset.name_of(self.shard)
        if dataset.manifest.checksums is None or self.offsets is NO_SAMPLES:
            return
        name, store = checksums_name(shard_name), dataset.index_store
        cure = f"run `{_index_command(dataset, shard_name, checksums=True)}`"
        try:
            self.checksums = read_checksums(store, shard_name, encode_index(self.offsets))
        except FileNotFoundError:
            yield Problem(shard_name, f"{name}: no such file in {store.url}; {cure}")
        except ShardError:
            yield Problem(shard_name, f"{name}: damaged, or of another tar or index; {cure}")

    def problems(self, size: int, update: Callable[[bytes], object]) -> Iterator[Problem]:
        """Yield what is wrong with the samples.

        Args:
            size: Of the tar in bytes.
            update: Called with all bytes of the tar, piece by piece.
        """
        name, count = self.dataset.name_of(self.shard), len(self.offsets) - 1
        num_whole = int(np.searchsorted(self.offsets[1:], size, side="right"))
        whole = self.offsets[: num_whole + 1]
        keys = Counter[object]()
        for index, data in enumerate(read_samples(self.dataset.store, name, size, whole, update)):
            try:
                keys[self._key(index, data)] += 1
            except SampleError as error:
                if (self.shard, index) not in self.dataset.removed:  # else it may be erased
                    yield Problem(name, str(error), range(index, index + 1))
        if num_whole < count:  # the tar is cut off: so are all later samples
            stop = self.offsets[num_whole + 1]
            reason = f"{name}: truncated: {size} bytes, its index needs {stop} or more"
            yield Problem(name, reason, range(num_whole, count))
        for key, times in keys.items():
            if times > 1:
                yield Problem(name, f"{name}: key {key!r} comes {times} times, not in one piece")

    def _key(self, index: int, data: bytes) -> object:
        """Return the key of a sample. Read it again before calling it bad."""
        for num_reads in range(1, MAX_SAMPLE_READS):
            try:
                return self._checked(index, data)
            except ChecksumError:
                pass
            except SampleError:
                if num_reads == 2 or self.checksums is not None:  # the same bytes would come again
                    raise
            store, name = self.dataset.store, self.dataset.name_of(self.shard)
            start, stop = int(self.offsets[index]), int(self.offsets[index + 1])
            store.drop_cache(name, start, stop)
            data = store.read_range(name, start, stop)
        return self._checked(index, data)

    def _checked(self, index: int, data: bytes) -> object:
        shards = self.dataset.shards
        if self.checksums is not None and sample_checksum(data) != self.checksums[index]:
            raise shards.checksum_error(self.shard, index)
        try:
            sample = shards.parse(data, self.shard, index)
        except SampleError as error:
            if error.is_refused:  # its file is whole, and it must keep its place
                return object()
            raise
        if self.decode is not None:
            self.decode(sample)
        return sample["__key__"]
