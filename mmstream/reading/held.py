"""Part of reading: samples that were fetched together, held until they are taken.

Held as columns, an entry a sample: numpy's arrays cost Python's garbage collector nothing, where a
window's dicts and views would be walked again and again. Dicts are made when samples are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.mixture import Mixture
from mmstream.errors import SampleError, ShardError
from mmstream.storage import LocalFile
from mmstream.tar.scan import Scan, blocks_of, scan_samples
from mmstream.types import IntArray, Sample, SampleLineage

__all__ = ["Fetched", "Group", "Outcome", "shard_error"]

Objects = npt.NDArray[np.object_]

Outcome: TypeAlias = Sample | SampleError | ShardError
"""A raw sample, or why there is none."""


MAX_SCANNED = 512
"""Samples whose headers are looked at together: 256 KiB of them at a time."""


class Group(NamedTuple):
    """Samples of one shard, in its order; all arrays have one entry a sample."""

    shard: int
    index: IntArray  # type: ignore[assignment]  # the field's name wins over tuple.index
    start: IntArray
    """Bytes [start, stop) of the shard."""
    stop: IntArray
    place: IntArray
    """Of the sample among those that were asked for."""

    def part(self, first: int, end: int) -> Group:
        """Return samples [first, end)."""
        return Group(self.shard, *(column[first:end] for column in self[1:]))

    @property
    def range(self) -> tuple[int, int, int]:
        """Shard and bytes of all samples together."""
        return self.shard, int(self.start[0]), int(self.stop[-1])

    @property
    def num_bytes(self) -> int:
        """Length of the range."""
        return int(self.stop[-1] - self.start[0])


class Fetched:
    """Samples that were asked for together; each can be taken once.

    Args:
        dataset: what they are of.
        num_samples: how many.
        zero_copy: fields will be views of what was read instead of bytes of their own.
    """

    def __init__(self, dataset: Dataset | Mixture, num_samples: int, *, zero_copy: bool) -> None:
        self._dataset, self._zero_copy = dataset, zero_copy
        self._num_samples = num_samples
        self._errors: dict[int, ShardError] = {}
        self._put: list[tuple[Group, Any, int, LocalFile | None]] = []
        self._key, self._url, self._source = (self._objects() for _ in range(3))
        self._data = self._parts()
        self._shard, self._own_shard, self._index = (self._ints() for _ in range(3))
        self._start, self._stop = self._ints(), self._ints()
        self._is_odd, self._is_held = np.ones((2, num_samples), dtype=np.bool_)
        # Of first members, second members, and so on: field, and its part of which data.
        self._members: list[tuple[Objects, Objects, IntArray, IntArray]] = []

    def __len__(self) -> int:
        """Samples that were not taken yet."""
        return int(self._is_held.sum())

    def put_error(self, places: IntArray, error: ShardError) -> None:
        """Hold why samples cannot be had."""
        self._errors |= dict.fromkeys(places.tolist(), error)

    def put(self, group: Group, data: Any, begin: int, file: LocalFile | None = None) -> None:
        """Hold samples; `find` has to follow.

        Args:
            group: which.
            data: bytes of their shard, or a view or map of them; for views they stay in memory.
            begin: where in the shard they start.
            file: the shard, to read fields from again when samples are taken, instead of holding
                them here; None: hold them.
        """
        self._put.append((group, data, begin, file))

    def find(self) -> None:
        """Find the members of all samples that were put since the time before."""
        put, self._put = self._put, []
        if not put:
            return
        groups, data, begins, files = zip(*put, strict=True)
        of = np.repeat(np.arange(len(put)), [group.place.size for group in groups])
        index, start, stop, place = map(np.concatenate, zip(*(g[1:] for g in groups), strict=True))
        begin = np.array(begins)[of]
        start, stop = start - begin, stop - begin
        origins = [_locate(self._dataset, group.shard) for group in groups]
        self._source[place] = _column([source for source, _, _ in origins])[of]
        self._url[place] = _column([dataset.url_of(shard) for _, dataset, shard in origins])[of]
        self._own_shard[place] = np.array([shard for _, _, shard in origins])[of]
        self._shard[place] = np.array([group.shard for group in groups])[of]
        self._index[place], self._start[place], self._stop[place] = index, start, stop
        held = _column([memoryview(one) for one in data])[of]
        file = _column(files)[of]
        blocks = [blocks_of(one) for one in data]
        for first in range(0, place.size, MAX_SCANNED):
            some = slice(first, first + MAX_SCANNED)
            scan = scan_samples(blocks, of[some], start[some], stop[some])
            self._hold(place[some], held[some], begin[some], file[some], scan)

    def _hold(
        self, place: IntArray, data: Objects, begin: IntArray, file: Objects, scan: Scan
    ) -> None:
        """Hold what was found in samples: where in the data it lies, or bytes of its own."""
        self._key[place], self._is_odd[place] = scan.keys, scan.odd
        for depth, (field, start, stop) in enumerate(scan.members):
            if depth == len(self._members):
                self._members.append((self._objects(), self._parts(), self._ints(), self._ints()))
            fields, parts, starts, stops = self._members[depth]
            part, start, stop = self._own(data, begin, file, start, stop)
            fields[place], parts[place], starts[place], stops[place] = field, part, start, stop
        odd = place[scan.odd]
        self._data[odd], self._start[odd], self._stop[odd] = self._own(
            data[scan.odd], begin[scan.odd], file[scan.odd], self._start[odd], self._stop[odd]
        )

    def _own(
        self, data: Objects, begin: IntArray, file: Objects, start: IntArray, stop: IntArray
    ) -> tuple[Objects, IntArray, IntArray]:
        """Return what bytes [start, stop) of data are to be taken from, and their places there."""
        if self._zero_copy:
            return data, start, stop
        if file.size and file[0] is not None:  # what `find` finds together is of one range
            return file, start + begin, stop + begin
        return _copies(data, start, stop), start - start, stop - start

    def take(self, place: int) -> Outcome:
        """Return a sample."""
        return self.take_all(place, place + 1)[0]

    def take_all(self, first: int, end: int) -> list[Outcome]:
        """Return the samples of places [first, end)."""
        here = slice(first, end)
        keys, urls, own_shards, indexes = (
            column[here].tolist() for column in (self._key, self._url, self._own_shard, self._index)
        )
        samples: list[Sample] = [
            {"__key__": key, "__url__": url} for key, url in zip(keys, urls, strict=True)
        ]
        failed = self._add_fields(samples, here)
        lineages = map(
            SampleLineage._make, zip(own_shards, indexes, *repeat(repeat(0), 3), strict=False)
        )
        for sample, lineage in zip(samples, lineages, strict=True):
            sample["__lineage__"] = lineage
        if isinstance(self._dataset, Mixture):
            for sample, source in zip(samples, self._source[here].tolist(), strict=True):
                sample["__source__"] = source
        outcomes: list[Outcome] = [*samples]
        for row in np.flatnonzero(self._is_odd[here]).tolist():
            outcomes[row] = self._alone(first + row)
        for row in failed:
            outcomes[row] = self._again(first + row)
        for column in (self._data, *(parts for _, parts, _, _ in self._members)):
            column[here] = b""
        self._is_odd[here], self._is_held[here] = True, False
        return outcomes

    def _add_fields(self, samples: list[Sample], here: slice) -> set[int]:
        """Add the fields of samples; return the rows that cannot be taken as they were found."""
        failed: set[int] = set()
        for columns in self._members:
            found = zip(samples, *(column[here].tolist() for column in columns), strict=True)
            for row, (sample, field, part, start, stop) in enumerate(found):
                if field is not None:
                    try:
                        sample[field] = part[start:stop]  # all of some bytes are these bytes
                    except OSError:
                        failed.add(row)
        return failed

    def _alone(self, place: int) -> Outcome:
        """Return a sample that is not like most, or why there is none."""
        if place in self._errors:
            return self._errors[place]
        shard, index = int(self._shard[place]), int(self._index[place])
        try:
            part = memoryview(self._data[place][self._start[place] : self._stop[place]])
            return self._dataset.parse(part, shard, index, zero_copy=self._zero_copy)
        except SampleError as error:
            return error
        except OSError:
            return self._again(place)

    def _again(self, place: int) -> Outcome:
        """Return a sample whose shard was changed or failed since it was looked at: read now.

        Raises:
            StorageError: storage failed.
        """
        shard, index = int(self._shard[place]), int(self._index[place])
        start, stop = self._dataset.offsets(shard)[index : index + 2].tolist()
        data = self._dataset.read_ranges([(shard, start, stop)])[0]
        if isinstance(data, OSError):
            return shard_error(self._dataset, data, shard, stop)
        try:
            return self._dataset.parse(data, shard, index)
        except SampleError as bad:
            return bad

    def _objects(self) -> Objects:
        return np.full(self._num_samples, None, dtype=np.object_)

    def _parts(self) -> Objects:
        return np.full(self._num_samples, b"", dtype=np.object_)

    def _ints(self) -> IntArray:
        return np.zeros(self._num_samples, dtype=np.int64)


def shard_error(dataset: Dataset | Mixture, error: OSError, shard: int, stop: int) -> ShardError:
    """Return what is wrong with a shard that was not read up to byte `stop`.

    Raises:
        StorageError: nothing is, its storage failed.
    """
    found = dataset.explain(error, shard, stop)
    if not isinstance(found, ShardError):
        raise found
    return found


def _locate(dataset: Dataset | Mixture, shard: int) -> tuple[str, Dataset, int]:
    """Return the name of a shard's source, its dataset, and the shard's number in that."""
    return dataset.locate(shard) if isinstance(dataset, Mixture) else ("", dataset, shard)


def _copies(data: Objects, start: IntArray, stop: IntArray) -> Objects:
    """Return bytes [start, stop) of each entry."""
    bounds = zip(data.tolist(), start.tolist(), stop.tolist(), strict=True)
    return _column([bytes(one[first:end]) for one, first, end in bounds])


def _column(values: Sequence[Any]) -> Objects:
    """Return objects as an array, whatever they are; numpy would look into views and bytes."""
    return np.fromiter(values, np.object_, len(values))
