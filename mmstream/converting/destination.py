"""The destination of a conversion, before its first shard and after its last one.

    LOCKS -> inspect, begin -> shards -> finish

A conversion writes these, in this order:

    mmstream.unfinished.json   the marker: the plan, and the command that continues it
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

A killed conversion leaves its marker. `open_dataset` then refuses the folder, and names the command
that continues. A list of bad samples from an earlier dataset is removed before the marker is
written. If no row became a sample, only the rejects stay; the next call tries every row again.

One conversion may write there, or several that write other ranges of shards. A conversion of all
shards holds ``.mmstream.lock`` in the destination. One of the shards [a, b) holds
``reports/shards-A-B.lock``. Both kinds exclude each other: each puts its own lock there first, and
then looks for those of the other kind. So at least one of two sees the other.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from mmstream.converting.plan import RETRIED_SHARDS, num_shards, shard_name
from mmstream.converting.quality.duplicates import DUPLICATES_NAME
from mmstream.converting.report import (
    REJECTS_NAME,
    REPORT_NAME,
    REPORTS,
    report_name,
    write_rejects,
    write_report,
)
from mmstream.converting.shard import ShardReport
from mmstream.converting.sidecar import sidecar_name
from mmstream.dataset.bad_list import BAD_NAME, PREVIOUS_NAME
from mmstream.dataset.files import README_NAME, commit, json_lines, read_json, require_files
from mmstream.dataset.index_tars import MAX_PARTS
from mmstream.dataset.manifest import (
    INDEX_PART_NAME,
    MANIFEST_NAME,
    MARKER_NAME,
    Manifest,
    ShardInfo,
)
from mmstream.dataset.shard_indexes import write_part
from mmstream.errors import ConfigError, ManifestError, escaped
from mmstream.storage import RemoteStore, Store, is_remote, open_store
from mmstream.storage.local import remove_temporaries
from mmstream.storage.store import map_requests
from mmstream.storage.urls import local_path
from mmstream.storage.write_lock import (
    LOCK_NAME,
    LockedError,
    WriteLock,
    require_unlocked,
    write_lock,
)

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
    LOCK_NAME,
)
_SHARD_SUFFIXES = ("tar", "tar.idx", "tar.crc32c", "tar.facts", "parquet")
_REPORT_SUFFIXES = ("json", "rejects.jsonl")
_SHARD_SUFFIX = "|".join(map(re.escape, _SHARD_SUFFIXES))
_SHARD_FILE = re.compile(rf"shard-\d{{6,}}\.({_SHARD_SUFFIX})")
_REPORT_SUFFIX = "|".join(map(re.escape, _REPORT_SUFFIXES))
_REPORT_FILE = rf"shard-\d{{6,}}\.({_REPORT_SUFFIX})"
_OWNED_FILE = "|".join(
    [_SHARD_FILE.pattern, INDEX_PART_NAME.pattern, *map(re.escape, _SINGLE_FILES)]
)
"""The names of all files that a conversion writes into a dataset's folder, or removes there."""
_WRITTEN_FILE = rf"{_OWNED_FILE}|{re.escape(README_NAME)}"
_MAY_LIE_HERE = re.compile(
    rf"{_OWNED_FILE}|(README|LICENSE|LICENCE|NOTICE|CITATION|CHANGELOG)(\.\w+)?", re.IGNORECASE
)
"""Files that a new dataset's folder may hold: those of a conversion, and those about a dataset."""


_RESULTS = ("num_rejects", RETRIED_SHARDS)
"""Keys of a manifest's ``source`` that are no part of the plan."""


def require_foreign(rows: Sequence[str], store: Store) -> None:
    """Raise a ConfigError if the conversion would replace or remove a file of rows.

    Links count as the file that they lead to.

    Args:
        rows: Paths and URLs of the files of rows, or of folders of them.
        store: The destination.
    """
    remote = [name for name in rows if is_remote(name)]
    local = [name for name in rows if not is_remote(name)]
    folders = {store: _OWNED_FILE, open_store(store.url_of(REPORTS)): _REPORT_FILE}
    for folder, owned in folders.items():
        path = folder.local_path("")
        if path is None:
            doubled = next((name for name in remote if _is_owned(name, folder, owned)), None)
        else:
            doubled = _same_file(local, path, owned)
        if doubled is not None:
            raise ConfigError(
                f"{escaped(doubled)}: lies in {escaped(folder.url)} under a name that convert "
                "would replace or remove; move the rows, or name another destination"
            )


def _is_owned(url: str, folder: Store, owned: str) -> bool:
    parent, _, name = url.rstrip("/").rpartition("/")
    is_folder = url.rstrip("/") == folder.url
    return is_folder or (parent == folder.url and re.fullmatch(owned, name) is not None)


def _same_file(paths: Sequence[str], folder: str, owned: str) -> str | None:
    """Return the path that an owned name in a folder leads to, or that is the folder itself."""
    statuses = {path: Path(local_path(path)).stat() for path in paths}
    by_inode = {status.st_ino: (path, status) for path, status in statuses.items()}
    try:
        entries = os.scandir(folder)
        at_folder = by_inode.get(os.stat(folder).st_ino)  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return None
    with entries:
        if at_folder is not None and os.path.samestat(at_folder[1], os.stat(folder)):  # noqa: PTH116
            return at_folder[0]
        for entry in entries:
            # Most files are told apart without a look at them: a folder may hold a million.
            is_like = entry.is_symlink() or entry.inode() in by_inode
            if is_like and re.fullmatch(owned, entry.name):
                with suppress(OSError):  # a link that leads nowhere
                    status = entry.stat()
                    path, known = by_inode.get(status.st_ino, ("", None))
                    if known is not None and os.path.samestat(known, status):
                        return path
    return None


def inspect(store: Store, plan: dict[str, Any], media_root: str | None, overwrite: bool) -> State:
    """Return the state of a destination for this plan. Writes nothing.

    Raises:
        ConfigError: It holds another conversion, or files that no conversion wrote.
        ManifestError: Its manifest or marker is damaged, or is no file.
    """
    require_files(store)
    names = store.list()
    if MARKER_NAME in names:
        marker = read_marker(store)
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
        _require_same_plan(store, "a dataset", saved, plan)
        return "finished" if manifest.num_samples or not plan["num_rows"] else "clear"
    tars = [name for name in names if name.endswith(".tar")]
    if tars and not overwrite and _has_reports(store):
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


def begin(
    store: Store, state: State, plan: dict[str, Any], media_root: str | None, command: str
) -> None:
    """Write the marker. Before that, remove what is to be replaced, and what killed runs left."""
    remove_temporary_files(store)
    if state == "finished":
        return
    marker: dict[str, Any] = {"command": command, "media_root": media_root, "plan": plan}
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


def begin_range(
    store: Store, plan: dict[str, Any], media_root: str | None, command: str, shards: range
) -> None:
    """Write the marker, unless another range has. Before, remove what killed runs of it left.

    Raises:
        ConfigError: Another range has another plan.
    """
    if shards:
        stems = "|".join(shard_name(index).removesuffix(".tar") for index in shards)
        remove_temporary_files(
            store, rf"({stems})\.({_SHARD_SUFFIX})", rf"({stems})\.({_REPORT_SUFFIX})"
        )
    if not store.exists(MARKER_NAME):
        with marker_lock(store):
            if inspect(store, plan, media_root, overwrite=False) == "fresh":
                _write_marker(store, {"command": command, "media_root": media_root, "plan": plan})
                return
    inspect(store, plan, media_root, overwrite=False)


def finish(store: Store, plan: dict[str, Any], reports: Sequence[ShardReport]) -> None:
    """Write ``rejects.jsonl``, ``report.json``, the index, the manifest; remove the marker."""
    _write_rejects(store, reports)
    manifest = manifest_of(plan, reports)
    write_report(store, manifest, (report.counts for report in reports))
    commit(store, manifest)
    store.remove(MARKER_NAME)


def manifest_of(plan: dict[str, Any], reports: Sequence[ShardReport]) -> Manifest:
    """Return the manifest of finished shards, without parts of the index."""
    source = {**plan, "num_rejects": sum(report.num_rejects for report in reports)}
    return Manifest(_with_samples(reports), dict(_fields(reports)), source, checksums="written")


def finish_retry(store: Store, reports: Sequence[ShardReport]) -> None:
    """Add the extra shards of a retry to a finished dataset, if they hold a sample.

    The new manifest is the only commit. ``rejects.jsonl`` is written before it, from the reports.
    """
    old = Manifest.read(store)
    shards = _with_samples(reports)
    if not shards:
        remove_shards(store, [report.name for report in reports])
        return
    write_rejects(store, ((report.name, report.rejects_bytes) for report in reports))
    source = {
        **old.source,
        "num_rejects": sum(report.num_rejects for report in reports),
        RETRIED_SHARDS: [*old.source.get(RETRIED_SHARDS, []), len(reports)],
    }
    all_reports = [*_earlier_reports(store, old), *reports]
    fields = dict(_fields(all_reports))
    manifest = replace(old, shards=(*old.shards, *shards), fields=fields, source=source)
    write_report(store, manifest, (report.counts for report in all_reports))
    parts = old.index_parts if len(old.index_parts) < MAX_PARTS else ()
    first = parts[-1].last_shard + 1 if parts else 0
    part = write_part(store, manifest, first, len(manifest.shards) - 1)
    assert part is not None
    store.write(MANIFEST_NAME, replace(manifest, index_parts=(*parts, part)).to_bytes())


def _earlier_reports(store: Store, manifest: Manifest) -> list[ShardReport]:
    """Return the reports of all shards of a finished dataset, in their order."""
    count = num_shards(manifest.source) + sum(manifest.source.get(RETRIED_SHARDS, []))

    def read(index: int) -> ShardReport:
        name = report_name(shard_name(index))
        try:
            return msgspec.json.decode(store.read(name), type=ShardReport)
        except (FileNotFoundError, msgspec.MsgspecError) as error:
            raise ManifestError(
                f"{store.url_of(name)}: {error}; bring it back, or convert again with "
                "rerun=mm.Rerun(overwrite=True)"
            ) from None

    return map_requests(store, read, range(count))


def remove_shards(store: Store, shards: Sequence[str]) -> None:
    """Remove all files of some shards, which no manifest names. Their reports go first."""
    stems = [shard.removesuffix(".tar") for shard in shards]
    for suffix in _REPORT_SUFFIXES:
        map_requests(store, store.remove, [f"{REPORTS}/{stem}.{suffix}" for stem in stems])
    for suffix in _SHARD_SUFFIXES:
        map_requests(store, store.remove, [f"{stem}.{suffix}" for stem in stems])


def give_up(store: Store, reports: Sequence[ShardReport]) -> None:
    """Leave only ``rejects.jsonl``: without a sample there is no dataset."""
    _write_rejects(store, reports)
    _remove_reports(store)
    map_requests(store, store.remove, [sidecar_name(report.name) for report in reports])
    store.remove(MARKER_NAME)


def _with_samples(reports: Sequence[ShardReport]) -> tuple[ShardInfo, ...]:
    return tuple(
        ShardInfo(report.name, report.num_samples, report.num_bytes, report.sha256)
        for report in reports
        if report.num_samples
    )


def _fields(reports: Sequence[ShardReport]) -> Counter[str]:
    fields: Counter[str] = Counter()
    for report in reports:
        fields.update(report.fields)
    return fields


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


def _remove_reports(store: Store) -> None:
    reports = open_store(store.url_of(REPORTS))
    names = [name for name in reports.list() if re.fullmatch(_REPORT_FILE, name)]
    map_requests(reports, reports.remove, names)
    folder = reports.local_path("")
    if folder is not None:
        with suppress(OSError):  # it does not exist, or holds other files
            Path(folder).rmdir()


def _has_reports(store: Store) -> bool:
    names = open_store(store.url_of(REPORTS)).list()
    return any(re.fullmatch(_REPORT_FILE, name) for name in names)


def _clear(store: Store) -> None:
    """Remove what a conversion writes, and no other files."""
    for name in (MANIFEST_NAME, REJECTS_NAME, REPORT_NAME, DUPLICATES_NAME):
        store.remove(name)
    _remove_reports(store)
    owned = [
        name
        for name in store.list()
        if _SHARD_FILE.fullmatch(name) or INDEX_PART_NAME.fullmatch(name)
    ]
    map_requests(store, store.remove, owned)


def remove_temporary_files(
    store: Store, files: str = _WRITTEN_FILE, reports: str = _REPORT_FILE
) -> None:
    """Remove what killed conversions left of files that they were writing.

    Args:
        store: The destination.
        files: Regular expression of the names of files that nobody else writes.
        reports: The same for the folder of reports.
    """
    folder = store.local_path("")
    if folder is not None:
        remove_temporaries(Path(folder), files)
        remove_temporaries(Path(folder, REPORTS), reports)
    if isinstance(store, RemoteStore):
        store.remove_uploads(f"{files}|{REPORTS}/({reports})")


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


def _require_same_plan(store: Store, content: str, saved: Any, plan: dict[str, Any]) -> None:
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
    if not differing and is_other_version:
        raise ConfigError(
            f"{store.url}: holds {content} of another version of mmstream, which writes the same "
            f"rows as other bytes (converter {saved.get('converter')!r}, this one is "
            f"{plan['converter']!r}). A finished dataset is read as it is; to convert again, name "
            "another destination, or replace it with rerun=mm.Rerun(overwrite=True)"
        )
    if differing:
        raise ConfigError(
            f"{store.url}: holds {content} with other settings: {'; '.join(differing)}. "
            "Name another destination, or replace it with rerun=mm.Rerun(overwrite=True)"
        )


def read_marker(store: Store) -> dict[str, Any]:
    """Return the marker of an unfinished conversion: its plan, and what continues it."""
    return read_json(store, MARKER_NAME)


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
def marker_lock(store: Store) -> Iterator[None]:
    """Hold the lock on the marker for the block. Ranges that start together wait for each other."""
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
