"""Part of reading: from (shard, index) pairs to raw samples, in few and long ranges.

Samples that lie close come in one range. A range of a remote shard is a request, and all of a call
travel side by side. Ranges of local shards are read two megabytes at a time, so that the memory of
some serves the next; what the system's page cache then holds is forgotten here, and read again when
a sample is taken. For views shards are mapped instead, and nothing is copied. What came is handed
to `Fetched`, which makes samples of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from mmap import MADV_WILLNEED, PAGESIZE, mmap
from typing import TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.mixture import Mixture
from mmstream.errors import ShardError
from mmstream.reading.held import Fetched, Group, Outcome, shard_error
from mmstream.storage import LocalFile, LocalStore, RemoteStore
from mmstream.types import IntArray, SampleRef

__all__ = ["Fetched", "Fetcher", "Outcome"]


MAX_GAP_BYTES = {LocalStore: 4 * 1024, RemoteStore: 256 * 1024}
"""Samples closer than this come in one range: at 100 MB/s, 256 KiB cost 3 ms, a request 20."""

MAX_RANGE_BYTES = {LocalStore: 2 * 1024 * 1024, RemoteStore: 8 * 1024 * 1024}
"""Longest merged range: long enough for full bandwidth, short enough to run several at once."""

MAX_LOT_BYTES = 2 * 1024 * 1024
"""Bytes of local ranges that are read before they are looked at: each thread's own memory."""

MAX_OPEN = 256
"""Shards mapped or open at a time: open files, of which a process may often have 1,024."""


Data: TypeAlias = bytes | OSError
"""What came of a range."""


class Fetcher:
    """Fetches samples for a `Reader`, in any of its threads."""

    def __init__(self, dataset: Dataset | Mixture, *, zero_copy: bool) -> None:
        self._dataset, self._zero_copy = dataset, zero_copy
        self._maps: WeakValueDictionary[int, mmap] = WeakValueDictionary()  # views keep them alive
        self._files: WeakValueDictionary[int, LocalFile] = WeakValueDictionary()  # samples do
        self._num_bytes = self._num_requests = 0
        self._lock = threading.Lock()

    def fetch(self, refs: Sequence[SampleRef] | IntArray, *, later: bool = False) -> Fetched:
        """Return samples; errors of data become values here.

        Args:
            refs: (shard, index) of each.
            later: they are taken some time later: what the system's page cache holds of local
                shards is read again then, and not held here.

        Raises:
            StorageError: storage failed after retries.
        """
        shards, indexes = np.asarray(refs, dtype=np.int64).reshape(-1, 2).T
        fetched = Fetched(self._dataset, shards.size, zero_copy=self._zero_copy)
        places = np.lexsort((indexes, shards))
        of_shards = np.split(places, np.flatnonzero(np.diff(shards[places])) + 1)
        num_bytes, num_requests, unread = 0, 0, list[Group]()
        for place in of_shards if shards.size else ():
            shard, index = int(shards[place[0]]), indexes[place]
            try:
                offsets = self._dataset.offsets(shard)
            except ShardError as error:
                fetched.put_error(place, error)
                continue
            whole = Group(shard, index, offsets[index], offsets[index + 1], place)
            kind = type(self._dataset.store_of(shard))
            groups = _merge(whole, MAX_GAP_BYTES[kind], MAX_RANGE_BYTES[kind])
            num_requests += len(groups)
            num_bytes += sum(group.num_bytes for group in groups)
            mapped = self._mapped(whole, groups) if self._zero_copy else None
            if mapped is None:
                unread += groups
            else:
                fetched.put(whole, mapped, 0)
        fetched.find()
        for group, data in self._read(unread):
            self._put(group, data, fetched, later=later and not self._zero_copy)
            if not self._zero_copy:
                fetched.find()
        fetched.find()
        with self._lock:
            self._num_bytes += num_bytes
            self._num_requests += num_requests
        return fetched

    def pop_counts(self) -> tuple[int, int]:
        """Return how many bytes and ranges were read since the call before."""
        with self._lock:
            found = self._num_bytes, self._num_requests
            self._num_bytes = self._num_requests = 0
        return found

    def _read(self, groups: Sequence[Group]) -> Iterator[tuple[Group, Data]]:
        """Yield each group with its bytes: what is far away all together, local ones in lots."""
        lots: dict[int, list[Group]] = {}  # number 0 is what is far away
        number, num_bytes = 1, 0
        for group in groups:
            if not self._is_near(group):
                lots.setdefault(0, []).append(group)
                continue
            num_bytes += group.num_bytes
            lots.setdefault(number, []).append(group)
            if num_bytes >= MAX_LOT_BYTES:
                number, num_bytes = number + 1, 0
        for lot in lots.values():
            found = self._dataset.read_ranges([group.range for group in lot])
            yield from zip(lot, found, strict=True)
            del found  # before the next lot is read

    def _is_near(self, group: Group) -> bool:
        return isinstance(self._dataset.store_of(group.shard), LocalStore)

    def _mapped(self, whole: Group, groups: Sequence[Group]) -> mmap | None:
        """Return a shard as a map; None: it has to be read, be it only for the error."""
        if not self._is_near(whole):
            return None
        with self._lock:
            found = self._maps.get(whole.shard)
            if found is None and len(self._maps) < MAX_OPEN:
                try:
                    found = self._maps[whole.shard] = self._dataset.map_shard(whole.shard)
                except (OSError, ValueError):  # ValueError: an empty file
                    return None
        if found is None or len(found) < groups[-1].range[2]:
            return None
        for group in groups:
            _, start, stop = group.range
            page = start // PAGESIZE * PAGESIZE
            found.madvise(MADV_WILLNEED, page, stop - page)  # all ranges come in at once, behind us
        return found

    def _cached(self, group: Group) -> LocalFile | None:
        """Return the shard of a range that was read just now; None: the system does not hold it."""
        if not self._is_near(group):
            return None
        with self._lock:
            file = self._files.get(group.shard)
            if file is None and len(self._files) < MAX_OPEN:
                try:
                    file = self._files[group.shard] = self._dataset.open_shard(group.shard)
                except OSError:
                    return None
        return file if file is not None and file.is_cached(*group.range[1:]) else None

    def _put(self, group: Group, data: Data, fetched: Fetched, *, later: bool) -> None:
        """Hold what came of a range."""
        if not isinstance(data, OSError):
            fetched.put(group, data, group.range[1], self._cached(group) if later else None)
            return
        error = shard_error(self._dataset, data, group.shard, group.range[2])
        if group.place.size == 1:
            fetched.put_error(group.place, error)
            return
        for number in range(group.place.size):  # samples before the cut are still good
            one = group.part(number, number + 1)
            self._put(one, self._dataset.read_ranges([one.range])[0], fetched, later=False)


def _merge(whole: Group, max_gap_bytes: int, max_range_bytes: int) -> list[Group]:
    """Cut a shard's samples into groups that one range each shall fetch."""
    far = whole.start[1:] - whole.stop[:-1] > max_gap_bytes
    groups = []
    for first, end in pairwise([0, *(np.flatnonzero(far) + 1).tolist(), whole.start.size]):
        while first < end:
            limit = int(whole.start[first]) + max_range_bytes
            fitting = int(np.searchsorted(whole.stop[first:end], limit, side="right"))
            following = first + max(1, fitting)
            groups.append(whole.part(first, following))
            first = following
    return groups
