"""Step 4 of a conversion: rows with drafts -> rows with the bytes of their media.

    rows -> formats -> LOAD -> shard

Rows keep their order. One slow server must not hold up the downloads of the rows behind it. So many
rows are in flight, and what has arrived waits for its turn: in memory, and beyond a limit on disk.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeAlias, TypeVar
from weakref import WeakSet

import msgspec

from mmstream.converting.draft import Draft, MediaRef, RowError
from mmstream.converting.media.archives import Archive, Archives
from mmstream.converting.media.check import IdleCpus, LoadedRow, ReadRow, check_rows
from mmstream.converting.media.references import (
    LocalFolder,
    MediaAccess,
    Objects,
    inline_bytes,
    is_inline,
    parse_reference,
    short_name,
)
from mmstream.converting.options import DownloadOptions, MediaOptions
from mmstream.converting.rows.records import Row
from mmstream.errors import StorageError, escaped

if TYPE_CHECKING:
    from mmstream.converting.media.download import Downloader

T = TypeVar("T")

MAX_ROW_BYTES = 1 << 30
"""Limit on the media of one row. A sample is held in memory whole, when written and when read."""

MAX_ROWS_AHEAD = 8192
"""Most rows whose media are on their way. Rows of files on local disk are not read ahead."""
MAX_BYTES_AHEAD = 128 << 20
"""Bytes that may wait in memory for the rows before them. More of them wait on disk."""
MAX_MEDIA_AHEAD = 2 * MAX_ROWS_AHEAD
"""Most media that are on their way."""
MAX_INLINE_BYTES_AHEAD = 64 << 20
"""Bytes that waiting rows may have themselves, without what is fetched for them."""
NUM_OBJECT_THREADS = 16
"""Objects that a process reads at the same time."""


def load_rows(
    drafts: Iterable[tuple[Row, Draft | RowError]],
    access: MediaAccess,
    options: MediaOptions,
    idle_cpus: IdleCpus | None = None,
) -> Iterator[LoadedRow]:
    """Yield each row with its draft and its media, in order.

    Nothing is lost: a row that cannot be used is yielded with its `RowError` and without media.
    Downloads and objects of later rows are under way meanwhile.

    Args:
        drafts: Rows, each with its draft, or with the error that it has already.
        access: What may be read for them.
        options: What is asked of the files, and how images are changed.
        idle_cpus: What helps to check them.

    Raises:
        StorageError: Storage or the network failed. That is not a row's fault, so the conversion
            stops.
    """
    with closing(_Loader(access)) as loader:
        yield from check_rows(_read_rows(drafts, loader), options, idle_cpus)


def _read_rows(
    drafts: Iterable[tuple[Row, Draft | RowError]], loader: _Loader
) -> Iterator[ReadRow]:
    """Yield each row when its turn has come, before its media are read."""
    waiting: deque[_WaitingRow] = deque()
    for row, draft in drafts:
        waiting.append(loader.start(row, draft, is_first=not waiting))
        while waiting and (waiting[0].is_ready or loader.is_full(waiting)):
            yield loader.finish(waiting.popleft())
    while waiting:
        yield loader.finish(waiting.popleft())


@dataclass(slots=True)
class _WaitingRow:
    row: Row
    draft: Draft | RowError
    arriving: dict[int, Future[Kept]]
    """The media that must arrive, by their number in the row."""
    inline_bytes: int

    @property
    def is_ready(self) -> bool:
        return all(future.done() for future in self.arriving.values())


class _Loader:
    """Reads media for the rows of a shard. The downloader is that of the process."""

    def __init__(self, access: MediaAccess) -> None:
        self._access = access
        self._folder = LocalFolder(access.root or "", access.root_stamp)
        self._objects = Objects(access)
        self._archives = Archives()
        self._arrived = ArrivedBytes(MAX_BYTES_AHEAD)
        self._inline_bytes = self._num_arriving = 0
        self._downloads: WeakSet[Future[bytes]] = WeakSet()
        self._threads = ThreadPoolExecutor(NUM_OBJECT_THREADS, "mmstream-objects")

    def close(self) -> None:
        """Give up what is under way. Nobody waits for requests that are still sent again."""
        for download in list(self._downloads):
            download.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._arrived.close()

    def start(self, row: Row, draft: Draft | RowError, is_first: bool) -> _WaitingRow:
        """Start to fetch what a row needs from elsewhere. A row that fails has its error.

        A row that must wait, for its media or for the rows before it, counts with its size.
        """
        if isinstance(draft, RowError):
            return _WaitingRow(row, draft, {}, 0)
        arriving = {
            number: _then(future, self._arrived.keep)
            for number, ref in enumerate(draft.media)
            if (future := self._fetch(ref)) is not None
        }
        inline_bytes = 0
        if arriving or not is_first:
            inline_bytes = len(msgspec.json.encode(draft.content))
            inline_bytes += sum(len(ref.data or "") + len(ref.path) for ref in draft.media)
        self._inline_bytes += inline_bytes
        self._num_arriving += len(arriving)
        return _WaitingRow(row, draft, arriving, inline_bytes)

    def is_full(self, waiting: deque[_WaitingRow]) -> bool:
        """Tell whether no further row should start before the first one is done."""
        return (
            len(waiting) >= MAX_ROWS_AHEAD
            or self._num_arriving >= MAX_MEDIA_AHEAD
            or self._inline_bytes > MAX_INLINE_BYTES_AHEAD
        )

    def finish(self, waiting: _WaitingRow) -> ReadRow:
        """Return a row whose turn it is. Its media are waited for, or read, one after the other."""
        self._inline_bytes -= waiting.inline_bytes
        self._num_arriving -= len(waiting.arriving)
        refs = waiting.draft.media if isinstance(waiting.draft, Draft) else ()
        return waiting.row, waiting.draft, self._media(refs, waiting.arriving)

    def _media(
        self, refs: tuple[MediaRef, ...], arriving: dict[int, Future[Kept]]
    ) -> Iterator[bytes]:
        bytes_left = MAX_ROW_BYTES
        try:
            for number, ref in enumerate(refs):
                if number in arriving:
                    data = self._arrived.take(arriving.pop(number))
                else:
                    data = self._read(ref, bytes_left)
                bytes_left -= len(data)
                if bytes_left < 0:
                    raise RowError(
                        f"{short_name(ref.path)}: the row's media are over the limit of "
                        f"{MAX_ROW_BYTES} bytes"
                    )
                yield data
        finally:  # the row may have failed before it took all of them
            for future in arriving.values():
                future.add_done_callback(self._arrived.drop)

    def _fetch(self, ref: MediaRef) -> Future[bytes] | None:
        """Start to fetch a medium that lies elsewhere. None: it is at hand, or it is refused."""
        if ref.data is not None or is_inline(ref.path):
            return None
        try:
            reference = parse_reference(ref.path, self._access)
        except RowError:
            return None  # `_read` says it
        if reference.source == "object":
            return self._threads.submit(self._read, ref, MAX_ROW_BYTES)
        if reference.source == "file":
            return None
        downloader = shared_downloader(self._access.downloads, self._access.num_processes)
        download = downloader.start(reference.location, MAX_ROW_BYTES)
        self._downloads.add(download)
        return download

    def _read(self, ref: MediaRef, max_bytes: int) -> bytes:
        """Return the bytes of a medium that need not be downloaded. Runs in a thread, too."""
        try:
            if ref.data is not None:
                return ref.data
            data = inline_bytes(ref.path)
            return self._read_stored(ref.path, max_bytes) if data is None else data
        except RowError as error:
            raise RowError(f"{short_name(ref.path)}: {error}") from None

    def _read_stored(self, text: str, max_bytes: int) -> bytes:
        """Return the bytes of a local file or an object, a span or a member of it."""
        reference = parse_reference(text, self._access)
        path = reference.location
        source = self._objects if reference.source == "object" else self._folder
        if reference.member is not None:
            read = partial(source.read_range, path)
            archive = Archive(reference.is_zip, source.stamp(path), read)
            return self._archives.read(archive, reference.member, max_bytes)
        if reference.span is None:
            return source.read(path, max_bytes)
        start, stop = reference.span
        if stop - start > max_bytes:
            raise RowError(f"more than {max_bytes:,} bytes")
        return source.read_range(path, start, stop)


def shared_downloader(options: DownloadOptions, num_processes: int) -> Downloader:
    """Return the downloader of this process. Its client is imported when a row needs it first."""
    from mmstream.converting.media import download

    return download.shared_downloader(options, num_processes)


def _then(future: Future[bytes], function: Callable[[bytes], T]) -> Future[T]:
    """Return the future of what a function makes of a future's result."""
    result: Future[T] = Future()

    def finish(done: Future[bytes]) -> None:
        try:
            value = function(done.result())
        except BaseException as error:  # CancelledError too: whoever waits must get it
            result.set_exception(error)
        else:
            result.set_result(value)

    future.add_done_callback(finish)
    return result


class _Spilled(NamedTuple):
    start: int
    num_bytes: int


Kept: TypeAlias = bytes | _Spilled
"""What has arrived: in memory, or a span of the temporary file."""


class ArrivedBytes:
    """What has arrived and was not taken yet. Safe to use from several threads.

    Args:
        max_bytes: Beyond this much in memory, what arrives is written to a temporary file.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._file_size = 0

    def close(self) -> None:
        """Remove the temporary file."""
        with self._lock:
            if self._file is not None:
                self._file.close()

    def keep(self, data: bytes) -> Kept:
        """Keep the bytes of a medium until they are taken."""
        with self._lock:
            if self._num_bytes + len(data) > self._max_bytes:
                return self._spill(data)
            self._num_bytes += len(data)
            return data

    def take(self, future: Future[Kept]) -> bytes:
        """Wait for a medium and return its bytes. Raises what its future raised."""
        kept = future.result()
        with self._lock:
            if not isinstance(kept, _Spilled):
                self._num_bytes -= len(kept)
                return kept
            assert self._file is not None
            data = os.pread(self._file.fileno(), kept.num_bytes, kept.start)
        if len(data) != kept.num_bytes:
            raise StorageError("a temporary file of media was cut short; run the command again")
        return data

    def drop(self, future: Future[Kept]) -> None:
        """Forget a medium that has arrived, or failed, and that nobody takes."""
        if future.exception() is None and not isinstance(future.result(), _Spilled):
            self.take(future)

    def _spill(self, data: bytes) -> _Spilled:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
            self._file.write(data)
            self._file.flush()
        except (OSError, ValueError) as error:  # ValueError: closed, nobody waits any more
            raise StorageError(
                f"{escaped(tempfile.gettempdir())}: {error}; media wait there for the rows before "
                "them. Set TMPDIR to a folder with more space, then run the same command again"
            ) from error
        self._file_size += len(data)
        return _Spilled(self._file_size - len(data), len(data))
