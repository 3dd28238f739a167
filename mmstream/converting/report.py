"""What a conversion made of its rows, in numbers: ``report.json`` at the destination.

    shard reports, rejects -> REPORT -> destination, `ConvertReport`

The content depends only on the rows, the media and the options, as the shards do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableSequence
from dataclasses import dataclass, field

import msgspec

from mmstream.converting.draft import Draft, Media
from mmstream.converting.rejects import REJECTS_NAME, RejectGroup, group_rejects
from mmstream.dataset.json_file import json_lines
from mmstream.errors import ManifestError
from mmstream.storage import Store

__all__ = [
    "REPORT_NAME",
    "CorpusReport",
    "MediaCount",
    "RowCounter",
    "RowCounts",
    "read_report",
    "total_report",
    "write_report",
]

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
    """Rejects that are no fault: blank lines, and rows that the caller's function left out."""


class RowCounter:
    """Counts the rows of one shard while they are written.

    Args:
        live: Also counted here: rows, rejects, bytes of samples.
    """

    def __init__(self, live: MutableSequence[int] | None = None) -> None:
        self._live: MutableSequence[int] = [0, 0, 0] if live is None else live
        self._formats: Counter[str] = Counter()
        self._unread_keys: Counter[str] = Counter()
        self._media: dict[str, tuple[int, int]] = {}

    def add(self, draft: Draft, media: Iterable[Media]) -> None:
        """Count one row that became a sample."""
        self._live[0] += 1
        self._formats[draft.format] += 1
        for key in draft.unread:
            name = key[:MAX_KEY_CHARACTERS]
            if name in self._unread_keys or len(self._unread_keys) < MAX_KEYS:
                self._unread_keys[name] += 1
        for medium in media:
            num_files, num_bytes = self._media.get(medium.extension, (0, 0))
            self._media[medium.extension] = num_files + 1, num_bytes + len(medium.data)

    def add_reject(self) -> None:
        """Count one row that became no sample."""
        self._live[0] += 1
        self._live[1] += 1

    def add_sample(self, fields: Mapping[str, bytes]) -> None:
        """Count the bytes of one sample."""
        self._live[2] += sum(map(len, fields.values()))

    @property
    def counts(self) -> RowCounts:
        """The counts so far."""
        media = {name: MediaCount(*self._media[name]) for name in sorted(self._media)}
        formats = {name: rows for name, rows in self._formats.items() if name}
        return RowCounts(_by_number(formats), _by_number(self._unread_keys), media)


def write_report(
    store: Store,
    counts: Iterable[RowCounts],
    *,
    num_rows: int,
    num_samples: int,
    num_rejects: int,
    num_shards: int,
    num_bytes: int,
) -> CorpusReport:
    """Write ``report.json`` and return it. ``rejects.jsonl`` must lie at the destination already.

    Args:
        store: The destination.
        counts: Of every shard.
        num_rows: Of the dataset; the other numbers too, as in `CorpusReport`.
        num_samples: Of the dataset.
        num_rejects: Of the dataset.
        num_shards: Of the dataset.
        num_bytes: Of the dataset.
    """
    total = _sum(counts)
    groups = group_rejects(store) if num_rejects else []
    report = CorpusReport(
        num_rows,
        num_samples,
        num_rejects,
        num_shards,
        num_bytes,
        total.formats,
        total.unread_keys,
        total.media,
        tuple(groups[:MAX_REJECT_KINDS]),
        sum(group.num_rows for group in groups if group.example.left_out),
    )
    store.write(REPORT_NAME, json_lines(report))
    return report


def read_report(store: Store) -> CorpusReport | None:
    """Return the report of a finished conversion. None: it has none, as those of mmstream 0.1.

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


def total_report(reports: Iterable[CorpusReport]) -> CorpusReport:
    """Return the sums over several datasets, such as the splits of a conversion."""
    reports = list(reports)
    total = _sum(RowCounts(report.formats, report.unread_keys, report.media) for report in reports)
    groups = [group for report in reports for group in report.reject_kinds]
    kinds: dict[str, RejectGroup] = {}
    for group in groups:
        known = kinds.get(group.kind)
        num_rows = group.num_rows + (known.num_rows if known else 0)
        kinds[group.kind] = RejectGroup(group.kind, num_rows, (known or group).example)
    return CorpusReport(
        sum(report.num_rows for report in reports),
        sum(report.num_samples for report in reports),
        sum(report.num_rejects for report in reports),
        sum(report.num_shards for report in reports),
        sum(report.num_bytes for report in reports),
        total.formats,
        total.unread_keys,
        total.media,
        tuple(sorted(kinds.values(), key=lambda group: -group.num_rows)[:MAX_REJECT_KINDS]),
        sum(report.num_left_out for report in reports),
    )


def _sum(counts: Iterable[RowCounts]) -> RowCounts:
    formats: Counter[str] = Counter()
    unread_keys: Counter[str] = Counter()
    media: dict[str, MediaCount] = {}
    for shard in counts:
        formats.update(shard.formats)
        for key, num_rows in shard.unread_keys.items():
            if key in unread_keys or len(unread_keys) < MAX_KEYS:
                unread_keys[key] += num_rows
        for extension, count in shard.media.items():
            before = media.get(extension, MediaCount(0, 0))
            media[extension] = MediaCount(
                before.num_files + count.num_files, before.num_bytes + count.num_bytes
            )
    by_files = sorted(media.items(), key=lambda item: (-item[1].num_files, item[0]))
    return RowCounts(_by_number(formats), _by_number(unread_keys), dict(by_files))


def _by_number(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
