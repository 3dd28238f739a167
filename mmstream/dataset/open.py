"""Opening a corpus: from a name to a `Dataset`, without opening a shard.

A folder or prefix with a manifest, a folder of plain tars, one tar, a list or a brace pattern:
opening reads a manifest, or lists a folder, and the bad list that lies there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import braceexpand
import msgspec

from mmstream.dataset.bad_list import BAD_NAME, read_bad
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index import build_index, index_name, num_indexed
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME, Manifest, ShardInfo
from mmstream.errors import ConfigError, ManifestError
from mmstream.storage import Store, is_remote, open_store, split_url

__all__ = ["open_dataset"]

logger = logging.getLogger(__name__)


def open_dataset(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, bad_list: bool = True
) -> Dataset:
    """Open a corpus.

    Args:
        source: a folder or prefix with a manifest or with plain tars, one tar, a list of tars, or
            a brace pattern such as ``"s3://bucket/shard-{000000..000099}.tar"``.
        bad_list: whether to heed the list of known-bad samples in the dataset's root, where
            ``mmstream verify --write-bad`` has put one.

    Returns:
        The dataset. Local tars without an index are indexed in memory here, a few milliseconds
        a thousand samples; ``mmstream index`` does so once and for all.

    Raises:
        ManifestError: a conversion that has not finished, no shards, a malformed manifest or bad
            list, or remote tars without an index.
        FileNotFoundError, StorageError: as the storage.
    """
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        if "{" not in name and not name.endswith((".tar", ".tgz", ".tar.gz")):
            return _open_folder(open_store(name), bad_list)
        urls = list(braceexpand.braceexpand(name)) if "{" in name else [name]
    else:
        urls = [os.fspath(item) for item in source]
    if not urls:
        raise ConfigError("open_dataset: the list of tars is empty")
    return _open_tars(urls, bad_list)


def _open_folder(store: Store, bad_list: bool) -> Dataset:
    found = store.list()
    if MARKER_NAME in found:
        raise ManifestError(f"{store.url}: conversion has not finished; {_finisher(store)}")
    if MANIFEST_NAME in found:
        manifest = Manifest.from_bytes(store.read(MANIFEST_NAME), store.url_of(MANIFEST_NAME))
        data = open_store(manifest.data_url) if manifest.data_url else store
        known = {shard.name for shard in manifest.shards}
        if unknown := [name for name in found if name.endswith(".tar") and name not in known]:
            logger.warning(
                "%s: %d tars are not in %s and are left out (%s, ...); see mmstream index",
                store.url, len(unknown), MANIFEST_NAME, unknown[0],
            )  # fmt: skip
        bad = read_bad(store, manifest) if bad_list and BAD_NAME in found else None
        return Dataset(manifest, data, store, bad=bad)
    names = [name for name in found if name.endswith(".tar")]
    if packed := [name for name in found if name.endswith((".tgz", ".tar.gz"))]:
        logger.warning("%s: %d gzipped tars are left out; see mmstream index --repack", store.url,
                       len(packed))  # fmt: skip
    if not names:
        raise ManifestError(f"{store.url}: {_what_is_no_dataset(store)}")
    return _open_plain(store, names, found, bad_list)


def _what_is_no_dataset(store: Store) -> str:
    if store.url.endswith(".json"):
        return (
            "no dataset, but a mixture's file opens with mm.open_mixture, and "
            "`mmstream info | train | replay`"
        )
    folder = store.local_path("")
    if folder is None or Path(folder).is_dir():
        return f"neither {MANIFEST_NAME} nor tars in it"
    if Path(folder).is_file():
        return "a file that is no tar; `mmstream convert` makes shards of rows"
    return "no such folder" + "; write s3:// with two slashes" * ("/s3:/" in store.url)


def _finisher(store: Store) -> str:
    """Return what to do about an unfinished conversion: the command that its marker names."""
    try:
        marker = msgspec.json.decode(store.read(MARKER_NAME))
        return f"finish it with: {marker['command']}"
    except (OSError, KeyError, TypeError, RecursionError, UnicodeError, msgspec.MsgspecError):
        return "run the same `mmstream convert` again to finish it"


def _open_tars(urls: Sequence[str], bad_list: bool) -> Dataset:
    """Open tars by name; their root is the folder that they share."""
    paths = [url if is_remote(url) else open_store(url).url for url in urls]
    if len({is_remote(path) for path in paths}) > 1:
        raise ConfigError("open_dataset: local tars and remote ones in one list")
    folders = [split_url(path)[0] for path in paths]
    root = os.path.commonpath(folders) if not is_remote(paths[0]) else _common_prefix(folders)
    store = open_store(root)
    names = [path[len(store.url) :].lstrip("/") for path in paths]
    if len(set(names)) != len(names):
        raise ConfigError("open_dataset: a tar is named twice")
    sizes: dict[str, int] = {}
    for folder in dict.fromkeys(folders):
        prefix = folder[len(store.url) :].strip("/")
        listed = open_store(folder).list()
        sizes |= {f"{prefix}/{name}" if prefix else name: size for name, size in listed.items()}
    if root not in folders and store.exists(BAD_NAME):
        sizes[BAD_NAME] = 0
    return _open_plain(store, names, sizes, bad_list, some=True)


def _common_prefix(folders: Sequence[str]) -> str:
    parts = [folder.split("/") for folder in folders]
    shared = os.path.commonprefix(parts)  # noqa: RUF071 - of lists, so by whole parts
    if len(shared) < 3:  # "s3:", "", bucket
        raise ConfigError(f"open_dataset: tars of one corpus lie in one bucket, not {folders[:2]}")
    return "/".join(shared)


def _open_plain(
    store: Store,
    names: Sequence[str],
    sizes: Mapping[str, int],
    bad_list: bool,
    some: bool = False,
) -> Dataset:
    """Open tars without a manifest: counts come from the sizes of their indexes.

    Args:
        store: their root.
        names: of the tars.
        sizes: of all objects there.
        bad_list: whether to heed the list of bad samples among them.
        some: the root may hold other tars, which that list may name.
    """
    shards, built = [], {}
    for name in names:
        if name not in sizes:
            hint = "; write a range in braces, or name the folder" if "*" in name else ""
            raise FileNotFoundError(f"{store.url_of(name)}: no such tar{hint}")
        index_bytes = sizes.get(index_name(name))
        if index_bytes is not None:
            count = num_indexed(index_bytes)
        elif not store.access.concurrent:
            built[name] = build_index(store, name)
            count = built[name].size - 1
        else:
            raise ManifestError(
                f"{store.url_of(name)}: no index beside it; run `mmstream index {store.url}` "
                "(with --output FOLDER where you may not write)"
            )
        shards.append(ShardInfo(name, count, sizes[name]))
    manifest = Manifest(tuple(shards))
    heeded = bad_list and BAD_NAME in sizes
    bad = read_bad(store, manifest, some=some) if heeded else None
    return Dataset(manifest, store, offsets=built, bad=bad)
