"""Step 4 of a conversion: rows with drafts -> rows with the bytes of their media.

    rows -> formats -> LOAD -> shard

Rows keep their order. One slow server must not hold up the downloads of the rows behind it. So many
rows are in flight, and what has arrived waits for its turn: in memory, and beyond a limit on disk.

Media may be members of a tar or a zip. The directory of an archive is read once, and kept for the
rows that follow, because rows usually name the members of few archives at a time. A tar has no
directory: all its headers are read. The module `zipfile` reads the directory of a zip. Its members
are read here, by ranges and within limits. Each is stored as it is, or compressed by deflate, as
nearly all zips are.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec

from mmstream.converting.draft import Draft, MediaRef, RowError
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
import io
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Generic, TypeVar

from mmstream.errors import ShardError
from mmstream.tar.lazy_bytes import LazyBytes
from mmstream.tar.samples import iter_members, links_of

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


@dataclass(slots=True, eq=False)
class Ticket:
    """A medium that was asked for. `ArrivedBytes.take` redeems it, once."""

    done: threading.Event = field(default_factory=threading.Event)
    is_dropped: bool = False
    value: bytes | _Spilled | BaseException = b""


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


MAX_KEPT_MEMBERS = 500_000
"""Most members that are remembered, of all archives together: about 200 MB. The archive that was
named last is always kept, even if it alone has more."""

Member = TypeVar("Member")
ReadRange = Callable[[int, int], bytes]
"""(start, stop) -> these bytes of an archive."""


class _Directory(NamedTuple, Generic[Member]):
    members: dict[str, Member]
    fault: str | None
    """Why the archive cannot be read."""

    @property
    def num_kept(self) -> int:
        return max(1, len(self.members))  # what has no members takes memory, too


class Directories(Generic[Member]):
    """The directories of the archives that were named last. Safe to use from several threads.

    Args:
        read_directory: (reads a range, size in bytes) -> the members by their plain names. It
            raises a `RowError` where the archive cannot be read.
    """

    def __init__(self, read_directory: Callable[[ReadRange, int], dict[str, Member]]) -> None:
        self._read_directory = read_directory
        self._directories: OrderedDict[Hashable, _Directory[Member]] = OrderedDict()
        self._num_kept = 0
        self._lock = threading.Lock()

    def members(self, archive: Hashable, read: ReadRange, num_bytes: int) -> dict[str, Member]:
        """Return the members of an archive by their plain names.

        Args:
            archive: What identifies it: two archives have the same only if they are the same.
            read: Returns bytes [start, stop) of the archive.
            num_bytes: Size of the archive.

        Raises:
            RowError: The archive cannot be read. That is remembered, too.
        """
        with self._lock:
            if archive not in self._directories:
                self._keep(archive, self._directory(read, num_bytes))
            self._directories.move_to_end(archive)
            members, fault = self._directories[archive]
        if fault is not None:
            raise RowError(fault)
        return members

    def _directory(self, read: ReadRange, num_bytes: int) -> _Directory[Member]:
        try:
            return _Directory(self._read_directory(read, num_bytes), None)
        except RowError as error:
            return _Directory({}, str(error))

    def _keep(self, archive: Hashable, directory: _Directory[Member]) -> None:
        """Keep a directory, and forget those that were named least recently."""
        self._directories[archive] = directory
        self._num_kept += directory.num_kept
        while len(self._directories) > 1 and self._num_kept > MAX_KEPT_MEMBERS:
            _, oldest = self._directories.popitem(last=False)
            self._num_kept -= oldest.num_kept


def plain_name(name: str) -> str:
    """Return the name of a member without ``./`` before it."""
    return name.removeprefix("./")


MAX_TAR_MEMBERS = 1 << 24
"""Most members of one tar."""

_SOUNDS = ("flac", "wav", "opus", "mp3", "ogg", "m4a", "sph")
"""Types of sounds that a tar of Shar may hold. Its rows do not say which."""

Spans = dict[str, tuple[int, int]]


class TarMembers:
    """The members of tars that were named last. Safe to use from several threads."""

    def __init__(self) -> None:
        self._directories = Directories(_spans)

    def span(self, tar: Hashable, member: str, read: ReadRange, num_bytes: int) -> tuple[int, int]:
        """Return where in a tar the bytes of a member are: (start, stop).

        Args:
            tar: What identifies it: two tars have the same only if they are the same.
            member: Its name, with or without ``./`` before it. Where a tar has a name twice, the
                first one counts. ``NAME.*`` is the sound of this name, whatever its type.
            read: Returns bytes [start, stop) of the tar.
            num_bytes: Size of the tar.

        Raises:
            RowError: It is no plain tar, or it has no such file.
        """
        spans, name = self._directories.members(tar, read, num_bytes), plain_name(member)
        names = [name]
        if name.endswith(".*"):
            names += [f"{name[:-1]}{extension}" for extension in _SOUNDS]
        span = next((spans[name] for name in names if name in spans), None)
        if span is None:
            raise RowError("no such member of the tar")
        if span[0] == span[1]:
            raise RowError("empty file")
        return span


def _spans(read: ReadRange, num_bytes: int) -> Spans:
    spans: Spans = {}
    try:
        members = list(islice(iter_members(read, num_bytes), MAX_TAR_MEMBERS + 1))
    except ShardError as error:
        raise RowError(f"not a plain tar: {error}") from None
    if len(members) > MAX_TAR_MEMBERS:
        raise RowError(f"a tar of more than {MAX_TAR_MEMBERS:,} members")
    links = links_of(members)
    for member in members:
        span = links.get(member.offset)
        if member.is_file:
            span = (member.data_offset, member.data_offset + member.size)
        if span is not None:
            spans.setdefault(plain_name(member.name), span)
    return spans


MAX_DIRECTORY_BYTES = 1 << 28
"""Longest directory that is read: about two million members."""

_HEADER = struct.Struct("<4s22xHH")
"""What stands before a member: its mark, and the lengths of its name and of what follows that."""
_MARK = b"PK\3\4"
_IS_ENCRYPTED = 1


class _Member(NamedTuple):
    header_offset: int
    num_stored_bytes: int
    num_bytes: int
    crc32: int
    method: int
    is_encrypted: bool


class ZipMembers:
    """The members of zips that were named last. Safe to use from several threads."""

    def __init__(self) -> None:
        self._directories = Directories(_directory)

    def read(
        self, archive: Hashable, name: str, read: ReadRange, num_bytes: int, max_bytes: int
    ) -> bytes:
        """Return the bytes of a member.

        Args:
            archive: What identifies the zip: two zips have the same only if they are the same.
            name: Of the member. Where a zip has it twice, the first one counts.
            read: Returns bytes [start, stop) of the zip.
            num_bytes: Size of the zip.
            max_bytes: The largest member that is read.

        Raises:
            RowError: It is no zip, or has no such file, or it is damaged, encrypted, too large, or
                compressed in a rare way.
        """
        member = self._directories.members(archive, read, num_bytes).get(plain_name(name))
        if member is None:
            raise RowError("no such member of the zip")
        if not member.num_bytes:
            raise RowError("empty file")
        if max(member.num_bytes, member.num_stored_bytes) > max_bytes:
            raise RowError(f"more than {max_bytes:,} bytes")
        return _data(member, read, num_bytes)


def _directory(read: ReadRange, num_bytes: int) -> dict[str, _Member]:
    """Return the members of a zip by their names."""
    num_read = 0

    def read_ranges(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        nonlocal num_read
        num_read += sum(stop - start for start, stop in ranges)
        if num_read > MAX_DIRECTORY_BYTES:
            raise RowError(f"a zip whose directory has more than {MAX_DIRECTORY_BYTES:,} bytes")
        return [read(start, stop) for start, stop in ranges]

    members: dict[str, _Member] = {}
    try:
        # A buffer gives `zipfile` all bytes that it asks for, also where they come in pieces.
        file = io.BufferedReader(LazyBytes(num_bytes, read_ranges).open())
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    member = _Member(
                        info.header_offset,
                        info.compress_size,
                        info.file_size,
                        info.CRC,
                        info.compress_type,
                        bool(info.flag_bits & _IS_ENCRYPTED),
                    )
                    members.setdefault(plain_name(info.filename), member)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError) as error:
        raise RowError(f"not a zip ({type(error).__name__})") from None
    return members


def _data(member: _Member, read: ReadRange, num_bytes: int) -> bytes:
    """Return the bytes of a member, compared with its checksum."""
    if member.is_encrypted:
        raise RowError("is encrypted; unpack the zip first")
    if member.method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise RowError("is not compressed by deflate; unpack the zip first")
    start = member.header_offset
    header = read(start, start + _HEADER.size) if start + _HEADER.size <= num_bytes else b""
    if not header.startswith(_MARK):
        raise RowError("is not where the zip's directory says")
    _, name_bytes, extra_bytes = _HEADER.unpack(header)
    start += _HEADER.size + name_bytes + extra_bytes
    stop = start + member.num_stored_bytes
    if stop > num_bytes:
        raise RowError("is not where the zip's directory says")
    data = read(start, stop)
    if member.method == zipfile.ZIP_DEFLATED:
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.num_bytes + 1)
        except zlib.error:
            raise RowError("is damaged: it cannot be unpacked") from None
    if len(data) != member.num_bytes or zlib.crc32(data) != member.crc32:
        raise RowError("is damaged: it has another checksum than the zip says")
    return data
