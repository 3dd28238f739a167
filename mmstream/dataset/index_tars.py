"""Index tars that other programs wrote, so that they open quickly.

`index_tars` reads the headers of each tar. It writes ``NAME.tar.idx`` beside the tar (or into
another folder), the index of all tars in one part, and a manifest that names all of them. On
request it reads the tars whole, and writes the checksums of their samples too. Of tars that have
both, only these small files are read.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from mmstream.dataset.bad_list import REMOVED_NAME, read_removed, trim_bad
from mmstream.dataset.index import (
    Checksums,
    build_index,
    checksums_name,
    checksums_size,
    decode_checksums,
    decode_index,
    encode_checksums,
    encode_index,
    index_name,
    index_size,
    num_indexed,
    read_samples,
    require_whole,
    sample_checksum,
)
from mmstream.dataset.manifest import (
    INDEX_PART_NAME,
    MANIFEST_NAME,
    MARKER_NAME,
    Manifest,
    ShardInfo,
    name_fault,
)
from mmstream.dataset.open import require_files
from mmstream.dataset.shard_indexes import write_part
from mmstream.errors import ConfigError, ManifestError, ShardError, escaped
from mmstream.storage import Store, open_store
from mmstream.storage.write_lock import write_lock
from mmstream.tar.header import BLOCK

logger = logging.getLogger(__name__)

GZIPPED = (".tar.gz", ".tgz")


@dataclass(frozen=True)
class IndexReport:
    """The counts that `index_tars` returns."""

    num_shards: int
    num_samples: int
    num_built: int
    """Indexes that this call built. The others existed already."""
    num_summed: int = 0
    """Tars that this call read whole for the checksums of their samples."""


def index_tars(
    url: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    checksums: bool = False,
    num_threads: int | None = None,
    progress: bool = True,
) -> IndexReport:
    """Index the tars of a folder or prefix, and write a manifest.

    Args:
        url: The folder or prefix of the tars.
        output: Folder for the indexes and the manifest. Default: beside the tars.
        overwrite: Build indexes again that exist already, with `checksums` those too.
        checksums: Also write a checksum of every sample, and a sha256 of every tar into the
            manifest. All bytes are read, other than of tars that have both. The checksums prove
            that bytes have not changed since this call.
        num_threads: Tars that are indexed at the same time. Default: 8, or 32 on object storage.
        progress: Show a progress bar (on a terminal only).

    Raises:
        ConfigError: There are no tars, a conversion has not finished there, or another process
            writes where this call would.
        ManifestError: A manifest, a bad list or a marker is there, but is not a file.
        ShardError: A tar cannot be indexed; the message names it. Indexes that are built already
            stay.
        FileNotFoundError: A tar vanished meanwhile.
        StorageError: The storage failed.
    """
    store = open_store(url)
    target = store if output is None else open_store(output)
    for folder in (store, target):
        require_files(folder)
    if not any(name.endswith((".tar", *GZIPPED)) for name in store.list()):
        _tar_sizes(store)  # an error; a lock would make the folder
    with write_lock(target, "index"):
        sizes = _tar_sizes(store)
        old = _old_index(target, sizes, overwrite)
        _require_places_of_removed(target, sizes.keys() - old.replaced)
        trim_bad(target, set() if overwrite else sizes.keys() - old.replaced)
        if checksums:
            num_bytes = sum(size for name, size in sizes.items() if name not in old.summed)
            logger.info("%s: %.2f GB are read for checksums", store.url, num_bytes / 1e9)
        index = partial(_index, store, target, old, overwrite, checksums)
        default_threads = 32 if store.access.concurrent else 8  # of a remote store they mostly wait
        with ThreadPoolExecutor(num_threads or default_threads) as pool:
            indexed = pool.map(index, sizes.items())
            is_hidden = None if progress else True
            tars = list(tqdm(indexed, total=len(sizes), unit="tar", disable=is_hidden))
        data_url = None if target == store else store.url
        manifest = _manifest(target, old, tars, data_url, checksums)
        part = write_part(target, manifest, 0, len(tars) - 1)
        manifest = replace(manifest, index_parts=() if part is None else (part,))
        if manifest != old.manifest:
            target.write(MANIFEST_NAME, manifest.to_bytes())
            # Few readers need those that neither this manifest nor the one before lists. These read
            # the files beside the tars.
            parts = {part.name for part in (*manifest.index_parts, *old.manifest.index_parts)}
            for name in old.files:
                if INDEX_PART_NAME.fullmatch(name) and name not in parts:
                    target.remove(name)
    return IndexReport(
        num_shards=len(tars),
        num_samples=sum(tar.info.num_samples for tar in tars),
        num_built=sum(tar.is_new for tar in tars),
        num_summed=sum(tar.is_summed for tar in tars),
    )


@dataclass(frozen=True)
class _OldIndex:
    """The files that earlier calls left at the target, and those that still describe the tars."""

    manifest: Manifest
    """Without shards where there is none."""
    shards: Mapping[str, ShardInfo]
    """Those of the manifest, by name."""
    files: Mapping[str, int]
    """Bytes of all files of the target."""
    has_columns: bool
    """Checksums of samples lie there, whatever the manifest says."""
    replaced: Set[str]
    """Tars that were replaced since: they have another size than the manifest says."""
    summed: Set[str]
    """Tars whose checksums need not be made again, if they fit the index."""


def _old_index(target: Store, sizes: Mapping[str, int], overwrite: bool) -> _OldIndex:
    """Return what earlier calls have left.

    Args:
        target: Where the index lies.
        sizes: Bytes of the tars, by name.
        overwrite: Checksums are made again.
    """
    manifest = _old_manifest(target)
    files = {name: stat.size for name, stat in target.list().items()}
    shards = {shard.name: shard for shard in manifest.shards}
    replaced = {
        name for name, size in sizes.items() if name in shards and shards[name].num_bytes != size
    }
    are_summed = not overwrite and manifest.checksums is not None
    summed = {name for name, shard in shards.items() if shard.sha256 and are_summed} - replaced
    has_columns = any(checksums_name(name) in files for name in sizes)
    return _OldIndex(manifest, shards, files, has_columns, replaced, summed)


def _require_places_of_removed(target: Store, names: Set[str]) -> None:
    """Refuse to index where samples were taken down of a tar that is gone or replaced.

    In another tar they may have other indexes, and would be shown again.
    """
    taken = {name for takedown in read_removed(target).takedowns for name in takedown.samples}
    if lost := sorted(taken - names):
        raise ConfigError(
            f"{target.url}: samples of {escaped(lost[0])} were taken down, and this tar is gone or "
            f"was replaced: bring it back; or leave them out of the new one, and {REMOVED_NAME} "
            "without it"
        )


def _tar_sizes(store: Store) -> dict[str, int]:
    """Return the bytes of the tars of a folder, by name. Gzipped ones are left out.

    Raises:
        ConfigError: There are none, a name is impossible, or a conversion has not finished.
    """
    sizes = {name: stat.size for name, stat in store.list().items()}
    if MARKER_NAME in sizes:
        raise ConfigError(f"{store.url}: a conversion has not finished here; finish that first")
    tars = {name: size for name, size in sizes.items() if name.endswith(".tar")}
    if not tars:
        raise ConfigError(
            f"{store.url}: no tars to index; name the folder of plain ones (`mmstream convert` "
            "writes them of gzipped ones, and of rows and pictures)"
        )
    for name in tars:
        if fault := name_fault(name):
            raise ConfigError(f"{store.url}: {escaped(name)} {fault}; rename it")
    num_gzipped = sum(name.endswith(GZIPPED) for name in sizes)
    if num_gzipped:
        logger.warning(
            "%s: %d gzipped tars are left out; `mmstream convert` writes plain ones of them",
            store.url,
            num_gzipped,
        )
    return tars


class _IndexedTar(NamedTuple):
    """A tar with its index."""

    info: ShardInfo
    is_new: bool
    """This call has built its index."""
    has_checksums: bool
    is_summed: bool = False
    """This call has made its checksums."""


def _index(
    store: Store,
    target: Store,
    old: _OldIndex,
    overwrite: bool,
    checksums: bool,
    tar: tuple[str, int],
) -> _IndexedTar:
    """Make the index of a tar, and its checksums, where they do not stand already.

    Args:
        store: Where the tars lie.
        target: Where the indexes lie.
        old: What lies there.
        overwrite: As for `index_tars`.
        checksums: As for `index_tars`.
        tar: Its name, and its size in bytes.
    """
    name, size = tar
    column_name = checksums_name(name)
    is_new = overwrite or name in old.replaced or index_name(name) not in old.files
    if is_new:
        index = encode_index(build_index(store, name, size))
        target.write(index_name(name), index)
    else:
        index = _read_index(target, old, name, index_size(size // BLOCK))
    offsets = decode_index(index, index_name(name))
    if not is_new and name not in old.shards:
        require_whole(store, name, size, offsets)
    info = ShardInfo(name, len(offsets) - 1, size)
    column = _read_column(target, old, name, index)
    if checksums and (column is None or name not in old.summed):
        digest = hashlib.sha256()
        samples = read_samples(store, name, size, offsets, digest.update)
        column = np.array(list(map(sample_checksum, samples)), dtype=np.uint32)  # to the end
        sha256 = digest.hexdigest()
        target.write(column_name, encode_checksums(column, index))
        if old.manifest.erased.get(name) == sha256:
            sha256 = old.shards[name].sha256 or sha256  # its identity stays
        elif name in old.shards and old.shards[name].sha256 not in (None, sha256):
            logger.warning(
                "%s: other bytes than the sha256 of the old manifest says: it was replaced or is "
                "damaged; its checksums are those of the bytes that it has now",
                escaped(name),
            )
        return _IndexedTar(replace(info, sha256=sha256), is_new, True, is_summed=True)
    if column is None and column_name in old.files:
        target.remove(column_name)  # of another tar, or of another index
    if checksums:
        info = replace(info, sha256=old.shards[name].sha256)
    return _IndexedTar(info, is_new, column is not None)


def _read_index(target: Store, old: _OldIndex, name: str, max_bytes: int) -> bytes:
    """Return an index. No tar has more samples than blocks."""
    num_bytes = old.files[index_name(name)]
    if num_bytes > max_bytes:
        raise ShardError(
            f"{index_name(name)}: more than {max_bytes} bytes, so it has more samples than the "
            "tar has blocks; run `mmstream index --overwrite`"
        )
    return target.read_range(index_name(name), 0, num_bytes)


def _read_column(target: Store, old: _OldIndex, name: str, index: bytes) -> Checksums | None:
    """Return the checksums of a tar that lie there, if they belong to this index."""
    file = checksums_name(name)
    num_bytes = old.files.get(file)
    if name in old.replaced or num_bytes != checksums_size(num_indexed(len(index))):
        return None
    try:
        return decode_checksums(target.read_range(file, 0, num_bytes), index, file)
    except ShardError:
        return None


def _old_manifest(target: Store) -> Manifest:
    try:
        return Manifest.from_bytes(target.read(MANIFEST_NAME))
    except FileNotFoundError:
        pass
    except ManifestError as error:
        logger.warning(
            "%s: a new manifest is made; what else the old one said is lost, such as the sha256 of "
            "tars (%s)",
            target.url,
            error,
        )
    return Manifest(())


def _manifest(
    target: Store,
    old: _OldIndex,
    tars: Sequence[_IndexedTar],
    data_url: str | None,
    checksums: bool,
) -> Manifest:
    """Return the new manifest, but for its parts. Of one with the same shards, all else is kept.

    Checksums that fit their indexes are kept, even where no old manifest tells of them.
    """
    shards = tuple(tar.info for tar in tars)
    manifest = old.manifest
    kind = manifest.checksums
    if (kind is None and old.has_columns) or any(tar.is_summed for tar in tars):
        kind = "indexed"
    num_without = sum(not tar.has_checksums for tar in tars)
    if kind and num_without:
        logger.warning(
            "%s: %d of %d tars have no checksums, so none are compared; run "
            "`mmstream index --checksums`",
            target.url,
            num_without,
            len(tars),
        )
        kind = None
    are_same = _without_sha256(manifest.shards) == _without_sha256(shards)
    if manifest.data_url == data_url and are_same:
        shards = shards if checksums else manifest.shards
        return replace(manifest, shards=shards, checksums=kind)
    names = {info.name for info in shards}
    erased = {name: sha256 for name, sha256 in manifest.erased.items() if name in names}
    source = {"by": "mmstream index"}
    return Manifest(shards, source=source, data_url=data_url, checksums=kind, erased=erased)


def _without_sha256(shards: Sequence[ShardInfo]) -> list[ShardInfo]:
    return [replace(shard, sha256=None) for shard in shards]
