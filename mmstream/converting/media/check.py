"""What a media file really is: its type, the checks that are asked of it, and its facts.

    load -> CHECK (type, checks, facts, spans of the row; made smaller where asked for) -> shard

To decode and encode takes most of the time of a conversion, and needs nothing but the bytes of the
media. So CPUs that have no shard of their own do it for a shard of others, such as the last one.
All else stays with the process of the shard: it reads and downloads media, and writes the samples.
Rows stay in order, so the shard has the same bytes.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias

from mmstream.converting.draft import Draft, Media, MediaRef, RowError
from mmstream.converting.media.references import short_name
from mmstream.converting.options import MediaOptions
from mmstream.converting.rows.records import Row
from mmstream.errors import DecodeError, MMStreamError, escaped
from mmstream.media.facts import Facts, media_facts
from mmstream.media.limits import Deadline, Limits
from mmstream.media.types import Kind, Shape, sniff_file

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
        encoded = encode(data, extension, shape, target, options, _limits())
        _check_size(encoded.original, options)
        return Media(encoded.extension, encoded.data, _size_facts(encoded.shape, encoded.original))
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

    An end behind that of the file is no fault: decoders cut it, and many corpora round up.

    Args:
        content: The ``json`` of the sample, with its ``segments``, or ``start_s``.
        media: Its files. Those whose duration is not known are not compared.

    Raises:
        RowError: A span starts too late. The message says where, and how long the file is.
    """
    durations = [medium.facts.get("duration_s") for medium in media]
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


BATCH_BYTES = 4 << 20
"""Media that a CPU gets at a time: 25 photographs, or one video."""
BATCH_ROWS = 64
MAX_BYTES_AT_ONCE = 128 << 20
"""Bytes of all batches of a shard that are under way. The batch that was read last waits until the
others leave room for it, so its bytes come on top. One batch alone may have more."""

ReadRow: TypeAlias = tuple[Row, Draft | RowError, Iterator[bytes]]
"""A row whose turn it is. Its media are read one after the other, when they are asked for; that may
raise its RowError."""

LoadedRow: TypeAlias = tuple[Row, Draft | RowError, list[Media]]
"""A row that failed has its RowError, and no media."""


class File(NamedTuple):
    """A media file that was read."""

    kind: Kind
    sha256: str | None
    """What the row expects."""
    data: bytes


class IdleCpus(Protocol):
    """CPUs that have no shard of their own. An engine knows them.

    At most one batch for each of them is under way, and one for the shard's own CPU.
    """

    def count(self) -> int:
        """Return how many may check media for this shard now, beside its own.

        A CPU that is counted may be busy by the time it is asked. Its batch waits then.
        """
        ...

    def submit(self, check: Callable[[], list[LoadedRow]]) -> Future[list[LoadedRow]]:
        """Let one of them check a batch of rows."""
        ...


def check_rows(
    rows: Iterator[ReadRow], options: MediaOptions, idle_cpus: IdleCpus | None = None
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
            yield _checked_row(_RowFiles(row[0], row[1], _files(row)), options)
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


class _RowFiles(NamedTuple):
    """A row with its files."""

    row: Row
    draft: Draft | RowError
    files: Iterable[File | RowError]
    """The last one may be the reason why the next file was not read."""


def _read_batch(rows: Iterable[ReadRow]) -> list[_RowFiles]:
    batch: list[_RowFiles] = []
    num_bytes = 0
    for row in rows:
        batch.append(_RowFiles(row[0], row[1], list(_files(row))))
        num_bytes += _num_bytes(batch[-1])
        if num_bytes >= BATCH_BYTES or len(batch) == BATCH_ROWS:
            break
    return batch


def _num_bytes(row: _RowFiles) -> int:
    return sum(len(file.data) for file in row.files if isinstance(file, File))


def _files(read_row: ReadRow) -> Iterator[File | RowError]:
    """Read the files of a row, one after the other."""
    _, draft, media = read_row
    refs = draft.media if isinstance(draft, Draft) else ()
    try:
        for ref, data in zip(refs, media, strict=True):
            yield File(ref.kind, ref.sha256, data)
    except RowError as error:
        yield error


def _checked_rows(batch: Iterable[_RowFiles], options: MediaOptions) -> list[LoadedRow]:
    return [_checked_row(row, options) for row in batch]


def _checked_row(row: _RowFiles, options: MediaOptions) -> LoadedRow:
    """Return a row with its media, or with the error of the first one that failed."""
    if isinstance(row.draft, RowError):
        return row.row, row.draft, []
    media: list[Media] = []
    try:
        for file in row.files:
            if isinstance(file, RowError):
                return row.row, file, []
            _require_sha256(file.sha256, file.data)
            media.append(checked(file.kind, file.data, options))
    except RowError as error:
        return row.row, _named(row.draft.media[len(media)], error), []
    try:
        require_starts_inside(row.draft.content, media)
    except RowError as error:
        return row.row, _named(row.draft.media[0], error), []
    return row.row, row.draft, media


def _named(ref: MediaRef, error: RowError) -> RowError:
    return RowError(f"{short_name(ref.path)}: {error}")


def _require_sha256(expected: str | None, data: bytes) -> None:
    if expected is None:
        return
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != expected.strip().lower():
        raise RowError(f"another file than the row says: its sha256 is {sha256}")
