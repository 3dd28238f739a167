"""Reads the columns of shards from a part of an index, which lies on this machine or is fetched.

A local part is mapped. A remote one becomes a file of this machine, see `index_cache`. While a
large one arrives, and where there is no room for it, the table and the columns of single shards are
read by ranges.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from mmap import mmap
from typing import Any

import numpy as np

from mmstream.dataset.index_cache import (
    MAX_SMALL_BYTES,
    fetch_part,
    has_room,
    map_cached,
    part_ranges,
    remove_cached,
)
from mmstream.dataset.index_part import (
    HAS_TAR_CRC32C,
    ShardColumns,
    Table,
    columns_size,
    decode_columns,
    decode_table,
    table_size,
)
from mmstream.dataset.manifest import IndexPart
from mmstream.errors import MMStreamError, ShardError, StorageError, escaped
from mmstream.storage import NotAFileError, ObjectStat, ReplacedError, Store, map_file
from mmstream.types import IntArray

logger = logging.getLogger(__name__)

WAIT_S = 2.0
"""Seconds to wait for another process that fetches a small part."""


class PartReader:
    """Reads one part, in any thread. Forked and unpickled copies work too.

    Args:
        store: Where the part lies.
        part: What the manifest says of it.
        counts: int64, samples of each of its shards by the manifest.
        sizes: int64, bytes of their tars.

    Attributes:
        num_requests: Requests that were sent so far.
    """

    def __init__(self, store: Store, part: IndexPart, counts: IntArray, sizes: IntArray) -> None:
        self.part = part
        self.num_requests = 0
        self._store, self._counts, self._sizes = store, counts, sizes
        self._map: mmap | None = None
        self._table: Table | None = None
        self._is_kept = store.access.concurrent and store.local_path("") is None
        self._fetcher_of: dict[int, threading.Thread] = {}
        self._lock_of: dict[int, threading.Lock] = {}

    def __getstate__(self) -> dict[str, Any]:
        emptied: dict[str, Any] = {"_map": None, "_table": None, "_fetcher_of": {}, "_lock_of": {}}
        return self.__dict__ | emptied

    @property
    def url(self) -> str:
        """Path or URL of the part."""
        return self._store.url_of(self.part.name)

    def read(self, shards: Sequence[int]) -> list[ShardColumns | ShardError | OSError]:
        """Return the columns of each shard, or in its place the error that it met.

        Args:
            shards: Positions in the part.

        Raises:
            FileNotFoundError: There is no such part.
            ShardError: It is damaged, or of other shards.
            StorageError: The storage failed after retries.
        """
        with self._lock:
            table = self._open()
            part_map = self._map
        spans = [(int(table[i]["offset"]), columns_size(table[i])) for i in shards]
        answers: Sequence[bytes | memoryview | OSError]
        if part_map is not None:
            answers = [memoryview(part_map)[start : start + size] for start, size in spans]
        else:
            answers = self._read_ranges([(start, start + size) for start, size in spans])
        return [
            self._decode(answer, table[shard], shard)
            for shard, answer in zip(shards, answers, strict=True)
        ]

    def tar_checksum(self, shard: int) -> int | None:
        """Return the CRC-32C of a whole tar, if the part knows it; errors as `read`."""
        with self._lock:
            row = self._open()[shard]
        return int(row["tar_crc32c"]) if row["flags"] & HAS_TAR_CRC32C else None

    @property
    def _lock(self) -> threading.Lock:
        """Of this process: one that a thread held at a fork is never given back in the child."""
        return self._lock_of.setdefault(os.getpid(), threading.Lock())

    def drop(self) -> None:
        """Read the part again at the next use: its bytes were wrong. What is cached is dropped."""
        if self._is_kept and self._map is not None:
            remove_cached(self.part)
        self._map = self._table = None
        self._store.drop_cache(self.part.name, 0, self.part.num_bytes)

    def _decode(
        self, answer: bytes | memoryview | OSError, row: Any, shard: int
    ) -> ShardColumns | ShardError | OSError:
        if isinstance(answer, OSError):
            return answer
        try:
            return decode_columns(answer, row, f"{self.url}: shard {shard}")
        except ShardError as error:
            return error

    def _open(self) -> Table:
        """Map the part, or read its table. Return the table."""
        if self._map is None and (part_map := self._find()) is not None:
            try:
                self._table = self._decode_table(memoryview(part_map))
            except ShardError:
                if self._is_kept:
                    remove_cached(self.part)
                raise
            self._map = part_map
        if self._table is None:
            size = table_size(self.part.last_shard - self.part.first_shard + 1)
            if size > self.part.num_bytes:
                raise ShardError(f"{self.url}: {self.part.num_bytes} bytes hold no table")
            (answer,) = self._read_ranges([(0, size)])
            if isinstance(answer, OSError):
                raise self._explain(answer)
            self._table = self._decode_table(answer)
        return self._table

    def _find(self) -> mmap | None:
        """Return the part as a map of a file of this machine. None: it is read by ranges."""
        path = self._store.local_path(self.part.name)
        if path is not None:
            known = {self.part.name: ObjectStat(self.part.num_bytes, None)}
            try:
                return map_file(path, self.part.name, known)
            except StorageError as error:  # another size, or no file
                raise ShardError(str(error)) from None
        if not self._is_kept:
            return None
        part_map = map_cached(self.part)
        if part_map is None and self._has_room():
            self._fetch()
            part_map = map_cached(self.part)
        return part_map

    def _has_room(self) -> bool:
        self._is_kept = has_room(self.part)
        if not self._is_kept:
            logger.info(
                "%s: is not kept on this machine (no room, or no folder of this user); what is "
                "needed of it is read by ranges",
                escaped(self.url),
            )
        return self._is_kept

    def _fetch(self) -> None:
        """Fetch the part into its file: a small one now, a large one in the background."""
        if self.part.num_bytes > MAX_SMALL_BYTES:
            thread = self._fetcher_of.get(os.getpid())
            if thread is None or not thread.is_alive():
                thread = threading.Thread(target=self._fetch_quietly, daemon=True)
                self._fetcher_of[os.getpid()] = thread
                thread.start()
            return
        end = time.monotonic() + WAIT_S
        while not self._fetch_now() and time.monotonic() < end:
            time.sleep(0.02)

    def _fetch_now(self) -> bool:
        """Fetch the part. Return False if another process fetches it."""
        try:
            is_fetched = fetch_part(self._store, self.part)
        except (MMStreamError, FileNotFoundError) as error:
            raise self._explain(error) from None
        except OSError as error:  # of the disk
            logger.warning("%s: cannot be kept on this machine: %s", escaped(self.url), error)
            self._is_kept = False
            return True
        self.num_requests += len(part_ranges(self.part)) * is_fetched
        return is_fetched

    def _fetch_quietly(self) -> None:
        with suppress(ShardError, OSError):  # who needs the part meets the error too
            self._fetch_now()

    def _decode_table(self, data: bytes | memoryview) -> Table:
        table = decode_table(data, self.url, self.part)
        is_same = np.array_equal(table["num_samples"], self._counts)
        if not (is_same and np.array_equal(table["num_bytes"], self._sizes)):
            raise ShardError(f"{self.url}: is of other shards than the manifest names")
        return table

    def _read_ranges(self, spans: Sequence[tuple[int, int]]) -> list[bytes | OSError]:
        self.num_requests += len(spans)
        return self._store.read_ranges([(self.part.name, start, stop) for start, stop in spans])

    def _explain(self, error: Exception) -> Exception:
        """Return a ShardError where the part is not as long as the manifest says, else `error`."""
        if isinstance(error, FileNotFoundError | ShardError):
            return error
        if isinstance(error, ReplacedError | NotAFileError):
            return ShardError(str(error))
        with suppress(OSError):
            size = self._store.size(self.part.name)
            if size != self.part.num_bytes:
                return ShardError(f"{self.url}: {size} bytes, not {self.part.num_bytes}")
        return error
