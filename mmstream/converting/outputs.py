"""The datasets that a conversion writes, one for each split: their state, their lock, their jobs.

    rows -> plan -> OUTPUTS (lock, begin) -> jobs -> engines -> duplicates -> OUTPUTS (finish)

All of them are checked before anything is written. Duplicates are looked for before the manifests
are written. The sidecars are complete then. So the answer does not depend on workers, and a call
that was killed there finds the same again.

A conversion writes these, in this order:

    mmstream.unfinished.json   the marker: the plan
    shard-000000.tar           the shards, each with its index (.idx) and checksums (.crc32c);
                               reports/shard-000000.json commits each of them; the shard's
                               rejects lie beside the report (.rejects.jsonl)
    shard-000000.parquet       the sidecar of each shard: its samples and its rejects
    rejects.jsonl              one line per rejected row: file, row number from 1, reason
    duplicates.jsonl           pairs of samples that hold the same, if they were asked for
    report.json                counts: rejects by kind, formats, keys that nothing read, media
    README.md                  what the files are, for datasets.load_dataset; never replaced
    mmstream.index.HEX         the index of all shards, named by its content
    mmstream.json              the manifest; then the marker is removed

A killed conversion leaves its marker. `open_dataset` then refuses the folder, and says what
finishes it. A list of bad samples from an earlier dataset is removed before the marker is written.
If no row became a sample, only the rejects stay; the next call tries every row again.

One conversion may write there, or several that write other ranges of shards. A conversion of all
shards holds ``.mmstream.lock`` in the destination. One of the shards [a, b) holds
``reports/shards-A-B.lock``. Both kinds exclude each other: each puts its own lock there first, and
then looks for those of the other kind. So at least one of two sees the other.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from mmstream.converting.duplicates import (
    DUPLICATES_NAME,
    KINDS,
    Duplicates,
    drop_duplicates,
    find_duplicates,
    find_in,
    read_corpus,
    write_pairs,
)
from mmstream.converting.media.references import MediaAccess
from mmstream.converting.options import Options, Rerun
from mmstream.converting.plan import (
    APPENDED,
    RETRIED_SHARDS,
    Append,
    KnownRows,
    appends_of,
    known_rows,
    next_round,
    num_all_shards,
    num_own_shards,
    num_rows_of,
    num_shards,
    plan_append,
    plan_of,
    require_appendable,
    rounds,
    select,
    shard_name,
)
from mmstream.converting.report import (
    REJECTS_NAME,
    REPORT_NAME,
    REPORTS,
    remove_leftovers,
    remove_reports,
    report_name,
    write_rejects,
    write_report,
)
from mmstream.converting.rows.records import RowSource
from mmstream.converting.shard import ShardJob, ShardReport, shard_sizes
from mmstream.dataset.bad_list import BAD_NAME, PREVIOUS_NAME, REMOVED_NAME
from mmstream.dataset.columns import sidecar_name
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index import object_sha256
from mmstream.dataset.manifest import (
    INDEX_PART_NAME,
    MANIFEST_NAME,
    MARKER_NAME,
    IndexPart,
    Manifest,
    ShardInfo,
    json_lines,
    read_json,
)
from mmstream.dataset.open import open_dataset, require_files
from mmstream.dataset.shard_indexes import README_NAME, commit, write_part
from mmstream.errors import ConfigError, ManifestError, MMStreamError, escaped
from mmstream.settings import refuse_broken
from mmstream.storage import Store, is_remote, join_url, open_store
from mmstream.storage.store import local_path, map_requests
from mmstream.storage.write_lock import (
    LOCK_NAME,
    LockedError,
    WriteLock,
    require_unlocked,
    write_lock,
)
from mmstream.types import IntArray

logger = logging.getLogger(__name__)

State: TypeAlias = Literal["fresh", "unfinished", "finished", "clear"]
"""What a destination holds.

- "fresh": nothing.
- "unfinished": a conversion of the same plan that was interrupted.
- "finished": a complete conversion of the same plan.
- "clear": something that the caller agreed to replace.
"""

_SINGLE_FILES = (
    MANIFEST_NAME,
    MARKER_NAME,
    REJECTS_NAME,
    REPORT_NAME,
    DUPLICATES_NAME,
    BAD_NAME,
    PREVIOUS_NAME,
    REMOVED_NAME,
    LOCK_NAME,
)

MAX_PARTS = 64
"""Most parts of an index. Appended shards are one more; then all become one part again."""

_SHARD_SUFFIX = r"tar|tar\.idx|tar\.crc32c|tar\.facts|parquet"
_REPORT_SUFFIX = r"json|rejects\.jsonl"
_SHARD_FILE = re.compile(rf"shard-\d{{6,}}\.({_SHARD_SUFFIX})")
_REPORT_FILE = rf"shard-\d{{6,}}\.({_REPORT_SUFFIX})"
_OWNED_FILE = "|".join(
    [_SHARD_FILE.pattern, INDEX_PART_NAME.pattern, *map(re.escape, _SINGLE_FILES)]
)
"""The names of all files that a conversion writes into a dataset's folder, or removes there."""
LEFTOVERS = {"": rf"{_OWNED_FILE}|{re.escape(README_NAME)}", REPORTS: _REPORT_FILE}
"""Files that a conversion writes, for `remove_leftovers`."""
_MAY_LIE_HERE = re.compile(
    rf"{_OWNED_FILE}|(README|LICENSE|LICENCE|NOTICE|CITATION|CHANGELOG)(\.\w+)?", re.IGNORECASE
)
"""Files that a new dataset's folder may hold: those of a conversion, and those about a dataset."""


_RESULTS = ("num_rejects", RETRIED_SHARDS, APPENDED)
"""Keys of a manifest's ``source`` that are not part of the plan."""

_OF_ROWS = ("rows", "rows_sha256", "rows_total", "num_rows", "limit", "encoding")
"""Keys of a plan that say which rows there are. Those of an append are others."""


def require_foreign(rows: Sequence[str], store: Store) -> None:
    """Raise a ConfigError if the conversion would replace or remove a file of rows.

    Links count, and so do the files that they lead to.

    Args:
        rows: Paths and URLs of the files of rows, or of folders of them.
        store: The destination.
    """
    folders = {store: _OWNED_FILE, open_store(store.url_of(REPORTS)): _REPORT_FILE}
    for folder, owned in folders.items():
        url = folder.url.rstrip("/") if is_remote(folder.url) else os.path.realpath(folder.url)
        owned_place = re.compile(rf"{re.escape(url)}(/({owned}))?")
        for name in rows:
            if any(map(owned_place.fullmatch, _places_of(name))):
                raise ConfigError(
                    f"{escaped(name)}: lies in {escaped(folder.url)} under a name that convert "
                    "would replace or remove; move the rows, or name another destination"
                )


def _places_of(rows: str) -> set[str]:
    """Return where a file of rows lies: the file, and the link that leads to it."""
    if is_remote(rows):
        return {rows.rstrip("/")}
    path = Path(local_path(rows))
    return {os.path.realpath(path), str(Path(os.path.realpath(path.parent), path.name))}


def inspect(store: Store, plan: dict[str, Any], media_root: str | None, overwrite: bool) -> State:
    """Return the state of a destination for this plan. Writes nothing.

    Raises:
        ConfigError: It holds another conversion, or files that no conversion wrote.
        ManifestError: Its manifest or marker is damaged, or is not a file.
    """
    require_files(store)
    names = store.list()
    if REMOVED_NAME in names and overwrite:
        raise ConfigError(
            f"{store.url}: samples were taken down here ({REMOVED_NAME}), and another conversion "
            "may show them again: name another destination; or leave their rows out, and remove "
            "this file"
        )
    if MARKER_NAME in names:
        marker = read_json(store, MARKER_NAME)
        if overwrite or marker.get("clearing"):
            return "clear"
        _require_same_plan(store, "an unfinished conversion", marker.get("plan"), plan)
        if marker.get("media_root") != media_root:
            raise ConfigError(
                f"{store.url}: an unfinished conversion has the media root "
                f"{marker.get('media_root')!r}, this one {media_root!r}; pass the same media_root, "
                "or start again with rerun=mm.Rerun(overwrite=True)"
            )
        return "unfinished"
    if MANIFEST_NAME in names:
        if overwrite:
            return "clear"
        manifest = Manifest.from_bytes(store.read(MANIFEST_NAME))
        source = manifest.source
        if source.get("by") == "mmstream index":
            raise ConfigError(
                f"{store.url}: its manifest is of `mmstream index`, so what was converted here is "
                "not known; name another destination, or convert again with "
                "rerun=mm.Rerun(overwrite=True)"
            )
        saved = {key: value for key, value in source.items() if key not in _RESULTS}
        are_others = saved.get("rows_sha256") != plan["rows_sha256"]
        hint = "; rerun=mm.Rerun(append=True) adds rows" if are_others else ""
        _require_same_plan(store, "a dataset", saved, plan, _OTHER_PLACE + hint)
        return "finished"
    tars = [name for name in names if name.endswith(".tar")]
    if tars and not overwrite and _report_files(store):
        raise ConfigError(
            f"{store.url}: holds shards of a conversion, but its {MANIFEST_NAME} is gone: bring it "
            "back, make a new one with `mmstream index`, or convert again with "
            "rerun=mm.Rerun(overwrite=True)"
        )
    foreign = tars or [name for name in names if not _MAY_LIE_HERE.fullmatch(name)]
    if foreign and not overwrite:
        others = f" and {len(foreign) - 1:,} more" if len(foreign) > 1 else ""
        raise ConfigError(
            f"{store.url}: holds {escaped(foreign[0])}{others}, which no conversion wrote; "
            "name an empty destination, or pass rerun=mm.Rerun(overwrite=True) (it replaces "
            "shard-*.tar and keeps other files)"
        )
    return "clear" if tars else "fresh"


def _inspect_for_append(store: Store, plan: dict[str, Any]) -> Manifest:
    """Return the manifest of a dataset to which rows of this plan can be appended.

    Raises:
        ConfigError: There is none, or it was written with other options.
    """
    require_files(store)
    manifest = require_appendable(store, plan)
    saved = {k: v for k, v in manifest.source.items() if k not in (*_RESULTS, *_OF_ROWS)}
    kept = {key: plan.get(key) for key in plan.keys() - _OF_ROWS}
    advice = "Append with the settings of the dataset, or convert into a folder of its own"
    _require_same_plan(store, "a dataset", saved, kept, advice)
    return manifest


def begin(store: Store, state: State, marker: dict[str, Any]) -> None:
    """Write the marker. Before that, remove what is to be replaced, and what killed runs left."""
    remove_leftovers(store, LEFTOVERS)
    if state == "finished":
        return
    if state == "clear":
        # Until all is removed, the marker says "clearing". If this call is killed before that, the
        # next one must not take the old shards for its own.
        store.write(MARKER_NAME, json_lines({**marker, "clearing": True}))
        _clear(store)
    if state != "unfinished":
        _write_marker(store, marker)


def _write_marker(store: Store, marker: dict[str, Any]) -> None:
    """Write the marker. A list of bad samples of an earlier dataset is removed before."""
    store.remove(BAD_NAME)
    store.remove(PREVIOUS_NAME)
    store.write(MARKER_NAME, json_lines(marker))


def begin_range(store: Store, shards: range, marker: dict[str, Any]) -> None:
    """Write the marker, unless another range has. Before, remove what killed runs of it left.

    Raises:
        ConfigError: Another range has another plan.
    """
    if shards:
        stems = "|".join(shard_name(index).removesuffix(".tar") for index in shards)
        shards_of_range = rf"({stems})\.({_SHARD_SUFFIX})"
        reports_of_range = rf"({stems})\.({_REPORT_SUFFIX})"
        remove_leftovers(store, {"": shards_of_range, REPORTS: reports_of_range})
    if not store.exists(MARKER_NAME):
        with _marker_lock(store):
            if inspect(store, marker["plan"], marker["media_root"], overwrite=False) == "fresh":
                _write_marker(store, marker)
                return
    inspect(store, marker["plan"], marker["media_root"], overwrite=False)


def finish(store: Store, plan: dict[str, Any], reports: Sequence[ShardReport]) -> None:
    """Write ``rejects.jsonl``, ``report.json``, the index, the manifest; remove the marker."""
    _write_rejects(store, reports)
    manifest = manifest_of(plan, reports)
    write_report(
        store, manifest, num_rows_of(manifest.source), (report.counts for report in reports)
    )
    commit(store, manifest)
    store.remove(MARKER_NAME)


def manifest_of(plan: dict[str, Any], reports: Sequence[ShardReport]) -> Manifest:
    """Return the manifest of finished shards, without parts of the index."""
    source = {**plan, "num_rejects": sum(report.num_rejects for report in reports)}
    return Manifest(_with_samples(reports), dict(_fields(reports)), source, checksums="written")


def finish_extra(
    store: Store, reports: Sequence[ShardReport], append: Append | None = None
) -> None:
    """Add the extra shards of a retry or an append to a finished dataset, if they hold a sample.

    The new manifest is the only commit. ``rejects.jsonl`` is written before it, from the reports:
    of the last retry, and of everything that was appended.
    """
    old = Manifest.read(store)
    shards = _with_samples(reports)
    if not shards:
        _remove_shards_from(store, num_all_shards(old.source))
        return
    source = dict(old.source)
    if append is None:
        source[RETRIED_SHARDS] = [*source.get(RETRIED_SHARDS, []), len(reports)]
    else:
        source[APPENDED] = [*source.get(APPENDED, []), msgspec.to_builtins(append)]
    last_round = source.get(RETRIED_SHARDS, [num_shards(source)])[-1]
    all_reports = [*_earlier_reports(store, old), *reports]
    current = all_reports[num_own_shards(source) - last_round :]
    write_rejects(store, ((report.name, report.rejects_bytes) for report in current))
    source["num_rejects"] = sum(report.num_rejects for report in current)
    fields = dict(_fields(all_reports))
    manifest = replace(old, shards=(*old.shards, *shards), fields=fields, source=source)
    write_report(
        store, manifest, num_rows_of(manifest.source), (report.counts for report in all_reports)
    )
    index_parts = old.index_parts if len(old.index_parts) < MAX_PARTS else ()
    first = index_parts[-1].last_shard + 1 if index_parts else 0
    part = write_part(store, manifest, first, len(manifest.shards) - 1)
    assert part is not None
    store.write(MANIFEST_NAME, replace(manifest, index_parts=(*index_parts, part)).to_bytes())
    _remove_shards_from(store, num_all_shards(source))


def _earlier_reports(store: Store, manifest: Manifest) -> list[ShardReport]:
    """Return the reports of all shards of a finished dataset, in their order."""

    def read(index: int) -> ShardReport:
        name = report_name(shard_name(index))
        try:
            return msgspec.json.decode(store.read(name), type=ShardReport)
        except (FileNotFoundError, msgspec.MsgspecError) as error:
            raise ManifestError(
                f"{store.url_of(name)}: {error}; bring it back, or convert again with "
                "rerun=mm.Rerun(overwrite=True)"
            ) from None

    return map_requests(store, read, range(num_all_shards(manifest.source)))


def _remove_shards_from(store: Store, first: int) -> None:
    """Remove all files of shards from a number on, which no manifest names: reports go first.

    Those of other rows are among them, where an append was killed and never completed.
    """
    files = [name for name in store.list() if _SHARD_FILE.fullmatch(name)]
    for names in (_report_files(store), files):
        behind = [name for name in names if int(re.split(r"[-.]", name)[1]) >= first]
        map_requests(store, store.remove, behind)


def give_up(store: Store, reports: Sequence[ShardReport]) -> None:
    """Leave only ``rejects.jsonl``: without a sample there is no dataset."""
    _write_rejects(store, reports)
    remove_reports(store, _report_files(store))
    map_requests(store, store.remove, [sidecar_name(report.name) for report in reports])
    store.remove(MARKER_NAME)


def _with_samples(reports: Sequence[ShardReport]) -> tuple[ShardInfo, ...]:
    return tuple(report.shard for report in reports if report.num_samples)


def _fields(reports: Sequence[ShardReport]) -> Counter[str]:
    return sum((Counter(report.fields) for report in reports), Counter())


def _write_rejects(store: Store, reports: Sequence[ShardReport]) -> None:
    rejects = {report.name: report.rejects_bytes for report in reports}
    folder = open_store(store.url_of(REPORTS))
    outdated = []
    for name in folder.list():  # an earlier run may have rejected rows that are samples now
        match = re.fullmatch(r"(shard-\d{6,})\.rejects\.jsonl", name)
        if match and not rejects.get(f"{match[1]}.tar"):
            outdated.append(name)
    map_requests(folder, folder.remove, outdated)
    write_rejects(store, rejects.items())


def _report_files(store: Store) -> list[str]:
    names = open_store(store.url_of(REPORTS)).list()
    return [f"{REPORTS}/{name}" for name in names if re.fullmatch(_REPORT_FILE, name)]


def _clear(store: Store) -> None:
    """Remove what a conversion writes, and no other files."""
    for name in (MANIFEST_NAME, REJECTS_NAME, REPORT_NAME, DUPLICATES_NAME):
        store.remove(name)
    remove_reports(store, _report_files(store))
    owned = [
        name
        for name in store.list()
        if _SHARD_FILE.fullmatch(name) or INDEX_PART_NAME.fullmatch(name)
    ]
    map_requests(store, store.remove, owned)


_FOLLOWS_FROM = {
    "rows_sha256": {"encoding", "limit", "group_spans"},
    "rows_total": {"encoding", "limit", "group_spans"},
    "num_rows": {
        *("encoding", "limit", "group_spans", "rows_total"),
        *("splits", "split_by", "split_by_media"),
    },
}
"""{key of a plan: keys whose change explains its own}."""


def _setting(value: Any) -> str:
    return "not set" if value is None else repr(value)


_OTHER_PLACE = "Name another destination, or replace it with rerun=mm.Rerun(overwrite=True)"


def _require_same_plan(
    store: Store, content: str, saved: Any, plan: dict[str, Any], advice: str = _OTHER_PLACE
) -> None:
    """Raise a ConfigError if the saved plan is another one. It says what differs."""
    saved = saved if isinstance(saved, dict) else {}
    is_other_version = saved.get("converter") != plan["converter"]
    # Another version has other options. Those that both know say more than the version.
    unknown = plan.keys() ^ saved.keys() | {"converter"} if is_other_version else set()
    changed = [
        key for key in plan | saved if saved.get(key) != plan.get(key) and key not in unknown
    ]
    differing = [
        f"{key} was {_setting(saved.get(key))} and is now {_setting(plan.get(key))}"
        for key in changed
        if not _FOLLOWS_FROM.get(key, set()) & set(changed)
    ]
    refuse_broken(
        (
            differing,
            f"{store.url}: holds {content} with other settings: {'; '.join(differing)}. {advice}",
        ),
        (
            is_other_version,
            f"{store.url}: holds {content} of another version of mmstream, which writes the same "
            f"rows as other bytes (converter {saved.get('converter')!r}, this one is "
            f"{plan['converter']!r}). A finished dataset is read as it is; to convert again, name "
            "another destination, or replace it with rerun=mm.Rerun(overwrite=True)",
        ),
    )


RANGE_COMMAND = "convert --shard-range"
MARKER_LOCK = "marker.lock"
MARKER_WAIT_S = 120.0

_RANGE_LOCK = re.compile(r"shards-(\d+)-(\d+)\.lock")


def lock_all(store: Store, command: str, locks: ExitStack) -> WriteLock:
    """Lock a destination for one writer, against ranges of shards, too.

    Locks of dead ranges are taken over, and removed when `locks` are closed.

    Raises:
        LockedError: Another process writes there.
    """
    lock = locks.enter_context(write_lock(store, command))
    reports = open_store(store.url_of(REPORTS))
    names = [name for name in reports.list() if _RANGE_LOCK.fullmatch(name) or name == MARKER_LOCK]
    # Side by side: each dead holder on another machine is watched for a minute.
    map_requests(
        reports, lambda name: locks.enter_context(write_lock(reports, command, name)), names
    )
    return lock


def lock_shards(store: Store, shards: range, locks: ExitStack) -> WriteLock:
    """Lock a range of shards, which is not empty.

    Raises:
        LockedError: Another process writes all shards, or some of these.
    """
    reports = open_store(store.url_of(REPORTS))
    own_name = f"shards-{shards.start:06d}-{shards.stop:06d}.lock"
    lock = locks.enter_context(write_lock(reports, RANGE_COMMAND, own_name))
    require_unlocked(store)
    for name in reports.list():
        match = _RANGE_LOCK.fullmatch(name)
        if match and name != own_name:
            start, stop = int(match[1]), int(match[2])
            if start < shards.stop and shards.start < stop:
                require_unlocked(reports, name)
    return lock


@contextmanager
def _marker_lock(store: Store) -> Iterator[None]:
    """Hold the lock on the marker for the block. Ranges that start together wait for each other.

    A conditional write would not do: where storage has none, only the pause of a lock keeps two
    ranges with different options from both taking the marker for their own.
    """
    reports = open_store(store.url_of(REPORTS))
    deadline = time.monotonic() + MARKER_WAIT_S
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(write_lock(reports, RANGE_COMMAND, MARKER_LOCK))
                break
            except LockedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield


# -- one output for each split ---------------------------------------------------------------------

POLL_INTERVAL_S = 1.0
"""Seconds between two looks at a destination to which another rank converts."""

LOG_INTERVAL_S = 60.0
"""Seconds between two lines of the log that say so."""


@dataclass(frozen=True)
class Work:
    """What a call does for its plan. The bytes of the output do not depend on it."""

    rerun: Rerun = field(default_factory=Rerun)
    shard_range: tuple[int, int] | None = None
    """First shard and the one after the last, counted over all splits. None: all shards."""

    def __post_init__(self) -> None:
        if self.shard_range is None:
            return
        refuse_broken(
            (
                self.rerun.retry_rejects,
                "retry_rejects=True adds shards to a finished dataset; leave out shard_range",
            ),
            (
                self.rerun.append,
                "append=True adds shards to a finished dataset; leave out shard_range",
            ),
            (
                self.shard_range[0] >= self.shard_range[1],
                f"shard_range={self.shard_range}: must be the first shard, from 0, and the one "
                "after the last",
            ),
            (
                self.rerun.overwrite,
                "overwrite=True would remove what other ranges wrote; leave it out, and empty the "
                "destination before the first range",
            ),
        )


class Output(NamedTuple):
    """One dataset that a conversion writes: all rows, or one split."""

    split: str | None
    store: Store
    rows: IntArray | range
    """0-based row numbers, in the order of the shards."""
    plan: dict[str, Any]
    state: State
    work: Work
    first_shard: int = 0
    """Number of its first shard over all splits."""
    lock: WriteLock | None = None
    """None: no shard needs to be written."""
    extra: Mapping[str, IntArray | range] = MappingProxyType({})
    """{name: rows} of extra shards: those of the retries before, or with `Rerun.retry_rejects` and
    `Rerun.append` those of this one."""
    appends: Mapping[str, Append] = MappingProxyType({})
    """{name of an extra shard: the append that it is of}."""
    known: KnownRows | None = None
    """Which rows the dataset has already, where this call appends some."""
    expected: Mapping[str, ShardInfo] = MappingProxyType({})
    """Shards of a finished dataset that are looked at or written again."""
    lost_parts: tuple[IndexPart, ...] = ()
    """Parts of a finished dataset's index that are missing or damaged."""

    @property
    def shards(self) -> range:
        """The shards of this call by their numbers in the plan of this dataset."""
        shards = range(num_shards(self.plan))
        if self.work.shard_range is None:
            return shards
        start, stop = self.work.shard_range
        return shards[max(0, start - self.first_shard) : max(0, stop - self.first_shard)]


def plan_outputs(
    store: Store,
    rows_urls: Sequence[str],
    source: RowSource,
    rows_of_splits: Mapping[str | None, IntArray | range],
    options: Options,
    root: str | None,
    work: Work,
    locks: ExitStack,
) -> list[Output]:
    """Plan every dataset and check its destination. Writes nothing.

    A destination that has a lock is locked: if its holder lives, that is the error to report. If it
    is dead, the lock is removed at the end.

    Raises:
        ConfigError: a destination holds something else, such as a dataset without splits above
            the folders of splits. Whoever opens it would get that one.
    """
    if None not in rows_of_splits and store.exists(MANIFEST_NAME):
        raise ConfigError(
            f"{store.url}: holds a dataset without splits, so splits cannot lie there; name "
            "another destination"
        )
    outputs: list[Output] = []
    for split, rows in rows_of_splits.items():
        split_store = store if split is None else open_store(join_url(store.url, split))
        folder = split_store.local_path("")
        if folder is not None and Path(folder).is_file():
            raise ConfigError(f"{split_store.url}: is a file, not a folder; name another folder")
        require_foreign(rows_urls, split_store)
        lock = None
        if work.shard_range is None and split_store.exists(LOCK_NAME):
            lock = lock_all(split_store, "convert", locks)
        plan = plan_of(source, options, split, len(rows))
        if work.rerun.append:
            _inspect_for_append(split_store, plan)
            state: State = "finished"
        else:
            state = inspect(split_store, plan, root, work.rerun.overwrite)
        first_shard = sum(num_shards(output.plan) for output in outputs)
        outputs.append(Output(split, split_store, rows, plan, state, work, first_shard, lock))
    return outputs


def locked_outputs(
    store: Store,
    rows_urls: Sequence[str],
    source: RowSource,
    options: Options,
    root: str | None,
    work: Work,
    locks: ExitStack,
) -> list[Output]:
    """Plan and lock every dataset. Of several ranks of one job, one writes and the others wait.

    Raises:
        LockedError: another process writes there, and this one is not a rank of several.
        ConfigError: a destination holds something else.
    """
    rows_of_splits = select(source, options, root)
    said_at = -math.inf
    while True:
        try:
            outputs = plan_outputs(
                store, rows_urls, source, rows_of_splits, options, root, work, locks
            )
            return [locked(output, source, locks, root) for output in outputs]
        except LockedError:
            locks.close()
            if work.shard_range is not None or num_ranks() == 1:
                raise
            if time.monotonic() - said_at >= LOG_INTERVAL_S:
                said_at = time.monotonic()
                logger.warning(
                    "%s: another process writes there, this rank waits for it", store.url
                )
            time.sleep(POLL_INTERVAL_S)


def num_ranks() -> int:
    """Return the number of ranks of this job, as launchers such as torchrun say it."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdigit() else 1


def locked(output: Output, source: RowSource, locks: ExitStack, root: str | None) -> Output:
    """Return an output with the lock on its destination, if something may be written there."""
    if output.work.rerun.append:
        return _for_append(output, source, locks)
    if output.work.rerun.retry_rejects:
        return _for_retry(output, locks, root)
    if output.work.shard_range is not None:
        return _for_range(output, locks, root)
    output = _with_damage(output)
    is_whole = output.state == "finished" and not (output.expected or output.lost_parts)
    if output.lock is None and not is_whole:
        lock = lock_all(output.store, "convert", locks)
        # Another convert may have come and gone since the first look.
        state = inspect(output.store, output.plan, root, output.work.rerun.overwrite)
        output = _with_damage(output._replace(lock=lock, state=state))
    return output


def _for_retry(output: Output, locks: ExitStack, root: str | None) -> Output:
    """Return a finished output with the shards of its next retry."""
    lock = output.lock or lock_all(output.store, "convert", locks)
    state = inspect(output.store, output.plan, root, overwrite=False)
    if state != "finished":
        raise ConfigError(
            f"{output.store.url}: holds no finished conversion whose rejects could be tried again; "
            "first convert without retry_rejects=True"
        )
    source = Manifest.read(output.store).source
    if APPENDED in source:
        raise ConfigError(
            f"{output.store.url}: rows were appended since, so rejects of before are not tried "
            "again; append their rows with append=True, which takes those that are not there"
        )
    return output._replace(state=state, lock=lock, extra=next_round(output.store, source))


def _for_append(output: Output, source: RowSource, locks: ExitStack) -> Output:
    """Return a finished output with the shards of new rows.

    Where these rows were appended before, and their shards are damaged now, those are mended.
    """
    lock = output.lock or lock_all(output.store, "convert", locks)
    manifest = _inspect_for_append(output.store, output.plan)
    output = _with_damage(output._replace(lock=lock))
    if output.expected:
        return output
    known = known_rows(output.store, manifest, source)
    append = plan_append(manifest, output.plan, output.rows, known)
    extra = append.shards(output.rows)
    appends = dict.fromkeys(extra, append)
    return output._replace(known=known, extra=extra, appends=appends)


def _for_range(output: Output, locks: ExitStack, root: str | None) -> Output:
    """Return an output with the lock on its shards of this range."""
    lock = None
    if output.shards:
        lock = lock_shards(output.store, output.shards, locks)
    else:
        require_unlocked(output.store)
    state = inspect(output.store, output.plan, root, overwrite=False)
    if state == "clear":
        raise ConfigError(
            f"{output.store.url}: an overwrite was interrupted here; run it again to its end, or "
            "empty the destination"
        )
    return output._replace(state=state, lock=None if state == "finished" else lock)


def _with_damage(output: Output) -> Output:
    """Return a finished output with its damaged shards, or with all shards if it is checked.

    One list of the files tells which are missing, or have another size than in the manifest.
    """
    if output.state != "finished":
        return output._replace(expected={}, lost_parts=(), extra={}, appends={})
    manifest = Manifest.from_bytes(output.store.read(MANIFEST_NAME))
    sizes = {name: file.size for name, file in output.store.list().items()}
    own = _own_shards(output, manifest)
    shards = {
        shard.name: replace(shard, sha256=manifest.erased.get(shard.name, shard.sha256))
        for shard in manifest.shards
    }
    damaged = {
        name for name, shard in shards.items() if not shard_sizes(shard).items() <= sizes.items()
    }
    if others := damaged.difference(own):
        logger.warning(
            "%s: %d shards of other rows are missing or damaged, such as %s; run the command again "
            "that converted these rows",
            *(output.store.url, len(others), min(others)),
        )
    if output.work.rerun.check:
        damaged = {*shards}
    if output.plan["sidecar"]:
        damaged |= {name for name in own if sidecar_name(name) not in sizes}
    expected = {name: shards.get(name, ShardInfo(name, 0, 0)) for name in own if name in damaged}
    lost_parts = tuple(
        part
        for part in manifest.index_parts
        if sizes.get(part.name) != part.num_bytes
        or (
            output.work.rerun.check
            and object_sha256(output.store, part.name, part.num_bytes) != part.sha256
        )
    )
    of_append = {name: pair for name, pair in own.items() if pair and name in expected}
    appends = {name: append for name, (append, _) in of_append.items()}
    extra = {name: rows for name, (_, rows) in of_append.items()}
    if expected and not output.work.rerun.append:
        for shards_of_retry in rounds(output.store, manifest.source):
            extra |= {name: rows for name, rows in shards_of_retry.items() if name in expected}
    return output._replace(expected=expected, lost_parts=lost_parts, extra=extra, appends=appends)


def _own_shards(
    output: Output, manifest: Manifest
) -> dict[str, tuple[Append, IntArray | range] | None]:
    """Return the names of the shards that hold rows of this call; of appended ones, with these."""
    if not output.work.rerun.append:
        return dict.fromkeys(map(shard_name, range(num_own_shards(manifest.source))))
    return {
        name: (append, rows)
        for append in appends_of(manifest.source)
        if append.rows_sha256 == output.plan["rows_sha256"]
        for name, rows in append.shards(output.rows).items()
    }


def begin_output(output: Output, root: str | None) -> None:
    """Write the marker, if shards will be written.

    Args:
        output: With its lock.
        root: Folder of the media.
    """
    marker = {"media_root": root, "plan": output.plan}
    if output.work.shard_range is not None and output.state != "finished":
        begin_range(output.store, output.shards, marker)
    elif output.lock is not None:
        begin(output.store, output.state, marker)


def finish_output(output: Output, reports: Sequence[ShardReport]) -> None:
    """Make a dataset of the shards, or mend a finished one. A range of shards leaves that open."""
    if output.lock is None:
        return
    output.lock.require()
    if output.work.shard_range is None:  # a node of Ray may have died, or a range
        remove_leftovers(output.store, LEFTOVERS)
    if output.work.rerun.retry_rejects or output.known is not None:
        finish_extra(output.store, reports, next(iter(output.appends.values()), None))
    elif output.state == "finished":
        _mend_index(output)
    elif output.work.shard_range is None:
        finish(output.store, output.plan, reports)


def _mend_index(output: Output) -> None:
    """Write lost parts of a finished dataset's index again, from the files beside its tars."""
    store = output.store
    manifest = Manifest.from_bytes(store.read(MANIFEST_NAME)) if output.lost_parts else None
    for part in output.lost_parts:
        assert manifest is not None
        written = write_part(store, manifest, part.first_shard, part.last_shard)
        if written != part:
            raise MMStreamError(
                f"{store.url_of(part.name)}: is damaged, and the .idx and .crc32c files beside the "
                "tars give another one; run `mmstream convert --check`, then `mmstream index`"
            )
        logger.warning("%s: was missing or damaged; written again", store.url_of(part.name))


def jobs_of(
    output: Output, source: RowSource, options: Options, access: MediaAccess
) -> Iterator[ShardJob]:
    """Yield the jobs of all shards that are to be written or looked at."""
    for name, rows in shards_of(output):
        assert output.lock is not None
        append = output.appends.get(name)
        first_row = 0 if append is None else append.first_row
        yield ShardJob(
            output.store,
            name,
            source.select(rows),
            access,
            options,
            output.split,
            output.lock,
            output.work.rerun.check,
            output.expected.get(name),
            append=None if append is None else append.digest,
            first_row=first_row,
            refused={} if output.known is None else output.known.refused(rows, first_row),
        )


def shards_of(output: Output) -> Iterator[tuple[str, IntArray | range]]:
    """Yield (name, rows) of all shards that are to be written or looked at."""
    if output.lock is None:
        return
    num_rows = output.plan["samples_per_shard"]
    if not (output.work.rerun.retry_rejects or output.work.rerun.append):
        for index in output.shards:
            name = shard_name(index)
            if output.state != "finished" or name in output.expected:
                yield name, output.rows[index * num_rows : (index + 1) * num_rows]
    yield from output.extra.items()


def mark_duplicates(
    outputs: Sequence[Output], reports: Mapping[str | None, Sequence[ShardReport]], progress: bool
) -> tuple[dict[str, int], int]:
    """Find duplicates over all splits, and write what the plan asks for.

    Where one of the splits is finished already, its files stay as they are.

    Args:
        outputs: All splits, in order. Of two equal samples, the one in the earlier split stays.
        reports: Of the shards of each unfinished split.
        progress: Show a progress bar (on a terminal only).

    Returns:
        {kind: number of pairs}, and how many samples epochs leave out now. Empty and 0 if nothing
        was asked for, or all splits are finished.
    """
    exact, near = outputs[0].plan["duplicates"], outputs[0].plan["near_duplicates"]
    unfinished = [output for output in outputs if output.state != "finished"]
    if not (exact or near):
        return {}, 0
    if not unfinished:
        if outputs[0].work.rerun.retry_rejects or outputs[0].work.rerun.append:
            logger.warning("the new samples are not looked at; run `mmstream duplicates`")
        return {}, 0
    for output in unfinished:
        assert output.lock is not None
        output.lock.require()
    datasets = {}
    for output in outputs:
        if output.state == "finished":
            manifest = Manifest.read(output.store)
        else:
            manifest = manifest_of(output.plan, reports[output.split])
        datasets[output.split or ""] = Dataset(manifest, output.store)
    report = find_duplicates(
        datasets, kinds=KINDS if exact else (), near=near is not None, progress=progress
    )
    names = [output.split or "" for output in unfinished]
    kinds = ["pair"] * (exact == "drop") + ["near"] * (near == "drop")
    dropped = drop_duplicates(report, kinds, names) if kinds else {}
    write_pairs(report, names)
    for kind in report.by_kind:
        if (count := report.across(kind).again.size) and kind != "media":  # `warn_of_leaks` says it
            logger.warning(
                "%s: %d pairs of samples of two splits; see %s", kind, count, DUPLICATES_NAME
            )
    return report.num_pairs, sum(dropped.values())


def warn_of_leaks(outputs: Sequence[Output], progress: bool) -> None:
    """Warn of media that two splits hold, by the hashes in their sidecars.

    Args:
        outputs: All splits, in order. Their manifests are written.
        progress: Show a progress bar (on a terminal only).
    """
    plan, states = outputs[0].plan, {output.state for output in outputs}
    work, is_done = outputs[0].work, states == {"finished"}
    is_done = (is_done and not work.rerun.append) or work.shard_range is not None
    if is_done or len(outputs) == 1 or not plan["sidecar"]:
        return
    datasets = {output.split or "": open_dataset(output.store.url) for output in outputs}
    bad = {name: dataset.bad for name, dataset in datasets.items()}
    corpus = read_corpus(datasets, ["media"], bad, num_threads=1, progress=progress)
    leaks = Duplicates(corpus, {"media": find_in(corpus, "media")}).across("media")
    if not leaks.again.size:
        return
    is_by_media, came_so = plan.get("split_by_media"), plan["splits"][0][1] is None
    cure = (
        "they are equal bytes under different names; give them one name in the rows"
        if is_by_media
        else "the splits came with the rows; take these samples out of one of them"
        if came_so
        else "--split-by-media, mm.Splitting(by_media=True), keeps such rows in one split"
    )
    pair = [int(leaks.first[0]), int(leaks.again[0])]
    names = corpus.names_of(pair)
    logger.warning(
        "leak: %s media files of an earlier split are in a later one too, in %s of its samples, "
        "such as that of %s: %s",
        f"{leaks.again.size:,}",
        f"{np.unique(leaks.again).size:,}",
        " and ".join(f"{names[n].dataset}/{names[n].shard} {escaped(names[n].key)}" for n in pair),
        cure,
    )
