"""One dataset: its length, its order, and random access to raw samples.

`open_dataset` makes it. The stages read bytes and samples through `Dataset.shards`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from mmstream.dataset.keys import KeyTable, find_key, parse_address, refs_at, require_own
from mmstream.dataset.manifest import Manifest
from mmstream.dataset.shard_indexes import ShardIndexes
from mmstream.dataset.shards import ShardReader
from mmstream.display.sample_dict import SampleDict
from mmstream.display.text import count_text
from mmstream.errors import StateError
from mmstream.order import Corpus, Order
from mmstream.settings import AnyInt, checked, missing_attribute
from mmstream.storage import ObjectStat, Store
from mmstream.types import IntArray, Sample, SampleRef


class Dataset(Sequence[Sample]):
    """The samples of a dataset, in the order of its shards. `open_dataset` makes it.

    A `ShardSource`. It pickles small: workers get the manifest, not connections or indexes.

    Attributes:
        manifest: shards, fields, and where the dataset came from.
        shards: reads bytes and samples of the shards.
        index_store: where the indexes lie. Another store only after ``index --output``.
        bad: int64 [num_bad, 2], sorted (shard, index) of known-bad samples (see ``bad_list.py``).
            Length and random access include them; an epoch leaves them out.
        has_checksums: whether bytes that are read are compared with their checksums.

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
        *,
        checksums: bool = True,
    ) -> None:
        self.manifest = manifest
        self.index_store = store if index_store is None else index_store
        self.bad = np.zeros((0, 2), dtype=np.int64) if bad is None else bad
        self.has_checksums = checksums and manifest.checksums is not None
        indexes = ShardIndexes(self.index_store, manifest, self.has_checksums, offsets)
        self.shards = ShardReader(manifest, store, indexes, stats)
        self._key_tables: list[KeyTable] = []

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute("Dataset", name, self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_key_tables": []}

    @property
    def store(self) -> Store:
        """Where the tars lie."""
        return self.shards.store

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    @overload
    def __getitem__(self, item: int | str) -> Sample: ...
    @overload
    def __getitem__(self, item: slice) -> DatasetView: ...
    @checked({"item": "give a position, a key or a slice"}, late=True)
    def __getitem__(self, item: AnyInt | str | slice) -> Sample | DatasetView:
        """Return a sample as a dict of bytes, or a view of a slice.

        A string is a key, ``sample["__key__"]``. Keys stand in the tars, one header per sample.
        Where `mmstream.convert` wrote the rows in their order, some dozens are read. Else the first
        look-up reads the headers of all samples, and 8 bytes a sample are remembered:
        seconds per million local samples, and one request per sample in object storage. `find`
        takes an address instead, and reads nothing but the sample.

        Args:
            item: The position of the sample, its key, or a slice of positions.

        Raises:
            IndexError: no such position.
            KeyError: no sample has the key, or several have it; the message names them.
            ChecksumError: its bytes are not those of its checksum, in `MAX_SAMPLE_READS` reads.
            SampleError, ShardError, StorageError: it cannot be read.
        """
        if isinstance(item, slice):
            return DatasetView(self, range(*item.indices(len(self))))
        if isinstance(item, str):
            return SampleDict(self.read(*find_key(self.shards, item, self._key_tables)))
        number = operator.index(item)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"sample {item} of {len(self)}")
        ((shard, index),) = refs_at(self._ends, np.array([number]))
        return SampleDict(self.read(shard, index))

    def find(self, text: str) -> Sample:
        """Return the sample that a line of a log names.

        Args:
            text: ``shard[index]``, or a whole line that holds it: a message, a line of
                ``mmstream replay``, or a record of a quarantine file.

        Raises:
            ConfigError: the text names no sample, or none of this dataset.
            SampleError, ShardError, StorageError: it cannot be read.

        Examples:
            >>> dataset = mm.open_dataset("shards/")
            >>> line = "W [rank 0] shard-000000.tar[175] 000000176.jpg: truncated"
            >>> dataset.find(line)["__key__"]
            '000000176'
        """
        return SampleDict(self.read(*self.ref_of(text)))

    @checked()
    def ref_of(self, text: str) -> SampleRef:
        """Return (shard, index) of the sample that a line of a log names; errors as `find`."""
        shards = {info.name: shard for shard, info in enumerate(self.manifest.shards)}
        ref = parse_address(text, shards, self.counts)
        require_own(text, self.name_of(ref[0]), ref, self.shards)
        return ref

    def __repr__(self) -> str:
        size = f"{self.manifest.num_bytes / 1e6:,.1f} MB"
        bad = f", {len(self.bad):,} known to be bad" if len(self.bad) else ""
        samples = f"{count_text(len(self), 'sample')}{bad}"
        shards = count_text(self.num_shards, "shard")
        return f"<Dataset {self.store.url}: {samples}, {shards}, {size}>"

    def _repr_html_(self) -> str:
        from mmstream.display.overviews import dataset_html

        return dataset_html(self)

    @property
    def counts(self) -> IntArray:
        """Samples of each shard, int64 [num_shards]."""
        return self.shards.counts

    @property
    def corpus(self) -> Corpus:
        """The numbers and names from which an order is made.

        Where the dataset was baked, `num_bytes` is the size of its source. So the defaults of an
        order, and its steps, are those of the source.
        """
        names = [shard.name for shard in self.manifest.shards]
        sizes = np.array([shard.num_bytes for shard in self.manifest.shards], dtype=np.int64)
        checksums = [shard.sha256 for shard in self.manifest.shards]
        baked = self.manifest.source.get("bake")
        num_bytes = baked.get("source_bytes") if isinstance(baked, dict) else None
        if type(num_bytes) is not int or num_bytes <= 0:
            num_bytes = self.manifest.num_bytes
        return Corpus(self.counts, names, num_bytes, self.bad, sizes, checksums)

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
        return Order.from_corpus(self.corpus, drop_last=drop_last, **settings)

    def order_from_identity(self, identity: Mapping[str, Any]) -> Order:
        """Return the order that a saved state names; shards may have been appended since.

        Raises:
            StateError: the state belongs to a mixture or to another dataset.
        """
        if "sources" in identity:
            raise StateError("this state is of a mixture: give its JSON file")
        return Order.from_saved(identity, self.corpus)

    def read(self, shard: int, index: int) -> Sample:
        """Return one raw sample; raises what `dataset[i]` raises."""
        return self.shards.read(shard, index)


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
    @checked({"item": "give a position or a slice"}, late=True)
    def __getitem__(self, item: AnyInt | slice) -> Sample | DatasetView:
        """Return a sample, or a slice of these.

        Raises:
            IndexError: no such position.
        """
        if isinstance(item, slice):
            return DatasetView(self.dataset, self._rows[item])
        return self.dataset[self._rows[item]]

    def __iter__(self) -> Iterator[Sample]:
        return (self.dataset[row] for row in self._rows)

    def __repr__(self) -> str:
        return f"<{len(self):,} samples of {self.dataset!r}>"

    def _repr_html_(self) -> str:
        from mmstream.display.overviews import view_html

        return view_html(self)
