"""Step 3 of a conversion: rows with drafts -> rows with the bytes of their media.

rows -> formats -> LOAD -> shard

references   what a path or URL means
look_ahead   downloads and objects arrive before their row's turn
check_rows   rows whose media are read; idle CPUs help
types        what the bytes really are
check        what is asked of them; their facts
images       what is stored instead, where images are made smaller

Bytes of media that arrive before their row's turn: in memory, and beyond a limit on disk.

    downloads and objects -> LOOK AHEAD -> load

Rows keep their order. One slow server must not hold up the downloads of the rows behind it. So many
rows are in flight, and what has arrived waits for its turn.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec

from mmstream.converting.draft import Draft, MediaRef, RowError
from mmstream.converting.media.archives import TarMembers, ZipMembers
from mmstream.converting.media.check import IdleCpus, LoadedRow, ReadRow, check_rows
from mmstream.converting.media.references import (
    LocalFolder,
    MediaAccess,
    Reference,
    inline_bytes,
    is_inline,
    object_size,
    parse_reference,
    read_object,
    read_object_range,
    short_name,
)
from mmstream.converting.options import DownloadOptions, MediaOptions
from mmstream.converting.rows.records import Row
from mmstream.errors import StorageError, escaped

if TYPE_CHECKING:
    from mmstream.converting.media.download import Downloader

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
    with _Loader(access) as loader:
        yield from check_rows(_read_rows(drafts, loader), options, idle_cpus)


def _read_rows(
    drafts: Iterable[tuple[Row, Draft | RowError]], loader: _Loader
) -> Iterator[ReadRow]:
    """Yield each row when its turn has come, before its media are read."""
    waiting: deque[_WaitingRow] = deque()
    for row, draft in drafts:
        if not waiting and (isinstance(draft, RowError) or not draft.media):
            yield row, draft, None
            continue
        waiting.append(loader.start(row, draft, is_first=not waiting))
        while waiting and (waiting[0].is_ready or loader.is_full(waiting)):
            yield loader.finish(waiting.popleft())
    while waiting:
        yield loader.finish(waiting.popleft())


@dataclass(slots=True)
class _WaitingRow:
    row: Row
    draft: Draft | RowError
    tickets: dict[int, Ticket]
    """Of the media that must arrive, by their number in the row."""
    inline_bytes: int

    @property
    def is_ready(self) -> bool:
        return all(ticket.done.is_set() for ticket in self.tickets.values())


class _Loader:
    """Reads media for the rows of a shard. A context manager.

    The downloader and the threads start when a row first needs them. The downloader is that of the
    process; the downloads that nobody waits for any more end with the loader.
    """

    def __init__(self, access: MediaAccess) -> None:
        self._access = access
        self._folder = LocalFolder(access.root or "", access.root_stamp)
        self._tars, self._zips = TarMembers(), ZipMembers()
        self._arrived = ArrivedBytes(MAX_BYTES_AHEAD)
        self._inline_bytes = self._num_tickets = 0
        self._resources = ExitStack()
        self._downloads: set[Future[bytes]] = set()
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> _Loader:
        self._resources.enter_context(self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        for download in tuple(self._downloads):
            download.cancel()
        self._resources.close()

    def start(self, row: Row, draft: Draft | RowError, is_first: bool) -> _WaitingRow:
        """Start to fetch what a row needs from elsewhere. A row that fails has its error.

        A row that must wait, for its media or for the rows before it, counts with its size.
        """
        if isinstance(draft, RowError):
            return _WaitingRow(row, draft, {}, 0)
        tickets: dict[int, Ticket] = {}
        for i, ref in enumerate(draft.media):
            future = self._fetch(ref)
            if future is not None:
                tickets[i] = self._arrived.wait_for(future)
        inline_bytes = 0
        if tickets or not is_first:
            inline_bytes = len(msgspec.json.encode(draft.content))
            inline_bytes += sum(len(ref.data or "") + len(ref.path) for ref in draft.media)
        self._inline_bytes += inline_bytes
        self._num_tickets += len(tickets)
        return _WaitingRow(row, draft, tickets, inline_bytes)

    def is_full(self, waiting: deque[_WaitingRow]) -> bool:
        """Tell whether no further row should start before the first one is done."""
        return (
            len(waiting) >= MAX_ROWS_AHEAD
            or self._num_tickets >= MAX_MEDIA_AHEAD
            or self._inline_bytes > MAX_INLINE_BYTES_AHEAD
        )

    def finish(self, waiting: _WaitingRow) -> ReadRow:
        """Return a row whose turn it is. Its media are waited for, or read, one after the other."""
        self._inline_bytes -= waiting.inline_bytes
        self._num_tickets -= len(waiting.tickets)
        if isinstance(waiting.draft, RowError):
            return waiting.row, waiting.draft, None
        media = self._media(waiting.draft.media, waiting.tickets)
        return waiting.row, waiting.draft, media

    def _media(self, refs: tuple[MediaRef, ...], tickets: dict[int, Ticket]) -> Iterator[bytes]:
        bytes_left = MAX_ROW_BYTES
        try:
            for i, ref in enumerate(refs):
                if i in tickets:
                    data = self._arrived.take(tickets[i])
                else:
                    with _named(ref):
                        data = self._read(ref, bytes_left)
                bytes_left -= len(data)
                if bytes_left < 0:
                    with _named(ref):
                        raise RowError(
                            f"the row's media are over the limit of {MAX_ROW_BYTES} bytes"
                        )
                yield data
        finally:  # the row may have failed before it took all of them
            for ticket in tickets.values():
                self._arrived.drop(ticket)

    def _fetch(self, ref: MediaRef) -> Future[bytes] | None:
        """Start to fetch a medium that lies elsewhere. None: it is at hand, or it is refused."""
        if ref.data is not None or is_inline(ref.path):
            return None
        try:
            reference = parse_reference(ref.path, self._access)
        except RowError:
            return None  # `finish` says it
        if reference.source == "web":
            return self._download(reference.location)
        if reference.source == "object":
            return self._thread_pool().submit(self._read_object, ref, reference)
        return None

    def _read(self, ref: MediaRef, max_bytes: int) -> bytes:
        """Return the bytes of a medium that is at hand."""
        if ref.data is not None:
            return ref.data
        if (data := inline_bytes(ref.path)) is not None:
            return data
        reference = parse_reference(ref.path, self._access)
        return self._read_stored(reference, max_bytes)

    def _read_object(self, ref: MediaRef, reference: Reference) -> bytes:
        """Return the bytes of an object, a span or a member of it. Runs in a thread."""
        with _named(ref):
            return self._read_stored(reference, MAX_ROW_BYTES)

    def _read_stored(self, reference: Reference, max_bytes: int) -> bytes:
        """Return the bytes of a local file or an object, a span or a member of it."""
        path, span = reference.location, reference.span
        is_object = reference.source == "object"
        if span is None and not reference.member:
            if is_object:
                return read_object(path, self._access, max_bytes)
            return self._folder.read(path, max_bytes)
        read: Callable[[int, int], bytes] = partial(self._folder.read_range, path)
        if is_object:
            read = partial(read_object_range, path, self._access)
        if reference.member:
            archive: tuple[Any, ...] = (
                (path, object_size(path, self._access)) if is_object else self._folder.stamp(path)
            )
            if reference.is_zip:
                return self._zips.read(archive, reference.member, read, archive[1], max_bytes)
            span = self._tars.span(archive, reference.member, read, archive[1])
        assert span is not None
        if span[1] - span[0] > max_bytes:
            raise RowError(f"the row's media are over the limit of {MAX_ROW_BYTES} bytes")
        return read(*span)

    def _download(self, url: str) -> Future[bytes]:
        downloader = shared_downloader(self._access.downloads, self._access.num_processes)
        download = downloader.start(url, MAX_ROW_BYTES)
        self._downloads.add(download)
        download.add_done_callback(self._downloads.discard)
        return download

    def _thread_pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_OBJECT_THREADS)
            # After an error, nobody waits for requests that are still sent again.
            self._resources.callback(self._threads.shutdown, wait=False, cancel_futures=True)
        return self._threads


@contextmanager
def _named(ref: MediaRef) -> Iterator[None]:
    """Put the name of a medium before the reason why it cannot be used."""
    try:
        yield
    except RowError as error:
        raise RowError(f"{short_name(ref.path)}: {error}") from None


def shared_downloader(options: DownloadOptions, num_processes: int) -> Downloader:
    """Return the downloader of this process. Its client is imported when a row needs it first."""
    from mmstream.converting.media import download

    return download.shared_downloader(options, num_processes)


class _Spilled(NamedTuple):
    start: int
    num_bytes: int


class Ticket:
    """A medium that was asked for. `ArrivedBytes.take` redeems it, once."""

    __slots__ = ("done", "is_dropped", "value")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.is_dropped = False
        self.value: bytes | _Spilled | BaseException = b""


class ArrivedBytes:
    """What has arrived and was not taken yet. A context manager, which removes its file.

    Args:
        max_bytes: Beyond this much in memory, what arrives is written to a temporary file.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._file_size = 0

    def __enter__(self) -> ArrivedBytes:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()

    def wait_for(self, future: Future[bytes]) -> Ticket:
        """Return the ticket of a medium that will arrive."""
        ticket = Ticket()
        future.add_done_callback(lambda done: self._arrive(ticket, done))
        return ticket

    def take(self, ticket: Ticket) -> bytes:
        """Wait for a medium and return its bytes. Raises what its future raised."""
        ticket.done.wait()
        value, ticket.value = ticket.value, b""
        if isinstance(value, BaseException):
            raise value
        if isinstance(value, _Spilled):
            return self._read(value)
        with self._lock:
            self._num_bytes -= len(value)
        return value

    def drop(self, ticket: Ticket) -> None:
        """Forget a medium whose row failed, once it has arrived."""
        with self._lock:
            ticket.is_dropped = True
            if ticket.done.is_set() and isinstance(ticket.value, bytes):
                self._num_bytes -= len(ticket.value)
                ticket.value = b""

    def _arrive(self, ticket: Ticket, future: Future[bytes]) -> None:
        with self._lock:
            try:
                data = future.result()
                ticket.value = b"" if ticket.is_dropped else self._keep(data)
            except BaseException as error:  # CancelledError too: whoever waits must get it
                ticket.value = error
            ticket.done.set()

    def _keep(self, data: bytes) -> bytes | _Spilled:
        if self._num_bytes + len(data) > self._max_bytes:
            return self._spill(data)
        self._num_bytes += len(data)
        return data

    def _spill(self, data: bytes) -> _Spilled:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
            self._file.write(data)
            self._file.flush()
        except (OSError, ValueError) as error:  # ValueError: closed, nobody waits any more
            raise StorageError(
                f"{escaped(tempfile.gettempdir())}: {error}; media wait there for the rows before "
                "them. Set TMPDIR to a folder with more space, then run the same command again"
            ) from error
        self._file_size += len(data)
        return _Spilled(self._file_size - len(data), len(data))

    def _read(self, spilled: _Spilled) -> bytes:
        with self._lock:
            assert self._file is not None
            data = os.pread(self._file.fileno(), spilled.num_bytes, spilled.start)
        if len(data) != spilled.num_bytes:
            raise StorageError("a temporary file of media was cut short; run the command again")
        return data
