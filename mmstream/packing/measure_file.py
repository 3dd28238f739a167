"""The lengths of all samples of a dataset: a measure, as columns of integers.

    mmstream.measure.NAME/        beside the manifest, or in a folder of its own
        measure.json              the shards, the settings, the columns' files
        num_tokens.<hash>.npy     one entry per sample, in the order of the dataset
        unusable.jsonl            which samples cannot be used, and why

A measure knows the shards that it was made of. A dataset may have got others since: then the
measure is of its first shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from mmstream.dataset.json_file import json_lines
from mmstream.dataset.manifest import ShardInfo, name_fault
from mmstream.dataset.sealed import decode_sealed, read_sealed, seal
from mmstream.errors import ConfigError, ManifestError, escaped
from mmstream.packing.array_files import ArrayInfo, open_array, remove_arrays, write_array
from mmstream.storage import Store, open_store
from mmstream.types import IntArray

__all__ = [
    "COLUMNS",
    "MEASURE_NAME",
    "UNUSABLE_NAME",
    "Measure",
    "MeasureHead",
    "is_same_shard",
    "measure_folder",
    "open_measure",
    "open_measure_head",
    "write_measure",
]

MEASURE_NAME = "measure.json"
UNUSABLE_NAME = "unusable.jsonl"

COLUMNS = (
    "num_tokens",
    "num_label_tokens",
    "num_documents",
    "num_images",
    "patches",
    "squared_patches",
    "num_seconds",
)
"""Columns that a plan knows. Only the first must be there: without "num_documents" each sample is
one document, and without another one all its values are 0."""

FORMAT_VERSION = 1

MAX_JSON_BYTES = 256 << 20
"""Largest measure.json."""

_CURE = "run `mmstream measure` again"


@dataclass(frozen=True, eq=False)
class Measure:
    """The lengths of all samples of a dataset.

    Attributes:
        shards: The shards that were measured, in the order of the dataset.
        columns: int64 [num_samples] each, by name. ``num_tokens`` must be there, and others of
            `COLUMNS` may. Further ones, such as "width", are for conditions. In ``num_tokens``,
            -1 says that the sample cannot be used. ``num_label_tokens`` does not count the first
            token of a document. ``patches`` is the sum of p over the media of a sample, each of p
            patches, and ``squared_patches`` the sum of p * p. ``num_seconds`` is rounded up.
        settings: What decides the lengths, in plain JSON types: tokenizer, templates, seeds.
        details: What else is known, in plain JSON types: probes, versions, dates. Measures that
            differ in it alone are the same measure.

    Raises:
        ConfigError: A column is absent, or has another length than the shards have samples.

    Examples:
        >>> import numpy as np
        >>> from mmstream.dataset.manifest import ShardInfo
        >>> shards = (ShardInfo("a.tar", 2, 10240), ShardInfo("b.tar", 1, 10240))
        >>> measure = Measure(shards, {"num_tokens": np.array([5, -1, 7])})
        >>> measure.column("num_documents").tolist(), measure.column("num_images").tolist()
        ([1, 1, 1], [0, 0, 0])
    """

    shards: tuple[ShardInfo, ...]
    columns: Mapping[str, IntArray]
    settings: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "num_tokens" not in self.columns:
            raise ConfigError("a measure needs the column num_tokens")
        for name, column in self.columns.items():
            if column.shape != (self.num_samples,):
                raise ConfigError(
                    f"{escaped(name)}: {len(column)} values for {self.num_samples} samples"
                )

    @property
    def num_samples(self) -> int:
        """Samples of all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def counts(self) -> IntArray:
        """Samples of each shard, int64 [num_shards]."""
        return np.array([shard.num_samples for shard in self.shards], dtype=np.int64)

    @property
    def digest(self) -> str:
        """Hash of the settings: equal for measures that count alike, of whatever samples."""
        return _digest(self.settings)

    def column(self, name: str) -> IntArray:
        """Return a column, int64 [num_samples]. One that is absent has its default values.

        Raises:
            ConfigError: There is no such column.
        """
        if name in self.columns:
            return self.columns[name]
        if name not in COLUMNS:
            names = ", ".join(sorted({*COLUMNS, *self.columns}))
            raise ConfigError(f"{escaped(name)}: the measure has no such column, but {names}")
        default = np.int64(name == "num_documents")
        return np.broadcast_to(default, self.num_samples)


@dataclass(frozen=True)
class MeasureHead:
    """What a measure is about, without its columns. The attributes are those of `Measure`."""

    shards: tuple[ShardInfo, ...]
    settings: Mapping[str, Any]
    details: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Hash of the settings: equal for measures that count alike, of whatever samples."""
        return _digest(self.settings)


@dataclass(frozen=True)
class _File:
    """The content of measure.json."""

    version: int
    settings: dict[str, Any]
    details: dict[str, Any]
    columns: dict[str, ArrayInfo]
    shards: list[ShardInfo]


def is_same_shard(shard: ShardInfo, known: ShardInfo) -> bool:
    """Tell whether two facts are of one shard. Checksums count where both have one."""
    if None in (shard.sha256, known.sha256):
        return replace(shard, sha256=None) == replace(known, sha256=None)
    return shard == known


def measure_folder(url: str, name: str) -> str:
    """Return where the measure of a dataset lies by default.

    Examples:
        >>> measure_folder("s3://bucket/corpus", "qwen")
        's3://bucket/corpus/mmstream.measure.qwen'
    """
    require_name(name)
    return f"{url.rstrip('/')}/mmstream.measure.{name}"


def require_name(name: str) -> None:
    """Raise a ConfigError where a name of a measure or plan cannot stand in a file's name."""
    if name_fault(name) or "/" in name or len(name) > 100:
        raise ConfigError(f"name {escaped(repr(name))}: cannot be the name of a folder")


def write_measure(measure: Measure, folder: str, unusable: Sequence[bytes] = ()) -> None:
    """Write a measure. It replaces an older one as a whole, when measure.json is replaced.

    Args:
        measure: What to write.
        folder: Path or URL.
        unusable: Lines of JSON: which samples cannot be used, and why.

    Raises:
        StorageError: The storage failed after retries.
    """
    store = open_store(folder)
    columns = {
        name: write_array(store, name, np.asarray(column, np.int64))
        for name, column in sorted(measure.columns.items())
    }
    if unusable:
        store.write(UNUSABLE_NAME, b"".join(line + b"\n" for line in unusable))
    else:
        store.remove(UNUSABLE_NAME)
    content = _File(
        FORMAT_VERSION, dict(measure.settings), dict(measure.details), columns, list(measure.shards)
    )
    store.write(MEASURE_NAME, seal(json_lines(content)))
    remove_arrays(store, {info.name for info in columns.values()})


def open_measure(folder: str) -> Measure:
    """Open a measure. Its columns are mapped, and are read when they are used.

    Args:
        folder: Path or URL. A remote measure is copied into the cache of this machine.

    Raises:
        FileNotFoundError: There is no measure.
        ManifestError: It is damaged.
        StorageError: The storage failed after retries.
    """
    store = open_store(folder)
    file = _read(store)
    columns = {name: open_array(store, info, "<i8") for name, info in file.columns.items()}
    try:
        return Measure(tuple(file.shards), columns, file.settings, file.details)
    except ConfigError as error:
        raise ManifestError(f"{store.url_of(MEASURE_NAME)}: {error}; {_CURE}") from None


def open_measure_head(folder: str) -> MeasureHead:
    """Open a measure without its columns; errors as `open_measure`."""
    file = _read(open_store(folder))
    return MeasureHead(tuple(file.shards), file.settings, file.details)


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(settings, order="sorted")).hexdigest()[:32]


def _read(store: Store) -> _File:
    url = store.url_of(MEASURE_NAME)
    return read_sealed(
        store,
        MEASURE_NAME,
        MAX_JSON_BYTES,
        lambda data: decode_sealed(data, url, _File, newest=FORMAT_VERSION, cure=_CURE),
    )
