"""Part of reading: from (shard, index) pairs to raw samples, in few and long ranges.

Samples that lie close come in one range. A range of a remote shard is a request, and all of a call
travel side by side. Ranges of local shards are read a few megabytes at a time, so that the memory
of some serves the next. For views they are pieces of the mapped file, nothing is copied, and a
sample's headers are parsed when it is taken: until then it is two numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, repeat
from mmap import MADV_WILLNEED, PAGESIZE, mmap
from operator import itemgetter
from typing import NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from mmstream.dataset import Dataset
from mmstream.errors import SampleError, ShardError
from mmstream.mixing import Mixture
from mmstream.sample import Sample
from mmstream.storage import LocalStore, RemoteStore

__all__ = ["Fetched", "Fetcher", "Outcome", "Ref"]

MAX_GAP_BYTES = {LocalStore: 4 * 1024, RemoteStore: 256 * 1024}
"""Samples closer than this come in one range: at 100 MB/s, 256 KiB cost 3 ms, a request 20."""

MAX_RANGE_BYTES = 8 * 1024 * 1024
"""Longest merged range: long enough for full bandwidth, short enough to run several at once."""

MAX_LOT_BYTES = 8 * 1024 * 1024
"""Bytes of local ranges that are read before they are cut into samples."""

MAX_MAPS = 256
"""Shards mapped at a time: each holds an open file, of which a process may often have 1,024."""

Outcome: TypeAlias = Sample | SampleError | ShardError
"""A raw sample, or why there is none."""

Ref: TypeAlias = tuple[int, int]
"""(shard, index)."""

Data: TypeAlias = bytes | memoryview | OSError
"""What came of a range."""


class Span(NamedTuple):
    """Where a sample lies: bytes [start, stop) of its shard."""

    shard: int
    index: int  # type: ignore[assignment]  # the field's name wins over tuple.index
    start: int
    stop: int
    place: int
    """Of the sample among those that were asked for."""


Group: TypeAlias = Sequence[Span]
"""Spans that come in one range."""


class Fetched:
    """Samples that were asked for together; each can be taken once.

    Held as dicts, or for views as places in ranges: lists of numbers cost Python's garbage
    collector nothing, where a window's dicts and views would be walked again and again.
    """

    def __init__(self, dataset: Dataset | Mixture, num_samples: int) -> None:
        self._dataset = dataset
        self._ready: list[Outcome | None] = [None] * num_samples
        self._ranges: list[memoryview] = []
        self._range_of = [0] * num_samples
        self._columns = tuple([0] * num_samples for _ in range(4))

    def put(self, place: int, outcome: Outcome) -> None:
        """Hold a sample that is at hand."""
        self._ready[place] = outcome

    def put_range(self, group: Group, data: memoryview) -> None:
        """Hold a range whose samples shall be views of it."""
        shards, indexes, starts, stops = self._columns
        begin = group[0].start
        for shard, index, start, stop, place in group:
            self._range_of[place] = len(self._ranges)
            shards[place], indexes[place] = shard, index
            starts[place], stops[place] = start - begin, stop - begin
        self._ranges.append(data)

    def take(self, place: int) -> Outcome:
        """Return a sample."""
        found = self._ready[place]
        if found is not None:
            self._ready[place] = None
            return found
        shards, indexes, starts, stops = self._columns
        part = self._ranges[self._range_of[place]][starts[place] : stops[place]]
        return parse(self._dataset, part, shards[place], indexes[place], views=True)


class Fetcher:
    """Fetches samples for a `Reader`, in any of its threads."""

    def __init__(self, dataset: Dataset | Mixture, *, views: bool) -> None:
        self._dataset, self._views = dataset, views
        self._maps: WeakValueDictionary[int, mmap] = WeakValueDictionary()  # views keep them alive
        self._num_bytes = self._num_requests = 0
        self._lock = threading.Lock()

    def fetch(self, refs: Iterable[Ref]) -> Fetched:
        """Return samples; errors of data become values here.

        Raises:
            StorageError: storage failed after retries.
        """
        wanted = sorted((shard, index, place) for place, (shard, index) in enumerate(refs))
        fetched = Fetched(self._dataset, len(wanted))
        groups: list[Group] = []
        for shard, of_shard in groupby(wanted, itemgetter(0)):
            _, indexes, places = zip(*of_shard, strict=True)
            try:
                offsets = self._dataset.offsets(shard)
            except ShardError as error:
                for place in places:
                    fetched.put(place, error)
                continue
            bounds = offsets[np.add.outer((0, 1), indexes)].tolist()
            max_gap_bytes = MAX_GAP_BYTES[type(self._dataset.store_of(shard))]
            groups += _merge(map(Span, repeat(shard), indexes, *bounds, places), max_gap_bytes)
        for group, data in self._read(groups):
            if self._views and isinstance(data, memoryview):
                fetched.put_range(group, data)
            else:
                self._split(group, data, fetched)
        with self._lock:
            self._num_bytes += sum(group[-1].stop - group[0].start for group in groups)
            self._num_requests += len(groups)
        return fetched

    def pop_counts(self) -> tuple[int, int]:
        """Return how many bytes and ranges were read since the call before."""
        with self._lock:
            found = self._num_bytes, self._num_requests
            self._num_bytes = self._num_requests = 0
        return found

    def _read(self, groups: Sequence[Group]) -> Iterator[tuple[Group, Data]]:
        """Yield each group with its bytes; for views, as a memoryview."""
        maps = [self._mapped(group) for group in groups] if self._views else [None] * len(groups)
        lots: dict[int, list[Group]] = {}  # number 0 is what is far away
        number, num_bytes = 1, 0
        for group, mapped in zip(groups, maps, strict=True):
            if mapped is not None:
                yield group, mapped
            elif not self._is_near(group):
                lots.setdefault(0, []).append(group)
            else:
                num_bytes += group[-1].stop - group[0].start
                lots.setdefault(number, []).append(group)
                if num_bytes >= MAX_LOT_BYTES:
                    number, num_bytes = number + 1, 0
        for lot in lots.values():
            found = self._dataset.read_ranges([_range(group) for group in lot])
            yield from zip(lot, map(self._as_view, found), strict=True)
            del found  # before the next lot is read

    def _is_near(self, group: Group) -> bool:
        return isinstance(self._dataset.store_of(group[0].shard), LocalStore)

    def _as_view(self, data: Data) -> Data:
        return memoryview(data) if self._views and isinstance(data, bytes) else data

    def _mapped(self, group: Group) -> memoryview | None:
        """Return a range of a mapped shard; None: it has to be read, be it only for the error."""
        shard, start, stop = _range(group)
        if not self._is_near(group):
            return None
        with self._lock:
            found = self._maps.get(shard)
            if found is None and len(self._maps) < MAX_MAPS:
                try:
                    found = self._maps[shard] = self._dataset.map_shard(shard)
                except (OSError, ValueError):  # ValueError: an empty file
                    return None
        if found is None or len(found) < stop:
            return None
        page = start // PAGESIZE * PAGESIZE
        found.madvise(MADV_WILLNEED, page, stop - page)  # all ranges come in at once, behind us
        return memoryview(found)[start:stop]

    def _split(self, group: Group, data: Data, fetched: Fetched) -> None:
        """Cut a range into its samples."""
        shard, begin, end = _range(group)
        if isinstance(data, OSError):
            error = self._dataset.explain(data, shard, end)
            if not isinstance(error, ShardError):
                raise error
            if len(group) == 1:
                fetched.put(group[0].place, error)
                return
            for span in group:  # samples before the cut are still good
                self._split([span], self._dataset.read_ranges([_range([span])])[0], fetched)
            return
        view = memoryview(data)
        for _, index, start, stop, place in group:
            part = view[start - begin : stop - begin]
            fetched.put(place, parse(self._dataset, part, shard, index, views=self._views))


def parse(
    dataset: Dataset | Mixture, data: memoryview, shard: int, index: int, *, views: bool
) -> Outcome:
    """Return the sample in a byte range, or why there is none."""
    try:
        return dataset.parse(data, shard, index, views=views)
    except SampleError as error:
        return error


def _range(group: Group) -> tuple[int, int, int]:
    return group[0].shard, group[0].start, group[-1].stop


def _merge(spans: Iterable[Span], max_gap_bytes: int) -> list[Group]:
    """Group a shard's spans, sorted, that one range shall fetch."""
    groups: list[list[Span]] = []
    for span in spans:
        if groups:
            last = groups[-1]
            near = span.start - last[-1].stop <= max_gap_bytes
            if near and span.stop - last[0].start <= MAX_RANGE_BYTES:
                last.append(span)
                continue
        groups.append([span])
    return list(groups)
