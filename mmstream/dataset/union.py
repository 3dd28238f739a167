"""Several datasets as one, each in its own folder.

    folders -> `open_dataset` of each -> UNION -> a `Dataset` whose shards have prefixed names

Each folder keeps its index, sidecars, bad list, takedowns and stored selections. What names a shard
inside of a file, such as a sidecar, is read through the dataset of its folder: `Dataset.own`.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from mmstream.dataset.dataset import Dataset, Takedown
from mmstream.dataset.manifest import Manifest
from mmstream.errors import ConfigError, escaped
from mmstream.storage import ObjectStat, UnionStore, join_url
from mmstream.types import IntArray


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
