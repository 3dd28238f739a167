"""What a dataset, or several, hold more than once, and what two datasets share.

    sidecars or tars -> hashes of shards -> CORPUS -> equal hashes, near hashes
                     -> DUPLICATES -> duplicates.jsonl, the bad list
                     -> LEAKS -> leaks.jsonl, a page with the pictures

What the samples of a shard hold is read from its sidecar, or from its tar. Equal hashes among many
are found with 32 bytes each in memory, and little more. The first sample in the order of the
dataset stays. Later ones are its duplicates. Nothing is rewritten: to drop duplicates is to put
them on the bad list, so that no epoch shows them.

Perceptual hashes that differ in few bits are found without comparing each with each. Hashes of 256
bits are cut into 16 bands of 16 bits. Two hashes that differ in at most 15 bits have a band in
common, since 15 bits cannot change 16 bands. So only hashes with an equal band are compared. A
million random hashes give 8 comparisons for each hash and band.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tqdm import tqdm

from mmstream.converting.sidecar import (
    HASH_BYTES,
    SCHEMA,
    content_hash,
    id_of,
    perceptual_hash,
    text_of,
)
from mmstream.dataset.bad_list import read_listed, write_bad
from mmstream.dataset.columns import read_sidecar, sidecar_name
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index import read_samples
from mmstream.errors import ConfigError, SampleError, ShardError
from mmstream.media.fields import json_object, media_files
from mmstream.media.types import kind_of
from mmstream.settings import PositiveInt, checked, refuse_broken
from mmstream.types import IntArray

logger = logging.getLogger(__name__)

Hashes = npt.NDArray[np.uint64]
"""uint64 [n, 2]: hashes of 128 bits. Those of pictures have 256: uint64 [n, 4]."""

_COLUMNS = ["file", "row", "id", "text_xxh3", "media"]
"""What is read of a sidecar. Others are made of a tar."""

_WEIGHT = np.uint64(0x9E3779B97F4A7C15)
_TEXT_WEIGHT = np.uint64(0xC2B2AE3D27D4EB4F)


class Entries(NamedTuple):
    """Hashes of one kind, and what they belong to."""

    hashes: npt.NDArray[Any]
    """uint64 [n, 2]; of the kind "near" uint8 [n, 32]."""
    samples: IntArray
    """int64 [n], ascending: the sample of each hash."""
    positions: IntArray
    """int64 [n]: which of its sample's media it is of. 0 for kinds of whole samples."""


@dataclass(frozen=True)
class ShardContents:
    """The hashes of the samples of one shard, in their order."""

    entries: Mapping[str, Entries]
    """By kind: "media", "text", "pair", "id", "near". Samples are counted in the shard."""
    num_media: IntArray
    """int64 [num_samples]"""
    row_of_sample: IntArray
    """int64 [num_samples]: equal for samples of the same row of the source."""
    has_perceptual: bool
    """False: there are images, and perceptual hashes of them were not made."""


def read_contents(
    dataset: Dataset, shard: int, *, perceptual: bool = False, num_threads: int = 1
) -> ShardContents:
    """Return the hashes of a shard's samples, in their order.

    They come from the shard's sidecar. Without one, or where it has no perceptual hashes and they
    are asked for, the whole tar is read. A sample that cannot be read has no hashes.

    Args:
        dataset: The dataset.
        shard: Position of the shard.
        perceptual: Also return perceptual hashes of images.
        num_threads: Threads that hash samples of a tar.

    Raises:
        ShardError: The shard has no sidecar, and its index cannot be read.
        StorageError: The storage failed after retries.
    """
    table = _read_sidecar(dataset, shard, _COLUMNS)
    if table is None:
        return _read_tar(dataset, shard, perceptual, num_threads)
    contents = _contents_of(table)
    if perceptual and not contents.has_perceptual:
        from_tar = _read_tar(dataset, shard, perceptual, num_threads)
        if not np.array_equal(from_tar.num_media, contents.num_media):
            return from_tar  # it has fields that only the sidecar calls media
        near = {"near": from_tar.entries["near"]}
        contents = replace(contents, entries={**contents.entries, **near})
    return contents


def fields_of_media(fields: Collection[str]) -> dict[str, list[str]]:
    """Return the fields of a sample that are media, in the order of the tar, with their frames."""
    files = media_files(fields).items()
    return {name: frames for name, frames in files if not name.startswith("__")}


def _read_sidecar(dataset: Dataset, shard: int, columns: Sequence[str]) -> pa.Table | None:
    """Return columns of a sidecar, a row for each sample. None: there is none that fits."""
    try:
        table = read_sidecar(dataset, shard, columns)
    except FileNotFoundError:
        return None
    except (ConfigError, ShardError) as error:
        fault = str(error)
    else:
        if set(columns) <= set(table.column_names) and not table["status"].null_count:
            return table
        fault = f"{sidecar_name(dataset.name_of(shard))}: samples or columns are missing"
    logger.warning("%s; the tar is read", fault)
    return None


def _contents_of(table: Any) -> ShardContents:
    import pyarrow.compute as pc  # slow to load, and most conversions look for no duplicates

    media, texts, ids = (_flat(table[name]) for name in ("media", "text_xxh3", "id"))
    num_media = _array(table["media"]).value_lengths().fill_null(0).to_numpy()
    num_media = np.asarray(num_media, dtype=np.int64).reshape(table.num_rows)
    of_media = Entries(
        _hashes(_flat(pc.struct_field(media, "xxh3")).to_pylist()),
        np.repeat(np.arange(num_media.size), num_media),
        np.arange(num_media.sum()) - np.repeat(np.cumsum(num_media) - num_media, num_media),
    )
    perceptual = _flat(pc.struct_field(media, "perceptual_hash"))
    is_image = _flat(pc.equal(pc.struct_field(media, "kind"), "image"))
    images, has_text = np.flatnonzero(_is_valid(perceptual)), _is_valid(texts)
    hashes_of_texts = _hashes(texts.fill_null(bytes(16)).to_pylist())
    # A pair is all media, in order, together with the text.
    weights = np.multiply.accumulate(np.full(num_media.max(initial=0) + 1, _WEIGHT))
    pairs = hashes_of_texts * _TEXT_WEIGHT
    np.add.at(pairs, of_media.samples, of_media.hashes * weights[of_media.positions][:, None])
    file = _flat(table["file"]).dictionary_encode().indices.to_numpy()
    row = _flat(table["row"]).to_numpy()
    is_new = np.ones(table.num_rows, dtype=np.bool_)
    is_new[1:] = (file[1:] != file[:-1]) | (row[1:] != row[:-1])
    entries = {
        "media": of_media,
        "near": Entries(
            _bytes(perceptual.drop_null().to_pylist(), HASH_BYTES),
            of_media.samples[images],
            of_media.positions[images],
        ),
        "text": _of_samples(hashes_of_texts, has_text),
        "pair": _of_samples(pairs, has_text | (num_media > 0)),
        "id": _of_samples(
            _hashes([content_hash((text or "").encode()) for text in ids.to_pylist()]),
            _is_valid(ids),
        ),
    }
    has_perceptual = bool(images.size) or not pc.any(is_image).as_py()
    return ShardContents(entries, num_media, np.cumsum(is_new), has_perceptual)


def _of_samples(hashes: Hashes, has_hash: npt.NDArray[np.bool_]) -> Entries:
    """Return the hashes of those samples that have one."""
    samples = np.flatnonzero(has_hash)
    return Entries(hashes[samples], samples, np.zeros_like(samples))


def _flat(column: Any) -> Any:
    """Return a column as one array; a column of lists as the array of all their items."""
    array = _array(column)
    return array.flatten() if pa.types.is_list(array.type) else array


def _array(column: Any) -> Any:
    """Return a column as one array."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array


def _is_valid(array: Any) -> npt.NDArray[np.bool_]:
    return np.asarray(array.is_valid().to_numpy(zero_copy_only=False), dtype=np.bool_)


def _hashes(values: Sequence[bytes]) -> Hashes:
    return _bytes(values, 16).view("<u8").astype(np.uint64, copy=False)


def _bytes(values: Sequence[bytes], width: int) -> npt.NDArray[np.uint8]:
    """Return byte strings of equal length: uint8 [n, width]."""
    return np.frombuffer(b"".join(values), dtype=np.uint8).reshape(-1, width)


def _read_tar(dataset: Dataset, shard: int, perceptual: bool, num_threads: int) -> ShardContents:
    """Return what the samples of a tar hold. Some of them for each thread are in memory."""
    name, size = dataset.name_of(shard), dataset.manifest.shards[shard].num_bytes
    samples = enumerate(
        read_samples(dataset.store, name, size, dataset.shards.offsets(shard), lambda _: None)
    )

    def describe(item: tuple[int, bytes]) -> dict[str, Any]:
        index, data = item
        sample: Mapping[str, Any] = {}
        with suppress(SampleError):
            sample = dataset.shards.parse(data, shard, index)
        return _described(sample, perceptual) | {"file": "", "row": index}

    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(num_threads) as pool:
        while batch := list(islice(samples, 4 * num_threads)):
            rows += pool.map(describe, batch)
    schema = pa.schema([SCHEMA.field(name) for name in _COLUMNS])
    return _contents_of(pa.Table.from_pylist(rows, schema))


def _described(sample: Mapping[str, Any], perceptual: bool) -> dict[str, Any]:
    """Return what a sidecar would say of a sample."""
    content = json_object(sample.get("json"))
    text = text_of(sample, content)
    media = []
    for name, frames in fields_of_media(sample).items():
        kind, data = kind_of(name), b"".join(sample[file] for file in frames or (name,))
        is_hashed = perceptual and kind == "image"
        medium = {"field": "", "kind": kind, "num_bytes": len(data), "xxh3": content_hash(data)}
        media.append(medium | {"perceptual_hash": perceptual_hash(data) if is_hashed else None})
    return {
        "id": id_of(content),
        "text_xxh3": None if text is None else content_hash(text),
        "media": media,
    }


BUCKET = 1 << 22
"""Hashes that are sorted at a time. Sorting takes about 60 bytes for each of them."""


def equal_to_first(hashes: Hashes) -> tuple[IntArray, IntArray]:
    """Find the hashes that came before.

    The hashes are cut into buckets, and sorted bucket by bucket. So besides the hashes themselves,
    the memory for one bucket is needed (about 250 MB), and 8 bytes for each hash.

    Args:
        hashes: uint64 [n, 2]

    Returns:
        (first, again): int64 [m] each. Hash ``again[i]`` equals hash ``first[i]``, the earliest of
        its kind. Sorted by `again`.

    Examples:
        >>> first, again = equal_to_first(np.array([[1, 1], [2, 2], [2, 2], [2, 3]], np.uint64))
        >>> first.tolist(), again.tolist()
        ([1], [2])
    """
    num_buckets = 1 + len(hashes) // BUCKET
    buckets = hashes[:, 0] % np.uint64(num_buckets)
    found = []
    for bucket in range(num_buckets):
        numbers = np.flatnonzero(buckets == bucket)
        found.append(_equal(hashes[numbers], numbers))
    first, again = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(again, kind="stable")
    return first[order], again[order]


def _equal(hashes: Hashes, numbers: IntArray) -> tuple[IntArray, IntArray]:
    """Return (first, again) of hashes, uint64 [n, words], that are called by ascending numbers."""
    order = np.lexsort(hashes.T)  # stable: the earliest comes first
    hashes, numbers = hashes[order], numbers[order]
    is_first = np.ones(len(numbers), dtype=np.bool_)
    is_first[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
    group_starts = np.flatnonzero(is_first)
    first_of_group = numbers[group_starts]
    group = np.cumsum(is_first) - 1
    return first_of_group[group[~is_first]], numbers[~is_first]


@dataclass(frozen=True, slots=True)
class SampleName:
    """What a sample, and one of its media, is called."""

    dataset: str
    shard: str
    index: int
    key: str
    fields: tuple[str, ...]
    """Its media."""


MEDIA_KINDS = ("media", "near")
"""Kinds whose hashes are those of media. The others are of whole samples."""


@dataclass
class Corpus:
    """The hashes of one or several datasets.

    Samples are numbered through: all of the first dataset, shard by shard, then the next one.
    """

    datasets: dict[str, Dataset]
    entries: Mapping[str, Entries]
    """By kind: "media", "text", "pair", "id", "near"."""
    num_media: IntArray
    """int64 [num_samples]: media of each sample."""
    rows: IntArray
    """int64 [num_samples]: equal for samples of the same row of the source."""

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
        kinds: What is needed: "media", "text", "pair", "near", "id". Each takes 32 bytes a sample
            (or medium), "near" 48 bytes an image.
        left_out: {name: int64 [n, 2] (shard, index) of the samples that do not count}
        num_threads: Threads that hash samples of shards without a sidecar.
        progress: Show a progress bar (on a terminal only).
    """
    found = {kind: [_no_entries(kind)] for kind in kinds}
    num_media, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    start = 0
    shards = [(name, shard) for name in datasets for shard in range(datasets[name].num_shards)]
    for name, shard in tqdm(shards, unit="shard", disable=None if progress else True):
        dataset = datasets[name]
        contents = read_contents(
            dataset, shard, perceptual="near" in found, num_threads=num_threads
        )
        is_usable = np.zeros(int(dataset.counts[shard]), dtype=np.bool_)
        is_usable[dataset.indexes_of(shard)] = True
        is_usable[left_out[name][left_out[name][:, 0] == shard, 1]] = False
        for kind, entries in found.items():
            hashes, samples, positions = contents.entries[kind]
            chosen = is_usable[samples]
            entries.append(Entries(hashes[chosen], samples[chosen] + start, positions[chosen]))
        num_media.append(contents.num_media)
        rows.append(contents.row_of_sample + start)
        start += is_usable.size
    joined = {  # kind by kind: what is joined is not held twice
        kind: Entries(*map(np.concatenate, zip(*found.pop(kind), strict=True)))
        for kind in list(found)
    }
    return Corpus(dict(datasets), joined, np.concatenate(num_media), np.concatenate(rows))


def _no_entries(kind: str) -> Entries:
    no_hashes = np.zeros((0, 32), np.uint8) if kind == "near" else np.zeros((0, 2), np.uint64)
    return Entries(no_hashes, np.zeros(0, np.int64), np.zeros(0, np.int64))


def _keys_and_fields(
    dataset: Dataset, shard: int, indexes: IntArray
) -> list[tuple[str, list[str]]]:
    """Return the key and the fields of media of samples, from the sidecar or from the tar."""
    table = _read_sidecar(dataset, shard, ["key", "status", "media"])
    if table is not None:
        samples = table.take(indexes).to_pylist()
        return [
            (sample["key"], [medium["field"] for medium in sample["media"] or ()])
            for sample in samples
        ]
    named: list[tuple[str, list[str]]] = []
    for index in indexes.tolist():
        try:
            sample = dataset.read(shard, index)
        except SampleError:
            named.append(("", []))
        else:
            named.append((sample["__key__"], list(fields_of_media(sample))))
    return named


DUPLICATES_NAME = "duplicates.jsonl"

KINDS = ("media", "text", "pair")


@dataclass(frozen=True, slots=True)
class DuplicatePair:
    """Two samples that hold the same."""

    kind: str
    """"media", "text", "pair" (all media and the text), or "near" (images that look alike)."""
    first: SampleName
    again: SampleName
    first_field: str | None = None
    """With "media" and "near": which field it is."""
    again_field: str | None = None
    distance: int = 0
    """With "near": bits of 256 that differ between the perceptual hashes."""


class PairNumbers(NamedTuple):
    """The pairs of one kind, as numbers of a corpus. All arrays are int64 [num_pairs]."""

    first: IntArray
    again: IntArray
    """Samples."""
    first_position: IntArray
    again_position: IntArray
    """Which of their media."""
    distance: IntArray

    def only(self, chosen: npt.NDArray[np.bool_]) -> PairNumbers:
        """Return some of the pairs."""
        return PairNumbers(*(column[chosen] for column in self))


@dataclass(frozen=True)
class Duplicates:
    """The duplicates of one dataset or several.

    Attributes:
        corpus: The hashes that were compared.
        by_kind: The pairs of each kind, as numbers of the corpus.
    """

    corpus: Corpus
    by_kind: Mapping[str, PairNumbers]

    @property
    def num_pairs(self) -> dict[str, int]:
        """{kind: number of pairs}. A sample or medium that comes n times is n - 1 pairs."""
        return {kind: int(numbers.again.size) for kind, numbers in self.by_kind.items()}

    def across(self, kind: str) -> PairNumbers:
        """Return the pairs of one kind whose samples are in two datasets. In splits, these leak."""
        numbers = self.by_kind[kind]
        return numbers.only(self._dataset_of(numbers.first) != self._dataset_of(numbers.again))

    def refs(self, kinds: Collection[str]) -> dict[str, IntArray]:
        """Return the samples that are duplicates as a whole.

        With "text" and "pair", that is the later sample of a pair. With "media" and "near", all
        media of a sample must be duplicates. So a conversation about two pictures of which one is
        new stays.

        Args:
            kinds: One kind or several.

        Returns:
            {name of the dataset: int64 [n, 2] (shard, index), sorted}
        """
        whole = {kind: self._whole(kind) for kind in kinds}
        samples = np.unique(np.concatenate([np.zeros(0, np.int64), *whole.values()]))
        if sum(part.size > 0 for part in whole.values()) > 1:
            samples = self._without_lost(samples, whole)
        shards, indexes = self.corpus.refs_of(samples)
        shard_of_dataset = np.array([shard for _, shard in self.corpus.shards], np.int64)
        refs = np.stack([shard_of_dataset[shards], indexes], axis=1)
        owners = self._dataset_of(samples)
        return {name: refs[owners == number] for number, name in enumerate(self.corpus.datasets)}

    def pairs(self, kinds: Collection[str] | None = None) -> Iterator[DuplicatePair]:
        """Yield all pairs: kind by kind, in the order of the later samples.

        The names of all samples that are part of a pair are in memory.

        Args:
            kinds: Only these. Default: all.
        """
        by_kind = {
            kind: numbers
            for kind, numbers in self.by_kind.items()
            if kinds is None or kind in kinds
        }
        involved = [np.concatenate([numbers.first, numbers.again]) for numbers in by_kind.values()]
        names = self.corpus.names_of(np.concatenate([np.zeros(0, np.int64), *involved]).tolist())
        for kind, numbers in by_kind.items():
            yield from self._pairs_of(kind, numbers, names)

    def _pairs_of(
        self, kind: str, numbers: PairNumbers, names: Mapping[int, SampleName]
    ) -> Iterator[DuplicatePair]:
        columns = (column.tolist() for column in numbers)
        for first, again, first_position, again_position, distance in zip(*columns, strict=True):
            fields: tuple[str | None, str | None] = (None, None)
            if kind in MEDIA_KINDS:
                fields = (
                    _field(names[first], first_position),
                    _field(names[again], again_position),
                )
            yield DuplicatePair(kind, names[first], names[again], *fields, distance)

    def _without_lost(self, samples: IntArray, whole: Mapping[str, IntArray]) -> IntArray:
        """Return the samples whose content stays in another one, where several kinds are joined.

        For example, B has the text of A, and C the picture of B. Where B is dropped, C stays.

        Args:
            samples: int64 [n], those that are duplicates of some kind, sorted.
            whole: By kind, which of them are.
        """
        members = {kind: set(part.tolist()) for kind, part in whole.items()}
        groups: dict[int, list[tuple[str, int, int]]] = {}  # of each sample: kind, first, position
        for kind in whole:
            numbers = self.by_kind[kind]
            columns = (numbers.first, numbers.again, numbers.first_position)
            for first, again, position in zip(*(c.tolist() for c in columns), strict=True):
                groups.setdefault(again, []).append((kind, first, position))
        holders: dict[tuple[str, int, int], int] = {}
        dropped = set[int]()
        for sample in samples.tolist():
            held = {group: holders.get(group, group[1]) not in dropped for group in groups[sample]}
            if any(
                sample in members[kind] and all(held[group] for group in held if group[0] == kind)
                for kind in whole
            ):
                dropped.add(sample)
                continue
            holders |= {group: sample for group, is_held in held.items() if not is_held}
        return np.array(sorted(dropped), dtype=np.int64)

    def _whole(self, kind: str) -> IntArray:
        again = self.by_kind[kind].again
        if kind not in MEDIA_KINDS:
            return again
        samples, counts = np.unique(again, return_counts=True)
        whole: IntArray = samples[counts == self.corpus.num_media[samples]]
        return whole

    def _dataset_of(self, samples: IntArray) -> IntArray:
        ends = np.cumsum([dataset.counts.sum() for dataset in self.corpus.datasets.values()])
        return np.asarray(np.searchsorted(ends, samples, side="right"), dtype=np.int64)


@checked(
    {
        "dataset": "give mm.open_dataset(...), or {name: dataset}",
        "kinds": "give a list, such as ['media', 'text']",
    }
)
def find_duplicates(
    dataset: Dataset | Mapping[str, Dataset],
    *,
    kinds: Collection[str] = KINDS,
    near: bool = False,
    num_threads: PositiveInt = 1,
    progress: bool = True,
) -> Duplicates:
    """Find samples that hold the same media, the same text, or both.

    Hashes come from the sidecars that `convert` wrote. Shards without a sidecar are read whole. In
    memory are 32 bytes for each sample and kind, 48 for each image with `near`, and about 250 MB to
    sort them. Samples of the same source row (``captions="each"``) are not duplicates of each
    other. Samples on the bad list are left out, but for those that are there as duplicates. So are
    those that were taken down.

    Args:
        dataset: A dataset, or several by name, such as splits. They are searched as one.
        kinds: "media" (a file that an earlier sample has too), "text" (equal text), "pair" (equal
            media in the same order, and equal text: the whole sample comes twice).
        near: Also find images that look alike: encoded again, resized, in another format.
        num_threads: Threads that read samples of shards without a sidecar.
        progress: Show a progress bar (on a terminal only).

    Returns:
        The pairs. The first sample in the order of the dataset counts as the original.

    Raises:
        ConfigError: An unknown kind.
        ShardError: A shard without a sidecar cannot be read.
        StorageError: The storage failed after retries.

    Examples:
        >>> duplicates = mm.find_duplicates(mm.open_dataset("shards/"), progress=False)
        >>> duplicates.num_pairs
        {'media': 384, 'text': 0, 'pair': 0}
    """
    unknown = sorted(set(kinds) - set(KINDS))
    refuse_broken((unknown, f"kinds={unknown}: must be among {', '.join(KINDS)}"))
    datasets = {"": dataset} if isinstance(dataset, Dataset) else dict(dataset)
    wanted = [kind for kind in KINDS if kind in kinds] + ["near"] * near
    left_out = {
        name: np.concatenate([read_listed(item, "bad"), *(taken.refs for taken in item.takedowns)])
        for name, item in datasets.items()
    }
    corpus = read_corpus(datasets, wanted, left_out, num_threads=num_threads, progress=progress)
    return Duplicates(corpus, {kind: find_in(corpus, kind) for kind in wanted})


def find_in(corpus: Corpus, kind: str) -> PairNumbers:
    """Return the pairs of one kind: "media", "text", "pair", "id", or "near"."""
    entries = corpus.entries[kind]
    if kind == "near":
        matches = keep_first(near_pairs(entries.hashes))
    else:
        matches = _equal_matches(entries.hashes)
    pairs = _pairs_of(entries, matches)
    return pairs.only(corpus.rows[pairs.first] != corpus.rows[pairs.again])


def _equal_matches(hashes: Hashes) -> Matches:
    first, again = equal_to_first(hashes)
    return Matches(first, again, np.zeros_like(first))


def _pairs_of(entries: Entries, matches: Matches) -> PairNumbers:
    """Return pairs of hashes as pairs of samples and media."""
    return PairNumbers(
        entries.samples[matches.first],
        entries.samples[matches.again],
        entries.positions[matches.first],
        entries.positions[matches.again],
        matches.distance,
    )


def drop_duplicates(
    duplicates: Duplicates, kinds: Collection[str], datasets: Collection[str]
) -> dict[str, int]:
    """Put duplicates on the bad lists of their datasets, in place of earlier duplicates there.

    The caller holds the locks of the datasets. Takes effect when they are opened again.

    Args:
        duplicates: The duplicates.
        kinds: Those to drop.
        datasets: The names of those whose lists are written.

    Returns:
        {name of the dataset: samples that its list names as duplicates}

    Raises:
        ConfigError: They are more than a bad list may name. Nothing was written to this dataset.
    """
    refs_of = duplicates.refs(kinds)
    dropped = {name: refs_of[name] for name in datasets}
    for name, refs in dropped.items():
        dataset = duplicates.corpus.datasets[name]
        write_bad(dataset, read_listed(dataset, "bad"), refs)
    return {name: len(refs) for name, refs in dropped.items()}


def write_pairs(duplicates: Duplicates, datasets: Collection[str]) -> None:
    """Write ``duplicates.jsonl`` into datasets: the pairs whose later sample is theirs."""
    pairs = list(duplicates.pairs())
    for name in datasets:
        store = duplicates.corpus.datasets[name].index_store
        with store.create(DUPLICATES_NAME) as file:
            for pair in pairs:
                if pair.again.dataset == name:
                    file.write(msgspec.json.encode(pair_of(pair)) + b"\n")


def pair_of(pair: DuplicatePair) -> dict[str, object]:
    """Return a pair as a line of JSONL has it."""
    distance = {"distance": pair.distance} if pair.kind == "near" else {}
    again = _json_of(pair.again, pair.again_field)
    first = _json_of(pair.first, pair.first_field)
    return {"kind": pair.kind, **distance, **again, "first": first}


def _json_of(name: SampleName, field: str | None) -> dict[str, object]:
    line: dict[str, object] = {"dataset": name.dataset} if name.dataset else {}
    line.update(shard=name.shard, index=name.index, key=name.key)
    return line if field is None else {**line, "field": field}


def _field(name: SampleName, position: int) -> str:
    return name.fields[position] if position < len(name.fields) else ""


LEAK_KINDS = ("media", "near", "text", "id")


@checked(
    {
        "a": "give mm.open_dataset(...)",
        "b": "give mm.open_dataset(...)",
        "kinds": "give a list, such as ['media', 'text']",
    }
)
def find_leaks(
    a: Dataset,
    b: Dataset,
    *,
    kinds: Collection[str] = LEAK_KINDS,
    num_threads: PositiveInt = 1,
    progress: bool = True,
) -> Duplicates:
    """Find samples of `b` that hold something that `a` holds too.

    Hashes come from the sidecars that `convert` wrote. Shards without a sidecar are read whole, and
    with "near" also those whose sidecar has no perceptual hashes. In memory are 32 bytes for each
    sample and kind, and 48 for each image with "near". Samples on the bad lists are left out: no
    epoch shows them.

    Args:
        a: A dataset, such as the training set.
        b: Another one, such as a benchmark.
        kinds: "media" (a file that both have), "near" (images that look alike: encoded again,
            resized, in another format), "text" (equal text), "id" (equal id of the rows).
        num_threads: Threads that read samples of shards without a sidecar.
        progress: Show a progress bar (on a terminal only).

    Returns:
        The pairs, each with a sample of `a` first and one of `b`. Their datasets are named "a" and
        "b". A medium or sample of `b` is in at most one pair of each kind.

    Raises:
        ConfigError: An unknown kind.
        ShardError: A shard without a sidecar cannot be read.
        StorageError: The storage failed after retries.

    Examples:
        >>> dataset = mm.open_dataset("shards/")
        >>> mm.find_leaks(dataset, dataset, kinds=["text"], progress=False).num_pairs
        {'text': 480}
    """
    unknown = sorted(set(kinds) - set(LEAK_KINDS))
    refuse_broken((unknown, f"kinds={unknown}: must be among {', '.join(LEAK_KINDS)}"))
    wanted = [kind for kind in LEAK_KINDS if kind in kinds]
    datasets, left_out = {"a": a, "b": b}, {"a": a.bad, "b": b.bad}
    corpus = read_corpus(datasets, wanted, left_out, num_threads=num_threads, progress=progress)
    num_samples = int(a.counts.sum())
    return Duplicates(corpus, {kind: _across(corpus, kind, num_samples) for kind in wanted})


def _across(corpus: Corpus, kind: str, num_samples: int) -> PairNumbers:
    """Return the pairs of one kind with one sample in each dataset.

    Args:
        corpus: Of both datasets.
        kind: One of `LEAK_KINDS`.
        num_samples: Of the first dataset.
    """
    entries = corpus.entries[kind]
    if kind == "near":
        num_first = int(np.searchsorted(entries.samples, num_samples))
        return _pairs_of(entries, match_with_first(near_pairs(entries.hashes), num_first))
    pairs = _pairs_of(entries, _equal_matches(entries.hashes))
    # The first of a kind is in `a`, if any is.
    return pairs.only((pairs.first < num_samples) & (pairs.again >= num_samples))


MAX_DISTANCE = 15
"""Most bits of 256 that differ between near-duplicates. One less than the number of bands."""

MAX_BUCKET = 4096
"""Largest group of hashes with an equal band in which each is compared with each."""


class NearPairs(NamedTuple):
    """Pairs of hashes that are near to each other.

    Equal hashes are one: the first of them represents the others.
    """

    representative: IntArray
    """int64 [n]: for each hash, the first that equals it."""
    first: IntArray
    """int64 [num_pairs]: a representative."""
    second: IntArray
    """A later representative that is near to `first`. Pairs are sorted by `second`."""
    distance: IntArray
    """Bits that differ: 1 to `MAX_DISTANCE`."""


class Matches(NamedTuple):
    """Hashes, each with the one that it is near to. All arrays are int64 [num_matches]."""

    first: IntArray
    again: IntArray
    """Later than `first`. Sorted, and none comes twice."""
    distance: IntArray


def near_pairs(hashes: npt.NDArray[np.uint8]) -> NearPairs:
    """Find all pairs of different hashes that differ in at most `MAX_DISTANCE` bits.

    In a group of more than 4,096 different hashes with an equal band, those near to an earlier one
    of the group are not compared with each other. So pictures that a corpus holds a million times,
    with small differences, cost little.

    Memory: about 150 bytes for each hash, and 24 for each pair.

    Args:
        hashes: uint8 [n, 32]
    """
    packed = np.ascontiguousarray(hashes).view(np.uint64).reshape(-1, 4)
    representative = np.arange(len(packed))
    equal, again = _equal(packed, representative)
    representative[again] = equal
    different = np.flatnonzero(representative == np.arange(len(packed)))
    pairs = [np.zeros((0, 2), dtype=np.int64)]
    for earlier, later in _near_different(packed[different]):
        pairs.append(np.stack([different[later], different[earlier]], axis=1))
    second, first = np.unique(np.concatenate(pairs), axis=0).T
    return NearPairs(representative, first, second, _distance(packed[first], packed[second]))


def keep_first(near: NearPairs) -> Matches:
    """Match each hash that is near to an earlier one that is kept with the first such.

    Hashes are looked at in order. One that is near to a kept one is not kept itself. So in a chain
    of pictures, each a little unlike the one before, none is dropped for one that it is not near
    to.
    """
    count = len(near.representative)
    leader, distance = np.arange(count), np.zeros(count, dtype=np.int64)
    pairs = zip(near.first.tolist(), near.second.tolist(), near.distance.tolist(), strict=True)
    for first, second, bits in pairs:
        if leader[first] == first and leader[second] == second:
            leader[second], distance[second] = first, bits
    return _matches(near, leader, distance, np.arange(count))


def match_with_first(near: NearPairs, num_first: int) -> Matches:
    """Match each of the later hashes with the nearest one among the first `num_first`."""
    count = len(near.representative)
    leader = np.where(near.representative < num_first, near.representative, -1)
    distance = np.zeros(count, dtype=np.int64)
    is_across = (near.first < num_first) & (near.second >= num_first)
    across = np.lexsort((near.first, near.distance))
    for number in across[is_across[across]].tolist():
        second = near.second[number]
        if leader[second] < 0:
            leader[second], distance[second] = near.first[number], near.distance[number]
    later = np.arange(num_first, count)
    is_matched = leader[near.representative[later]] >= 0
    return _matches(near, leader, distance, later[is_matched])


def _matches(near: NearPairs, leader: IntArray, distance: IntArray, hashes: IntArray) -> Matches:
    """Give each hash what its representative was matched with."""
    representative = near.representative[hashes]
    first = leader[representative]
    is_other = first != hashes
    return Matches(first[is_other], hashes[is_other], distance[representative][is_other])


def _near_different(hashes: Hashes) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield (earlier, later) of near hashes, for each band. A pair may come several times."""
    bands = hashes.view(np.uint16).reshape(-1, 16)
    for band in range(bands.shape[1]):
        keys = bands[:, band]
        order = np.argsort(keys, kind="stable")
        sizes = np.bincount(keys, minlength=1 << 16)
        stops = np.repeat(np.cumsum(sizes), sizes)
        num_after = stops - np.arange(len(keys)) - 1  # in the same bucket
        is_large = sizes > MAX_BUCKET
        num_after[np.repeat(is_large, sizes)] = 0
        yield from _near_neighbours(hashes, order, num_after)
        starts = np.cumsum(sizes) - sizes
        for bucket in np.flatnonzero(is_large).tolist():
            yield from _near_leaders(hashes, order[starts[bucket] :][: sizes[bucket]])


def _near_neighbours(
    hashes: Hashes, order: IntArray, num_after: IntArray
) -> Iterator[tuple[IntArray, IntArray]]:
    """Compare each hash with all that follow it in its bucket.

    A bucket of the hashes a, b, c: step 1 compares a with b and b with c, step 2 a with c.
    """
    ordered = hashes[order]
    head = np.ascontiguousarray(ordered[:, 0])
    active = np.flatnonzero(num_after > 0)
    step = 1
    while active.size:
        # A quarter of the bits decides about nearly all pairs.
        is_candidate = np.bitwise_count(head[active] ^ head[active + step]) <= MAX_DISTANCE
        candidates = active[is_candidate]
        is_near = _distance(ordered[candidates], ordered[candidates + step]) <= MAX_DISTANCE
        near = candidates[is_near]
        if near.size:
            yield order[near], order[near + step]
        step += 1
        active = active[num_after[active] >= step]


def _near_leaders(hashes: Hashes, members: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
    """Compare the first hash of a large bucket with the others, leave out the near ones; again."""
    while members.size > 1:
        leader, others = members[0], members[1:]
        is_near = _distance(hashes[others], hashes[leader]) <= MAX_DISTANCE
        if is_near.any():
            near = others[is_near]
            yield np.full_like(near, leader), near
        members = others[~is_near]


def _distance(a: Hashes, b: Hashes) -> IntArray:
    """Return the number of bits that differ, int64 [n]."""
    distance: IntArray = np.bitwise_count(a ^ b).sum(axis=-1, dtype=np.int64)
    return distance
