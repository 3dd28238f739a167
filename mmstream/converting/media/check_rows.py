"""Media of rows as they are stored: checked, and made smaller where that is asked for.

load -> CHECK ROWS -> the shard

To decode and encode takes most of the time of a conversion, and needs nothing but the bytes of the
media. So CPUs that have no shard of their own do it for a shard of others, such as the last one.
All else stays with the process of the shard: it reads and downloads media, and writes the samples.
Rows stay in order, so the shard has the same bytes.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, Protocol, TypeAlias

from mmstream.converting.draft import Draft, Kind, Media, RowError
from mmstream.converting.media.check import checked
from mmstream.converting.media.options import MediaOptions
from mmstream.converting.media.references import short_name
from mmstream.converting.media.spans import require_starts_inside
from mmstream.converting.rows.source import Row

__all__ = ["Answer", "IdleCpus", "LoadedRow", "MediaBatch", "ReadRow", "check_rows"]

BATCH_BYTES = 4 << 20
"""Media that a CPU gets at a time: 25 photographs, or one video."""
BATCH_ROWS = 64
MAX_BYTES_AT_ONCE = 128 << 20
"""Bytes of all batches of a shard that are under way. The batch that was read last waits until the
others leave room for it, so its bytes come on top. One batch alone may have more."""

ReadRow: TypeAlias = tuple[Row, Draft | RowError, Iterator[bytes] | None]
"""A row whose turn it is. Its media are read one after the other, when they are asked for; that may
raise its RowError. None: it has no media."""

LoadedRow: TypeAlias = tuple[Row, Draft | RowError, list[Media]]
"""A row that failed has its RowError, and no media."""

Outcome: TypeAlias = tuple[list[Media], RowError | None]
"""Media up to the first one that fails, and why that one does. The reason does not name it."""


class File(NamedTuple):
    """A media file that was read."""

    kind: Kind
    sha256: str | None
    """What the row expects."""
    data: bytes


class MediaBatch(NamedTuple):
    """Media of some rows, with all that is needed to check them on any machine."""

    rows: list[list[File]]
    options: MediaOptions

    def check(self) -> list[Outcome]:
        """Check the media of each row.

        The `data` of a medium is empty where it is stored as it was read: it need not travel back.
        """
        outcomes = []
        for files in self.rows:
            media, error = _check(files, self.options)
            outcomes.append((list(map(_without_same, media, files)), error))
        return outcomes


class Answer(Protocol):
    """The outcomes of a batch that is under way."""

    def result(self) -> list[Outcome]:
        """Wait for them. Raises whatever `MediaBatch.check` raised."""
        ...


class IdleCpus(Protocol):
    """CPUs that have no shard of their own. An engine knows them.

    At most one batch for each of them is under way, and one for the shard's own CPU.
    """

    def count(self) -> int:
        """Return how many may check media for this shard now, beside its own.

        A CPU that is counted may be busy by the time it is asked. Its batch waits then.
        """
        ...

    def submit(self, batch: MediaBatch) -> Answer:
        """Let one of them check a batch, or a thread on the shard's own CPU."""
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
    if idle_cpus is None or not _takes_long(options):
        for row in rows:
            yield _check_row(row, options)
        return
    waiting: deque[_Waiting] = deque()
    for row in rows:
        num_idle = idle_cpus.count()
        if not num_idle and not waiting:
            yield _check_row(row, options)
            continue
        batch = _read_batch(chain([row], rows))
        files = [files for _, _, files, _ in batch]
        num_bytes = _num_bytes(files)
        while waiting and (
            len(waiting) > num_idle
            or num_bytes + sum(other.num_bytes for other in waiting) > MAX_BYTES_AT_ONCE
        ):
            yield from waiting.popleft().rows()
        answer = idle_cpus.submit(MediaBatch(files, options))
        waiting.append(_Waiting(batch, num_bytes, answer))
    while waiting:
        yield from waiting.popleft().rows()


def _takes_long(options: MediaOptions) -> bool:
    """Tell whether media are decoded or written anew, and not only copied."""
    return options.changes_images or options.check == "full" or options.video_format is not None


@dataclass(slots=True)
class _Waiting:
    batch: list[_BatchRow]
    num_bytes: int
    answer: Answer

    def rows(self) -> Iterator[LoadedRow]:
        """Wait for the outcomes. Yield the rows."""
        for (row, draft, files, error), outcome in zip(
            self.batch, self.answer.result(), strict=True
        ):
            media = list(map(_with_same, outcome[0], files))
            yield _loaded(row, draft, (media, outcome[1]), error)


_BatchRow: TypeAlias = tuple[Row, Draft | RowError, list[File], RowError | None]
"""A row with the files that were read, and why the next one was not."""


def _read_batch(rows: Iterable[ReadRow]) -> list[_BatchRow]:
    batch: list[_BatchRow] = []
    num_bytes = 0
    for row in rows:
        batch.append(_read(row))
        num_bytes += _num_bytes([batch[-1][2]])
        if num_bytes >= BATCH_BYTES or len(batch) == BATCH_ROWS:
            break
    return batch


def _read(read_row: ReadRow) -> _BatchRow:
    row, draft, _ = read_row
    files: list[File] = []
    try:
        files.extend(_files(read_row))
    except RowError as error:
        return row, draft, files, error
    return row, draft, files, None


def _check_row(read_row: ReadRow, options: MediaOptions) -> LoadedRow:
    """Read and check the media of a row, one after the other."""
    row, draft, media = read_row
    if media is None:
        return row, draft, []
    with closing(media):  # type: ignore[type-var]  # it is a generator
        try:
            return _loaded(row, draft, _check(_files(read_row), options), None)
        except RowError as error:
            return row, error, []


def _files(read_row: ReadRow) -> Iterator[File]:
    _, draft, media = read_row
    if media is None or isinstance(draft, RowError):
        return
    for ref, data in zip(draft.media, media, strict=True):
        yield File(ref.kind, ref.sha256, data)


def _check(files: Iterable[File], options: MediaOptions) -> Outcome:
    media: list[Media] = []
    for kind, sha256, data in files:
        try:
            _require_sha256(sha256, data)
            media.append(checked(kind, data, options))
        except RowError as error:
            return media, error
    return media, None


def _loaded(
    row: Row, draft: Draft | RowError, outcome: Outcome, read_error: RowError | None
) -> LoadedRow:
    """Return a row with its media, or with the error of the first one that failed."""
    media, error = outcome
    if error is not None and isinstance(draft, Draft):
        error = RowError(f"{short_name(draft.media[len(media)].path)}: {error}")
    error = error or read_error
    if error is None and isinstance(draft, Draft):
        try:
            require_starts_inside(draft.content, media)
        except RowError as late:
            error = RowError(f"{short_name(draft.media[0].path)}: {late}")
    return (row, draft, media) if error is None else (row, error, [])


def _without_same(medium: Media, file: File) -> Media:
    return replace(medium, data=b"") if medium.data is file.data else medium


def _with_same(medium: Media, file: File) -> Media:
    return medium if medium.data else replace(medium, data=file.data)


def _num_bytes(rows: Sequence[Sequence[File]]) -> int:
    return sum(len(file.data) for files in rows for file in files)


def _require_sha256(expected: str | None, data: bytes) -> None:
    if expected is None:
        return
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != expected.strip().lower():
        raise RowError(f"another file than the row says: its sha256 is {sha256}")
