"""``mmstream.bad.json``: samples that are known to be bad, so that no epoch shows them.

The file lies beside the manifest, or beside the indexes. The order never plans a sample that it
names::

    {"version": 1, "bad": {"shard-000002.tar": [17, 480], "shard-000007.tar": "all"}}

`verify` finds such samples by reading all data. Samples that only a transform or a tokenizer
refuses are found by runs. They are in the quarantine files (see `decoding.bad_samples`).

Samples that are good, but duplicates of others, stand apart, as ``"duplicates": {...}``. `verify`
keeps them when it makes a new list. A list with duplicates has version 2.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.manifest import Manifest, name_fault, read_sealed_as, seal
from mmstream.errors import ConfigError, ManifestError, escaped
from mmstream.storage import Store
from mmstream.types import IntArray

logger = logging.getLogger(__name__)

BAD_NAME = "mmstream.bad.json"
PREVIOUS_NAME = "mmstream.bad.previous.json"
"""The list before the last change. A run that is in the middle of an epoch needs it to resume."""

LIST_VERSION = 2
"""Version of a list with duplicates. Other lists have version 1, which older versions read too."""

MAX_LIST_BYTES = 64 << 20
"""Largest file."""

MAX_BAD = 1 << 24
"""Most bad samples of a dataset, "all" of a shard counted. Each takes 16 bytes."""

Indexes: TypeAlias = list[int] | Literal["all"]
"""Bad samples of a shard. "all": the shard is missing or cannot be read."""


class _List(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    bad: dict[str, Indexes]
    duplicates: dict[str, list[int]] = {}
    crc32c: str | None = None
    """The seal (see `mmstream.dataset.manifest`)."""


def read_bad_names(store: Store) -> dict[str, Indexes]:
    """Return the samples of each shard that a list names, duplicates too; errors as `read_bad`."""
    listed = _read_list(store)
    names = dict(listed.bad)
    for name, indexes in listed.duplicates.items():
        bad = names.get(name, [])
        names[name] = "all" if bad == "all" else sorted({*bad, *indexes})
    return names


def read_duplicates(dataset: Dataset) -> IntArray:
    """Return the samples that a bad list names as duplicates: int64 [n, 2] (shard, index), sorted.

    Without a list, or where it cannot be read, there are none.
    """
    return _listed(dataset, "duplicates")


def listed_as_bad(dataset: Dataset) -> IntArray:
    """Return the samples of `Dataset.bad` that cannot be used: all but the duplicates.

    Returns:
        int64 [n, 2] (shard, index), sorted. A sample that the list names as both is among them.
    """
    return _listed(dataset, "bad")


def _listed(dataset: Dataset, kind: Literal["bad", "duplicates"]) -> IntArray:
    """Return the samples of one kind, but for those that the dataset does not have."""
    if dataset.folders:
        firsts = np.cumsum([0, *(own.num_shards for own in dataset.folders)]).tolist()
        placed = zip(dataset.folders, firsts, strict=False)
        return np.concatenate([np.add(_listed(own, kind), (first, 0)) for own, first in placed])
    store, manifest = dataset.index_store, dataset.manifest
    counts = {info.name: info.num_samples for info in manifest.shards}
    try:
        indexes_of: dict[str, Indexes] = getattr(_read_list(store), kind)
    except (FileNotFoundError, ManifestError):
        return np.zeros((0, 2), dtype=np.int64)
    names: dict[str, Indexes] = {
        name: indexes if indexes == "all" else [i for i in indexes if 0 <= i < counts[name]]
        for name, indexes in indexes_of.items()
        if name in counts
    }
    return read_bad(store, manifest, names=names)


def _read_list(store: Store) -> _List:
    return read_sealed_as(store, BAD_NAME, MAX_LIST_BYTES, _List, newest=LIST_VERSION, cure=_CURE)


def read_bad(
    store: Store,
    manifest: Manifest,
    *,
    is_subset: bool = False,
    names: Mapping[str, Indexes] | None = None,
) -> IntArray:
    """Read the bad list of a dataset.

    Args:
        store: Holds the list.
        manifest: Of the dataset.
        names: What `read_bad_names` returned, if it was read already.
        is_subset: The dataset has only some tars of the store. The list may name others, which are
            ignored.

    Returns:
        int64 [num_bad, 2] (shard, index), sorted.

    Raises:
        FileNotFoundError: There is no list.
        ManifestError: The list is malformed, of a newer version, or not of this dataset.
    """
    url = store.url_of(BAD_NAME)
    shards = {info.name: number for number, info in enumerate(manifest.shards)}
    num_bad = 0
    refs = [np.zeros((0, 2), dtype=np.int64)]
    for name, indexes in (read_bad_names(store) if names is None else names).items():
        if name not in shards:
            if is_subset:
                continue
            raise ManifestError(f"{url}: {escaped(name)} is not a shard of this dataset; {_CURE}")
        count = manifest.shards[shards[name]].num_samples
        num_bad += count if indexes == "all" else len(indexes)
        if num_bad > MAX_BAD:
            raise ManifestError(f"{url}: more than {MAX_BAD:,} bad samples; {_CURE}")
        if indexes == "all":
            bad = np.arange(count)
        else:
            wrong = next((index for index in indexes if not 0 <= index < count), None)
            if wrong is not None:
                raise ManifestError(
                    f"{url}: {escaped(name)}[{escaped(wrong)}]: it has {count} samples; {_CURE}"
                )
            bad = np.unique(np.asarray(indexes, dtype=np.int64))
        refs.append(np.stack([np.full_like(bad, shards[name]), bad], axis=1))
    return _sorted(np.concatenate(refs))


def write_bad(
    dataset: Dataset,
    bad: Iterable[Sequence[int]] | IntArray,
    duplicates: IntArray | None = None,
) -> IntArray:
    """Replace the bad list of a dataset. An empty one removes the file.

    Takes effect when the dataset is opened again. Entries of other tars in the same folder are
    kept. The same samples give the same bytes. When the list changes, the old one is kept as
    ``mmstream.bad.previous.json``.

    Args:
        dataset: The dataset.
        bad: (shard, index) of the bad samples, in any order.
        duplicates: (shard, index) of samples that are left out as duplicates, int64 [n, 2].
            Default: those that the old list names stay.

    Returns:
        int64 [num_bad, 2] (shard, index) of both, sorted.

    Raises:
        ConfigError: A sample does not exist in the dataset. Nothing is written then.
        StorageError: The list cannot be written.
    """
    store, counts = dataset.index_store, dataset.counts
    if duplicates is None:
        duplicates = read_duplicates(dataset)
    only_bad = _sorted(bad)
    refs = _sorted(np.concatenate([only_bad, duplicates]))
    if len(refs) > MAX_BAD:
        raise ConfigError(
            f"bad list: {len(refs):,} samples, a list has at most {MAX_BAD:,}; convert the dataset "
            "again without them"
        )
    for shard, index in refs.tolist():
        if not (0 <= shard < counts.size and 0 <= index < counts[shard]):
            raise ConfigError(f"bad list: sample {index} of shard {shard} is not in {dataset!r}")
    for shard in np.unique(refs[:, 0]).tolist():
        if fault := name_fault(dataset.name_of(shard)):
            raise ConfigError(
                f"bad list: {escaped(dataset.name_of(shard))} {fault}; rename this shard"
            )
    listed = _entries_of_other_tars(dataset)
    for shard, indexes in _by_shard(only_bad):
        is_all = indexes.size == counts[shard]
        listed.bad[dataset.name_of(shard)] = "all" if is_all else indexes.tolist()
    for shard, indexes in _by_shard(_sorted(duplicates)):
        listed.duplicates[dataset.name_of(shard)] = indexes.tolist()
    _write(store, listed)
    return refs


def _by_shard(refs: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Yield each shard with its indexes: [[0, 3], [0, 7], [2, 1]] -> (0, [3, 7]), (2, [1])."""
    shards, starts = np.unique(refs[:, 0], return_index=True)
    yield from zip(shards.tolist(), np.split(refs[:, 1], starts[1:]), strict=False)


def trim_bad(store: Store, names: Collection[str]) -> None:
    """Remove all shards but these from the bad list of a store, if there is one.

    Shards that are gone or replaced may have other bad samples now, or none.

    Raises:
        ManifestError: The list is malformed.
        StorageError: The list cannot be read or written.
    """
    if store.exists(BAD_NAME):
        listed = _read_list(store)
        gone = (listed.bad.keys() | listed.duplicates.keys()) - set(names)
        if gone:
            logger.warning(
                "%s: %d shards are gone or replaced, and off the list",
                store.url_of(BAD_NAME),
                len(gone),
            )
            _write(store, _without(listed, gone))


_CURE = "`mmstream verify --write-bad` makes a new list, or remove this one"


def _without(listed: _List, names: Collection[str]) -> _List:
    return _List(
        listed.version,
        {name: indexes for name, indexes in listed.bad.items() if name not in names},
        {name: indexes for name, indexes in listed.duplicates.items() if name not in names},
    )


def _write(store: Store, listed: _List) -> None:
    """Write the list, one shard per line. An empty list removes the file."""
    old = store.read(BAD_NAME) if store.exists(BAD_NAME) else b""
    version = LIST_VERSION if listed.duplicates else 1
    text = b'{\n  "version": %d,\n  "bad": %s' % (version, _lines(listed.bad))
    if listed.duplicates:
        text += b',\n  "duplicates": %s' % _lines(listed.duplicates)
    new = seal(text + b"\n}\n")
    if len(new) > MAX_LIST_BYTES:
        raise ConfigError(
            f"{store.url_of(BAD_NAME)}: would have {len(new):,} bytes, a list has at most "
            f"{MAX_LIST_BYTES:,}; convert the dataset again without these samples"
        )
    if old and old != new:
        store.write(PREVIOUS_NAME, old)
    if listed.bad or listed.duplicates:
        store.write(BAD_NAME, new)
    else:
        store.remove(BAD_NAME)


def _lines(indexes: Mapping[str, Indexes]) -> bytes:
    """Return an object of JSON, one shard per line."""
    lines = b",\n".join(
        b"    " + msgspec.json.encode(name) + b": " + msgspec.json.encode(indexes[name])
        for name in sorted(indexes)
    )
    return b"{\n%s\n  }" % lines if lines else b"{}"


def _entries_of_other_tars(dataset: Dataset) -> _List:
    """Return the entries of tars in the same folder that are not part of this dataset."""
    store = dataset.index_store
    own_names = {info.name for info in dataset.manifest.shards}
    try:
        listed = _read_list(store)
    except FileNotFoundError:
        return _List(LIST_VERSION, {})
    except ManifestError as error:
        logger.warning(
            "%s; the damaged list is kept as %s. Duplicates that it named take part again: leave "
            "them out by `mmstream duplicates --drop`",
            error,
            PREVIOUS_NAME,
        )
        return _List(LIST_VERSION, {})
    gone = {
        name
        for name in listed.bad.keys() | listed.duplicates.keys()
        if name in own_names or not dataset.store.exists(name)
    }
    return _without(listed, gone)


def _sorted(refs: Iterable[Sequence[int]] | IntArray) -> IntArray:
    array = np.asarray(refs if isinstance(refs, np.ndarray) else list(refs), dtype=np.int64)
    return np.unique(array.reshape(-1, 2), axis=0)
