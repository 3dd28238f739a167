"""Samples that no epoch shows: those that are known to be bad, and those that were taken down.

``mmstream.bad.json`` lies beside the manifest, or beside the indexes. The order never plans a
sample that it names::

    {"version": 1, "bad": {"shard-000002.tar": [17, 480], "shard-000007.tar": "all"}}

`verify` finds such samples by reading all data. Samples that only a transform or a tokenizer
refuses are found by runs. They are in the quarantine files (see `decoding.bad_samples`).

Samples that are good, but duplicates of others, stand apart, as ``"duplicates": {...}``. `verify`
keeps them when it makes a new list. A list with duplicates has version 2.

What was taken down stands in ``mmstream.removed.json``, beside it: see below.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np

from mmstream.dataset.dataset import Dataset, Takedown
from mmstream.dataset.manifest import Manifest, name_fault, read_sealed_as, seal
from mmstream.errors import ConfigError, ManifestError, escaped
from mmstream.storage import Store
from mmstream.storage.write_lock import write_lock
from mmstream.types import IntArray, SampleRef

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


def read_listed(dataset: Dataset, kind: Literal["bad", "duplicates"]) -> IntArray:
    """Return the samples that a bad list names: int64 [n, 2] (shard, index), sorted.

    Without a list, or where it cannot be read, there are none. Those that the dataset does not have
    are left out.

    Args:
        dataset: The dataset.
        kind: "bad": those that cannot be used, which are all of `Dataset.bad` but the duplicates.
            A sample that the list names as both is among them. "duplicates": those that it names as
            such.
    """
    if dataset.folders:
        firsts = np.cumsum([0, *(own.num_shards for own in dataset.folders)]).tolist()
        placed = zip(dataset.folders, firsts, strict=False)
        return np.concatenate([np.add(read_listed(own, kind), (first, 0)) for own, first in placed])
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
    names = read_bad_names(store) if names is None else names
    places = {info.name: shard for shard, info in enumerate(manifest.shards)}
    return _refs_of(places, manifest, store.url_of(BAD_NAME), _CURE, names, is_subset=is_subset)


def _refs_of(
    places: Mapping[str, int],
    manifest: Manifest,
    url: str,
    cure: str,
    names: Mapping[str, Indexes],
    *,
    is_subset: bool,
) -> IntArray:
    """Return int64 [n, 2] (shard, index), sorted, of the samples that a file names.

    Args:
        places: Position of each shard by its name.
        manifest: Of the dataset.
        url: Of the file, for messages.
        cure: What to do about a wrong file.
        names: The samples of each shard.
        is_subset: As for `read_bad`.

    Raises:
        ManifestError: There is no such sample, or there are too many.
    """
    num_named = 0
    refs = [np.zeros((0, 2), dtype=np.int64)]
    for name, indexes in names.items():
        if name not in places:
            if is_subset:
                continue
            raise ManifestError(f"{url}: {escaped(name)} is not a shard of this dataset; {cure}")
        count = manifest.shards[places[name]].num_samples
        num_named += count if indexes == "all" else len(indexes)
        if num_named > MAX_BAD:
            raise ManifestError(f"{url}: more than {MAX_BAD:,} bad samples; {cure}")
        if indexes == "all":
            numbers = np.arange(count)
        else:
            wrong = next((index for index in indexes if not 0 <= index < count), None)
            if wrong is not None:
                raise ManifestError(
                    f"{url}: {escaped(name)}[{escaped(wrong)}]: it has {count} samples; {cure}"
                )
            numbers = np.array(indexes, dtype=np.int64)
        refs.append(np.stack([np.full_like(numbers, places[name]), numbers], axis=1))
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
        duplicates = read_listed(dataset, "duplicates")
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
    bad = _lines(listed.bad, sorted(listed.bad))
    text = b'{\n  "version": %d,\n  "bad": %s' % (version, bad)
    if listed.duplicates:
        text += b',\n  "duplicates": %s' % _lines(listed.duplicates, sorted(listed.duplicates))
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


def _lines(of_shards: Mapping[str, Any], names: Iterable[str]) -> bytes:
    """Return an object of JSON, one shard per line."""
    lines = b",\n".join(
        b"    %s: %s" % (msgspec.json.encode(name), msgspec.json.encode(of_shards[name]))
        for name in names
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


# -- ``mmstream.removed.json``: samples that were taken down, so that no run shows them any more ---
#
# Each takedown appends to the file::
#
#     {"version": 1, "takedowns": [
#       {"reason": "request 17", "samples": {"shard-000002.tar": [17, 480]}}
#     ]}
#
# Where samples were erased (``mmstream takedown --erase``), version 2 also says which. Their keys
# stand nowhere any more, so it has the SHA-256 of each, by which the key is known again::
#
#       "erased": {"shard-000002.tar": {"17": ["4fc82b26..."]}}
#
# A new epoch is planned without these samples, as without known bad ones. An epoch that was planned
# before a takedown keeps its order, so that its states go on: the samples before each takedown are
# known. There, other samples take the rows of those that were taken down since.

REMOVED_NAME = "mmstream.removed.json"

MAX_TAKEDOWNS = 4096
"""Most takedowns of a dataset."""

_REMOVED_CURE = (
    "bring back an intact copy; without this file, what was taken down would be shown again"
)


class NamedTakedown(msgspec.Struct, forbid_unknown_fields=True):
    """A takedown as the file has it: its samples by the names of their shards."""

    reason: str
    samples: dict[str, list[int]]


class RemovedFile(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the file."""

    version: int
    takedowns: Annotated[list[NamedTakedown], msgspec.Meta(max_length=MAX_TAKEDOWNS)]
    erased: dict[str, dict[int, list[str]]] = {}
    """Of each shard: index of an erased sample -> what `digest_of` makes of its key, and of the id
    of its row where that was known. All of them were taken down."""
    unfinished: list[str] = []
    """Shards of which not everything is overwritten yet."""
    crc32c: str | None = None
    """The seal (see `mmstream.dataset.manifest`)."""


def read_removed(store: Store) -> RemovedFile:
    """Return what was taken down and erased, by names of shards. Without a file, nothing was.

    Raises:
        ManifestError: The file is damaged, malformed, or of a newer version.
        StorageError: The storage failed.
    """
    try:
        return read_sealed_as(
            store, REMOVED_NAME, MAX_LIST_BYTES, RemovedFile, newest=2, cure=_REMOVED_CURE
        )
    except FileNotFoundError:
        return RemovedFile(1, [])


def digest_of(text: str, column: Literal["key", "id"] = "key") -> str:
    """Return the SHA-256 by which a key, or the id of a row, is known after it was erased."""
    prefix = b"" if column == "key" else b"id\0"  # no key has a zero byte
    return hashlib.sha256(prefix + text.encode("utf-8", "backslashreplace")).hexdigest()


def erased_keys(
    store: Store, column: Literal["key", "id"] = "key"
) -> Callable[[str], Sequence[tuple[str, int]]]:
    """Return what tells which erased samples had a key, as (shard, index).

    Keys of samples that were taken down and not erased stand in their shards as before.

    Args:
        store: Of the index.
        column: "id": ask for ids of rows.

    Raises:
        ManifestError, StorageError: As `read_removed`.
    """
    places: dict[str, list[tuple[str, int]]] = {}
    for shard, digests_of_shard in read_removed(store).erased.items():
        for index, digests in digests_of_shard.items():
            for digest in digests:
                places.setdefault(digest, []).append((shard, index))
    return lambda text: places.get(digest_of(text, column), ())


def located(
    takedowns: Sequence[NamedTakedown], store: Store, manifest: Manifest, *, is_subset: bool = False
) -> tuple[Takedown, ...]:
    """Return takedowns by positions in a manifest.

    Args:
        takedowns: Those of `read_removed`.
        store: Of the file, for errors.
        manifest: Of the dataset.
        is_subset: The dataset has only some tars of the store. Samples of others are ignored.

    Raises:
        ManifestError: A sample is none of this dataset.
    """
    url = store.url_of(REMOVED_NAME)
    places = {info.name: shard for shard, info in enumerate(manifest.shards)} if takedowns else {}
    refs_of = partial(_refs_of, places, manifest, url, _REMOVED_CURE, is_subset=is_subset)
    return tuple(Takedown(takedown.reason, refs_of(takedown.samples)) for takedown in takedowns)


def take_down(
    dataset: Dataset,
    refs: Sequence[SampleRef],
    reason: str,
    digests: Mapping[SampleRef, list[str]] = MappingProxyType({}),
) -> int:
    """Take samples of a dataset down. The file is replaced as a whole, or not at all.

    Args:
        dataset: The dataset. It must be opened again to notice.
        refs: (shard, index) of the samples. Those that were taken down already do not count.
        reason: Why, for the file and for messages.
        digests: Of those samples that will be erased, what `digest_of` makes of their keys.

    Returns:
        The number of samples that were not taken down before.

    Raises:
        ConfigError: There would be too many, or a sample is none of the dataset.
        ManifestError: The file is damaged.
        StorageError: It cannot be written, or another process writes it now.
    """
    store, counts = dataset.index_store, dataset.counts.tolist()
    for shard, index in refs:
        if not (0 <= shard < len(counts) and 0 <= index < counts[shard]):
            raise ConfigError(f"takedown: sample {index} of shard {shard} is not in {dataset!r}")
    with write_lock(store, "takedown"):
        file = read_removed(store)
        known = {
            (name, index)
            for takedown in file.takedowns
            for name, indexes in takedown.samples.items()
            for index in indexes
        }
        samples: dict[str, list[int]] = {}
        for shard, index in sorted({(int(shard), int(index)) for shard, index in refs}):
            if (dataset.name_of(shard), index) not in known:
                samples.setdefault(dataset.name_of(shard), []).append(index)
        num_erased, unfinished = 0, set(file.unfinished)
        for (shard, index), digests_of_sample in digests.items():
            erased_of_shard = file.erased.setdefault(dataset.name_of(shard), {})
            if index not in erased_of_shard:
                erased_of_shard[int(index)] = digests_of_sample
                unfinished.add(dataset.name_of(shard))
                num_erased += 1
        if not samples and not num_erased:
            return 0
        num_new = sum(map(len, samples.values()))
        if samples:
            file.takedowns.append(NamedTakedown(escaped(reason, limit=None), samples))
        file.unfinished = sorted(unfinished)
        data = _encoded(file)
        is_long = len(file.takedowns) > MAX_TAKEDOWNS or len(data) > MAX_LIST_BYTES
        if is_long or len(known) + num_new > MAX_BAD:
            raise ConfigError(
                f"takedown: {len(known) + num_new:,} samples in {len(file.takedowns):,} takedowns "
                f"are too many for {REMOVED_NAME}; convert or reshard the dataset without them"
            )
        store.write(REMOVED_NAME, data)
    return num_new


def mark_erased(store: Store, shards: Sequence[str]) -> None:
    """Note that nothing is left of the erased samples of some shards. The caller has the lock."""
    file = read_removed(store)
    file.unfinished = [name for name in file.unfinished if name not in shards]
    store.write(REMOVED_NAME, _encoded(file))


def _encoded(file: RemovedFile) -> bytes:
    """Return the file, a takedown a line, and then a shard a line."""
    lines = b",\n".join(b"    " + msgspec.json.encode(takedown) for takedown in file.takedowns)
    text = b'{\n  "version": %d,\n  "takedowns": [\n%s\n  ]' % (2 if file.erased else 1, lines)
    if file.erased:
        text += b',\n  "erased": %s' % _lines(file.erased, file.erased)
    if file.unfinished:
        text += b',\n  "unfinished": %s' % msgspec.json.encode(file.unfinished)
    return seal(text + b"\n}\n")
