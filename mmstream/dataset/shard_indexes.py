"""Where the samples of a dataset's shards lie, whatever says so.

The parts of the index say it, where the manifest lists any. Else, or where a part is lost, the
``NAME.tar.idx`` and ``NAME.tar.crc32c`` beside a tar do, or what was built at opening. What was
read is kept as columns of 2 to 6 bytes a sample, up to `MAX_KEPT_BYTES`.

A local part is mapped. A remote one is read whole. Of a large one, the table and the columns of
single shards are read by ranges.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, cast

import numpy as np

from mmstream.dataset.index import (
    Checksums,
    PartWriter,
    ShardColumns,
    Table,
    checksums_name,
    checksums_size,
    columns_of,
    columns_sizes,
    decode_checksums,
    decode_columns,
    decode_index,
    decode_table,
    index_name,
    index_size,
    require_whole,
    table_size,
)
from mmstream.dataset.manifest import MANIFEST_NAME, IndexPart, Manifest, ShardInfo
from mmstream.errors import MMStreamError, ShardError, StorageError, escaped
from mmstream.storage import NotAFileError, ObjectStat, ReplacedError, Store, map_file
from mmstream.storage.local import create_file
from mmstream.tar.header import BLOCK
from mmstream.types import IntArray

logger = logging.getLogger(__name__)

MAX_PART_IN_MEMORY = 64 << 20
"""A remote part of at most this size is read whole: an index of 10 million samples."""

RANGE_BYTES = 8 << 20
"""Ranges of what is read whole. They are requested side by side."""


class PartReader:
    """Reads one part, in any thread. Forked and unpickled copies work too.

    Args:
        store: Where the part lies.
        part: What the manifest says of it.
        shards: Those that it describes, by the manifest.

    Attributes:
        num_requests: Requests that were sent so far.
        is_usable: False once it came damaged again and again, or was lost.
    """

    def __init__(self, store: Store, part: IndexPart, shards: Sequence[ShardInfo]) -> None:
        self.part = part
        self.num_requests = 0
        self.is_usable = True
        self._store = store
        self._counts = np.array([shard.num_samples for shard in shards], dtype=np.int64)
        self._sizes = np.array([shard.num_bytes for shard in shards], dtype=np.int64)
        self._data: memoryview | None = None
        self._table: Table | None = None
        self._lock_of: dict[int, threading.Lock] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_data": None, "_table": None, "_lock_of": {}}

    @property
    def url(self) -> str:
        """Path or URL of the part."""
        return self._store.url_of(self.part.name)

    def read(self, shards: Sequence[int]) -> list[ShardColumns | ShardError | OSError]:
        """Return the columns of each shard, or in its place the error that it met.

        Args:
            shards: Positions in the manifest.

        Raises:
            FileNotFoundError: There is no such part.
            ShardError: It is damaged, or of other shards.
            StorageError: The storage failed after retries.
        """
        with self._lock:
            table, data = self._open(), self._data
        rows = [table[shard - self.part.first_shard] for shard in shards]
        spans = [(int(row["offset"]), int(columns_sizes(row))) for row in rows]
        responses: Sequence[bytes | memoryview | OSError]
        if data is not None:
            responses = [data[start : start + size] for start, size in spans]
        else:
            responses = self._read_ranges([(start, start + size) for start, size in spans])
        read = zip(responses, rows, shards, strict=True)
        return [self._decode(response, row, shard) for response, row, shard in read]

    @property
    def _lock(self) -> threading.Lock:
        """The lock of this process. One held at a fork would never be released in the child."""
        return self._lock_of.setdefault(os.getpid(), threading.Lock())

    def drop(self) -> None:
        """Read the part again at the next use: its bytes were wrong."""
        self._data = self._table = None
        self._store.drop_cache(self.part.name, 0, self.part.num_bytes)

    def _decode(
        self, response: bytes | memoryview | OSError, row: Any, shard: int
    ) -> ShardColumns | ShardError | OSError:
        if isinstance(response, OSError):
            return response
        try:
            return decode_columns(
                response, row, f"{self.url}: shard {shard - self.part.first_shard}"
            )
        except ShardError as error:
            return error

    def _open(self) -> Table:
        """Map the part, read it whole, or read its table alone. Return the table."""
        if self._table is None:
            data = self._read_first()
            table = decode_table(data, self.url, self.part)
            is_same = np.array_equal(table["num_samples"], self._counts)
            if not (is_same and np.array_equal(table["num_bytes"], self._sizes)):
                raise ShardError(f"{self.url}: is of other shards than the manifest names")
            self._table = table
            self._data = data if len(data) == self.part.num_bytes else None
        return self._table

    def _read_first(self) -> memoryview:
        """Return the part, or its table where it is large and remote."""
        path = self._store.local_path(self.part.name)
        if path is not None:
            stats = {self.part.name: ObjectStat(self.part.num_bytes, None)}
            try:
                return memoryview(map_file(path, self.part.name, stats))
            except StorageError as error:  # another size, or no file
                raise ShardError(str(error)) from None
        size = self.part.num_bytes
        if size > MAX_PART_IN_MEMORY:
            size = min(size, table_size(self.part.last_shard - self.part.first_shard + 1))
        starts = range(0, size, RANGE_BYTES)
        pieces = self._read_ranges([(start, min(start + RANGE_BYTES, size)) for start in starts])
        for piece in pieces:
            if isinstance(piece, OSError):
                raise self._explain(piece)
        return memoryview(b"".join(cast(list[bytes], pieces)))

    def _read_ranges(self, spans: Sequence[tuple[int, int]]) -> list[bytes | OSError]:
        self.num_requests += len(spans)
        return self._store.read_ranges([(self.part.name, start, stop) for start, stop in spans])

    def _explain(self, error: OSError) -> OSError | ShardError:
        """Return a ShardError where the part is not as long as the manifest says, else `error`."""
        if isinstance(error, ReplacedError | NotAFileError):
            return ShardError(str(error))
        with suppress(OSError):
            size = self._store.size(self.part.name)
            if size != self.part.num_bytes:
                return ShardError(f"{self.url}: {size} bytes, not {self.part.num_bytes}")
        return error


MAX_INDEX_READS = 8
"""Reads of an index that is damaged or does not fit its checksums: storage may be at fault."""

MAX_KEPT_BYTES = 64 << 20
"""Bytes of columns that are kept: 2,000 shards of 5,000 samples with checksums."""


class ShardIndexes:
    """Finds the columns of shards, in any thread. It pickles small, without what it has read.

    Args:
        store: Where the index lies.
        manifest: Names the shards, and the parts of the index.
        has_checksums: Checksums are wanted, and there are some.
        built: Indexes that were built at opening, of tars without one. None: a manifest has named
            the tars, so whoever wrote it has checked the others.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        has_checksums: bool,
        built: Mapping[str, IntArray] | None = None,
    ) -> None:
        self.store, self.manifest, self.has_checksums = store, manifest, has_checksums
        self.built: dict[str, ShardColumns] | None = None
        if built is not None:
            self.built = {name: columns_of(offsets, None) for name, offsets in built.items()}
        self._readers = [
            PartReader(store, part, manifest.shards[part.first_shard : part.last_shard + 1])
            for part in manifest.index_parts
        ]
        first_shards = [part.first_shard for part in manifest.index_parts]
        self._first_shards = np.array(first_shards, dtype=np.int64)
        self._kept: dict[int, ShardColumns] = {}
        self._num_kept_bytes = 0
        self._lock_of: dict[int, threading.Lock] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}, "_num_kept_bytes": 0, "_lock_of": {}}

    @property
    def _lock(self) -> threading.Lock:
        """The lock of this process. One held at a fork would never be released in the child."""
        return self._lock_of.setdefault(os.getpid(), threading.Lock())

    def columns(
        self, shard: int, count_wrong: Callable[[int], None] = lambda _: None
    ) -> ShardColumns:
        """Return where the samples of a shard lie.

        Args:
            shard: Position in the manifest.
            count_wrong: Called with the number of reads that came wrong, after each of them.

        Raises:
            ShardError: No index, a damaged one, or one that does not fit the manifest or the
                checksums.
            StorageError: The storage failed after retries.
        """
        columns = self._kept.get(shard)
        if columns is None:
            columns = self._read_part(shard, count_wrong) or self.file_columns(
                shard, has_checksums=self.has_checksums, count_wrong=count_wrong
            )
            self._keep(shard, columns)
        return columns

    def load(self, shards: Sequence[int]) -> int:
        """Read what `columns` will need for these shards, all requests side by side.

        Nothing is raised: `columns` raises the error of a shard, and reads it again where the
        storage may be at fault. Returns the number of requests.
        """
        by_reader: dict[PartReader | None, list[int]] = {}
        for shard in [shard for shard in dict.fromkeys(shards) if shard not in self._kept]:
            by_reader.setdefault(self._reader_of(shard), []).append(shard)
        wanted = [
            shard
            for shard in by_reader.pop(None, [])
            if self._is_possible(shard)
            and self.manifest.shards[shard].name not in (self.built or ())
        ]
        for shard, columns in self._read_files(wanted, self.has_checksums).items():
            if isinstance(columns, ShardColumns):
                self._keep(shard, columns)
        num_requests = len(wanted) * (2 if self.has_checksums else 1)
        for reader, numbers in by_reader.items():
            assert reader is not None
            num_before = reader.num_requests
            with suppress(ShardError, OSError):
                for shard, response in zip(numbers, reader.read(numbers), strict=True):
                    if isinstance(response, ShardColumns):
                        with suppress(ShardError):
                            self._keep(shard, self._with_checksums(shard, response))
            num_requests += reader.num_requests - num_before
        return num_requests

    def forget(self, shard: int) -> None:
        """Read the index of a shard again at its next use."""
        with self._lock:
            columns = self._kept.pop(shard, None)
            self._num_kept_bytes -= 0 if columns is None else columns.num_bytes

    def part_columns(self, shard: int) -> ShardColumns | None:
        """Return the columns of a shard as its part says. None: no part describes the shard.

        Raises:
            FileNotFoundError: There is no such part.
            ShardError: It is damaged, or of other shards.
            StorageError: The storage failed after retries.
        """
        reader = self._reader_of(shard)
        if reader is None:
            return None
        (response,) = reader.read([shard])
        if isinstance(response, ShardColumns):
            return response
        raise response

    def file_columns(
        self,
        shard: int,
        *,
        has_checksums: bool,
        count_wrong: Callable[[int], None] = lambda _: None,
    ) -> ShardColumns:
        """Return the columns of a shard as the files beside its tar say; errors as `columns`.

        Bytes that are not an index are read again: storage may be at fault.
        """
        info = self.manifest.shards[shard]
        if self.built is not None and info.name in self.built:
            return self.built[info.name]
        if not self._is_possible(shard):  # before memory is taken for them
            raise ShardError(
                f"{info.name}: {info.num_bytes} bytes cannot hold {info.num_samples} samples; run "
                "`mmstream index --overwrite`"
            )
        num_left = MAX_INDEX_READS
        while True:
            columns = self._read_files([shard], has_checksums)[shard]
            num_left -= 1
            if isinstance(columns, ShardColumns):
                return columns
            if not num_left or not isinstance(columns, ShardError):
                raise columns
            count_wrong(1)
            for file, num_bytes in self._files(info, has_checksums).items():
                self.store.drop_cache(file, 0, num_bytes)

    def _reader_of(self, shard: int) -> PartReader | None:
        """Return the reader of the part that describes a shard. None: none that can be used."""
        number = int(np.searchsorted(self._first_shards, shard, side="right")) - 1
        if number < 0 or shard > self._readers[number].part.last_shard:
            return None
        return self._readers[number] if self._readers[number].is_usable else None

    def _read_part(self, shard: int, count_wrong: Callable[[int], None]) -> ShardColumns | None:
        """Return the columns of a shard from its part. None: its files must be read.

        Bytes that are wrong are read again: storage may be at fault.
        """
        reader = self._reader_of(shard)
        if reader is None:
            return None
        error: Exception
        for _ in range(MAX_INDEX_READS):
            try:
                columns = self.part_columns(shard)
                return None if columns is None else self._with_checksums(shard, columns)
            except FileNotFoundError as absent:
                error = absent
                break
            except ShardError as damaged:
                error = damaged
                count_wrong(1)
                reader.drop()
        reader.is_usable = False
        logger.warning(
            "%s; the .idx files beside the tars are read instead; run `mmstream index`",
            escaped(error),
        )
        return None

    def _with_checksums(self, shard: int, columns: ShardColumns) -> ShardColumns:
        """Return columns with checksums if they are wanted, else without."""
        if not self.has_checksums:
            return replace(columns, checksums=None)
        if columns.checksums is None:
            raise ShardError(
                f"{self.manifest.shards[shard].name}: its part of the index has no checksums"
            )
        return columns

    def _keep(self, shard: int, columns: ShardColumns) -> None:
        with self._lock:
            if shard not in self._kept:
                self._kept[shard] = columns
                self._num_kept_bytes += columns.num_bytes
            while self._num_kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
                first = next(iter(self._kept))
                self._num_kept_bytes -= self._kept.pop(first).num_bytes

    def _is_possible(self, shard: int) -> bool:
        """Tell whether a tar is large enough for as many samples as the manifest says."""
        info = self.manifest.shards[shard]
        return info.num_samples * BLOCK <= info.num_bytes

    def _read_files(
        self, shards: Sequence[int], has_checksums: bool
    ) -> dict[int, ShardColumns | MMStreamError | OSError]:
        """Return the columns of shards, or the error of each, from the files beside their tars."""
        files = {s: self._files(self.manifest.shards[s], has_checksums) for s in shards}
        ranges = [(file, 0, size) for sizes in files.values() for file, size in sizes.items()]
        stats = dict[str, ObjectStat]()
        # All at once: on an object store, each of them is a request.
        responses = iter(self.store.read_ranges(ranges, stats) if ranges else [])
        results: dict[int, ShardColumns | MMStreamError | OSError] = {}
        for shard, sizes in files.items():
            data = {file: next(responses) for file in sizes}
            try:
                results[shard] = self._decode(self.manifest.shards[shard], sizes, data, stats)
            except (MMStreamError, OSError) as error:
                results[shard] = error
        return results

    def _files(self, info: ShardInfo, has_checksums: bool) -> dict[str, int]:
        """Return the files of a shard's index, with the bytes that they have by the manifest."""
        sizes = {index_name(info.name): index_size(info.num_samples)}
        if has_checksums:
            sizes[checksums_name(info.name)] = checksums_size(info.num_samples)
        return sizes

    def _decode(
        self,
        info: ShardInfo,
        sizes: Mapping[str, int],
        responses: Mapping[str, bytes | OSError],
        stats: Mapping[str, ObjectStat],
    ) -> ShardColumns:
        """Return the columns of a shard from what was read of its files.

        Args:
            info: Of the shard.
            sizes: The bytes that were asked for, by file.
            responses: What was read of each, with checksums where they were asked for.
            stats: The files as they are, where the storage said so.
        """
        name, *checksums_names = sizes
        data = dict[str, bytes]()
        for file, response in responses.items():
            # A longer index is of other samples. Checksums tell, else its size must.
            is_sure = bool(checksums_names) or (file in stats and stats[file].size == sizes[file])
            if isinstance(response, OSError) or not is_sure:
                self._require_size(info, file, sizes[file])
            if isinstance(response, OSError):
                raise response
            data[file] = response
        offsets = decode_index(data[name], name)
        if offsets[-1] > info.num_bytes:
            raise ShardError(
                f"{info.name}: {info.num_bytes} bytes, its index goes to {offsets[-1]}: truncated, "
                "or the index is not this tar's"
            )
        if self.built is not None:
            is_near = not self.store.access.concurrent  # elsewhere each header is a request
            require_whole(self.store, info.name, info.num_bytes, offsets, thorough=is_near)
        checksums = None
        for checksums_file in checksums_names:
            checksums = decode_checksums(data[checksums_file], data[name], checksums_file)
        return columns_of(offsets, checksums)

    def _require_size(self, info: ShardInfo, file: str, size: int) -> None:
        """Raise a ShardError if an index, or a file of checksums, is absent or has another size."""
        is_index = file == index_name(info.name)
        command = "mmstream index" if is_index else "mmstream index --checksums"
        try:
            actual_size = self.store.size(file)
        except FileNotFoundError:
            absent = "no index" if is_index else "no checksums"
            raise ShardError(
                f"{info.name}: {absent} {file} in {self.store.url}; run `{command}`"
            ) from None
        except NotAFileError as error:
            raise ShardError(str(error)) from None
        if actual_size != size:
            raise ShardError(
                f"{file}: {actual_size} bytes, but the manifest says {info.num_samples} samples, "
                f"{size} bytes; run `{command} --overwrite`"
            )


# -- a part, from the files beside the tars --------------------------------------------------------

MAX_SHARDS_AT_ONCE = 128
"""Shards whose files are read side by side: 4 MB where shards have 5,000 samples."""


def write_part(
    store: Store,
    manifest: Manifest,
    first_shard: int,
    last_shard: int,
    *,
    rewritten: Mapping[str, Checksums | None] | None = None,
) -> IndexPart | None:
    """Write a part of the index for some shards in a row. Equal shards give an equal part.

    Args:
        store: Holds the files, and gets the part.
        manifest: Names the shards. Its parts are not looked at, unless some are `rewritten`.
        first_shard: Position of the first shard.
        last_shard: Position of the last one.
        rewritten: {name of a shard: its checksums}, where these alone have changed.

    Returns:
        The entry of the part in the manifest. None without shards.

    Raises:
        ShardError: The index of a shard is lost or damaged.
        StorageError: The storage failed after retries.
        OSError: The disk with the temporary file failed.
    """
    source = replace(manifest, index_parts=()) if rewritten is None else manifest
    indexes = ShardIndexes(store, source, manifest.checksums is not None)
    with tempfile.TemporaryFile(prefix="mmstream-") as columns_file:
        writer = PartWriter(columns_file, first_shard)
        for shard in range(first_shard, last_shard + 1):
            if (shard - first_shard) % MAX_SHARDS_AT_ONCE == 0:
                stop = min(shard + MAX_SHARDS_AT_ONCE, last_shard + 1)
                indexes.load(range(shard, stop))
            info, columns = manifest.shards[shard], indexes.columns(shard)
            if rewritten is not None and info.name in rewritten:
                columns = replace(columns, checksums=rewritten[info.name])
            writer.add(info.num_bytes, columns)
        return writer.write(store)


README_NAME = "README.md"
"""`datasets.load_dataset` and the viewer of Hugging Face's Hub read the YAML at its top. Without it
they would take indexes and reports for data. Format:
https://huggingface.co/docs/hub/datasets-manual-configuration"""

_README = """\
---
configs:
- config_name: default
  data_files: "*.tar"
---

Plain WebDataset tars, with indexes and a manifest of mmstream.

- `mmstream.open_dataset(FOLDER)` reads them in any order, and in training.
- `datasets.load_dataset(FOLDER)` and `webdataset` read them as they are.
"""


def commit(store: Store, manifest: Manifest) -> None:
    """Write the index in one part, ``README.md``, and last the manifest: it says that all is there.

    Args:
        store: Holds the shards and the files beside them.
        manifest: Names the shards.

    Raises:
        ShardError, StorageError, OSError: As `write_part`.
    """
    part = write_part(store, manifest, 0, len(manifest.shards) - 1)
    if not store.exists(README_NAME):
        store.write(README_NAME, _README.encode())
    index_parts = () if part is None else (part,)
    store.write(MANIFEST_NAME, replace(manifest, index_parts=index_parts).to_bytes())


# -- remote files that never change, as files of this machine --------------------------------------
#
#     ~/.cache/mmstream/index/<its SHA-256>       or below $XDG_CACHE_HOME
#
# Plans and sets of samples are such files. Each is compared with its SHA-256 when it arrives.
# Processes that need the same one at once agree by a lock: one of them fetches it. Files that no
# process has opened for `MAX_UNUSED_S` are removed when another one arrives.

MAX_BYTES_AT_ONCE = 64 << 20
"""So much of a file is in memory as it arrives, in ranges that come side by side."""

MAX_SHARE_OF_DISK = 0.01
"""A file that takes more of the free space is not kept."""

MAX_FETCHES = 4
"""Fetches of a file whose bytes came wrong."""

MAX_UNUSED_S = 30 * 24 * 3600.0


def map_whole(store: Store, part: IndexPart) -> mmap | bytes:
    """Return the bytes of a file that never changes, as a map of it where that is possible.

    A local file is mapped where it lies, and only its size is compared. A remote one is copied once
    into the cache of this machine, whatever its size, and mapped from there. Where the cache takes
    no copy, it is in the memory of this process.

    Args:
        store: Where the file lies.
        part: Its name, size and SHA-256, or the first digits of that.

    Raises:
        FileNotFoundError: There is no such file.
        ReplacedError: It has another size.
        ShardError: Its bytes are not those of its SHA-256.
        StorageError: The storage failed after retries.
    """
    path = store.local_path(part.name)
    if path is not None:
        return map_file(path, part.name, {part.name: ObjectStat(part.num_bytes, None)})
    name, reason = store.url_of(part.name), "it cannot be mapped"
    try:
        folder = cache_folder()
        data = _map_cached(folder, part)
        if data is None:
            _fetch(store, part, folder)
            data = _map_cached(folder, part)
        if data is not None:
            return data
    except (FileNotFoundError, ReplacedError):
        raise
    except OSError as error:
        reason = str(error)
    logger.warning(
        "%s: is in the memory of this process, because the cache took no copy: %s", name, reason
    )
    whole = store.read(part.name, part.num_bytes)
    if not hashlib.sha256(whole).hexdigest().startswith(part.sha256):
        raise ShardError(f"{name}: its bytes are not those of its sha256")
    return whole


def _map_cached(folder: Path, part: IndexPart) -> mmap | None:
    """Return the bytes of a file as a map of its copy, if this machine has it."""
    try:
        descriptor = os.open(folder / part.sha256, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with suppress(OSError), os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size == part.num_bytes:
            with suppress(OSError):  # the disk may be read-only
                os.utime(descriptor)  # it is in use
            return mmap(file.fileno(), 0, access=ACCESS_READ)
    return None


def _fetch(store: Store, part: IndexPart, folder: Path) -> None:
    """Fetch a file into the cache, unless another process has done so.

    Raises:
        FileNotFoundError: There is no such file.
        ShardError: Its bytes are not those of its checksum.
        StorageError: The storage failed after retries.
        OSError: The disk failed, or is full.
    """
    disk = os.statvfs(folder)
    if part.num_bytes > MAX_SHARE_OF_DISK * disk.f_bavail * disk.f_frsize:
        raise OSError(f"no room: {part.num_bytes / 1e6:.1f} MB are over 1 % of the free disk")
    with _locked(folder / f"{part.sha256}.lock"):
        if _map_cached(folder, part) is not None:  # another process was quicker
            return
        for _ in range(MAX_FETCHES - 1):
            with suppress(ShardError):
                _copy(store, part, folder / part.sha256)
                break
        else:
            _copy(store, part, folder / part.sha256)
        _remove_unused(folder)


def _copy(store: Store, part: IndexPart, path: Path) -> None:
    starts = range(0, part.num_bytes, RANGE_BYTES)
    ranges = [(part.name, start, min(start + RANGE_BYTES, part.num_bytes)) for start in starts]
    num_at_once = MAX_BYTES_AT_ONCE // RANGE_BYTES
    digest = hashlib.sha256()
    with create_file(path) as file:
        for first in range(0, len(ranges), num_at_once):
            stats = {part.name: ObjectStat(part.num_bytes, None)}
            for data in store.read_ranges(ranges[first : first + num_at_once], stats):
                if isinstance(data, OSError):
                    raise data
                digest.update(data)
                file.write(data)
        if not digest.hexdigest().startswith(part.sha256):
            raise ShardError(f"{store.url_of(part.name)}: its bytes are not those of its sha256")


def cache_folder() -> Path:
    """Return ``~/.cache/mmstream/index``, or that below $XDG_CACHE_HOME; make it if need be.

    Raises:
        OSError: There is none that only this user may change.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    is_own = True
    try:
        folder = root if root.is_absolute() else Path("~/.cache").expanduser()
        for name in ("mmstream", "index"):
            folder /= name
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            link, status = folder.lstat(), folder.stat()  # a link, such as to a scratch disk
            is_own = {link.st_uid, status.st_uid} == {os.geteuid()} and not status.st_mode & 0o022
            if not is_own:
                break
    except (OSError, RuntimeError) as error:  # no FileNotFoundError: that is said of the file
        raise OSError(str(error)) from None
    if not is_own:
        raise OSError(f"others may change {folder}")
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes. It ends with the process.

    A lock of `fcntl` belongs to the process: a worker that is forked meanwhile does not hold it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_unused(folder: Path) -> None:
    """Remove what no process has opened for a long time."""
    oldest = time.time() - MAX_UNUSED_S
    for path in folder.iterdir():
        with suppress(OSError):
            if path.lstat().st_mtime < oldest:
                path.unlink()
