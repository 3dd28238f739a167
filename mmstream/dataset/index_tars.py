"""Index tars that other programs wrote, so that they open quickly.

`index_tars` reads the headers of each tar. It writes ``NAME.tar.idx`` beside the tar (or into
another folder), and a manifest that names all of them.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from mmstream.dataset.bad_list import trim_bad
from mmstream.dataset.index import build_index, decode_index, encode_index, index_name
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME, Manifest, ShardInfo
from mmstream.errors import ConfigError, ManifestError, ShardError
from mmstream.storage import Store, open_store

__all__ = ["IndexReport", "index_tars"]

logger = logging.getLogger(__name__)

GZIPPED = (".tar.gz", ".tgz")


@dataclass(frozen=True)
class IndexReport:
    """What `index_tars` did."""

    num_shards: int
    num_samples: int
    num_built: int
    """Indexes that this call built. The others existed already."""
    num_repacked: int


def index_tars(
    url: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    repack: bool = False,
    overwrite: bool = False,
    num_threads: int = 8,
    progress: bool = True,
) -> IndexReport:
    """Index the tars of a folder or prefix, and write a manifest.

    Args:
        url: The folder or prefix of the tars.
        output: Folder for the indexes and the manifest. Default: beside the tars.
        repack: Unpack gzipped tars to plain ones first, into `output` or beside them. A gzipped
            tar has no byte index. Gzipped tars end in ``.tar.gz`` or ``.tgz``; a ``.tar`` that is
            gzipped counts too.
        overwrite: Build indexes again that exist already.
        num_threads: Tars that are indexed at the same time.
        progress: Show a progress bar (on a terminal only).

    Raises:
        ConfigError: There are no tars, or a conversion has not finished there.
        ShardError: A tar cannot be indexed; the message names it. Indexes that are built already
            stay.
        FileNotFoundError: A tar vanished meanwhile.
        StorageError: The storage failed.
    """
    store = open_store(url)
    target = store if output is None else open_store(output)
    sizes = _sizes(store)
    if MARKER_NAME in sizes:
        raise ConfigError(f"{store.url}: a conversion has not finished here; finish that first")
    repacked, num_unpacked = _repack(store, target, sizes, overwrite) if repack else ([], 0)
    if repacked and output is not None:
        _copy_plain_tars(store, target, sizes)
        store = target
    if repacked:
        sizes = _sizes(store)
    names = [name for name in sizes if name.endswith(".tar")]
    if not names:
        raise ConfigError(f"{store.url}: no tars to index{_hint(store, sizes)}")
    gzipped = [name for name in sizes if name.endswith(GZIPPED)]
    if gzipped and not repack:
        logger.warning("%s: %d gzipped tars are left out; pass --repack", store.url, len(gzipped))
    target_names = target.list()
    # A tar that has another size than the manifest says was replaced since it was indexed.
    indexed_sizes = _indexed_sizes(target)
    outdated = {
        name for name in names if overwrite or indexed_sizes.get(name, sizes[name]) != sizes[name]
    }
    trim_bad(target, set(names) - outdated)

    def index_tar(name: str) -> tuple[ShardInfo, bool]:
        is_new = name in outdated or index_name(name) not in target_names
        if is_new:
            offsets = build_index(store, name)
            target.write(index_name(name), encode_index(offsets))
        else:
            offsets = decode_index(target.read(index_name(name)), index_name(name))
        return ShardInfo(name, len(offsets) - 1, sizes[name]), is_new

    with ThreadPoolExecutor(num_threads) as pool:
        results = list(
            tqdm(
                pool.map(index_tar, names),
                total=len(names),
                unit="tar",
                disable=None if progress else True,
            )
        )
    shards = tuple(info for info, _ in results)
    _write_manifest(target, shards, None if target == store else store.url)
    return IndexReport(
        num_shards=len(shards),
        num_samples=sum(shard.num_samples for shard in shards),
        num_built=sum(is_new for _, is_new in results),
        num_repacked=num_unpacked,
    )


def _sizes(store: Store) -> dict[str, int]:
    """Return the bytes of all objects of a folder."""
    return {name: stat.size for name, stat in store.list().items()}


def _indexed_sizes(target: Store) -> dict[str, int]:
    """Return the sizes that tars had when they were indexed, from the manifest if there is one."""
    try:
        manifest = Manifest.from_bytes(target.read(MANIFEST_NAME))
    except (FileNotFoundError, ManifestError):
        return {}
    return {shard.name: shard.num_bytes for shard in manifest.shards}


def _write_manifest(target: Store, shards: Sequence[ShardInfo], data_url: str | None) -> None:
    """Write the manifest; an old one that describes the same shards stays, as it may hold more."""
    try:
        old = Manifest.from_bytes(target.read(MANIFEST_NAME))
    except (FileNotFoundError, ManifestError):
        old = None
    old_shards = [replace(shard, sha256=None) for shard in old.shards] if old else None
    if old is None or old_shards != list(shards) or old.data_url != data_url:
        manifest = Manifest(tuple(shards), source={"by": "mmstream index"}, data_url=data_url)
        target.write(MANIFEST_NAME, manifest.to_bytes())


def _repack(
    store: Store, target: Store, sizes: dict[str, int], overwrite: bool
) -> tuple[list[str], int]:
    """Unpack the gzipped tars of one store into another.

    Returns:
        The names of the plain tars, and how many were unpacked by this call. A plain tar that
        existed already stays, unless `overwrite` is set.
    """
    plain_names: dict[str, str] = {}
    for name, size in sizes.items():
        if not name.endswith((".tar", *GZIPPED)) or size < 2:
            continue
        if store.read_range(name, 0, 2) != b"\x1f\x8b":
            continue
        plain_name = name.removesuffix(".gz").removesuffix(".tgz")
        if not plain_name.endswith(".tar"):
            plain_name += ".tar"
        if plain_name == name and target == store:
            raise ConfigError(f"{name}: is gzipped under a plain name; give --output FOLDER")
        plain_names[name] = plain_name
    num_unpacked = 0
    target_names = target.list()
    for name, plain_name in plain_names.items():
        if plain_name in target_names and not overwrite:
            continue
        target.remove(index_name(plain_name))  # if there is one, it belongs to an older tar
        try:
            with (
                gzip.open(_ObjectReader(store, name, sizes[name])) as source,  # type: ignore[call-overload]
                target.create(plain_name) as file,
            ):
                shutil.copyfileobj(source, file, 1 << 20)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ShardError(f"{name}: cannot be unpacked: {error}") from error
        num_unpacked += 1
    return list(plain_names.values()), num_unpacked


def _copy_plain_tars(store: Store, target: Store, sizes: dict[str, int]) -> None:
    """Copy the tars that are not gzipped beside the unpacked ones: a dataset has one folder."""
    target_names = target.list()
    for name, size in sizes.items():
        if name.endswith(".tar") and name not in target_names:
            with target.create(name) as file:
                shutil.copyfileobj(_ObjectReader(store, name, size), file, 1 << 20)


class _ObjectReader:
    """An object of a store as a readable file, for code that reads from front to back."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        self._store = store
        self._name = name
        self._size = size
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._size, self._position + size)
        if stop <= self._position:
            return b""
        data = self._store.read_range(self._name, self._position, stop)
        self._position = stop
        return data


def _hint(store: Store, sizes: dict[str, int]) -> str:
    folder = store.local_path("")
    if folder is not None and not Path(folder).is_dir():
        return "; name their folder" if Path(folder).is_file() else ": no such folder"
    num_gzipped = sum(name.endswith(GZIPPED) for name in sizes)
    return f" ({num_gzipped} gzipped ones: pass --repack)" if num_gzipped else ""
