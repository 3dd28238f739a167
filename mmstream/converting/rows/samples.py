"""Samples of another data set: tars that mmstream, webdataset or img2dataset wrote.

    tars -> SAMPLES (a `RowSource`) -> plan -> shards of another size, order or split

A sample is written again as it is: the same key, the same fields, byte for byte. Samples that the
bad list names are left out. Untrusted tars may use the same keys. Of two samples with one key in
a shard, the second one gets its number after its key: ``0001-7``. Side by side they would be read
as one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np

from mmstream.converting.draft import RowError, StoredSample
from mmstream.converting.rows.records import Row, RowRange, RowSource, encodable, identity_of
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.keys import read_keys
from mmstream.errors import ChecksumError, SampleError
from mmstream.media.fields import json_object
from mmstream.tar.samples import is_reserved
from mmstream.types import IntArray

SAMPLES_AT_ONCE = 64
"""Samples that are fetched together from an object store."""

KEYS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class SampleRange(RowRange):
    """The samples of one shard."""

    dataset: Dataset
    indexes: IntArray
    """int64 [n] 0-based numbers of the rows."""
    shards: IntArray
    """int64 [n] positions of their shards in the data set."""
    positions: IntArray
    """int64 [n] positions of the samples in these shards."""
    is_temporary: bool = False
    """The tars are copies in a temporary folder of this machine."""

    def __len__(self) -> int:
        return len(self.indexes)

    def read(self) -> Iterator[Row]:
        """Yield the samples in order. One that cannot be read has a `RowError` as its value.

        The keys of the shard are in memory.

        Raises:
            ShardError: A shard is missing, or is another one than its index.
            StorageError: The storage failed after retries.
        """
        keys: set[str] = set()
        for number, value in enumerate(self._values()):
            index = int(self.indexes[number])
            if isinstance(value, StoredSample):
                while value.key in keys:
                    value = StoredSample(f"{value.key}-{index + 1}", value.fields)
                keys.add(value.key)
            name = encodable(self.dataset.name_of(int(self.shards[number])))
            yield Row(index, name, int(self.positions[number]) + 1, value)

    def _values(self) -> Iterator[StoredSample | RowError]:
        refs = zip(self.shards.tolist(), self.positions.tolist(), strict=True)
        if not self.dataset.store.access.concurrent:
            yield from (self._value(ref) for ref in refs)
            return
        listed = list(refs)
        with ThreadPoolExecutor(SAMPLES_AT_ONCE) as pool:
            for start in range(0, len(listed), SAMPLES_AT_ONCE):
                yield from pool.map(self._value, listed[start : start + SAMPLES_AT_ONCE])

    def _value(self, ref: tuple[int, int]) -> StoredSample | RowError:
        try:
            sample = self.dataset.read(*ref)
        except (SampleError, ChecksumError) as error:
            return RowError(str(error))
        fields = {name: bytes(data) for name, data in sample.items() if not is_reserved(name)}
        return StoredSample(str(sample["__key__"]), fields)


@dataclass(frozen=True)
class SampleSource(RowSource):
    """A data set of tars."""

    name: str
    dataset: Dataset
    limit: int | None = None
    is_temporary: bool = False
    """The tars are copies in a temporary folder of this machine."""
    splits: Mapping[str, range] = field(default_factory=dict)

    @property
    def num_left_out(self) -> int:
        """Samples that the bad list names."""
        return len(self._left_out)

    @cached_property
    def _left_out(self) -> IntArray:
        """int64 [num_bad], ascending: numbers of the bad samples, over all shards."""
        return np.sort(self._starts[self.dataset.bad[:, 0]] + self.dataset.bad[:, 1])

    @cached_property
    def _starts(self) -> IntArray:
        """int64 [num_shards]: number of the first sample of each shard."""
        counts = self.dataset.counts
        starts: IntArray = np.cumsum(counts) - counts
        return starts

    @property
    def num_rows(self) -> int:
        """Number of samples that are not bad, up to the limit."""
        total = len(self.dataset) - len(self._left_out)
        return total if self.limit is None else min(total, self.limit)

    @property
    def sha256(self) -> str:
        """Checksum of the list of shards with their sizes and checksums, and of the bad list."""
        shards = [
            (encodable(shard.name), shard.num_samples, shard.num_bytes, shard.sha256)
            for shard in self.dataset.manifest.shards
        ]
        return hashlib.sha256(
            msgspec.json.encode([shards, self._left_out.tolist(), self.limit])
        ).hexdigest()

    def select(self, rows: IntArray | range) -> SampleRange:
        """Return samples by their numbers from 0, in the given order.

        With samples 1 and 2 of 5 bad, the rows 0, 1 and 2 are the samples 0, 3 and 4: the bad
        numbers less the bad ones before them are 1 and 1, and rows from there on move by 2.
        """
        index = np.asarray(rows, dtype=np.int64)
        before = self._left_out - np.arange(len(self._left_out))
        number = index + np.searchsorted(before, index, side="right")
        shards = np.searchsorted(self._starts, number, side="right") - 1
        positions = number - self._starts[shards]
        return SampleRange(self.dataset, index, shards, positions, self.is_temporary)

    def identities(self, field: str | None) -> Iterator[tuple[bytes, bool]]:
        """Yield the identity of every sample, which is its key.

        With `field`, it is the value of this key in the sample's ``json``, and all samples are
        read; otherwise one header of each.
        """
        for start in range(0, self.num_rows, KEYS_AT_ONCE):
            rows = self.select(range(start, min(self.num_rows, start + KEYS_AT_ONCE)))
            if field is None:
                refs = list(zip(rows.shards.tolist(), rows.positions.tolist(), strict=True))
                for ref, key in zip(refs, read_keys(self.dataset.shards, refs), strict=True):
                    yield (key if key is not None else str(ref)).encode("utf-8", "replace"), False
                continue
            for row in rows.read():
                if isinstance(row.value, StoredSample):
                    content = json_object(row.value.fields.get("json"))
                    own_key = row.value.key.encode("utf-8", "replace")
                    has_field = content.get(field) is not None
                    yield identity_of(content, field) if has_field else (own_key, False)
                else:
                    yield str((row.file, row.number)).encode(), False
