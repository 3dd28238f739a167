"""One dataset: its length, its indexes, and random access to raw samples.

`open_dataset` makes it. An index is read whole, once, when its shard is first used.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from mmap import mmap
from typing import Any, NamedTuple, overload

import numpy as np

from mmstream.dataset.index import decode_index, index_name
from mmstream.dataset.manifest import Manifest
from mmstream.errors import SampleError, ShardError, StateError, where
from mmstream.order import Corpus, Order
from mmstream.storage import (
    NotAFileError,
    ObjectStat,
    ReplacedError,
    Store,
    map_file,
    require_known,
)
from mmstream.tar.samples import parse_sample
from mmstream.types import IntArray, Sample, SampleLineage

__all__ = ["Dataset", "DatasetView", "ShardLocation"]


MAX_INDEX_READS = 4
"""Reads of an index whose bytes are no index: storage may have delivered them wrong."""

MAX_INDEXES = 4096
"""Indexes kept in memory; 160 MB for shards of 5,000 samples."""


class Dataset(Sequence[Sample]):
    """The samples of a dataset, in the order of its shards. `open_dataset` makes it.

    A `ShardSource`. It pickles small: workers get the manifest, not connections or indexes.

    Attributes:
        manifest: shards, fields, and where the dataset came from.
        store: where the tars lie.
        index_store: where the indexes lie. Another store only after ``index --output``.
        bad: int64 [num_bad, 2], sorted (shard, index) of known-bad samples (see ``bad_list.py``).
            Length and random access include them; an epoch leaves them out.

    Examples:
        >>> dataset = mm.open_dataset("shards/")
        >>> len(dataset), dataset[0]["__key__"]
        (480, '000000001')
    """

    can_finish_epoch = True

    def __init__(
        self,
        manifest: Manifest,
        store: Store,
        index_store: Store | None = None,
        offsets: Mapping[str, IntArray] | None = None,
        bad: IntArray | None = None,
        stats: Mapping[str, ObjectStat] | None = None,
    ) -> None:
        self.manifest, self.store = manifest, store
        self.index_store = store if index_store is None else index_store
        self.bad = np.zeros((0, 2), dtype=np.int64) if bad is None else bad
        # The shards as they were when the dataset was opened, or first read in this process.
        names = (shard.name for shard in manifest.shards)
        self._known = {name: stats[name] for name in names if name in stats} if stats else {}
        self._built = dict(offsets or {})  # indexes built at opening, of tars without one
        self._indexes: dict[int, IntArray] = {}
        self._urls: dict[int, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_indexes": {}, "_urls": {}}

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    @overload
    def __getitem__(self, item: int) -> Sample: ...
    @overload
    def __getitem__(self, item: slice) -> DatasetView: ...
    def __getitem__(self, item: int | slice) -> Sample | DatasetView:
        """Return sample `item` as a dict of bytes, or a view of a slice.

        Raises:
            IndexError: no such sample.
            SampleError, ShardError, StorageError: it cannot be read.
        """
        if isinstance(item, slice):
            return DatasetView(self, range(*item.indices(len(self))))
        number = operator.index(item)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"sample {item} of {len(self)}")
        shard = int(np.searchsorted(self._ends, number, side="right"))
        index = number - int(self._ends[shard] - self.counts[shard])
        return self.read(shard, index)

    def __repr__(self) -> str:
        size = f"{self.manifest.num_bytes / 1e6:,.1f} MB"
        bad = f", {len(self.bad):,} known to be bad" if len(self.bad) else ""
        samples = f"{len(self):,} samples{bad}"
        return f"<Dataset {self.store.url}: {samples}, {self.num_shards} shards, {size}>"

    def _repr_html_(self) -> str:
        from mmstream.display import dataset_html

        return dataset_html(self)

    @cached_property
    def counts(self) -> IntArray:
        """Samples of each shard, int64 [num_shards]."""
        return np.array([shard.num_samples for shard in self.manifest.shards], dtype=np.int64)

    @property
    def corpus(self) -> Corpus:
        """What an order knows of the dataset."""
        names = [shard.name for shard in self.manifest.shards]
        sizes = np.array([shard.num_bytes for shard in self.manifest.shards], dtype=np.int64)
        checksums = [shard.sha256 for shard in self.manifest.shards]
        return Corpus(self.counts, names, self.manifest.num_bytes, self.bad, sizes, checksums)

    @cached_property
    def _ends(self) -> IntArray:
        return np.cumsum(self.counts)

    @property
    def num_shards(self) -> int:
        """Shards of the corpus."""
        return len(self.manifest.shards)

    def name_of(self, shard: int) -> str:
        """Return a shard's name, relative to the corpus' root."""
        return self.manifest.shards[shard].name

    def locate(self, shard: int) -> ShardLocation:
        """Return where a shard lies: in this dataset, which has no source name."""
        return ShardLocation("", self, shard)

    def plan_order(self, *, drop_last: bool = True, **settings: Any) -> Order:
        """Return the order of the dataset. Settings and errors are those of `Order.from_counts`."""
        corpus = self.corpus
        return Order.from_counts(
            corpus.counts,
            names=corpus.names,
            num_bytes=corpus.num_bytes,
            bad=corpus.bad,
            sizes=corpus.sizes,
            checksums=corpus.checksums,
            drop_last=drop_last,
            **settings,
        )

    def order_from_identity(self, identity: Mapping[str, Any]) -> Order:
        """Return the order that a saved state names; shards may have been appended since.

        Raises:
            StateError: the state belongs to a mixture or to another dataset.
        """
        if "sources" in identity:
            raise StateError("this state is of a mixture: give its JSON file")
        corpus = self.corpus
        return Order.from_identity(
            identity, corpus.counts, corpus.names, corpus.bad, corpus.sizes, corpus.checksums
        )

    def offsets(self, shard: int) -> IntArray:
        """Return a shard's index: int64 [num_samples + 1], byte offsets of its samples.

        Raises:
            ShardError: no index, a damaged one, or one that does not fit the manifest.
            StorageError: storage failed after retries.
        """
        offsets = self._indexes.get(shard)
        if offsets is None:
            offsets = self._load_index(shard)
            if len(self._indexes) >= MAX_INDEXES:
                self._indexes.pop(list(self._indexes)[0], None)  # noqa: RUF015 - threads share it
            self._indexes[shard] = offsets
        return offsets

    def forget_index(self, shard: int) -> None:
        """Read a shard's index again at its next use."""
        self._indexes.pop(shard, None)

    def read(self, shard: int, index: int) -> Sample:
        """Return one raw sample; raises what `dataset[i]` raises."""
        offsets = self.offsets(shard)
        start, stop = int(offsets[index]), int(offsets[index + 1])
        data = self.read_ranges([(shard, start, stop)])[0]
        if isinstance(data, OSError):
            raise self.explain(data, shard, stop) from data
        return self.parse(data, shard, index)

    def read_ranges(self, ranges: Sequence[tuple[int, int, int]]) -> list[bytes | OSError]:
        """Return the bytes of each (shard, start, stop), or in its place the error that it met.

        A shard that is not the one that was opened gives a `ReplacedError`.
        """
        return self.store.read_ranges(
            [(self.name_of(shard), start, stop) for shard, start, stop in ranges], self._known
        )

    def map(self, shard: int, earlier: mmap | None = None) -> mmap | None:
        """Return a shard's file as a map of its bytes.

        Args:
            shard: position of the shard in the manifest.
            earlier: the map of an earlier call. It is returned again if the file is still the same.

        Returns:
            The map, or None where the shard is no file of this machine, is empty, or was replaced.
            `read_ranges` then reads it, or says why it cannot.
        """
        name = self.name_of(shard)
        path = self.store.local_path(name)
        if path is None:
            return None
        try:
            if earlier is None:
                return map_file(path, name, self._known)
            require_known(path, name, self.store.stat(name), self._known)
        except OSError:
            return None
        return earlier

    def parse(
        self, data: bytes | memoryview, shard: int, index: int, *, zero_copy: bool = False
    ) -> Sample:
        """Return the sample in a byte range of a shard.

        Raises:
            SampleError: the bytes are no sample; names its address.
        """
        try:
            sample = parse_sample(data, self.url_of(shard), zero_copy=zero_copy)
        except SampleError as error:
            raise SampleError(f"{where(self.name_of(shard), index)} {error}") from error
        sample["__lineage__"] = SampleLineage(shard, index)
        return sample

    def url_of(self, shard: int) -> str:
        """Return a shard's URL."""
        url = self._urls.get(shard)
        if url is None:
            url = self._urls[shard] = self.store.url_of(self.name_of(shard))
        return url

    def explain(self, error: OSError, shard: int, stop: int) -> OSError | ShardError:
        """Return a ShardError where the fault is the shard's, else `error`.

        Such a shard is absent, replaced, no file, or ends before byte `stop`.
        """
        name = self.name_of(shard)
        if isinstance(error, ReplacedError):
            return ShardError(
                f"{name}: was replaced while this run read it: {error.difference}; "
                "start a new run, or put the old file back"
            )
        if isinstance(error, NotAFileError):
            return ShardError(str(error))
        if isinstance(error, FileNotFoundError):
            return ShardError(f"{name}: no such shard in {self.store.url}")
        try:
            size = self.store.size(name)
        except OSError:
            return error
        if size < stop:
            return ShardError(f"{name}: truncated: {size} bytes, its index needs {stop} or more")
        return error

    def _load_index(self, shard: int) -> IntArray:
        info = self.manifest.shards[shard]
        name = index_name(info.name)
        if info.name in self._built:
            return self._built[info.name]
        try:
            offsets = self._read_index(name)
        except FileNotFoundError:
            raise ShardError(
                f"{info.name}: no index {name} in {self.index_store.url}; run `mmstream index`"
            ) from None
        if offsets.size != info.num_samples + 1:
            raise ShardError(
                f"{name}: {offsets.size - 1} samples, the manifest says {info.num_samples}; "
                "run `mmstream index --overwrite`"
            )
        if offsets[-1] > info.num_bytes:
            raise ShardError(
                f"{info.name}: {info.num_bytes} bytes, its index goes to {offsets[-1]}: truncated, "
                "or the index is not this tar's"
            )
        return offsets

    def _read_index(self, name: str) -> IntArray:
        """Return an index. Bytes that are no index are read again: storage may be at fault."""
        for _ in range(MAX_INDEX_READS - 1):
            with suppress(ShardError):
                return decode_index(self.index_store.read(name), name)
        return decode_index(self.index_store.read(name), name)


class ShardLocation(NamedTuple):
    """Where a shard of a `ShardSource` lies."""

    source: str
    """Name of its source in a mixture; "" for a single dataset."""
    dataset: Dataset
    shard: int
    """Position in the manifest of `dataset`."""


class DatasetView(Sequence[Sample]):
    """A slice of a dataset: reads a sample when it is asked for."""

    def __init__(self, dataset: Dataset, rows: range) -> None:
        self.dataset, self._rows = dataset, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, item: int) -> Sample: ...
    @overload
    def __getitem__(self, item: slice) -> DatasetView: ...
    def __getitem__(self, item: int | slice) -> Sample | DatasetView:
        if isinstance(item, slice):
            return DatasetView(self.dataset, self._rows[item])
        return self.dataset[self._rows[item]]

    def __iter__(self) -> Iterator[Sample]:
        return (self.dataset[row] for row in self._rows)

    def __repr__(self) -> str:
        return f"<{len(self):,} samples of {self.dataset!r}>"

    def _repr_html_(self) -> str:
        from mmstream.display import view_html

        return view_html(self)
