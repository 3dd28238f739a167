"""The datasets that a conversion writes, one for each split: their state, their lock, their jobs.

    rows -> plan -> OUTPUTS -> jobs -> engines -> duplicates -> destination

All of them are checked before anything is written. Duplicates are looked for before the manifests
are written. The sidecars are complete then. So the answer does not depend on workers, and a call
that was killed there finds the same again.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from mmstream.converting.destination import (
    State,
    begin,
    begin_range,
    finish,
    finish_retry,
    inspect,
    lock_all,
    lock_shards,
    manifest_of,
    remove_temporary_files,
    require_foreign,
)
from mmstream.converting.media.references import MediaAccess
from mmstream.converting.options import Options, Rerun
from mmstream.converting.plan import (
    RETRIED_SHARDS,
    next_round,
    num_shards,
    plan_of,
    rounds,
    select,
    shard_name,
)
from mmstream.converting.quality.corpus import read_corpus
from mmstream.converting.quality.duplicates import (
    DUPLICATES_NAME,
    KINDS,
    Duplicates,
    drop_duplicates,
    find_duplicates,
    find_in,
    write_pairs,
)
from mmstream.converting.rows.records import RowSource
from mmstream.converting.shard import ShardJob, ShardReport, shard_sizes
from mmstream.converting.sidecar import sidecar_name
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index import object_sha256
from mmstream.dataset.manifest import MANIFEST_NAME, IndexPart, Manifest, ShardInfo
from mmstream.dataset.open import open_dataset
from mmstream.dataset.shard_indexes import write_part
from mmstream.errors import ConfigError, ManifestError, MMStreamError, escaped
from mmstream.storage import Store, join_url, open_store
from mmstream.storage.write_lock import LOCK_NAME, LockedError, WriteLock, require_unlocked
from mmstream.types import IntArray

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at a destination to which another rank converts."""

SAY_S = 60.0
"""Seconds between two lines of the log that say so."""


@dataclass(frozen=True)
class Work:
    """What a call does for its plan. The bytes of the output do not depend on it."""

    rerun: Rerun = field(default_factory=Rerun)
    shard_range: tuple[int, int] | None = None
    """First shard and the one behind the last, counted over all splits. None: all shards."""
    facts: bool = False
    """Whether the facts of shards are written beside their indexes, for `mmstream plan`."""

    def __post_init__(self) -> None:
        if self.shard_range is None:
            return
        if self.rerun.retry_rejects:
            raise ConfigError(
                "retry_rejects=True adds shards to a finished dataset; leave out shard_range"
            )
        if self.shard_range[0] >= self.shard_range[1]:
            raise ConfigError(
                f"shard_range={self.shard_range}: must be the first shard, from 0, and the one "
                "behind the last"
            )
        if self.rerun.overwrite:
            raise ConfigError(
                "overwrite=True would remove what other ranges wrote; leave it out, and empty the "
                "destination before the first range"
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
    extra: Mapping[str, IntArray] = MappingProxyType({})
    """{name: rows} of extra shards: those of the retries before, or with `Rerun.retry_rejects`
    those of this one."""
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
            the folders of splits. Who opens it would get that one.
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
        LockedError: another process writes there, and this one is no rank of several.
        ConfigError: a destination holds something else.
    """
    rows_of_splits = select(source, options, root)
    said_at = -math.inf
    while True:
        try:
            outputs = plan_outputs(
                store, rows_urls, source, rows_of_splits, options, root, work, locks
            )
            return [locked(output, locks, root) for output in outputs]
        except LockedError:
            locks.close()
            if work.shard_range is not None or num_ranks() == 1:
                raise
            if time.monotonic() - said_at >= SAY_S:
                said_at = time.monotonic()
                logger.warning(
                    "%s: another process writes there, this rank waits for it", store.url
                )
            time.sleep(LOOK_S)


def num_ranks() -> int:
    """Return the number of ranks of this job, as launchers such as torchrun say it."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdigit() else 1


def locked(output: Output, locks: ExitStack, root: str | None) -> Output:
    """Return an output with the lock on its destination, if something may be written there."""
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
    return output._replace(state=state, lock=lock, extra=next_round(output.store, source))


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
        return output._replace(expected={}, lost_parts=(), extra={})
    manifest = Manifest.from_bytes(output.store.read(MANIFEST_NAME))
    if manifest.checksums is None:
        raise ManifestError(
            f"{output.store.url}: has no checksums of samples, so an early version of mmstream "
            "wrote it; convert into another folder, or write it anew with "
            "rerun=mm.Rerun(overwrite=True)"
        )
    files = output.store.list()
    sizes = {name: file.size for name, file in files.items()}
    expected = {
        shard.name: shard
        for shard in manifest.shards
        if output.work.rerun.check or not shard_sizes(shard).items() <= sizes.items()
    }
    lost_parts = tuple(
        part
        for part in manifest.index_parts
        if sizes.get(part.name) != part.num_bytes
        or (
            output.work.rerun.check
            and object_sha256(output.store, part.name, part.num_bytes) != part.sha256
        )
    )
    if output.plan["sidecar"]:
        shards = {shard.name: shard for shard in manifest.shards}
        counts = [num_shards(output.plan), *manifest.source.get(RETRIED_SHARDS, [])]
        for name in map(shard_name, range(sum(counts))):
            if sidecar_name(name) not in sizes:
                expected[name] = shards.get(name, ShardInfo(name, 0, 0))
    extra: dict[str, IntArray] = {}
    if expected:
        for shards_of_retry in rounds(output.store, manifest.source):
            extra |= {name: rows for name, rows in shards_of_retry.items() if name in expected}
    return output._replace(expected=expected, lost_parts=lost_parts, extra=extra)


def begin_output(output: Output, root: str | None, command: str) -> None:
    """Write the marker, if shards will be written.

    Args:
        output: With its lock.
        root: Folder of the media.
        command: What continues the conversion.
    """
    store, plan = output.store, output.plan
    if output.work.shard_range is not None and output.state != "finished":
        begin_range(store, plan, root, command, output.shards)
    elif output.lock is not None:
        begin(store, output.state, plan, root, command)


def finish_output(output: Output, reports: Sequence[ShardReport]) -> None:
    """Make a dataset of the shards, or mend a finished one. A range of shards leaves that open."""
    if output.lock is None:
        return
    output.lock.require()
    if output.work.shard_range is None:  # a node of Ray may have died, or a range
        remove_temporary_files(output.store)
    if output.work.rerun.retry_rejects:
        finish_retry(output.store, reports)
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
        yield ShardJob(
            output.store,
            name,
            source.select(rows),
            access,
            options.format,
            options.reading.captions,
            options.media,
            output.split,
            options.sidecar,
            options.duplicates.near is not None,
            output.lock,
            output.work.rerun.check,
            output.expected.get(name),
            facts=output.work.facts,
        )


def shards_of(output: Output) -> Iterator[tuple[str, IntArray | range]]:
    """Yield (name, rows) of all shards that are to be written or looked at."""
    if output.lock is None:
        return
    num_rows = output.plan["samples_per_shard"]
    if not output.work.rerun.retry_rejects:
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
        if outputs[0].work.rerun.retry_rejects:
            logger.warning(
                "the samples of retried rows are not looked at; run `mmstream duplicates`"
            )
        return {}, 0
    for output in unfinished:
        assert output.lock is not None
        output.lock.require()
    datasets = {_name(output): _dataset(output, reports) for output in outputs}
    report = find_duplicates(
        datasets, kinds=KINDS if exact else (), near=near is not None, progress=progress
    )
    names = [_name(output) for output in unfinished]
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
    is_range = outputs[0].work.shard_range is not None
    if is_range or len(outputs) == 1 or not plan["sidecar"] or states == {"finished"}:
        return
    datasets = {_name(output): open_dataset(output.store.url) for output in outputs}
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


def _name(output: Output) -> str:
    return output.split or ""


def _dataset(output: Output, reports: Mapping[str | None, Sequence[ShardReport]]) -> Dataset:
    if output.state == "finished":
        return Dataset(Manifest.read(output.store), output.store)
    return Dataset(manifest_of(output.plan, reports[output.split]), output.store)
