"""The hashes of all samples of several datasets, numbered through.

contents of shards -> CORPUS -> duplicates, leaks
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from mmstream.converting.quality.contents import (
    Hashes,
    ShardContents,
    fields_of_media,
    read_contents,
)
from mmstream.converting.sidecar import open_sidecar
from mmstream.dataset.dataset import Dataset
from mmstream.errors import ConfigError, SampleError
from mmstream.types import IntArray
from mmstream.wrong_arguments import require_numbers

__all__ = ["Corpus", "Entries", "SampleName", "read_corpus"]


@dataclass(frozen=True, slots=True)
class SampleName:
    """What a sample, and one of its media, is called."""

    dataset: str
    shard: str
    index: int
    key: str
    fields: tuple[str, ...]
    """Its media."""


@dataclass
class Entries:
    """Hashes of one kind, shard by shard, and the samples that they belong to."""

    hashes: list[Hashes] = field(default_factory=list)
    samples: list[IntArray | range] = field(default_factory=list)
    """The sample of each hash, numbered through over all datasets."""
    media: list[IntArray | range] = field(default_factory=list)
    """The position of each hash among the media of its shard. Empty for other kinds."""

    @cached_property
    def ends(self) -> IntArray:
        """Where the hashes of each shard end."""
        return np.cumsum([len(chunk) for chunk in self.hashes])

    def sample_of(self, numbers: IntArray) -> IntArray:
        """Return the samples of hashes that are numbered through over all shards."""
        return self._pick(self.samples, numbers)

    def medium_of(self, numbers: IntArray) -> IntArray:
        """Return the positions of hashes among the media of their shards."""
        return self._pick(self.media, numbers)

    def _pick(self, chunks: list[IntArray | range], numbers: IntArray) -> IntArray:
        picked = np.zeros(numbers.size, dtype=np.int64)
        shards = np.searchsorted(self.ends, numbers, side="right")
        for shard in np.unique(shards).tolist():
            in_shard = shards == shard
            start = int(self.ends[shard]) - len(self.hashes[shard])
            local = numbers[in_shard] - start
            chunk = chunks[shard]
            picked[in_shard] = local + chunk.start if isinstance(chunk, range) else chunk[local]
        return picked


@dataclass
class Corpus:
    """The hashes of one or several datasets.

    Samples are numbered through: all of the first dataset, shard by shard, then the next one.
    """

    datasets: dict[str, Dataset]
    media: Entries = field(default_factory=Entries)
    texts: Entries = field(default_factory=Entries)
    pairs: Entries = field(default_factory=Entries)
    ids: Entries = field(default_factory=Entries)
    near: Entries = field(default_factory=Entries)
    """Perceptual hashes: its `hashes` are uint8 [n, 32]."""
    num_media: list[IntArray | None] = field(default_factory=list)
    """Media of each sample of a shard. None: each has one."""
    rows: list[IntArray | None] = field(default_factory=list)
    """The row of each sample of a shard. None: each has its own."""

    @cached_property
    def shards(self) -> list[tuple[str, int]]:
        """(dataset, shard) of all shards."""
        return [
            (name, shard)
            for name, dataset in self.datasets.items()
            for shard in range(dataset.num_shards)
        ]

    @cached_property
    def ends(self) -> IntArray:
        """Where the samples of each shard end."""
        counts = [self.datasets[name].counts[shard] for name, shard in self.shards]
        return np.cumsum(np.array(counts, dtype=np.int64))

    def refs_of(self, samples: IntArray) -> tuple[IntArray, IntArray]:
        """Return the position in `shards` of samples, and their indexes there."""
        shards = np.searchsorted(self.ends, samples, side="right")
        counts = np.diff(self.ends, prepend=0)
        return shards, samples - (self.ends - counts)[shards]

    def same_row(self, a: IntArray, b: IntArray) -> npt.NDArray[np.bool_]:
        """Tell which pairs of samples come from the same row of the source."""
        shard_a, index_a = self.refs_of(a)
        shard_b, index_b = self.refs_of(b)
        is_same: npt.NDArray[np.bool_] = a == b
        for number in np.flatnonzero((shard_a == shard_b) & ~is_same).tolist():
            rows = self.rows[int(shard_a[number])]
            if rows is not None:
                is_same[number] = rows[index_a[number]] == rows[index_b[number]]
        return is_same

    def media_counts(self, samples: IntArray) -> IntArray:
        """Return how many media samples have."""
        shards, indexes = self.refs_of(samples)
        counts = np.ones(samples.size, dtype=np.int64)
        for number, (shard, index) in enumerate(
            zip(shards.tolist(), indexes.tolist(), strict=True)
        ):
            stored = self.num_media[shard]
            if stored is not None:
                counts[number] = stored[index]
        return counts

    def media_start(self, samples: IntArray) -> IntArray:
        """Return the position of the first medium of samples, among the media of their shards."""
        shards, indexes = self.refs_of(samples)
        starts = indexes.copy()
        for shard in np.unique(shards).tolist():
            stored = self.num_media[shard]
            if stored is not None:
                in_shard = shards == shard
                starts[in_shard] = (np.cumsum(stored) - stored)[indexes[in_shard]]
        return starts

    def names_of(self, samples: Iterable[int]) -> dict[int, SampleName]:
        """Return the names of samples. The sidecars of their shards are read again."""
        wanted = np.unique(np.fromiter(samples, dtype=np.int64))
        shards, indexes = self.refs_of(wanted)
        names: dict[int, SampleName] = {}
        for number in np.unique(shards).tolist():
            dataset_name, shard = self.shards[number]
            dataset = self.datasets[dataset_name]
            in_shard = shards == number
            named = _keys_and_fields(dataset, shard, indexes[in_shard])
            for sample, index, (key, fields) in zip(
                wanted[in_shard].tolist(), indexes[in_shard].tolist(), named, strict=True
            ):
                names[sample] = SampleName(
                    dataset_name, dataset.name_of(shard), index, key, tuple(fields)
                )
        return names


def read_corpus(
    datasets: Mapping[str, Dataset],
    kinds: Iterable[str],
    left_out: Mapping[str, IntArray],
    *,
    num_threads: int,
    progress: bool,
) -> Corpus:
    """Read the hashes of datasets.

    Args:
        datasets: {name: dataset}
        kinds: What is needed: "media", "text", "pair", "near", "id". Each takes 16 bytes a sample
            (or medium), "near" 32 bytes an image.
        left_out: {name: int64 [n, 2] (shard, index) of the samples that do not count}
        num_threads: Threads that hash samples of shards without a sidecar.
        progress: Show a progress bar (on a terminal only).

    Raises:
        ConfigError: `num_threads` is not 1 or more.
    """
    require_numbers(num_threads=num_threads)
    if num_threads < 1:
        raise ConfigError(f"num_threads={num_threads}: must be 1 or more")
    kinds = set(kinds)
    corpus = Corpus(dict(datasets))
    start = 0
    for name, shard in tqdm(corpus.shards, unit="shard", disable=None if progress else True):
        dataset = corpus.datasets[name]
        contents = read_contents(
            dataset, shard, perceptual="near" in kinds, num_threads=num_threads
        )
        is_usable = np.ones(int(dataset.counts[shard]), dtype=np.bool_)
        is_usable[left_out[name][left_out[name][:, 0] == shard, 1]] = False
        _add(corpus, contents, is_usable, kinds, start)
        start += int(dataset.counts[shard])
    return corpus


def _add(
    corpus: Corpus,
    contents: ShardContents,
    is_usable: npt.NDArray[np.bool_],
    kinds: set[str],
    start: int,
) -> None:
    count = len(is_usable)
    rows = contents.row_of_sample
    corpus.rows.append(None if np.unique(rows).size == rows.size else rows)
    corpus.num_media.append(None if (contents.num_media == 1).all() else contents.num_media)
    columns = [
        ("text", corpus.texts, contents.texts, contents.has_text),
        ("id", corpus.ids, contents.ids, contents.has_id),
    ]
    if "pair" in kinds:
        columns.append(("pair", corpus.pairs, contents.pairs(), contents.has_pair))
    for kind, entries, hashes, has_hash in columns:
        if kind in kinds:
            chosen = np.flatnonzero(has_hash & is_usable)
            is_all = chosen.size == count
            entries.hashes.append(hashes if is_all else hashes[chosen])
            entries.samples.append(range(start, start + count) if is_all else chosen + start)
    sample = contents.sample_of_medium
    if "media" in kinds:
        chosen = np.flatnonzero(is_usable[sample])
        corpus.media.hashes.append(contents.media[chosen])
        one_each = chosen.size == count and corpus.num_media[-1] is None
        corpus.media.samples.append(
            range(start, start + count) if one_each else sample[chosen] + start
        )
        corpus.media.media.append(range(count) if one_each else chosen)
    if "near" in kinds:
        chosen = np.flatnonzero(is_usable[sample[contents.images]])
        media = contents.images[chosen]
        corpus.near.hashes.append(contents.perceptual[chosen])  # type: ignore[arg-type]
        corpus.near.samples.append(sample[media] + start)
        corpus.near.media.append(media)


def _keys_and_fields(
    dataset: Dataset, shard: int, indexes: IntArray
) -> list[tuple[str, list[str]]]:
    """Return the key and the fields of media of samples, from the sidecar or from the tar."""
    try:
        parquet: Any = open_sidecar(dataset.store, dataset.name_of(shard))
        rows = parquet.read(columns=["key", "status", "media"], use_threads=False)
        samples = [row for row in rows.to_pylist() if row["status"] == "success"]
        if len(samples) == dataset.counts[shard]:
            return [
                (samples[i]["key"], [medium["field"] for medium in samples[i]["media"]])
                for i in indexes.tolist()
            ]
    except (FileNotFoundError, OSError, ValueError, KeyError):  # of Arrow, too: as in contents.py
        pass
    named: list[tuple[str, list[str]]] = []
    for index in indexes.tolist():
        try:
            sample = dataset.read(shard, index)
        except SampleError:
            named.append(("", []))
        else:
            named.append((sample["__key__"], fields_of_media(sample)))
    return named
