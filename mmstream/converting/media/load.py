"""Step 4 of a conversion: rows with drafts -> rows with the bytes of their media, read and checked.

    rows -> formats -> LOAD -> CHECK (type, checks, facts; made smaller where asked for) -> shard

Rows keep their order. One slow server must not hold up the downloads of the rows after it. So many
rows are in flight, and what has arrived waits for its turn: in memory, and beyond a limit on disk.

To decode and encode takes most of the time of a conversion, and needs nothing but the bytes of the
media. So CPUs that have no shard of their own do it for a shard of others, such as the last one.
All else stays with the process of the shard: it reads and downloads media, and writes the samples.
Rows stay in order, so the shard has the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, BinaryIO, ClassVar, NamedTuple, TypeAlias
from weakref import WeakSet

import msgspec

from mmstream.converting.draft import Draft, Media, MediaRef, RowError
from mmstream.converting.media.references import (
    Archive,
    Archives,
    LocalFolder,
    MediaAccess,
    Objects,
    inline_bytes,
    is_inline,
    parse_reference,
    short_name,
)
from mmstream.converting.options import MediaOptions
from mmstream.converting.rows.records import Row
from mmstream.errors import DecodeError, MMStreamError, StorageError, escaped
from mmstream.media.fields import FRAMES
from mmstream.media.frames import FrameList
from mmstream.media.limits import Deadline, Limits
from mmstream.media.types import Facts, Kind, Shape, sniff_file
from mmstream.processes.machine import num_cores

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
) -> Iterator[_ReadRow]:
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
        self._downloads: WeakSet[Future[Kept]] = WeakSet()
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
            number: future
            for number, ref in enumerate(draft.files)
            if (future := self._fetch(ref)) is not None
        }
        inline_bytes = 0
        if arriving or not is_first:
            inline_bytes = len(msgspec.json.encode(draft.content))
            inline_bytes += sum(len(ref.data or "") + len(ref.path) for ref in draft.files)
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

    def finish(self, waiting: _WaitingRow) -> _ReadRow:
        """Return a row whose turn it is. Its media are waited for, or read, one after the other."""
        self._inline_bytes -= waiting.inline_bytes
        self._num_arriving -= len(waiting.arriving)
        refs = waiting.draft.files if isinstance(waiting.draft, Draft) else ()
        return _ReadRow(waiting.row, waiting.draft, self._files(refs, waiting.arriving))

    def _files(
        self, refs: Sequence[MediaRef], arriving: dict[int, Future[Kept]]
    ) -> Iterator[bytes | RowError]:
        """Yield the media files of a row, or in the end why the next one cannot be read."""
        bytes_left = MAX_ROW_BYTES
        try:
            for number, ref in enumerate(refs):
                if number in arriving:
                    data = self._arrived.take(arriving.pop(number))
                else:
                    data = self._read(ref, bytes_left)
                bytes_left -= len(data)
                if bytes_left < 0:
                    yield RowError(
                        f"{short_name(ref.path)}: the row's media are over the limit of "
                        f"{MAX_ROW_BYTES} bytes"
                    )
                    return
                yield data
        except RowError as error:
            yield error
        finally:  # the row may have failed before it took all of them
            for future in arriving.values():
                future.add_done_callback(self._arrived.drop)

    def _fetch(self, ref: MediaRef) -> Future[Kept] | None:
        """Start to fetch a medium that lies elsewhere. None: it is at hand, or it is refused."""
        if ref.data is not None or is_inline(ref.path):
            return None
        try:
            reference = parse_reference(ref.path, self._access)
        except RowError:
            return None  # `_read` says it
        if reference.source == "object":
            return self._threads.submit(lambda: self._arrived.keep(self._read(ref, MAX_ROW_BYTES)))
        if reference.source == "file":
            return None
        from mmstream.converting.media.download import shared_downloader  # loads aiohttp

        downloader = shared_downloader(self._access.downloads, self._access.num_processes)
        download = downloader.start(reference.location, MAX_ROW_BYTES, self._arrived.keep)
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
        is_here = not future.cancelled() and future.exception() is None
        if is_here and not isinstance(future.result(), _Spilled):
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


# -- rows whose turn it is are checked: by this CPU, and by idle ones

BATCH_BYTES = 4 << 20
"""Media that a CPU gets at a time: 25 photographs, or one video."""
BATCH_ROWS = 64
MAX_BYTES_AT_ONCE = 128 << 20
"""Bytes of all batches of a shard that are under way. The batch that was read last waits until the
others leave room for it, so its bytes come on top. One batch alone may have more."""

LoadedRow: TypeAlias = tuple[Row, Draft | RowError, list[Media]]
"""A row that failed has its RowError, and no media."""


class _ReadRow(NamedTuple):
    """A row whose turn it is."""

    row: Row
    draft: Draft | RowError
    files: Iterable[bytes | RowError]
    """Of its media, read one after the other when they are asked for. The last one may be the
    reason why the next file was not read."""


class IdleCpus:
    """CPUs that have no shard of their own, for the threads of this process.

    At most one batch for each of them is under way, and one for the shard's own CPU.
    """

    _cpus_per_shard: ClassVar[Any]
    """An int in memory that the main process shares. Only it writes there."""

    @classmethod
    def begin(cls, cpus_per_shard: Any) -> None:
        """Prepare a worker process."""
        cls._cpus_per_shard = cpus_per_shard

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(num_cores(), "mmstream-check")

    def close(self) -> None:
        """Give up: after an error, nobody waits for a video that is still decoded."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def count(self) -> int:
        """Return how many may check media for this shard now, beside its own.

        A CPU that is counted may be busy by the time it is asked. Its batch waits then.
        """
        return int(self._cpus_per_shard.value) - 1

    def submit(self, check: Callable[[], list[LoadedRow]]) -> Future[list[LoadedRow]]:
        """Let one of them check a batch of rows."""
        return self._threads.submit(check)


def check_rows(
    rows: Iterator[_ReadRow], options: MediaOptions, idle_cpus: IdleCpus | None = None
) -> Iterator[LoadedRow]:
    """Yield each row with its draft and its checked media, in order.

    Args:
        rows: They are read in this thread.
        options: What is asked of media, and how they are changed.
        idle_cpus: What helps, where checks take long. While none is idle, one row at a time is in
            memory. Otherwise it is a batch for each of them, and one for this shard's own CPU.
    """
    takes_long = options.changes_images or options.check == "full" or options.video_format
    waiting: deque[tuple[int, Future[list[LoadedRow]]]] = deque()
    for row in rows:
        num_idle = 0 if idle_cpus is None or not takes_long else idle_cpus.count()
        if idle_cpus is None or not (num_idle or waiting):
            yield _checked_row(row, options)
            continue
        batch = _read_batch(chain([row], rows))
        num_bytes = sum(map(_num_bytes, batch))
        while waiting and (
            len(waiting) > num_idle
            or num_bytes + sum(waiting_bytes for waiting_bytes, _ in waiting) > MAX_BYTES_AT_ONCE
        ):
            yield from waiting.popleft()[1].result()
        check = partial(_checked_rows, batch, options)
        waiting.append((num_bytes, idle_cpus.submit(check)))
    for _, checked_rows in waiting:
        yield from checked_rows.result()


def _read_batch(rows: Iterable[_ReadRow]) -> list[_ReadRow]:
    batch: list[_ReadRow] = []
    num_bytes = 0
    for row in rows:
        batch.append(row._replace(files=list(row.files)))
        num_bytes += _num_bytes(batch[-1])
        if num_bytes >= BATCH_BYTES or len(batch) == BATCH_ROWS:
            break
    return batch


def _num_bytes(row: _ReadRow) -> int:
    return sum(len(file) for file in row.files if isinstance(file, bytes))


def _checked_rows(batch: Iterable[_ReadRow], options: MediaOptions) -> list[LoadedRow]:
    return [_checked_row(row, options) for row in batch]


def _checked_row(row: _ReadRow, options: MediaOptions) -> LoadedRow:
    """Return a row with its media, or with the error of the first one that failed."""
    if isinstance(row.draft, RowError):
        return row.row, row.draft, []
    refs = row.draft.files
    files: list[Media] = []
    try:
        for ref, file in zip(refs, row.files, strict=False):
            if isinstance(file, RowError):
                return row.row, file, []
            sha256 = ref.sha256 and hashlib.sha256(file).hexdigest()
            if sha256 != ref.sha256:
                fault = RowError(f"another file than the row says: its sha256 is {sha256}")
                return row.row, _named(ref, fault), []
            files.append(Media(FRAMES, file) if ref.frames else checked(ref.kind, file, options))
    except RowError as error:
        return row.row, _named(refs[len(files)], error), []
    try:
        media = _with_frames(row.draft.media, iter(files), options)
        require_starts_inside(row.draft.content, media)
    except RowError as error:
        return row.row, _named(row.draft.media[0], error), []
    return row.row, row.draft, media


def _with_frames(
    refs: Sequence[MediaRef], files: Iterator[Media], options: MediaOptions
) -> list[Media]:
    """Return the media of a row. Lists get the frames that follow them, and their facts."""
    media = []
    for ref in refs:
        medium = next(files)
        if ref.frames:
            medium = replace(medium, frames=tuple(islice(files, len(ref.frames))))
            if options.check != "none":
                names = [short_name(frame.path) for frame in ref.frames]
                facts = facts_of_frames(medium, names)
                _check_duration(facts, options)
                medium = replace(medium, facts=facts)
        media.append(medium)
    return media


def facts_of_frames(medium: Media, names: Sequence[str]) -> Facts:
    """Return the facts of a list of frames, which are of one size. Each is checked already.

    Args:
        medium: The list with its frames.
        names: Of the frames.

    Raises:
        RowError: A frame has another size, or the times are wrong.
    """
    try:
        frames = FrameList.parse(medium.data, names, [frame.data for frame in medium.frames])
        return frames.facts(Deadline.start(TIMEOUT_S), decode=False)
    except DecodeError as error:
        raise RowError(str(error)) from None


def _named(ref: MediaRef, error: RowError) -> RowError:
    return RowError(f"{short_name(ref.path)}: {error}")


# -- what a media file really is: its type, the checks that are asked of it, its facts


_NOT_IN_TRAINING = ("tiff", "heic")
"""Images that no decoder of a training run reads. A sample would silently have no image."""

TIMEOUT_S = 300.0
"""Seconds that reading or decoding a file may take. A busy machine must not reject a file."""

_SOUND_ALONE = {"mp4": "m4a", "mov": "m4a", "mkv": "mka", "webm": "mka", "wmv": "wma"}
"""What files are called that hold sound alone. Their first bytes do not tell that."""


def checked(kind: Kind, data: bytes, options: MediaOptions) -> Media:
    """Return a medium as it is stored, with its facts, after all checks.

    Args:
        kind: What the row says that it is.
        data: The file.
        options: What is asked of it, and how images and videos are changed.

    Raises:
        RowError: It is something else, fails a check, or a library fails with it in any other way.
            The message does not name the file.
    """
    try:
        return _checked(kind, data, options)
    except DecodeError as error:
        raise RowError(str(error)) from None
    except MMStreamError:
        raise
    except Exception as error:  # libraries raise what they like about a stranger's file
        raise RowError(
            f"cannot be read or stored: {escaped(error) or type(error).__name__}"
        ) from None


def _checked(kind: Kind, data: bytes, options: MediaOptions) -> Media:
    extension = _extension(kind, data, options)
    if kind == "image":
        return _image(data, extension, options)
    if options.check == "none":
        return Media(extension, data)
    from mmstream.media.facts import media_facts  # loads FFmpeg

    facts = media_facts(data, kind, Deadline.start(TIMEOUT_S), decode=options.check == "full")
    _check_duration(facts, options)
    if kind == "video" and options.video_format == "mp4":
        from mmstream.converting.media.remux import remuxed  # loads FFmpeg

        copy = remuxed(data, Deadline.start(TIMEOUT_S))
        if copy is not None:
            return Media("mp4", copy, facts)
    return Media(extension, data, facts)


def _extension(kind: Kind, data: bytes, options: MediaOptions) -> str:
    """Return the type by the first bytes."""
    media_type = sniff_file(data)
    article = "a" if kind == "video" else "an"
    if media_type is None:
        raise RowError(f"not {article} {kind} (starts with {data[:12]!r})")
    if kind == "audio" and media_type.extension in _SOUND_ALONE and options.check != "none":
        return _SOUND_ALONE[media_type.extension]  # `media_facts` refuses it if it has pictures
    if media_type.kind != kind:
        raise RowError(f"not {article} {kind} but {media_type.extension}")
    return media_type.extension


def _image(data: bytes, extension: str, options: MediaOptions) -> Media:
    if extension in _NOT_IN_TRAINING and options.image_format is None:
        raise RowError(
            f"{extension} is not supported; make it png or jpg, for example with --image-format jpg"
        )
    if options.check == "none" and not options.changes_images:
        return Media(extension, data)
    from mmstream.converting.media.images import encode, target_of  # loads Pillow
    from mmstream.media.image import decode_bytes

    shape = _shape(data, extension)
    if shape is not None:
        _check_size(shape, options)
    target = target_of(extension, shape, options)
    if target is not None:
        encoded, size, original = encode(data, extension, shape, target, options, _limits())
        _check_size(original, options)
        return Media(target, encoded, _size_facts(size, original))
    if options.check == "full" or (shape is None and options.check == "header"):
        shape = decode_bytes(data, _limits())[0].shape[:2]
        _check_size(shape, options)
    return Media(extension, data, _size_facts(shape, shape) if shape is not None else {})


def _shape(data: bytes, extension: str) -> Shape | None:
    """Return (height, width) as the header says them. None: only decoding tells."""
    from mmstream.media.image import header_shape

    if extension in _NOT_IN_TRAINING:
        return None
    shape = header_shape(data, _limits())
    if shape is not None:
        _limits().check_picture(*shape)
    return shape


def _limits() -> Limits:
    """Return the limits that training has by default, with more time."""
    return Limits.start(timeout_s=TIMEOUT_S)


def _size_facts(shape: Shape, original: Shape) -> Facts:
    return {
        "width": shape[1],
        "height": shape[0],
        "original_width": original[1],
        "original_height": original[0],
    }


def _check_size(shape: Shape, options: MediaOptions) -> None:
    shorter, longer = sorted(shape)
    if options.min_image_side is not None and shorter < options.min_image_side:
        raise RowError(f"{shape[1]}x{shape[0]} pixels; min_image_side is {options.min_image_side}")
    if options.max_aspect is not None and longer > options.max_aspect * shorter:
        raise RowError(f"{shape[1]}x{shape[0]} pixels; max_aspect is {options.max_aspect:g}")


def _check_duration(facts: Facts, options: MediaOptions) -> None:
    shortest, longest = options.min_duration_s, options.max_duration_s
    if shortest is None and longest is None:
        return
    duration = facts.get("duration_s")
    if not isinstance(duration, int | float):
        raise RowError("its duration is not known, and min_duration_s or max_duration_s is set")
    if shortest is not None and duration < shortest:
        raise RowError(f"{duration:g} s; min_duration_s is {shortest:g}")
    if longest is not None and duration > longest:
        raise RowError(f"{duration:g} s; max_duration_s is {longest:g}")


def require_starts_inside(content: Mapping[str, Any], media: Sequence[Media]) -> None:
    """Refuse a span that starts at the end of a file or later: training would find nothing there.

    An end after that of the file is not a fault: decoders cut it, and many corpora round up.

    Args:
        content: The ``json`` of the sample, with its ``segments``, or ``start_s``.
        media: Its files. Those whose duration is not known are not compared.

    Raises:
        RowError: A span starts too late. The message says where, and how long the file is.
    """
    durations = [medium.facts.get("end_s", medium.facts.get("duration_s")) for medium in media]
    lengths = [value for value in durations if isinstance(value, int | float)]
    if not lengths:
        return
    for name, start_s in _starts(content):
        if start_s >= min(lengths):
            raise RowError(
                f"{name}: starts at {start_s:g} s, and the file lasts {min(lengths):g} s; it is "
                "another file, or was cut off"
            )


def _starts(content: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, seconds) of each span that states its start as a number."""
    segments = content.get("segments")
    spans = segments if isinstance(segments, list) else []
    named = [("start_s", content), *((f"segments[{i}]", span) for i, span in enumerate(spans))]
    for name, span in named:
        start = span.get("start_s") if isinstance(span, Mapping) else None
        if isinstance(start, int | float) and not isinstance(start, bool):
            yield name, start
