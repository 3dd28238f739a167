"""``mmstream.removed.json``: samples that were taken down, so that no run shows them any more.

The file lies beside the manifest, or beside the indexes. Each takedown appends to it::

    {"version": 1, "takedowns": [
      {"reason": "request 17", "samples": {"shard-000002.tar": [17, 480]}}
    ]}

A new epoch is planned without these samples, as without known bad ones. An epoch that was planned
before a takedown keeps its order, so that its states go on: the samples before each takedown are
known. There, other samples take the rows of those that were taken down since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

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


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    takedowns: Annotated[list[NamedTakedown], msgspec.Meta(max_length=MAX_TAKEDOWNS)]
    crc32c: str | None = None
    """The seal (see `mmstream.dataset.manifest`)."""


def read_takedowns(store: Store) -> Sequence[NamedTakedown]:
    """Return what was taken down, by names of shards. Without a file, nothing was.

    Raises:
        ManifestError: The file is damaged, malformed, or of a newer version.
        StorageError: The storage failed.
    """
    try:
        file = read_sealed_as(store, REMOVED_NAME, MAX_LIST_BYTES, _File, newest=1, cure=_CURE)
    except FileNotFoundError:
        return ()
    return file.takedowns


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
                    f"{url}: {where(name, wrong or 0)} is no sample of this dataset; {_CURE}"
                )
            refs.append(np.stack([np.full(len(indexes), places[name]), indexes], axis=1))
        result.append(Takedown(takedown.reason, np.unique(np.concatenate(refs), axis=0)))
    return tuple(result)


def take_down(dataset: Dataset, refs: Sequence[SampleRef], reason: str) -> int:
    """Take samples of a dataset down. The file is replaced as a whole, or not at all.

    Args:
        dataset: The dataset. It must be opened again to notice.
        refs: (shard, index) of the samples. Those that were taken down already do not count.
        reason: Why, for the file and for messages.

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
        takedowns = list(read_takedowns(store))
        known = {
            (name, index)
            for takedown in takedowns
            for name, indexes in takedown.samples.items()
            for index in indexes
        }
        samples: dict[str, list[int]] = {}
        for shard, index in sorted({(int(shard), int(index)) for shard, index in refs}):
            if (dataset.name_of(shard), index) not in known:
                samples.setdefault(dataset.name_of(shard), []).append(index)
        if not samples:
            return 0
        num_new = sum(map(len, samples.values()))
        data = _encoded([*takedowns, NamedTakedown(escaped(reason, limit=None), samples)])
        is_long = len(takedowns) >= MAX_TAKEDOWNS or len(data) > MAX_LIST_BYTES
        if is_long or len(known) + num_new > MAX_BAD:
            raise ConfigError(
                f"takedown: {len(known) + num_new:,} samples in {len(takedowns) + 1:,} takedowns "
                f"are too many for {REMOVED_NAME}; convert or reshard the dataset without them"
            )
        store.write(REMOVED_NAME, data)
    return num_new


def _encoded(takedowns: Sequence[NamedTakedown]) -> bytes:
    lines = b",\n".join(b"    " + msgspec.json.encode(takedown) for takedown in takedowns)
    return seal(b'{\n  "version": 1,\n  "takedowns": [\n%s\n  ]\n}\n' % lines)
