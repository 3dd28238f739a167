"""The lengths of all samples of a dataset: a measure, as a file of integers for each shard.

    mmstream.measure.DIGEST/      beside the manifest; the digest is that of the settings
        <hash of a shard>         its lengths: one line of JSON, then int64 [num_samples, columns]
        unusable.jsonl            which samples cannot be used, and why

A file is written when its shard is measured, and never changes. So a call that was killed goes on
where it was, and appended shards are measured alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
from crc32c import crc32c

from mmstream.dataset.manifest import ShardInfo, name_fault
from mmstream.errors import ConfigError, escaped
from mmstream.storage import Store, open_store
from mmstream.types import IntArray

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

SELECTION = "selection"
"""Setting of a measure: the digest of the selection. Absent: all samples were measured."""

NOT_MEASURED = -2
"""Tokens of a sample that is not chosen."""

NUM_THREADS = 16
"""Files that are read at a time."""


@dataclass(frozen=True, eq=False)
class Measure:
    """The lengths of all samples of a dataset.

    Attributes:
        shards: The shards that were measured, in the order of the dataset.
        columns: int64 [num_samples] each, by name. ``num_tokens`` must be there, and others of
            `COLUMNS` may. Further ones, such as "width", are for conditions. In ``num_tokens``,
            -1 says that the sample cannot be used, -2 that it is not chosen. ``num_label_tokens``
            does not count the first token of a document. ``patches`` is the sum of p over the media
            of a sample, each of p patches, and ``squared_patches`` the sum of p * p.
            ``num_seconds`` is rounded up.
        settings: What decides the lengths, in plain JSON types: tokenizer, templates, seeds.

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

    @cached_property
    def ends(self) -> IntArray:
        """int64 [num_shards + 1], samples before each shard, and of all shards."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    @property
    def digest(self) -> str:
        """Hash of the settings: equal for measures that count alike, of whatever samples."""
        return settings_digest(self.settings)

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


def is_same_shard(shard: ShardInfo, other: ShardInfo) -> bool:
    """Tell whether two entries are of one shard. Checksums count where both have one."""
    if None in (shard.sha256, other.sha256):
        return replace(shard, sha256=None) == replace(other, sha256=None)
    return shard == other


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Return the hash of settings in plain JSON types."""
    return hashlib.sha256(msgspec.json.encode(settings, order="sorted")).hexdigest()[:32]


def measure_folder(root: str, settings: Mapping[str, Any]) -> str:
    """Return where the measure of these settings lies within a folder or URL."""
    return f"{root.rstrip('/')}/mmstream.measure.{settings_digest(settings)[:12]}"


def require_name(name: str) -> None:
    """Raise a ConfigError where a name of a plan cannot stand in a file's name."""
    if name_fault(name) or "/" in name or len(name) > 100:
        raise ConfigError(f"name {escaped(repr(name))}: cannot be the name of a folder")


class ShardLengths(NamedTuple):
    """The lengths of the samples of one shard."""

    values: IntArray
    """int64 [num_samples, len(COLUMNS)]."""
    reasons: list[tuple[int, str]]
    """Which samples cannot be used, and why."""


class _Head(msgspec.Struct):
    crc32c: int
    reasons: list[tuple[int, str]]


def write_lengths(store: Store, shard: ShardInfo, lengths: ShardLengths) -> None:
    """Write what was measured of a shard."""
    numbers = np.ascontiguousarray(lengths.values, "<i8").tobytes()
    head = msgspec.json.encode(_Head(int(crc32c(numbers)), lengths.reasons))
    store.write(_file_name(shard), head + b"\n" + numbers)


def read_lengths(store: Store, shards: Sequence[ShardInfo]) -> list[ShardLengths | None]:
    """Return what was measured of each shard. None: nothing yet, or its file is damaged."""
    existing = store.list()

    def read(shard: ShardInfo) -> ShardLengths | None:
        if _file_name(shard) not in existing:
            return None
        head, _, numbers = store.read(_file_name(shard)).partition(b"\n")
        try:
            content = msgspec.json.decode(head, type=_Head)
        except msgspec.MsgspecError:
            return None
        if content.crc32c != crc32c(numbers):
            return None
        if len(numbers) != shard.num_samples * len(COLUMNS) * 8:
            return None
        values = np.frombuffer(numbers, "<i8").reshape(-1, len(COLUMNS))
        return ShardLengths(values.astype(np.int64), content.reasons)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(read, shards))


def measure_of_shards(
    shards: Sequence[ShardInfo], lengths: Sequence[ShardLengths], settings: Mapping[str, Any]
) -> Measure:
    """Return the lengths of all shards as one measure."""
    values = np.concatenate([np.zeros((0, len(COLUMNS)), np.int64), *(of.values for of in lengths)])
    columns = {name: np.ascontiguousarray(values[:, i]) for i, name in enumerate(COLUMNS)}
    return Measure(tuple(shards), columns, settings)


def write_measure(measure: Measure, root: str) -> None:
    """Write a measure into a folder or URL, as `write_lengths` writes it shard by shard."""
    store = open_store(measure_folder(root, measure.settings))
    values = np.column_stack([measure.column(name) for name in COLUMNS])
    for shard, part in zip(
        measure.shards, np.split(values, np.cumsum(measure.counts)), strict=False
    ):
        write_lengths(store, shard, ShardLengths(part, []))


def _file_name(shard: ShardInfo) -> str:
    return hashlib.sha256(msgspec.json.encode(shard)).hexdigest()[:32]
