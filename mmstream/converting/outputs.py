"""The datasets that a conversion writes, one for each split: their state, their lock, their jobs.

    rows -> plan -> OUTPUTS -> jobs -> engines -> destination

All of them are checked before anything is written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mmstream.converting.destination import State, inspect, require_foreign
from mmstream.converting.media.access import MediaAccess
from mmstream.converting.options import Options
from mmstream.converting.plan import plan_of, select, shard_name
from mmstream.converting.rows.source import RowSource
from mmstream.converting.shard import ShardJob, shard_sizes
from mmstream.converting.sidecar import sidecar_name
from mmstream.dataset.checksums import object_sha256
from mmstream.dataset.index_writer import write_part
from mmstream.dataset.manifest import MANIFEST_NAME, IndexPart, Manifest, ShardInfo
from mmstream.errors import ConfigError, MMStreamError
from mmstream.storage import Store, join_url, open_store
from mmstream.storage.write_lock import LOCK_NAME, WriteLock, write_lock
from mmstream.types import IntArray

__all__ = ["Output", "jobs_of", "locked", "mend_index", "plan_outputs"]

logger = logging.getLogger(__name__)


class Output(NamedTuple):
    """One dataset that a conversion writes: all rows, or one split."""

    split: str | None
    store: Store
    rows: IntArray | range
    """0-based row numbers, in the order of the shards."""
    plan: dict[str, Any]
    state: State
    lock: WriteLock | None = None
    """None: nothing needs to be written."""
    check: bool = False
    expected: Mapping[str, ShardInfo] = MappingProxyType({})
    """Shards of a finished dataset that are looked at or written again."""
    has_checksums: bool = True
    """False: a finished dataset of 0.1, without checksums of samples."""
    lost_parts: tuple[IndexPart, ...] = ()
    """Parts of a finished dataset's index that are missing or damaged."""


def plan_outputs(
    store: Store,
    rows_urls: Sequence[str],
    source: RowSource,
    options: Options,
    root: str | None,
    overwrite: bool,
    locks: ExitStack,
) -> list[Output]:
    """Plan every dataset and check its destination. Writes nothing.

    A destination that has a lock is locked: if its holder lives, that is the error to report. If it
    is dead, the lock is removed at the end.
    """
    outputs: list[Output] = []
    for split, rows in select(source, options).items():
        split_store = store if split is None else open_store(join_url(store.url, split))
        folder = split_store.local_path("")
        if folder is not None and Path(folder).is_file():
            raise ConfigError(f"{split_store.url}: is a file, not a folder; name another folder")
        require_foreign(rows_urls, split_store)
        lock = None
        if split_store.exists(LOCK_NAME):
            lock = locks.enter_context(write_lock(split_store, "convert"))
        plan = plan_of(source, options, split, len(rows))
        state = inspect(split_store, plan, root, overwrite)
        outputs.append(Output(split, split_store, rows, plan, state, lock))
    return outputs


def locked(
    output: Output, locks: ExitStack, root: str | None, overwrite: bool, check: bool
) -> Output:
    """Return an output with the lock on its destination, if something may be written there."""
    output = _with_damage(output._replace(check=check))
    is_whole = output.state == "finished" and not (output.expected or output.lost_parts)
    if output.lock is None and not is_whole:
        lock = locks.enter_context(write_lock(output.store, "convert"))
        # Another convert may have come and gone since the first look.
        state = inspect(output.store, output.plan, root, overwrite)
        output = _with_damage(output._replace(lock=lock, state=state))
    return output


def _with_damage(output: Output) -> Output:
    """Return a finished output with its damaged shards, or with all shards if it is checked.

    One list of the files tells which are missing, or have another size than in the manifest.
    """
    if output.state != "finished":
        return output._replace(expected={}, lost_parts=())
    manifest = Manifest.from_bytes(output.store.read(MANIFEST_NAME))
    has_checksums = manifest.checksums is not None
    files = output.store.list()
    sizes = {name: file.size for name, file in files.items()}
    expected = {
        shard.name: shard
        for shard in manifest.shards
        if output.check or not shard_sizes(shard, has_checksums).items() <= sizes.items()
    }
    if output.plan["sidecar"]:
        shards = {shard.name: shard for shard in manifest.shards}
        for name in _shard_names(output):
            if sidecar_name(name) not in sizes:
                expected[name] = shards.get(name, ShardInfo(name, 0, 0))
    lost_parts = tuple(
        part
        for part in manifest.index_parts
        if sizes.get(part.name) != part.num_bytes
        or (output.check and object_sha256(output.store, part.name, part.num_bytes) != part.sha256)
    )
    return output._replace(expected=expected, has_checksums=has_checksums, lost_parts=lost_parts)


def _shard_names(output: Output) -> list[str]:
    """Return the names of all shards, those without a sample included."""
    return [
        shard_name(index)
        for index, _ in enumerate(range(0, len(output.rows), output.plan["samples_per_shard"]))
    ]


def mend_index(output: Output) -> None:
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
    if output.lock is None:
        return
    num_rows = options.samples_per_shard
    for index, start in enumerate(range(0, len(output.rows), num_rows)):
        name = shard_name(index)
        if output.state != "finished" or name in output.expected:
            yield ShardJob(
                output.store,
                name,
                source.select(output.rows[start : start + num_rows]),
                access,
                options.format,
                options.captions,
                options.media,
                output.split,
                options.sidecar,
                output.lock,
                output.check,
                output.expected.get(name),
                output.has_checksums,
            )
