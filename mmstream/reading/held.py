"""Samples that were read together, held until they are taken.

Bytes are compared with their checksums before anything is made of them.

They are held as columns with one entry per sample. Numpy arrays cost Python's garbage collector
nothing, while it would walk the dicts of a whole window again and again. Dicts are made when
samples are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.dataset.index import wrong_samples
from mmstream.dataset.source import ShardSource
from mmstream.errors import SampleError, ShardError
from mmstream.reading.large_samples import NO_CHECKSUM, LargeSample, LargeSamples
from mmstream.reading.step import Outcome
from mmstream.storage import ObjectStat
from mmstream.tar.scan import Scan, blocks_of, scan_samples
from mmstream.types import IntArray, Sample, SampleLineage

ObjectArray = npt.NDArray[np.object_]

MAX_LARGE = 16
"""Large samples of a step whose other headers are read side by side."""

MAX_SCANNED = 512
"""Samples whose headers are parsed together: 256 KiB of headers at a time."""


class SampleRange(NamedTuple):
    """Samples of one shard, in its order. Every array has one entry per sample."""

    shard: int
    index: IntArray  # type: ignore[assignment]  # the field's name wins over tuple.index
    start: IntArray
    """The sample is bytes [start, stop) of the shard."""
    stop: IntArray
    position: IntArray
    """Position among the samples that were asked for."""
    checksum: IntArray
    """CRC-32C of the sample's bytes; `NO_CHECKSUM` where there is none."""

    def slice(self, first: int, end: int) -> SampleRange:
        """Return samples [first, end)."""
        return SampleRange(self.shard, *(column[first:end] for column in self[1:]))

    def select(self, is_wanted: npt.NDArray[np.bool_]) -> SampleRange:
        """Return some of the samples."""
        return SampleRange(self.shard, *(column[is_wanted] for column in self[1:]))

    @property
    def bounds(self) -> tuple[int, int, int]:
        """Shard, and the bytes [start, stop) of all samples together."""
        return self.shard, int(self.start[0]), int(self.stop[-1])

    @property
    def num_bytes(self) -> int:
        """Length of the range."""
        return int(self.stop[-1] - self.start[0])


class SampleTable(NamedTuple):
    """Samples of several shards, by shard and then by index. Every array has one entry per sample.

    The columns are those of `SampleRange`.
    """

    shard: IntArray
    index: IntArray  # type: ignore[assignment]
    start: IntArray
    stop: IntArray
    position: IntArray
    checksum: IntArray

    def select(self, is_wanted: npt.NDArray[np.bool_] | slice) -> SampleTable:
        """Return some of the samples."""
        return SampleTable(*(column[is_wanted] for column in self))

    def range(self, first: int, end: int) -> SampleRange:
        """Return samples [first, end), which are of one shard."""
        return SampleRange(int(self.shard[first]), *(column[first:end] for column in self[1:]))


class _Members(NamedTuple):
    """First (second, ...) members of all samples: ``data[position][start:stop]`` is the payload."""

    field: ObjectArray
    """None where a sample has no such member."""
    data: ObjectArray
    start: IntArray
    stop: IntArray


class HeldSamples:
    """Samples that were asked for together. Each can be taken once.

    Args:
        source: what they belong to.
        num_samples: how many there are.
        is_viewed: tells which fields will be views of what was read, not bytes of their own. None:
            none.
        large_samples: makes samples of the first bytes of large ones.

    Attributes:
        large: samples of which only the first bytes are put, by position.
        num_bytes: bytes of all samples that were put.
        num_wrong: samples whose bytes are not those of their checksums. A ChecksumError takes
            their place.
    """

    def __init__(
        self,
        source: ShardSource,
        num_samples: int,
        *,
        is_viewed: Callable[[str], bool] | None = None,
        large_samples: LargeSamples | None = None,
    ) -> None:
        self._source = source
        self._large_samples = large_samples
        self.large: dict[int, LargeSample] = {}
        self._is_viewed = is_viewed
        self._num_samples = num_samples
        self.num_bytes = 0
        self.num_wrong = 0
        self._errors: dict[int, ShardError | SampleError] = {}
        self._mapped_stats: dict[int, ObjectStat] = {}
        self._is_mixture = False
        self._key, self._url, self._source_name = (self._objects(None) for _ in range(3))
        self._shard, self._local_shard, self._index = (self._integers() for _ in range(3))
        # Whole samples, for those whose members are not plain files.
        self._data = self._objects(b"")
        self._start, self._stop = self._integers(), self._integers()
        self._is_irregular = np.ones(num_samples, dtype=np.bool_)
        self._is_held = np.ones(num_samples, dtype=np.bool_)
        self._members: list[_Members] = []

    def __len__(self) -> int:
        """Samples that were not taken yet."""
        return int(self._is_held.sum())

    def put_error(self, positions: IntArray, error: ShardError | SampleError) -> None:
        """Hold why samples cannot be had."""
        self._errors |= dict.fromkeys(positions.tolist(), error)

    def put(
        self,
        samples: SampleTable,
        data: Sequence[Any],
        data_starts: IntArray,
        data_of_sample: IntArray,
        mapped_stats: Mapping[int, ObjectStat] | None = None,
    ) -> None:
        """Hold samples that lie in pieces of data, and find their members.

        Samples that are not those of their checksums become errors.

        Args:
            samples: which ones.
            data: bytes of shards, or views or maps of them. With views they stay in memory.
            data_starts: the byte where each of `data` begins, as `samples` counts them.
            data_of_sample: number of the piece of data that has each sample; it never falls.
            mapped_stats: of the files that `data` are maps of, by shard. A file that is written
                over in place changes what was mapped, so it is compared again when samples are
                taken.
        """
        self._mapped_stats.update(mapped_stats or {})
        is_right = np.ones(samples.position.size, dtype=np.bool_)
        for number in np.unique(data_of_sample[samples.checksum != NO_CHECKSUM]).tolist():
            first, end = np.searchsorted(data_of_sample, (number, number + 1)).tolist()
            of_data = samples.range(first, end)
            start, stop = of_data.start - data_starts[number], of_data.stop - data_starts[number]
            for wrong in wrong_samples(data[number], start, stop, of_data.checksum):
                self._put_wrong(of_data.shard, of_data.index[wrong], of_data.position[wrong])
                self.num_wrong += 1
                is_right[first + wrong] = False
        if not is_right.all():
            samples, data_of_sample = samples.select(is_right), data_of_sample[is_right]
        if samples.position.size:
            views = [memoryview(piece) for piece in data]
            self._scan(samples, views, data_starts[data_of_sample], data_of_sample)

    def _put_wrong(self, shard: int, index: int, position: int) -> None:
        """Hold that the bytes of a sample are not those of its checksum."""
        location = self._source.locate(shard)
        error = location.dataset.shards.checksum_error(location.shard, int(index))
        self._errors[int(position)] = error

    def _scan(
        self,
        samples: SampleTable,
        data: list[memoryview],
        data_start: IntArray,
        range_of_sample: IntArray,
    ) -> None:
        """Find the members of samples. Arrays have one entry per sample."""
        shard, index, _, _, position, _ = samples
        start, stop = samples.start - data_start, samples.stop - data_start
        self.num_bytes += int((stop - start).sum())
        shards = shard.tolist()
        locations = {one_shard: self._source.locate(one_shard) for one_shard in set(shards)}
        urls = {
            one_shard: location.dataset.shards.url_of(location.shard)
            for one_shard, location in locations.items()
        }
        names = [locations[one_shard].source for one_shard in shards]
        if any(names):
            self._is_mixture = True
            self._source_name[position] = _object_array(names)
        self._url[position] = _object_array([urls[one_shard] for one_shard in shards])
        self._local_shard[position] = [locations[one_shard].shard for one_shard in shards]
        self._shard[position], self._index[position] = shard, index
        self._start[position], self._stop[position] = start, stop
        data_of_sample = _object_array(data)[range_of_sample]
        if self.large:
            is_large = np.isin(position, list(self.large))
            for i in np.flatnonzero(is_large).tolist():
                self._data[position[i]] = bytes(data_of_sample[i][start[i] : stop[i]])
            position, range_of_sample = position[~is_large], range_of_sample[~is_large]
            start, stop = start[~is_large], stop[~is_large]
            data_of_sample = data_of_sample[~is_large]
        blocks = [blocks_of(one_range) for one_range in data]
        for first in range(0, position.size, MAX_SCANNED):
            batch = slice(first, first + MAX_SCANNED)
            scan = scan_samples(blocks, range_of_sample[batch], start[batch], stop[batch])
            self._hold(position[batch], data_of_sample[batch], scan)

    def _hold(self, position: IntArray, data: ObjectArray, scan: Scan) -> None:
        """Hold the members of samples: views of `data`, or bytes of their own."""
        self._key[position], self._is_irregular[position] = scan.keys, scan.irregular
        for depth, (field, start, stop) in enumerate(scan.members):
            if depth == len(self._members):
                columns = self._objects(None), self._objects(b"")
                self._members.append(_Members(*columns, self._integers(), self._integers()))
            members = self._members[depth]
            members.field[position] = field
            members.data[position], members.start[position], members.stop[position] = self._own(
                data, start, stop, self._are_viewed(field)
            )
        irregular = position[scan.irregular]
        are_viewed = np.full(irregular.size, self._is_viewed is not None)
        self._data[irregular], self._start[irregular], self._stop[irregular] = self._own(
            data[scan.irregular], self._start[irregular], self._stop[irregular], are_viewed
        )

    def _are_viewed(self, fields: ObjectArray) -> npt.NDArray[np.bool_]:
        """Return which fields stay views of what was read."""
        if self._is_viewed is None:
            return np.zeros(fields.size, dtype=np.bool_)
        names = fields.tolist()
        is_viewed = {name: name is None or self._is_viewed(name) for name in set(names)}
        return np.fromiter(map(is_viewed.__getitem__, names), np.bool_, len(names))

    def _own(
        self,
        data: ObjectArray,
        start: IntArray,
        stop: IntArray,
        are_viewed: npt.NDArray[np.bool_],
    ) -> tuple[ObjectArray, IntArray, IntArray]:
        """Return what bytes [start, stop) of data are taken from, and where they lie in it."""
        if are_viewed.all():
            return data, start, stop
        copied = ~are_viewed
        data, start, stop = data.copy(), start.copy(), stop.copy()
        data[copied] = _copies(data[copied], start[copied], stop[copied])
        stop[copied] -= start[copied]
        start[copied] = 0
        return data, start, stop

    def take(self, position: int) -> Outcome:
        """Return the sample at a position."""
        return self.take_all(position, position + 1)[0]

    def take_all(self, first: int, end: int) -> list[Outcome]:
        """Return the samples at positions [first, end)."""
        taken = slice(first, end)
        self._drop_changed_maps(first, end)
        keys, urls, local_shards, indexes = (
            column[taken].tolist()
            for column in (self._key, self._url, self._local_shard, self._index)
        )
        samples: list[Sample] = [
            {"__key__": key, "__url__": url} for key, url in zip(keys, urls, strict=True)
        ]
        for members in self._members:
            columns = (column[taken].tolist() for column in members)
            for sample, field, data, start, stop in zip(samples, *columns, strict=True):
                if field is not None:
                    sample[field] = data[start:stop]  # a slice of whole bytes copies nothing
        lineages = map(
            SampleLineage._make,  # half the time of a call
            zip(local_shards, indexes, *repeat(repeat(0), 3), strict=False),
        )
        for sample, lineage in zip(samples, lineages, strict=True):
            sample["__lineage__"] = lineage
        if self._is_mixture:
            for sample, name in zip(samples, self._source_name[taken].tolist(), strict=True):
                sample["__source__"] = name
        outcomes: list[Outcome] = [*samples]
        large = [position for position in sorted(self.large) if first <= position < end]
        outcomes_of_large = self._assemble(large) if large else {}
        for row in np.flatnonzero(self._is_irregular[taken]).tolist():
            outcome = outcomes_of_large.get(first + row)
            outcomes[row] = self._parse(first + row) if outcome is None else outcome
        for column in (self._data, *(members.data for members in self._members)):
            column[taken] = b""
        self._is_irregular[taken], self._is_held[taken] = True, False
        return outcomes

    def _assemble(self, positions: Sequence[int]) -> dict[int, Outcome]:
        """Return large samples by position, but for those with an error."""
        positions = [position for position in positions if position not in self._errors]
        with ThreadPoolExecutor(MAX_LARGE, thread_name_prefix="mmstream-large") as pool:
            outcomes = list(pool.map(self._assemble_one, positions))
        return dict(zip(positions, outcomes, strict=True))

    def _assemble_one(self, position: int) -> Outcome:
        assert self._large_samples is not None, "only it makes samples large"
        shard, index = int(self._shard[position]), int(self._index[position])
        return self._large_samples.sample(shard, index, self.large[position], self._data[position])

    def _drop_changed_maps(self, first: int, end: int) -> None:
        """Hold an error for samples in a map whose file was changed since it was mapped."""
        shards = self._shard[first:end]
        for shard in self._mapped_stats.keys() & set(shards.tolist()):
            location = self._source.locate(shard)
            error = location.dataset.shards.change_since(location.shard, self._mapped_stats[shard])
            if error is None:
                continue
            positions = first + np.flatnonzero(shards == shard)
            if location.dataset.has_checksums:  # they decide, once each sample was read again
                for position in positions.tolist():
                    self._put_wrong(shard, self._index[position], position)
            else:
                self.put_error(positions, error)
            self._is_irregular[positions] = True

    def _parse(self, position: int) -> Outcome:
        """Return a sample that the scan left out, or why there is none."""
        if position in self._errors:
            return self._errors[position]
        source, dataset, shard = self._source.locate(int(self._shard[position]))
        data = memoryview(self._data[position])[self._start[position] : self._stop[position]]
        try:
            zero_copy = self._is_viewed is not None
            sample = dataset.shards.parse(
                data, shard, int(self._index[position]), zero_copy=zero_copy
            )
        except SampleError as error:
            return error
        for name, value in sample.items():
            if isinstance(value, memoryview) and self._is_viewed and not self._is_viewed(name):
                sample[name] = bytes(value)
        if source:
            sample["__source__"] = source
        return sample

    def _objects(self, value: Any) -> ObjectArray:
        return np.full(self._num_samples, value, dtype=np.object_)

    def _integers(self) -> IntArray:
        return np.zeros(self._num_samples, dtype=np.int64)


def _copies(data: ObjectArray, start: IntArray, stop: IntArray) -> ObjectArray:
    """Return bytes [start, stop) of each entry."""
    bounds = zip(data.tolist(), start.tolist(), stop.tolist(), strict=True)
    return _object_array([bytes(entry[first:end]) for entry, first, end in bounds])


def _object_array(values: Sequence[Any]) -> ObjectArray:
    """Return objects as an array. `np.array` would look into bytes and views."""
    return np.fromiter(values, np.object_, len(values))
