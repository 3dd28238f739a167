"""Index tars that other programs wrote, so that they open quickly.

`index_tars` reads the headers of each tar. It writes ``NAME.tar.idx`` beside the tar (or into
another folder), the index of all tars in parts, and a manifest that names all of them. On request
it reads the tars whole, and writes the checksums of their samples too. Of tars that a part of the
index describes already, nothing is read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from tqdm import tqdm

from mmstream.dataset.bad_list import trim_bad
from mmstream.dataset.checksums import (
    Checksums,
    checksums_name,
    checksums_size,
    decode_checksums,
    encode_checksums,
    read_samples,
    sample_checksum,
)
from mmstream.dataset.files import picture_hint, require_files
from mmstream.dataset.index import (
    build_index,
    decode_index,
    encode_index,
    index_name,
    index_size,
    num_indexed,
    require_whole,
)
from mmstream.dataset.index_part import PartWriter, ShardColumns, columns_of, tar_checksum
from mmstream.dataset.manifest import (
    INDEX_PART_NAME,
    MANIFEST_NAME,
    MARKER_NAME,
    IndexPart,
    Manifest,
    ShardInfo,
    name_fault,
)
from mmstream.dataset.shard_indexes import ShardIndexes
from mmstream.errors import ConfigError, ManifestError, ShardError, escaped
from mmstream.storage import Store, open_store
from mmstream.storage.write_lock import write_lock
from mmstream.tar.header import BLOCK
from mmstream.types import IntArray

logger = logging.getLogger(__name__)

GZIPPED = (".tar.gz", ".tgz")

MAX_PARTS = 64
"""Most parts of an index. Appended tars are one more part; then all become one part again."""


@dataclass(frozen=True)
class IndexReport:
    """What `index_tars` did."""

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
        ManifestError: A manifest, a bad list or a marker is there, but is no file.
        ShardError: A tar cannot be indexed; the message names it. Indexes that are built already
            stay.
        FileNotFoundError: A tar vanished meanwhile.
        StorageError: The storage failed.
    """
    store = open_store(url)
    target = store if output is None else open_store(output)
    for each in (store, target):
        require_files(each)
    settings = (overwrite, checksums, num_threads, progress)
    if not any(name.endswith((".tar", *GZIPPED)) for name in store.list()):
        return _index_tars(store, target, *settings)  # an error; a lock would make the folder
    with write_lock(target, "index"):
        return _index_tars(store, target, *settings)


def _index_tars(
    store: Store,
    target: Store,
    overwrite: bool,
    checksums: bool,
    num_threads: int | None,
    progress: bool,
) -> IndexReport:
    sizes = _sizes(store)
    if MARKER_NAME in sizes:
        raise ConfigError(f"{store.url}: a conversion has not finished here; finish that first")
    names = _tar_names(store, sizes)
    old = _old_index(target, {name: sizes[name] for name in names}, overwrite)
    trim_bad(target, set() if overwrite else set(names) - old.replaced)
    if checksums:
        num_bytes = sum(sizes[name] for name in names if name not in old.summed)
        logger.info("%s: %.2f GB are read for checksums", store.url, num_bytes / 1e9)
    parts = [] if overwrite or checksums else _kept_parts(old, names)
    num_kept = parts[-1].last_shard + 1 if parts else 0
    tars = [_IndexedTar(old.shards[name], False, old.kind is not None) for name in names[:num_kept]]
    indexer = _Indexer(store, target, old, overwrite, checksums)
    new_sizes = {name: sizes[name] for name in names[num_kept:]}
    new_tars, new_part = _index_new(indexer, new_sizes, num_kept, num_threads, progress)
    tars += new_tars
    parts += [new_part] if new_part else []
    data_url = None if target == store else store.url
    manifest = _manifest(target, old, tars, data_url, checksums, tuple(parts))
    if manifest != old.manifest:
        target.write(MANIFEST_NAME, manifest.to_bytes())
        _remove_parts(target, old, {part.name for part in parts})
    return IndexReport(
        num_shards=len(tars),
        num_samples=sum(tar.info.num_samples for tar in tars),
        num_built=sum(tar.is_new for tar in tars),
        num_summed=sum(tar.was_summed for tar in tars),
    )


@dataclass(frozen=True)
class _OldIndex:
    """What earlier calls have left at the target, and what of it still describes the tars."""

    manifest: Manifest | None
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
    tar_checksums: Mapping[str, int]
    """CRC-32C of whole tars, as far as it is known."""

    @property
    def kind(self) -> Literal["written", "indexed"] | None:
        """Who made the checksums of samples that the manifest tells of."""
        return self.manifest.checksums if self.manifest else None

    @property
    def parts(self) -> tuple[IndexPart, ...]:
        """The parts of the index."""
        return self.manifest.index_parts if self.manifest else ()


def _old_index(target: Store, sizes: Mapping[str, int], overwrite: bool) -> _OldIndex:
    """Return what earlier calls have left.

    Args:
        target: Where the index lies.
        sizes: Bytes of the tars, by name.
        overwrite: Checksums are made again.
    """
    manifest, files = _old_manifest(target), _sizes(target)
    shards = {shard.name: shard for shard in manifest.shards} if manifest else {}
    replaced = {
        name for name, size in sizes.items() if name in shards and shards[name].num_bytes != size
    }
    summed: set[str] = set()
    if not overwrite and manifest is not None and manifest.checksums is not None:
        summed = {name for name, shard in shards.items() if shard.sha256} - replaced
    return _OldIndex(
        manifest=manifest,
        shards=shards,
        files=files,
        has_columns=any(checksums_name(name) in files for name in sizes),
        replaced=replaced,
        summed=summed,
        tar_checksums=_old_checksums(target, manifest),
    )


def _tar_names(store: Store, sizes: Mapping[str, int]) -> list[str]:
    """Return the names of the tars of a folder, which are not gzipped by their names."""
    names = [name for name in sizes if name.endswith(".tar")]
    if not names:
        raise ConfigError(f"{store.url}: no tars to index{_hint(store, sizes)}")
    for name in names:
        if fault := name_fault(name):
            raise ConfigError(f"{store.url}: {escaped(name)} {fault}; rename it")
    gzipped = [name for name in sizes if name.endswith(GZIPPED)]
    if gzipped:
        logger.warning(
            "%s: %d gzipped tars are left out; `mmstream convert` writes plain ones of them",
            store.url,
            len(gzipped),
        )
    return names


def _index_new(
    indexer: _Indexer,
    sizes: Mapping[str, int],
    first_shard: int,
    num_threads: int | None,
    progress: bool,
) -> tuple[list[_IndexedTar], IndexPart | None]:
    """Index tars side by side, and write the part of the index that describes them.

    Args:
        indexer: Makes the index of each tar.
        sizes: Bytes of the tars, by name.
        first_shard: Position of the first one in the manifest.
        num_threads: Tars that are indexed at the same time.
        progress: Show a progress bar.
    """
    tars: list[_IndexedTar] = []
    is_hidden = None if progress else True
    with (
        ThreadPoolExecutor(num_threads or _num_threads(indexer.store)) as pool,
        tempfile.TemporaryFile(prefix="mmstream-") as columns_file,
    ):
        writer = PartWriter(columns_file, first_shard)
        indexed = pool.map(indexer, sizes.keys(), sizes.values())
        for tar in tqdm(indexed, total=len(sizes), unit="tar", disable=is_hidden):
            assert tar.columns is not None
            writer.add(tar.info.num_bytes, tar.columns, tar.crc32c)
            tars.append(tar._replace(columns=None))
        return tars, writer.write(indexer.target)


def _num_threads(store: Store) -> int:
    """Return how many tars are indexed at the same time. Threads of a remote store mostly wait."""
    return 32 if store.access.concurrent else 8


def _kept_parts(old: _OldIndex, names: Sequence[str]) -> list[IndexPart]:
    """Return the parts of an old index that still describe the first shards, and are there.

    Args:
        old: What earlier calls have left.
        names: Of all tars now.
    """
    parts: list[IndexPart] = []
    if old.manifest is None or (old.kind is None and old.has_columns):
        return parts
    for part in old.parts[: MAX_PARTS - 1]:
        infos = old.manifest.shards[part.first_shard : part.last_shard + 1]
        old_names = [info.name for info in infos]
        files = {index_name(info.name): index_size(info.num_samples) for info in infos}
        if old.kind:
            files |= {checksums_name(i.name): checksums_size(i.num_samples) for i in infos}
        is_kept = (
            part.first_shard == (parts[-1].last_shard + 1 if parts else 0)
            and old_names == list(names[part.first_shard : part.last_shard + 1])
            and old.files.get(part.name) == part.num_bytes
            and old.replaced.isdisjoint(old_names)
            and files.items() <= old.files.items()
        )
        if not is_kept:
            break
        parts.append(part)
    return parts


class _IndexedTar(NamedTuple):
    """What is known of a tar when its index stands."""

    info: ShardInfo
    is_new: bool
    """This call has built its index."""
    has_checksums: bool
    was_summed: bool = False
    """This call has made its checksums."""
    columns: ShardColumns | None = None
    """Where its samples lie. None: a part of the index that stays says it."""
    crc32c: int | None = None
    """CRC-32C of the tar, if it is known."""


@dataclass(frozen=True)
class _Indexer:
    """Makes the index of a tar, and its checksums, where they do not stand already."""

    store: Store
    """Where the tars lie."""
    target: Store
    """Where the indexes lie."""
    old: _OldIndex
    overwrite: bool
    checksums: bool

    def __call__(self, name: str, size: int) -> _IndexedTar:
        column_name = checksums_name(name)
        is_new = (
            self.overwrite or name in self.old.replaced or index_name(name) not in self.old.files
        )
        if is_new:
            index = encode_index(build_index(self.store, name, size))
            self.target.write(index_name(name), index)
        else:
            index = self._read_index(name, index_size(size // BLOCK))
        offsets = decode_index(index, index_name(name))
        if not is_new and name not in self.old.shards:
            require_whole(self.store, name, size, offsets)
        info = ShardInfo(name, len(offsets) - 1, size)
        column = self._read_column(name, index)
        if not self.checksums:
            if column is None and column_name in self.old.files:
                self.target.remove(column_name)  # of another tar, or of another index
            checksum = self._known_checksum(info, offsets, column)
            columns = columns_of(offsets, column)
            return _IndexedTar(info, is_new, column is not None, False, columns, checksum)
        if column is not None and name in self.old.summed:
            info = replace(info, sha256=self.old.shards[name].sha256)
            checksum = self._known_checksum(info, offsets, column)
            return _IndexedTar(info, is_new, True, False, columns_of(offsets, column), checksum)
        column, sha256, checksum = _sum_up(self.store, info, offsets)
        self.target.write(column_name, encode_checksums(column, index))
        self._warn_of_other_bytes(name, sha256)
        info, columns = replace(info, sha256=sha256), columns_of(offsets, column)
        return _IndexedTar(info, is_new, True, True, columns, checksum)

    def _read_index(self, name: str, max_bytes: int) -> bytes:
        """Return an index. No tar has more samples than blocks."""
        num_bytes = self.old.files[index_name(name)]
        if num_bytes > max_bytes:
            raise ShardError(
                f"{index_name(name)}: more than {max_bytes} bytes, so it has more samples than the "
                "tar has blocks; run `mmstream index --overwrite`"
            )
        return self.target.read_range(index_name(name), 0, num_bytes)

    def _read_column(self, name: str, index: bytes) -> Checksums | None:
        """Return the checksums of a tar that lie there, if they belong to this index."""
        file = checksums_name(name)
        num_bytes = self.old.files.get(file)
        if name in self.old.replaced or num_bytes != checksums_size(num_indexed(len(index))):
            return None
        try:
            return decode_checksums(self.target.read_range(file, 0, num_bytes), index, file)
        except ShardError:
            return None

    def _known_checksum(
        self, info: ShardInfo, offsets: IntArray, column: Checksums | None
    ) -> int | None:
        """Return the CRC-32C of a tar whose checksums stand already, if it is known."""
        if column is None or info.name not in self.old.shards:
            return None
        if self.old.kind == "written":  # by mmstream: there are zeros after the samples
            return tar_checksum(offsets, column, info.num_bytes)
        return self.old.tar_checksums.get(info.name)

    def _warn_of_other_bytes(self, name: str, sha256: str) -> None:
        if name in self.old.shards and self.old.shards[name].sha256 not in (None, sha256):
            logger.warning(
                "%s: other bytes than the sha256 of the old manifest says: it was replaced or is "
                "damaged; its checksums are those of the bytes that it has now",
                escaped(name),
            )


def _sum_up(store: Store, info: ShardInfo, offsets: IntArray) -> tuple[Checksums, str, int]:
    """Read a tar whole. Return the checksums of its samples, and its sha256 and CRC-32C."""
    digest, checksum = hashlib.sha256(), 0

    def update(data: bytes) -> None:
        nonlocal checksum
        digest.update(data)
        checksum = sample_checksum(data, checksum)

    samples = read_samples(store, info.name, info.num_bytes, offsets, update)
    column = np.array(list(map(sample_checksum, samples)), dtype=np.uint32)  # reads to the end
    return column, digest.hexdigest(), checksum


def _sizes(store: Store) -> dict[str, int]:
    """Return the bytes of all objects of a folder."""
    return {name: stat.size for name, stat in store.list().items()}


def _old_manifest(target: Store) -> Manifest | None:
    try:
        return Manifest.from_bytes(target.read(MANIFEST_NAME))
    except FileNotFoundError:
        return None
    except ManifestError as error:
        logger.warning(
            "%s: a new manifest is made; what else the old one said is lost, such as the sha256 of "
            "tars (%s)",
            target.url,
            error,
        )
        return None


def _old_checksums(target: Store, old: Manifest | None) -> dict[str, int]:
    """Return the CRC-32C of whole tars, by name, as the parts of an old index know them."""
    checksums: dict[str, int] = {}
    if old is not None and old.checksums == "indexed":
        indexes = ShardIndexes(target, old, has_checksums=True)
        for shard, info in enumerate(old.shards):
            with suppress(FileNotFoundError, ShardError):  # it is damaged, and made anew
                checksum = indexes.tar_checksum(shard)
                if checksum is not None:
                    checksums[info.name] = checksum
    return checksums


def _manifest(
    target: Store,
    old: _OldIndex,
    tars: Sequence[_IndexedTar],
    data_url: str | None,
    checksums: bool,
    parts: tuple[IndexPart, ...],
) -> Manifest:
    """Return the new manifest. Of an old one with the same shards, all else is kept.

    Checksums that fit their indexes are kept, even where no old manifest tells of them.
    """
    shards = tuple(tar.info for tar in tars)
    kind, manifest = old.kind, old.manifest
    if (kind is None and old.has_columns) or any(tar.was_summed for tar in tars):
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
    if (
        manifest is not None
        and manifest.data_url == data_url
        and _without_sha256(manifest.shards) == _without_sha256(shards)
    ):
        shards = shards if checksums else manifest.shards
        return replace(manifest, shards=shards, checksums=kind, index_parts=parts)
    source = {"by": "mmstream index"}
    return Manifest(shards, source=source, data_url=data_url, checksums=kind, index_parts=parts)


def _remove_parts(target: Store, old: _OldIndex, names: Set[str]) -> None:
    """Remove parts that neither this manifest nor the one before lists: few readers need them.

    A reader that does so reads the files beside the tars.
    """
    kept = names | {part.name for part in old.parts}
    for name in old.files:
        if INDEX_PART_NAME.fullmatch(name) and name not in kept:
            target.remove(name)


def _without_sha256(shards: Sequence[ShardInfo]) -> list[ShardInfo]:
    return [replace(shard, sha256=None) for shard in shards]


def _hint(store: Store, sizes: Mapping[str, int]) -> str:
    folder = store.local_path("")
    if folder is not None and not Path(folder).is_dir():
        return "; name their folder" if Path(folder).is_file() else ": no such folder"
    num_gzipped = sum(name.endswith(GZIPPED) for name in sizes)
    if num_gzipped:
        return f"; `mmstream convert` writes plain ones of the {num_gzipped} that are gzipped"
    return picture_hint(folder)
