"""``mmstream.removed.json``: samples that were taken down, so that no run shows them any more.

The file lies beside the manifest, or beside the indexes. Each takedown appends to it::

    {"version": 1, "takedowns": [
      {"reason": "request 17", "samples": {"shard-000002.tar": [17, 480]}}
    ]}

Where samples were erased (``mmstream takedown --erase``), version 2 also says which. Their keys
stand nowhere any more, so it has the SHA-256 of each, by which the key is known again::

      "erased": {"shard-000002.tar": {"17": ["4fc82b26..."]}}

A new epoch is planned without these samples, as without known bad ones. An epoch that was planned
before a takedown keeps its order, so that its states go on: the samples before each takedown are
known. There, other samples take the rows of those that were taken down since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
import numpy as np

from mmstream.dataset.bad_list import MAX_BAD, MAX_LIST_BYTES
from mmstream.dataset.dataset import Dataset, Takedown
from mmstream.dataset.manifest import Manifest, read_sealed_as, seal
from mmstream.errors import ConfigError, ManifestError, escaped, where
from mmstream.storage import Store
from mmstream.storage.write_lock import write_lock
from mmstream.types import SampleRef

REMOVED_NAME = "mmstream.removed.json"

MAX_TAKEDOWNS = 4096
"""Most takedowns of a dataset."""

_CURE = "bring back an intact copy; without this file, what was taken down would be shown again"


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
            store, REMOVED_NAME, MAX_LIST_BYTES, RemovedFile, newest=2, cure=_CURE
        )
    except FileNotFoundError:
        return RemovedFile(1, [])


def read_takedowns(store: Store) -> Sequence[NamedTakedown]:
    """Return what was taken down, by names of shards; as `read_removed`."""
    return read_removed(store).takedowns


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
        takedowns: What `read_takedowns` returned.
        store: Of the file, for errors.
        manifest: Of the dataset.
        is_subset: The dataset has only some tars of the store. Samples of others are ignored.

    Raises:
        ManifestError: A sample is none of this dataset.
    """
    url = store.url_of(REMOVED_NAME)
    places = {info.name: shard for shard, info in enumerate(manifest.shards)} if takedowns else {}
    result = []
    for takedown in takedowns:
        refs = [np.zeros((0, 2), dtype=np.int64)]
        for name, indexes in takedown.samples.items():
            if name not in places and is_subset:
                continue
            count = manifest.shards[places[name]].num_samples if name in places else 0
            wrong = next((index for index in indexes if not 0 <= index < count), None)
            if name not in places or wrong is not None:
                raise ManifestError(
                    f"{url}: {where(name, wrong or 0)} is not a sample of this dataset; {_CURE}"
                )
            refs.append(np.stack([np.full(len(indexes), places[name]), indexes], axis=1))
        result.append(Takedown(takedown.reason, np.unique(np.concatenate(refs), axis=0)))
    return tuple(result)


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
        lines = b",\n".join(
            b"    %s: %s" % (msgspec.json.encode(name), msgspec.json.encode(of_shard))
            for name, of_shard in file.erased.items()
        )
        text += b',\n  "erased": {\n%s\n  }' % lines
    if file.unfinished:
        text += b',\n  "unfinished": %s' % msgspec.json.encode(file.unfinished)
    return seal(text + b"\n}\n")
