"""Ground floor: ``mmstream.bad.json``, the samples that an epoch leaves out.

It lies beside the manifest or the indexes and names what is known to be bad, so that the order
never plans it::

    {"version": 1, "bad": {"shard-000002.tar": [17, 480], "shard-000007.tar": "all"}}

`verify` finds such samples by reading everything; the quarantine files of runs know of those that
only a transform or a tokenizer refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.manifest import Manifest
from mmstream.errors import ConfigError, ManifestError
from mmstream.storage import Store
from mmstream.types import IntArray

__all__ = ["BAD_NAME", "PREVIOUS_NAME", "read_bad", "trim_bad", "write_bad"]

logger = logging.getLogger(__name__)

BAD_NAME = "mmstream.bad.json"
PREVIOUS_NAME = "mmstream.bad.previous.json"
"""The list before the last change: a run that is in mid-epoch with it needs it to go on."""

LIST_VERSION = 1

Indexes: TypeAlias = list[int] | Literal["all"]
"""Bad samples of a shard; "all": it is missing or cannot be read."""


@dataclass(frozen=True)
class _Head:
    """What lists of all versions have."""

    version: int


class _List(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    bad: dict[str, Indexes]


def read_bad(store: Store, manifest: Manifest, *, some: bool = False) -> IntArray:
    """Return int64 [num_bad, 2], the sorted (shard, index) of the list in a store.

    Args:
        store: holds the list.
        manifest: of the dataset that it belongs to.
        some: the manifest is of some tars of the store only, so the list may name others.

    Raises:
        ManifestError: malformed, of a newer version, or not of this dataset.
    """
    url = store.url_of(BAD_NAME)
    refs: list[tuple[int, int]] = []
    shards = {info.name: number for number, info in enumerate(manifest.shards)}
    for name, indexes in _decode(store.read(BAD_NAME), url).items():
        if name not in shards and some:
            continue
        if name not in shards:
            raise ManifestError(f"{url}: {name} is no shard of this dataset; {_CURE}")
        count = manifest.shards[shards[name]].num_samples
        found = range(count) if indexes == "all" else [int(index) for index in indexes]
        for index in found:
            if not 0 <= index < count:
                raise ManifestError(f"{url}: {name}[{index}]: it has {count} samples; {_CURE}")
            refs.append((shards[name], index))
    return _sorted(refs)


def write_bad(dataset: Dataset, bad: Iterable[Sequence[int]] | IntArray) -> IntArray:
    """Make the list of a dataset that of these (shard, index), and return them sorted.

    The same samples give the same bytes. With none, there is no list afterwards. The dataset itself
    stays as it was opened. What the list says of tars beside those of this dataset is kept. A list
    that changes stays as ``mmstream.bad.previous.json``.

    Raises:
        ConfigError: a sample that the dataset does not have.
        StorageError: the place cannot be written.
    """
    store, counts = dataset.index_store, dataset.counts
    refs = _sorted(bad)
    for shard, index in refs.tolist():
        if not (0 <= shard < counts.size and 0 <= index < counts[shard]):
            raise ConfigError(f"bad list: sample {index} of shard {shard} is not in {dataset!r}")
    listed = _of_other_tars(dataset)
    shards, starts = np.unique(refs[:, 0], return_index=True)
    for shard, part in zip(shards.tolist(), np.split(refs[:, 1], starts[1:]), strict=False):
        listed[dataset.name_of(shard)] = "all" if part.size == counts[shard] else part.tolist()
    _put(store, listed)
    return refs


def trim_bad(store: Store, names: Collection[str]) -> None:
    """Cut the list of a store down to these shards: what became of others, nobody knows.

    Raises:
        ManifestError: there is a list, and it is malformed.
        StorageError: the place cannot be read or written.
    """
    if store.exists(BAD_NAME):
        listed = _decode(store.read(BAD_NAME), store.url_of(BAD_NAME))
        kept = {name: indexes for name, indexes in listed.items() if name in names}
        if kept != listed:
            logger.warning("%s: %d shards are gone or replaced, and off the list",
                           store.url_of(BAD_NAME), len(listed) - len(kept))  # fmt: skip
            _put(store, kept)


_CURE = "`mmstream verify --write-bad` makes a new list, or remove this one"


def _decode(data: bytes, url: str) -> dict[str, Indexes]:
    try:
        version = msgspec.json.decode(data, type=_Head).version
        if version != LIST_VERSION:
            raise ManifestError(
                f"{url}: list version {version}, this mmstream reads {LIST_VERSION}; "
                "install a newer mmstream"
            )
        return msgspec.json.decode(data, type=_List).bad
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ManifestError(f"{url}: {error}; {_CURE}") from None


def _put(store: Store, listed: dict[str, Indexes]) -> None:
    """Write the list, a shard a line; an empty one is none."""
    old = store.read(BAD_NAME) if store.exists(BAD_NAME) else b""
    lines = b",\n".join(
        b"    " + msgspec.json.encode(name) + b": " + msgspec.json.encode(listed[name])
        for name in sorted(listed)
    )
    new = b'{\n  "version": %d,\n  "bad": {\n%s\n  }\n}\n' % (LIST_VERSION, lines)
    if old and old != new:
        store.write(PREVIOUS_NAME, old)
    if listed:
        store.write(BAD_NAME, new)
    else:
        store.remove(BAD_NAME)


def _of_other_tars(dataset: Dataset) -> dict[str, Indexes]:
    """Return what the list says of tars that this dataset, opened by their names, leaves out."""
    store = dataset.index_store
    ours = {info.name for info in dataset.manifest.shards}
    try:
        listed = _decode(store.read(BAD_NAME), store.url_of(BAD_NAME))
    except (FileNotFoundError, ManifestError):
        return {}
    return {
        name: indexes
        for name, indexes in listed.items()
        if name not in ours and dataset.store.exists(name)
    }


def _sorted(refs: Iterable[Sequence[int]] | IntArray) -> IntArray:
    array = np.asarray(refs if isinstance(refs, np.ndarray) else list(refs), dtype=np.int64)
    return np.unique(array.reshape(-1, 2), axis=0)
