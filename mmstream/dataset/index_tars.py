"""Around the flow: make tars that others wrote quick to open.

`index_tars` writes ``NAME.tar.idx`` beside each tar (or elsewhere) by hopping headers, and a
manifest that names them.
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
    """Indexes built now; the others were there."""
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
        url: where the tars lie.
        output: where indexes and manifest go; None: beside the tars.
        repack: unpack gzipped tars (``.tar.gz``, ``.tgz``, or ``.tar`` that is gzipped) to plain
            ones, into `output` or beside them; a gzipped tar has no byte index.
        overwrite: build indexes anew that are there already.
        num_threads: tars indexed side by side; header hopping waits for storage.
        progress: show a progress bar (on a terminal only).

    Raises:
        ConfigError: no tars there, or a conversion that has not finished.
        ShardError: a tar cannot be indexed; names it. Indexes built before stay.
        StorageError, FileNotFoundError: as the storage.
    """
    store = open_store(url)
    target = store if output is None else open_store(output)
    found = store.list()
    if MARKER_NAME in found:
        raise ConfigError(f"{store.url}: a conversion has not finished here; finish that first")
    plain, num_repacked = _repack(store, target, found, overwrite) if repack else ([], 0)
    if plain and output is not None:
        _keep_together(store, target, found)
        store = target
    if plain:
        found = store.list()
    names = [name for name in found if name.endswith(".tar")]
    if not names:
        raise ConfigError(f"{store.url}: no tars to index" + _hint(store, found))
    if not repack and (packed := [name for name in found if name.endswith(GZIPPED)]):
        logger.warning("%s: %d gzipped tars are left out; pass --repack", store.url, len(packed))
    there, known = target.list(), _known_sizes(target)
    renewed = {name for name in names if overwrite or known.get(name, found[name]) != found[name]}
    trim_bad(target, set(names) - renewed)

    def one(name: str) -> tuple[ShardInfo, bool]:
        fresh = name in renewed or index_name(name) not in there
        offsets = (
            build_index(store, name)
            if fresh
            else decode_index(target.read(index_name(name)), index_name(name))
        )
        if fresh:
            target.write(index_name(name), encode_index(offsets))
        return ShardInfo(name, len(offsets) - 1, found[name]), fresh

    with ThreadPoolExecutor(num_threads) as pool:
        bar = tqdm(
            pool.map(one, names), total=len(names), unit="tar", disable=None if progress else True
        )
        done = list(bar)
    shards = tuple(info for info, _ in done)
    _write_manifest(target, shards, None if target == store else store.url)
    return IndexReport(
        len(shards),
        sum(shard.num_samples for shard in shards),
        sum(fresh for _, fresh in done),
        num_repacked,
    )


def _known_sizes(target: Store) -> dict[str, int]:
    """Return the sizes of tars as they were when they were indexed, where a manifest says so."""
    try:
        manifest = Manifest.from_bytes(target.read(MANIFEST_NAME))
    except (FileNotFoundError, ManifestError):
        return {}
    return {shard.name: shard.num_bytes for shard in manifest.shards}


def _write_manifest(target: Store, shards: Sequence[ShardInfo], data_url: str | None) -> None:
    """Write the manifest, unless one is there that says the same of these shards, and more."""
    try:
        old = Manifest.from_bytes(target.read(MANIFEST_NAME))
    except (FileNotFoundError, ManifestError):
        old = None
    bare = [replace(shard, sha256=None) for shard in old.shards] if old else None
    if old is None or bare != list(shards) or old.data_url != data_url:
        manifest = Manifest(tuple(shards), source={"by": "mmstream index"}, data_url=data_url)
        target.write(MANIFEST_NAME, manifest.to_bytes())


def _repack(
    store: Store, target: Store, found: dict[str, int], overwrite: bool
) -> tuple[list[str], int]:
    """Unpack the gzipped tars of a store into another.

    Returns:
        The plain ones' names, and how many were unpacked now: a plain tar that is there stays.
    """
    plain_names, num_unpacked, there = [], 0, target.list()
    for name in found:
        if not name.endswith((".tar", *GZIPPED)) or found[name] < 2:
            continue
        if store.read_range(name, 0, 2) != b"\x1f\x8b":
            continue
        plain = name.removesuffix(".gz").removesuffix(".tgz")
        plain = plain if plain.endswith(".tar") else f"{plain}.tar"
        if plain == name and target == store:
            raise ConfigError(f"{name}: is gzipped under a plain name; give --output FOLDER")
        plain_names.append(plain)
        if plain in there and not overwrite:
            continue
        target.remove(index_name(plain))  # of another tar, if there is one
        try:
            with (
                gzip.open(_Ranges(store, name, found[name])) as source,  # type: ignore[call-overload]
                target.create(plain) as file,
            ):
                shutil.copyfileobj(source, file, 1 << 20)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ShardError(f"{name}: cannot be unpacked: {error}") from error
        num_unpacked += 1
    return plain_names, num_unpacked


def _keep_together(store: Store, target: Store, found: dict[str, int]) -> None:
    """Copy the tars that were plain already beside the repacked ones: a corpus has one place."""
    there = target.list()
    for name in found:
        if name.endswith(".tar") and name not in there:
            with target.create(name) as file:
                shutil.copyfileobj(_Ranges(store, name, found[name]), file, 1 << 20)


class _Ranges:
    """An object of a store as a readable file: for gzip, which reads from front to back."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        self._store, self._name, self._size, self._at = store, name, size, 0

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._size, self._at + size)
        data = self._store.read_range(self._name, self._at, stop) if stop > self._at else b""
        self._at = stop
        return data


def _hint(store: Store, found: dict[str, int]) -> str:
    folder = store.local_path("")
    if folder is not None and not Path(folder).is_dir():
        return "; name their folder" if Path(folder).is_file() else ": no such folder"
    packed = sum(name.endswith(GZIPPED) for name in found)
    return f" ({packed} gzipped ones: pass --repack)" if packed else ""
