"""What a conversion made of its rows, in numbers: ``report.json`` at the destination.

    shard reports, rejects -> REPORT -> destination, `ConvertReport`

The content depends only on the rows, the media and the options, as the shards do.

Rejected rows lie in a file for each shard while it is written, then in one file for the dataset.
Both are written line by line, and no process holds them: a few kilobytes of gzip may be a million
empty rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from mmstream.converting.draft import Draft, Media
from mmstream.converting.rows.records import encodable
from mmstream.dataset.manifest import Manifest, json_lines
from mmstream.errors import ManifestError
from mmstream.storage import RemoteStore, Store
from mmstream.storage.local import remove_temporaries
from mmstream.storage.store import map_requests

T = TypeVar("T")

REPORT_NAME = "report.json"

MAX_KEYS = 1000
"""Most keys that are counted apart, so that a strange corpus cannot fill the memory."""
MAX_KEY_CHARACTERS = 200
MAX_REJECT_KINDS = 100
"""Most kinds of rejects that a report names. The most frequent ones come first."""


@dataclass(frozen=True)
class MediaCount:
    """The media files of one type."""

    num_files: int
    num_bytes: int
    """Their size in the tars."""


@dataclass(frozen=True)
class RowCounts:
    """What the rows of a shard, or of a dataset, were. Rejected rows are not counted."""

    formats: dict[str, int] = field(default_factory=dict)
    """{format: rows that were read as it}."""
    unread_keys: dict[str, int] = field(default_factory=dict)
    """{key that no part of its row's format read: rows that have it}."""
    media: dict[str, MediaCount] = field(default_factory=dict)
    """{extension: media files of this type}."""


@dataclass(frozen=True)
class CorpusReport:
    """The content of ``report.json``. The most frequent items come first."""

    num_rows: int
    num_samples: int
    num_rejects: int
    """All lines of ``rejects.jsonl``."""
    num_shards: int
    """Shards that hold samples."""
    num_bytes: int
    """Size of all tars."""
    formats: dict[str, int] = field(default_factory=dict)
    """As in `RowCounts`."""
    unread_keys: dict[str, int] = field(default_factory=dict)
    """As in `RowCounts`."""
    media: dict[str, MediaCount] = field(default_factory=dict)
    """As in `RowCounts`."""
    reject_kinds: tuple[RejectGroup, ...] = ()
    """Rejected rows by their reason, whatever names and numbers it quotes."""
    num_left_out: int = 0
    """Rejects that are not faults: blank lines, rows that the caller's function left out, and
    those that an append found in the dataset already."""


class RowCounter:
    """Counts the rows of one shard while they are written, or those of several shards."""

    def __init__(self) -> None:
        self._formats: Counter[str] = Counter()
        self._unread_keys: Counter[str] = Counter()
        self._media: dict[str, tuple[int, int]] = {}

    def add(self, draft: Draft, media: Iterable[Media]) -> None:
        """Count one row that became a sample."""
        self._formats[encodable(draft.format)] += 1  # of a tar: the names of its fields
        for key in draft.unread:
            self._add_unread(key[:MAX_KEY_CHARACTERS], 1)
        for medium in media:
            self._add_media(medium.extension, 1, len(medium.content))

    def add_counts(self, counts: RowCounts) -> None:
        """Add the counts of a shard, or of a dataset."""
        self._formats.update(counts.formats)
        for key, num_rows in counts.unread_keys.items():
            self._add_unread(key, num_rows)
        for extension, count in counts.media.items():
            self._add_media(extension, count.num_files, count.num_bytes)

    def _add_unread(self, key: str, num_rows: int) -> None:
        if key in self._unread_keys or len(self._unread_keys) < MAX_KEYS:
            self._unread_keys[key] += num_rows

    def _add_media(self, extension: str, num_files: int, num_bytes: int) -> None:
        files, size = self._media.get(extension, (0, 0))
        self._media[extension] = files + num_files, size + num_bytes

    @property
    def counts(self) -> RowCounts:
        """The counts so far."""
        media = {name: MediaCount(*self._media[name]) for name in sorted(self._media)}
        formats = {name: rows for name, rows in self._formats.items() if name}
        return RowCounts(_by_number(formats), _by_number(self._unread_keys), media)


def write_report(
    store: Store, manifest: Manifest, num_rows: int, counts: Iterable[RowCounts]
) -> None:
    """Write ``report.json``. ``rejects.jsonl`` must lie at the destination already.

    Args:
        store: The destination.
        manifest: Of the dataset.
        num_rows: Of the conversion, with those that were appended.
        counts: Of every shard.
    """
    total = total_counts(counts)
    groups = group_rejects(all_rejects(store)) if manifest.source["num_rejects"] else []
    report = CorpusReport(
        num_rows,
        manifest.num_samples,
        manifest.source["num_rejects"],
        len(manifest.shards),
        manifest.num_bytes,
        total.formats,
        total.unread_keys,
        total.media,
        tuple(groups[:MAX_REJECT_KINDS]),
        sum(group.num_rows for group in groups if group.example.left_out),
    )
    store.write(REPORT_NAME, json_lines(report))


def read_report(store: Store) -> CorpusReport | None:
    """Return the report of a finished conversion. None: it was removed.

    Raises:
        ManifestError: The file is damaged.
    """
    try:
        return msgspec.json.decode(store.read(REPORT_NAME), type=CorpusReport)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise ManifestError(
            f"{store.url_of(REPORT_NAME)}: {error}; remove it, {REJECTS_NAME} has the rejects"
        ) from None


def total_counts(shards: Iterable[RowCounts]) -> RowCounts:
    """Return the sums over several shards or datasets. The most frequent media come first."""
    counter = RowCounter()
    for counts in shards:
        counter.add_counts(counts)
    total = counter.counts
    media = sorted(total.media.items(), key=lambda item: -item[1].num_files)
    return replace(total, media=dict(media))


def joined_groups(groups: Iterable[RejectGroup]) -> tuple[RejectGroup, ...]:
    """Return the most frequent reasons of the rejects of several datasets."""
    joined: dict[str, RejectGroup] = {}
    for group in groups:
        total = joined.get(group.kind, RejectGroup(group.kind, 0, group.example))
        num_rows = total.num_rows + group.num_rows
        joined[group.kind] = RejectGroup(group.kind, num_rows, total.example)
    most_first = sorted(joined.values(), key=lambda group: -group.num_rows)
    return tuple(most_first[:MAX_REJECT_KINDS])


def _by_number(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


REJECTS_NAME = "rejects.jsonl"
REPORTS = "reports"
"""Folder of the shards' reports and rejects, at the destination."""

_BLOCK = 4 << 20
_MAX_GROUPS = 1000
"""Most reasons that are counted apart, so that a strange corpus cannot fill the memory."""

_NAME = re.compile(r"^(?!no |not |[\w.<>]+\(\): ).*?: ")
"""The path, URL or name of a field with which a reason begins. The caller's function is kept."""
_VALUE = re.compile(r"b?'[^']*'|b?\"[^\"]*\"|(?<=the keys ).*|\d+")
"""What a reason quotes from its row: strings, names of keys, numbers."""


class Reject(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row that became no sample: one line of ``rejects.jsonl``."""

    file: str
    """Name of the file of rows."""
    row: int
    """Counts from 1: the line of the file, or the item of the JSON array."""
    reason: str
    key: str = ""
    """Key that its sample would have. It names the row among those of all files."""
    left_out: bool = False
    """It is not a fault: a blank line, a row that the caller's function left out, or one that the
    dataset has already."""


@dataclass(frozen=True)
class RejectGroup:
    """Rejected rows that have one reason, whatever names and numbers it quotes."""

    kind: str
    """The reason with ``*`` in place of names, quoted values and numbers."""
    num_rows: int
    example: Reject
    """The first of them."""


class ShardRejects:
    """The rejects of one shard, as they come. Without any, there is no file.

    Args:
        store: The destination.
        shard: Name of the shard.
        stack: The file appears when it is closed without an error.
    """

    def __init__(self, store: Store, shard: str, stack: ExitStack) -> None:
        self.num_rejects = 0
        self.num_bytes = 0
        self._store, self._shard, self._stack = store, shard, stack
        self._file: BinaryIO | None = None

    def add(self, reject: Reject) -> None:
        """Write one reject."""
        if self._file is None:
            self._file = self._stack.enter_context(self._store.create(rejects_name(self._shard)))
        line = msgspec.json.encode(reject) + b"\n"
        self._file.write(line)
        self.num_rejects += 1
        self.num_bytes += len(line)


def report_name(shard: str) -> str:
    """Return the name of a shard's report: ``shard-000000.tar`` -> ``reports/...json``."""
    return f"{REPORTS}/{shard.removesuffix('.tar')}.json"


def rejects_name(shard: str) -> str:
    """Return the name of a shard's rejects: ``shard-000000.tar`` -> ``reports/...``."""
    return f"{REPORTS}/{shard.removesuffix('.tar')}.rejects.jsonl"


def read_shard_report(store: Store, shard: str, kind: type[T]) -> T | None:
    """Return the report of a shard. None: there is none, or it is damaged."""
    try:
        return msgspec.json.decode(store.read(report_name(shard)), type=kind)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def remove_reports(store: Store, names: Iterable[str]) -> None:
    """Remove reports and rejects of shards, and their folder if nothing else is there.

    Args:
        store: The dataset.
        names: From `report_name` or `rejects_name`.
    """
    map_requests(store, store.remove, names)
    root = store.local_path(REPORTS)
    if root is not None:  # names of shards may have folders
        folders = sorted(path for path in Path(root).rglob("*") if path.is_dir())
        for folder in [*reversed(folders), Path(root)]:
            with suppress(OSError):  # it does not exist, or holds other files
                folder.rmdir()


def remove_leftovers(store: Store, files: Mapping[str, str]) -> None:
    """Remove what killed calls left of files that they were writing.

    Args:
        store: The dataset.
        files: {folder in it, or "" for itself: regular expression of names of files there that
            nobody else writes}.
    """
    root = store.local_path("")
    if root is not None:
        for folder, names in files.items():
            remove_temporaries(Path(root, folder), names)
    if isinstance(store, RemoteStore):
        paths = [f"{re.escape(folder + '/') * bool(folder)}({files[folder]})" for folder in files]
        store.remove_uploads("|".join(paths))


def rejects_of(store: Store, shard: str) -> list[Reject]:
    """Return the rejects of one shard, as its file has them. Without a file there are none."""
    try:
        data = store.read(rejects_name(shard))
    except FileNotFoundError:
        return []
    try:
        return msgspec.json.Decoder(Reject).decode_lines(data)
    except msgspec.MsgspecError as error:
        raise ManifestError(f"{store.url_of(rejects_name(shard))}: {error}") from None


def write_rejects(store: Store, shards: Iterable[tuple[str, int]]) -> None:
    """Write ``rejects.jsonl`` from the files of the shards, a block at a time.

    Args:
        store: The destination.
        shards: (name of a shard, bytes of its rejects), in the order of the shards.
    """
    with store.create(REJECTS_NAME) as file:
        for shard, num_bytes in shards:
            for start in range(0, num_bytes, _BLOCK):
                stop = min(num_bytes, start + _BLOCK)
                file.write(store.read_range(rejects_name(shard), start, stop))


def group_rejects(rejects: Iterable[Reject]) -> list[RejectGroup]:
    """Return the reasons of rejects, the most frequent first.

    Reasons that differ in names, quoted values or numbers only are one group:
    ``a.jpg: no such file`` and ``b.jpg: no such file``, for example. From the 1,000th reason on,
    new ones count as the last group.
    """
    counts: dict[str, int] = {}
    examples: dict[str, Reject] = {}
    for reject in rejects:
        kind = _VALUE.sub("*", _NAME.sub("*: ", reject.reason))
        is_new = kind not in counts and not reject.left_out
        if is_new and len(counts) >= _MAX_GROUPS:
            kind = next(reversed(counts))
        counts[kind] = counts.get(kind, 0) + 1
        examples.setdefault(kind, reject)
    groups = [RejectGroup(kind, num_rows, examples[kind]) for kind, num_rows in counts.items()]
    return sorted(groups, key=lambda group: -group.num_rows)


def all_rejects(store: Store, name: str = REJECTS_NAME) -> Iterator[Reject]:
    """Yield the rejects of a finished conversion, or those of a file. A block is in memory."""
    for line in lines_of(store, name):
        yield msgspec.json.decode(line, type=Reject)


def lines_of(store: Store, name: str) -> Iterator[bytes]:
    """Yield the lines of a file without their ends. A block of the file is in memory."""
    num_bytes = store.size(name)
    remainder = b""
    for start in range(0, num_bytes, _BLOCK):
        block = remainder + store.read_range(name, start, min(num_bytes, start + _BLOCK))
        *lines, remainder = block.split(b"\n")
        yield from lines
