"""From a name to a `Dataset`, without opening a shard.

The name may be a folder or prefix with a manifest, a folder of plain tars, one tar, a list of tars
or of folders, or a brace pattern. Opening reads the manifest and the bad list. A local folder is
listed too; a prefix of an object store is listed only where there is no manifest.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

import braceexpand
import msgspec
import numpy as np

from mmstream.dataset.bad_list import (
    BAD_NAME,
    REMOVED_NAME,
    Indexes,
    NamedTakedown,
    located,
    read_bad,
    read_bad_names,
    read_removed,
)
from mmstream.dataset.dataset import Dataset, Takedown
from mmstream.dataset.index import build_index, index_name, num_indexed
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME, Manifest, ShardInfo
from mmstream.errors import ConfigError, ManifestError, escaped
from mmstream.settings import checked
from mmstream.storage import (
    LocalStore,
    ObjectStat,
    SharedStore,
    Store,
    UnionStore,
    is_remote,
    is_shared,
    join_url,
    open_store,
    split_url,
)
from mmstream.storage.store import MAX_FILE_NAME_BYTES, local_path, require_no_secret
from mmstream.tar.header import BLOCK
from mmstream.types import IntArray

StorageKind: TypeAlias = Literal["local", "shared"]
"""How a folder is read."""

TAR_ENDINGS = (".tar", ".tgz", ".tar.gz")

MAX_TARS = 1_000_000
"""Most names that a pattern in braces stands for."""

MAX_OPENED_AT_ONCE = 16
"""Folders of a union that are opened side by side."""

MAX_MARKER_BYTES = 1 << 20
"""Largest marker of an unfinished conversion that is read."""

logger = logging.getLogger(__name__)


@checked({"source": "pass a folder, a URL, a tar, or a list of tars or of folders"})
def open_dataset(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    bad_list: bool = True,
    checksums: bool = True,
    allow_foreign_urls: bool = False,
    storage_kind: StorageKind | None = None,
) -> Dataset:
    """Open a dataset.

    Args:
        source: A folder or prefix with a manifest or with plain tars, one tar, a list of tars, or
            a brace pattern such as ``"s3://bucket/shard-{000000..000099}.tar"``. A list of folders
            is opened as their union: ``base/shard-000000.tar`` is a shard of the folder ``base``.
            Only the last folder may grow, and other folders may be added at the end.
        bad_list: Leave the samples of the bad list out of all epochs. The list is in the
            dataset's root, where ``mmstream verify --write-bad`` has put it.
        checksums: Compare the bytes of every sample that is read with its checksum, where the
            manifest says that there are checksums. Bytes that differ are read again.
        allow_foreign_urls: The manifest may say that the tars lie outside of `source`, as after
            ``mmstream index --output``. Only for manifests that you trust: reading follows them to
            any folder of this machine, and to any server.
        storage_kind: How a folder is read. "local": a disk of this machine, through its page cache.
            "shared": a file system that is reached over a network, such as NFS or Lustre; many
            ranges are read side by side, and again where they fail. None: as
            ``/proc/self/mountinfo`` says.

    Returns:
        The dataset. Local tars without an index are indexed in memory, which takes a few
        milliseconds per thousand samples. ``mmstream index`` does it once and for all.

    Raises:
        ConfigError: `source` is not a name. Or the list is empty, names a tar twice, mixes local
            and remote tars, or tars and folders. Or folders of a list cannot be one dataset. Or a
            `storage_kind` for what is not a folder.
        ManifestError: No shards, a conversion that has not finished, a malformed manifest or bad
            list, one that is not a file, a manifest that leads elsewhere, or remote tars without an
            index.
        FileNotFoundError: No such tar.
        StorageError: The storage failed.

    Examples:
        >>> dataset = mm.open_dataset("shards/")  # or s3://bucket/corpus
        >>> len(dataset)
        480
        >>> type(dataset[0]["jpg"])  # reads this sample alone
        <class 'bytes'>
    """

    def open_folder(name: str) -> Dataset:
        store = open_store(name)
        return _open_folder(store, bad_list, checksums, allow_foreign_urls, storage_kind)

    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        require_no_secret(name)
        if _is_folder(name) or not ("{" in name or name.endswith(TAR_ENDINGS)):
            return open_folder(name)
        urls = expand_braces(name)
    else:
        urls = [os.fspath(item) for item in source]
        for url in urls:
            require_no_secret(url)
        folders = [url for url in urls if _is_folder(url) or not _is_tar(url)]
        if 0 < len(folders) < len(urls):
            raise ConfigError(
                f"open_dataset: {escaped(folders[0])} is a folder, and other names of the list are "
                "tars; give one or the other"
            )
        if folders:
            with ThreadPoolExecutor(MAX_OPENED_AT_ONCE) as pool:
                return union_of([*pool.map(open_folder, folders)], checksums=checksums)
    if not urls:
        raise ConfigError("open_dataset: the list of tars or folders is empty")
    return _open_tars(urls, bad_list, storage_kind)


def _is_folder(name: str) -> bool:
    """Tell whether a name is surely that of a folder: it exists as one, or ends with a slash."""
    return name.endswith("/") or (not is_remote(name) and Path(local_path(name)).is_dir())


def _is_tar(name: str) -> bool:
    """Tell whether a name of a list that is not a folder is a tar: it is called so, or exists."""
    if re.search(r"\.(tar|tgz)\b", posixpath.basename(name.lower())):
        return True
    return not is_remote(name) and Path(local_path(name)).exists()


def expand_braces(pattern: str) -> list[str]:
    """Return the names that a pattern in braces stands for; other names stand for themselves.

    Raises:
        ConfigError: There are more than a million, or a brace is not closed.
    """
    if "{" not in pattern:
        return [pattern]
    try:
        names = list(islice(braceexpand.braceexpand(pattern), MAX_TARS + 1))
    except ValueError:  # its UnbalancedBracesError
        raise ConfigError(f"{escaped(pattern)}: a brace is not closed") from None
    if len(names) > MAX_TARS:
        raise ConfigError(f"{escaped(pattern)}: more than {MAX_TARS:,} names")
    return names


def _open_folder(
    store: Store,
    bad_list: bool,
    checksums: bool,
    allow_foreign_urls: bool,
    storage_kind: StorageKind | None,
) -> Dataset:
    require_files(store)
    manifest, bad_names, takedowns, stats = None, None, None, None
    if store.access.concurrent:
        manifest, bad_names, takedowns = _read_side_by_side(store, bad_list)
    if manifest is None:
        stats = store.list()
        if MARKER_NAME in stats:
            raise ManifestError(f"{store.url}: conversion has not finished; {_finish_hint(store)}")
        if MANIFEST_NAME not in stats:
            return _open_listed(store, stats, bad_list, storage_kind)
        manifest = Manifest.read(store)
        if bad_list and BAD_NAME in stats:
            bad_names = read_bad_names(store)
        takedowns = read_removed(store).takedowns if REMOVED_NAME in stats else ()
        _warn_of_unnamed(store, manifest, stats)
    data_store = _data_store(store, manifest, allow_foreign_urls)
    return Dataset(
        manifest,
        _store_to_read(data_store, storage_kind),
        _store_to_read(store, storage_kind if isinstance(store, LocalStore) else None),
        bad=None if bad_names is None else read_bad(store, manifest, names=bad_names),
        stats=stats if data_store == store else None,
        checksums=checksums,
        takedowns=located(takedowns or (), store, manifest),
    )


def require_files(store: Store) -> None:
    """Refuse a folder where a manifest, a marker, or a list of samples is there but is not a file.

    `Store.list` leaves out what is not a file. The dataset would open as if there were no manifest,
    or no bad samples. Only a name that is not there at all counts as missing.

    Args:
        store: Root of the dataset. An object store holds nothing but objects, and is not asked.

    Raises:
        ManifestError: One of them is a folder, a FIFO, a device, or a link that leads nowhere.
    """
    for name in (MARKER_NAME, MANIFEST_NAME, BAD_NAME, REMOVED_NAME):
        path = store.local_path(name)
        if path is None or not os.path.lexists(path):
            continue
        try:
            store.stat(name)
        except FileNotFoundError:
            if os.path.lexists(path):  # else another process has removed it since
                raise ManifestError(
                    f"{path}: a link that leads nowhere; remove it, or bring its file back"
                ) from None
        except OSError as error:
            reason = error.strerror or str(error).removeprefix(f"{path}: ")
            raise ManifestError(f"{path}: {reason}; remove it, or put the file back") from None


def _read_side_by_side(
    store: Store, bad_list: bool
) -> tuple[Manifest | None, dict[str, Indexes] | None, Sequence[NamedTakedown]]:
    """Return the manifest of a dataset on an object store, its bad list, and what was taken down.

    Three requests are sent, at the same time, and nothing is listed. A conversion removes the
    manifest before anything else and writes it last, so its marker need not be looked for.
    """
    with ThreadPoolExecutor(2) as pool:
        bad_names = pool.submit(read_bad_names, store) if bad_list else None
        removed = pool.submit(read_removed, store)
        try:
            manifest = Manifest.read(store)
        except FileNotFoundError:
            return None, None, ()
        names = None
        if bad_names is not None:
            with suppress(FileNotFoundError):
                names = bad_names.result()
        return manifest, names, removed.result().takedowns


def _warn_of_unnamed(store: Store, manifest: Manifest, names: Iterable[str]) -> None:
    named = {shard.name for shard in manifest.shards}
    if unnamed := [name for name in names if name.endswith(".tar") and name not in named]:
        logger.warning(
            "%s: %d tars are not in %s and are left out (%s, ...): complete the `mmstream convert` "
            "that was killed there, or add them by `mmstream index`",
            store.url,
            len(unnamed),
            MANIFEST_NAME,
            escaped(unnamed[0]),
        )


def _open_listed(
    store: Store,
    stats: Mapping[str, ObjectStat],
    bad_list: bool,
    storage_kind: StorageKind | None,
) -> Dataset:
    """Open the tars of a folder without a manifest."""
    names = [name for name in stats if name.endswith(".tar")]
    num_gzipped = sum(name.endswith((".tgz", ".tar.gz")) for name in stats)
    if num_gzipped:
        logger.warning(
            "%s: gzipped tars are left out (%d); `mmstream convert` writes plain ones of them",
            store.url,
            num_gzipped,
        )
    if not names:
        raise ManifestError(f"{store.url}: {_why_no_dataset(store)}")
    return _open_plain(store, names, stats, bad_list, storage_kind)


def _store_to_read(store: Store, storage_kind: StorageKind | None) -> Store:
    """Return a store as its samples are read: a shared file system in another way than a disk.

    Raises:
        ConfigError: A kind for what is not a folder, or one that does not exist.
    """
    if not isinstance(store, LocalStore):
        if storage_kind is not None:
            raise ConfigError(f"{store.url}: storage_kind is for folders; leave it out")
        return store
    kind = storage_kind or ("shared" if is_shared(store.url) else "local")
    return SharedStore(store.url) if kind == "shared" else store


def _data_store(store: Store, manifest: Manifest, allow_foreign_urls: bool) -> Store:
    """Return where the tars of a manifest lie.

    A manifest may come from a stranger. So it leads out of the folder or prefix that the user has
    opened only with the user's consent. Else it could make this machine read its other files, or
    send requests with the user's credentials.
    """
    data_store = open_store(manifest.data_url) if manifest.data_url else store
    root, data_url = _normal_url(store.url), _normal_url(data_store.url)
    if not allow_foreign_urls and not f"{data_url}/".startswith(f"{root}/"):
        raise ManifestError(
            f"{store.url}: its manifest says that the tars lie in {escaped(data_url)}, which is "
            "not in this folder; if you trust that, open it with allow_foreign_urls=True"
        )
    if is_remote(data_url):
        forbidden = "?#%" if data_url.startswith("http") else "?#"
        for shard in manifest.shards:
            if set(shard.name) & set(forbidden):
                raise ManifestError(
                    f"{store.url_of(MANIFEST_NAME)}: shard {shard.name!r} has one of {forbidden}, "
                    "which mean something else in a URL; rename it"
                )
    elif data_store.local_path("") is not None:
        for shard in manifest.shards:
            if max(len(word.encode()) for word in shard.name.split("/")) > MAX_FILE_NAME_BYTES:
                raise ManifestError(
                    f"{store.url_of(MANIFEST_NAME)}: no file can have the name of shard "
                    f"{escaped(repr(shard.name))}, which is too long"
                )
    return data_store


def _normal_url(url: str) -> str:
    """Return a path or URL without "." and "..".

    Example: ``s3://bucket/a/../b`` is ``s3://bucket/b``.
    """
    scheme, separator, path = url.rpartition("://")
    return scheme + separator + posixpath.normpath(path)


def _why_no_dataset(store: Store) -> str:
    folder = store.local_path("")
    if folder is None or Path(folder).is_dir():
        return (
            f"neither {MANIFEST_NAME} nor tars in it; name the folder of one dataset, such as a "
            "split of a conversion; docs/your-own-data.md makes datasets of pictures and rows"
        )
    if Path(folder).is_file():
        return (
            "a file that is not a tar; `mmstream convert` makes shards of rows; of a dataset name "
            "the folder, and open a mixture's file with mm.Mixture.open"
        )
    return "no such folder"


def _finish_hint(store: Store) -> str:
    """Return what to do about an unfinished conversion."""
    command = "convert"
    with suppress(OSError, ValueError, RecursionError, msgspec.MsgspecError):
        marker = msgspec.json.decode(store.read(MARKER_NAME, max_bytes=MAX_MARKER_BYTES), type=dict)
        command = next((name for name in ("bake", "reshard") if name in marker), command)
    return f"run the same `mmstream {command}` again to finish it"


def _open_tars(urls: Sequence[str], bad_list: bool, storage_kind: StorageKind | None) -> Dataset:
    """Open tars by their names. The root of the dataset is the folder that all of them share.

    Example: ``/data/a/0.tar`` and ``/data/b/0.tar`` have the root ``/data``. Their names in the
    dataset are ``a/0.tar`` and ``b/0.tar``.
    """
    paths = [url if is_remote(url) else open_store(url).url for url in urls]
    if len({is_remote(path) for path in paths}) > 1:
        raise ConfigError("open_dataset: local tars and remote ones in one list")
    folders = [split_url(path)[0] for path in paths]
    root = _common_prefix(folders) if is_remote(paths[0]) else os.path.commonpath(folders)
    store = open_store(root)
    require_files(store)
    names = [path[len(store.url) :].lstrip("/") for path in paths]
    if len(set(names)) != len(names):
        raise ConfigError("open_dataset: a tar is named twice")
    stats: dict[str, ObjectStat] = {}
    for folder in dict.fromkeys(folders):
        prefix = folder[len(store.url) :].strip("/")
        for name, stat in open_store(folder).list().items():
            stats[f"{prefix}/{name}" if prefix else name] = stat
    for name in (BAD_NAME, REMOVED_NAME):
        if root not in folders and store.exists(name):
            stats[name] = store.stat(name)
    for name in stats:
        folder, _, file = name.rpartition("/")
        if folder and file == REMOVED_NAME:
            raise ConfigError(
                f"open_dataset: samples were taken down in {store.url_of(folder)}, and tars of "
                "several folders would show them: open the folders, open_dataset([FOLDER, FOLDER])"
            )
    return _open_plain(store, names, stats, bad_list, storage_kind, is_subset=True)


def _common_prefix(folders: Sequence[str]) -> str:
    split_folders = [folder.split("/") for folder in folders]
    # Called with lists, so it compares whole names of folders, not characters.
    shared = os.path.commonprefix(split_folders)  # noqa: RUF071
    if len(shared) < 3:  # "s3:", "", bucket
        raise ConfigError(f"open_dataset: tars of one corpus lie in one bucket, not {folders[:2]}")
    return "/".join(shared)


def _open_plain(
    store: Store,
    names: Sequence[str],
    stats: Mapping[str, ObjectStat],
    bad_list: bool,
    storage_kind: StorageKind | None,
    is_subset: bool = False,
) -> Dataset:
    """Open tars without a manifest. The sizes of their indexes give the sample counts.

    Args:
        store: Root of the dataset.
        names: Of the tars.
        stats: Of all objects in the folders of the tars.
        bad_list: Use the bad list, if there is one.
        storage_kind: As `open_dataset` has it.
        is_subset: The root may hold other tars, so the bad list may name some that are not in
            `names`.
    """
    shards: list[ShardInfo] = []
    offsets = {}
    for name in names:
        if name not in stats:
            hint = "; write a range in braces, or name the folder" if "*" in name else ""
            raise FileNotFoundError(f"{store.url_of(name)}: no such tar{hint}")
        index_stat = stats.get(index_name(name))
        if index_stat is not None:
            num_samples = num_indexed(index_stat.size)
            if num_samples > max(1, stats[name].size // BLOCK):
                raise ManifestError(
                    f"{store.url_of(index_name(name))}: {num_samples} samples, more than the tar "
                    "has blocks; run `mmstream index --overwrite`"
                )
        elif not store.access.concurrent:  # every header of a remote tar would be a request
            offsets[name] = build_index(store, name)
            num_samples = offsets[name].size - 1
        else:
            raise ManifestError(
                f"{store.url_of(name)}: no index beside it; run `mmstream index {store.url}` "
                "(with --output FOLDER where you may not write)"
            )
        shards.append(ShardInfo(name, num_samples, stats[name].size))
    manifest = Manifest(tuple(shards))
    uses_list = bad_list and BAD_NAME in stats
    bad = read_bad(store, manifest, is_subset=is_subset) if uses_list else None
    data_store = _store_to_read(store, storage_kind)
    takedowns = read_removed(store).takedowns if REMOVED_NAME in stats else ()
    return Dataset(
        manifest,
        data_store,
        offsets=offsets,
        bad=bad,
        stats=stats,
        takedowns=located(takedowns, store, manifest, is_subset=is_subset),
    )


# -- several datasets as one, each in its own folder -----------------------------------------------
#
# folders -> `open_dataset` of each -> UNION -> a `Dataset` whose shards have prefixed names
#
# Each folder keeps its index, sidecars, bad list, takedowns and stored selections. What names a
# shard inside of a file, such as a sidecar, is read through the dataset of its folder:
# `Dataset.own`.


def union_of(datasets: Sequence[Dataset], *, checksums: bool) -> Dataset:
    """Return the union of datasets, in their order.

    Args:
        datasets: At least one. They are of different folders.
        checksums: As `open_dataset` has it.

    Raises:
        ConfigError: Two of them have one shard, one was baked, or some have checksums and others
            none.
    """
    _require_apart(datasets)
    kinds = _kinds_of_checksums(datasets, needed=checksums)
    prefixes = prefixes_of(dataset.index_store.url for dataset in datasets)
    shards, index_parts, stats = [], [], dict[str, ObjectStat]()
    offsets: dict[str, IntArray] | None = None
    fields, takedowns, bad = Counter[str](), list[Takedown](), list[IntArray]()
    first_shards = np.cumsum([0, *(dataset.num_shards for dataset in datasets)]).tolist()
    for prefix, dataset, first in zip(prefixes, datasets, first_shards, strict=False):
        manifest = dataset.manifest
        shards += [replace(info, name=f"{prefix}/{info.name}") for info in manifest.shards]
        index_parts += [
            replace(
                part,
                name=f"{prefix}/{part.name}",
                first_shard=first + part.first_shard,
                last_shard=first + part.last_shard,
            )
            for part in manifest.index_parts
        ]
        if (built := dataset.shards.indexes.built) is not None:
            own = {f"{prefix}/{name}": columns.offsets() for name, columns in built.items()}
            offsets = (offsets or {}) | own
        stats |= {f"{prefix}/{name}": stat for name, stat in dataset.shards.known.items()}
        fields.update(manifest.fields)
        bad.append(np.add(dataset.corpus.before_takedowns.bad, (first, 0)))
        takedowns += [
            Takedown(reason, np.add(refs, (first, 0))) for reason, refs in dataset.takedowns
        ]
    are_counted = all(dataset.manifest.fields or not len(dataset) for dataset in datasets)
    union = Dataset(
        Manifest(
            tuple(shards),
            dict(fields) if are_counted else {},
            checksums="written" if kinds == {"written"} else "indexed" if kinds else None,
            index_parts=tuple(index_parts),
        ),
        UnionStore(
            tuple((p, dataset.store) for p, dataset in zip(prefixes, datasets, strict=True))
        ),
        UnionStore(
            tuple((p, dataset.index_store) for p, dataset in zip(prefixes, datasets, strict=True))
        ),
        offsets,
        np.concatenate(bad),
        stats,
        checksums=checksums,
        takedowns=takedowns,
    )
    union.folders = tuple(datasets)
    return union


def prefixes_of(urls: Iterable[str]) -> list[str]:
    """Return a prefix for each folder: its name, and a number where an earlier one has that.

    So prefixes stay where other folders are added at the end.

    Examples:
        >>> prefixes_of(["/data/train", "s3://bucket/a/train", "s3://bucket"])
        ['train', 'train-2', 'bucket']
    """
    prefixes: list[str] = []
    for url in urls:
        name = re.sub(r"[^\w.-]", "_", posixpath.basename(posixpath.normpath(url))) or "folder"
        prefix, number = name, 2
        while prefix in prefixes:
            prefix, number = f"{name}-{number}", number + 1
        prefixes.append(prefix)
    return prefixes


def _require_apart(datasets: Sequence[Dataset]) -> None:
    """Raise a ConfigError where two datasets have one shard, or one was baked."""
    seen: set[str] = set()
    for dataset in datasets:
        url, folder = escaped(dataset.index_store.url), dataset.store.local_path("")
        root = posixpath.normpath(dataset.store.url) if folder is None else os.path.realpath(folder)
        tars = {join_url(root, info.name) for info in dataset.manifest.shards}
        if shared := tars & seen:
            raise ConfigError(
                f"open_dataset: {escaped(min(shared))} is a shard of {url} and of a folder before "
                "it: name each folder once, and none inside another"
            )
        seen |= tars
        if "bake" in dataset.manifest.source:
            raise ConfigError(
                f"open_dataset: {url} was baked, and a union is of stored samples: bake the union "
                "of its sources, or read several bakes with mm.Mixture"
            )


def _kinds_of_checksums(datasets: Sequence[Dataset], *, needed: bool) -> set[str]:
    """Return the origins of checksums. None, where they are not needed and some have none.

    Raises:
        ConfigError: They are needed, and only some datasets have them.
    """
    kinds = {dataset.manifest.checksums: dataset for dataset in datasets if dataset.num_shards}
    lacking = kinds.pop(None, None)
    if lacking is None:
        return {kind for kind in kinds if kind is not None}
    if kinds and needed:
        raise ConfigError(
            f"open_dataset: {escaped(lacking.index_store.url)} has no checksums of its samples, "
            "and other folders have: run `mmstream index --checksums` there, or open all with "
            "checksums=False"
        )
    return set()
