"""The hashes of all samples of several datasets, numbered through.

    sidecars or tars -> hashes of shards -> CORPUS -> equal hashes, near hashes -> duplicates, leaks

What the samples of a shard hold is read from its sidecar, or from its tar. Equal hashes among many
are found with 16 bytes each in memory, and little more.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tqdm import tqdm

from mmstream.converting.sidecar import (
    HASH_BYTES,
    content_hash,
    id_of,
    open_sidecar,
    perceptual_hash,
    sidecar_name,
    text_of,
)
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index import read_samples
from mmstream.decoding.fields import json_object
from mmstream.errors import SampleError
from mmstream.media.types import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from mmstream.types import IntArray

logger = logging.getLogger(__name__)

Hashes = npt.NDArray[np.uint64]
"""uint64 [n, 2]: hashes of 128 bits."""

_MEDIA = IMAGE_EXTENSIONS | VIDEO_EXTENSIONS | AUDIO_EXTENSIONS
_WEIGHT = np.uint64(0x9E3779B97F4A7C15)
_TEXT_WEIGHT = np.uint64(0xC2B2AE3D27D4EB4F)


@dataclass(frozen=True)
class ShardContents:
    """The hashes of the samples of one shard, in their order."""

    texts: Hashes
    """Of each sample's text. Zeros where there is none."""
    has_text: npt.NDArray[np.bool_]
    ids: Hashes
    """Of each sample's id. Zeros where there is none."""
    has_id: npt.NDArray[np.bool_]
    num_media: IntArray
    """int64 [num_samples]"""
    media: Hashes
    """Of all media, sample by sample."""
    images: IntArray
    """Which media are images that have a perceptual hash: int64 [num_images]."""
    perceptual: npt.NDArray[np.uint8]
    """uint8 [num_images, 32]"""
    row_of_sample: IntArray
    """int64 [num_samples]: equal for samples of the same row of the source."""
    has_perceptual: bool
    """False: there are images, and perceptual hashes of them were not made."""

    @property
    def sample_of_medium(self) -> IntArray:
        """int64 [num_media]: the sample that each medium belongs to."""
        return np.repeat(np.arange(self.num_media.size), self.num_media)

    @property
    def has_pair(self) -> npt.NDArray[np.bool_]:
        """Which samples have media or a text."""
        return self.has_text | (self.num_media > 0)

    def pairs(self) -> Hashes:
        """Return a hash of each sample's media, in order, together with its text."""
        sums = self.texts * _TEXT_WEIGHT
        sample = self.sample_of_medium
        starts = np.cumsum(self.num_media) - self.num_media
        position = np.arange(sample.size) - starts[sample]
        most = int(self.num_media.max(initial=0))
        weights = np.multiply.accumulate(np.full(most + 1, _WEIGHT))
        np.add.at(sums, sample, self.media * weights[position][:, None])
        return sums


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
    contents = _read_sidecar(dataset, shard)
    if contents is None:
        return _read_tar(dataset, shard, perceptual, num_threads)
    if perceptual and not contents.has_perceptual:
        from_tar = _read_tar(dataset, shard, perceptual, num_threads)
        if len(from_tar.media) != len(contents.media):  # fields that only the sidecar calls media
            return from_tar
        contents = replace(contents, images=from_tar.images, perceptual=from_tar.perceptual)
    return contents


def fields_of_media(fields: Iterable[str]) -> list[str]:
    """Return the fields of a sample that are media, in the order of the tar."""
    return [
        name for name in fields if name.rpartition(".")[2] in _MEDIA and not name.startswith("__")
    ]


def _read_sidecar(dataset: Dataset, shard: int) -> ShardContents | None:
    """Return what a sidecar says. None: there is none, or it does not fit."""
    import pyarrow.compute as pc  # slow to load, and most conversions look for no duplicates

    name, count = dataset.name_of(shard), int(dataset.counts[shard])
    columns = ["status", "file", "row", "id", "text_xxh3", "media"]
    try:
        table = open_sidecar(dataset.store, name).read(columns=columns, use_threads=False)
        table = table.filter(pc.equal(table["status"], "success")).combine_chunks()
        media = _flat(table["media"])
        hashes = _flat(pc.struct_field(media, "perceptual_hash"))
        is_image = _flat(pc.equal(pc.struct_field(media, "kind"), "image"))
    except FileNotFoundError:
        return None
    except (pa.ArrowException, KeyError):
        logger.warning("%s: is damaged or foreign; the tar is read", _sidecar_url(dataset, shard))
        return None
    if table.num_rows != count:
        logger.warning(
            "%s: has %d samples, the shard %d; the tar is read",
            _sidecar_url(dataset, shard),
            table.num_rows,
            count,
        )
        return None
    images = np.flatnonzero(hashes.is_valid().to_numpy(zero_copy_only=False))
    texts, ids = _flat(table["text_xxh3"]), _flat(table["id"])
    has_id = ids.is_valid().to_numpy(zero_copy_only=False)
    file = _flat(table["file"]).dictionary_encode().indices.to_numpy()
    row = _flat(table["row"]).to_numpy()
    is_new = np.ones(count, dtype=np.bool_)
    is_new[1:] = (file[1:] != file[:-1]) | (row[1:] != row[:-1])
    return ShardContents(
        texts=_hashes(texts),
        has_text=texts.is_valid().to_numpy(zero_copy_only=False),
        ids=_hashes_of_ids(ids.to_pylist()),
        has_id=has_id,
        num_media=_num_media(table["media"], count),
        media=_hashes(_flat(pc.struct_field(media, "xxh3"))),
        images=images,
        perceptual=_bytes(hashes.drop_null(), HASH_BYTES),
        row_of_sample=np.cumsum(is_new),
        has_perceptual=bool(images.size) or not pc.any(is_image).as_py(),
    )


def _flat(column: Any) -> Any:
    """Return a column as one array; a column of lists as the array of all their items."""
    array = _array(column)
    return array.flatten() if pa.types.is_list(array.type) else array


def _array(column: Any) -> Any:
    """Return a column as one array."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array


def _num_media(column: Any, count: int) -> IntArray:
    lengths = _array(column).value_lengths().fill_null(0).to_numpy()
    return np.asarray(lengths, dtype=np.int64).reshape(count)


def _hashes(array: Any) -> Hashes:
    return _bytes(array.fill_null(bytes(16)), 16).view("<u8").astype(np.uint64, copy=False)


def _bytes(array: Any, width: int) -> npt.NDArray[np.uint8]:
    """Return a column of byte strings of equal length: uint8 [n, width]."""
    data = b"".join(array.to_pylist())
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, width)


def _sidecar_url(dataset: Dataset, shard: int) -> str:
    return dataset.store.url_of(sidecar_name(dataset.name_of(shard)))


def _hashes_of_ids(ids: Iterable[str | None]) -> Hashes:
    data = b"".join(bytes(16) if i is None else content_hash(i.encode()) for i in ids)
    return np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False).reshape(-1, 2)


@dataclass(frozen=True, slots=True)
class _Described:
    """The hashes of one sample of a tar."""

    text: bytes | None = None
    id: str | None = None
    media: tuple[bytes, ...] = ()
    perceptual: tuple[bytes | None, ...] = ()


def _read_tar(dataset: Dataset, shard: int, perceptual: bool, num_threads: int) -> ShardContents:
    samples = list(_described(dataset, shard, perceptual, num_threads))
    perceptual_hashes = [image for sample in samples for image in sample.perceptual]
    media = b"".join(medium for sample in samples for medium in sample.media)
    texts = b"".join(bytes(16) if sample.text is None else sample.text for sample in samples)
    return ShardContents(
        texts=_view(texts),
        has_text=np.array([sample.text is not None for sample in samples], dtype=np.bool_),
        ids=_hashes_of_ids(sample.id for sample in samples),
        has_id=np.array([sample.id is not None for sample in samples], dtype=np.bool_),
        num_media=np.array([len(sample.media) for sample in samples], dtype=np.int64),
        media=_view(media),
        images=np.flatnonzero([image is not None for image in perceptual_hashes]),
        perceptual=np.frombuffer(b"".join(filter(None, perceptual_hashes)), np.uint8).reshape(
            -1, HASH_BYTES
        ),
        row_of_sample=np.arange(len(samples)),
        has_perceptual=perceptual,
    )


def _view(data: bytes) -> Hashes:
    return np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False).reshape(-1, 2)


def _described(
    dataset: Dataset, shard: int, perceptual: bool, num_threads: int
) -> Iterator[_Described]:
    """Yield the hashes of each sample of a tar. Some samples for each thread are in memory."""
    name = dataset.name_of(shard)
    size = dataset.manifest.shards[shard].num_bytes
    samples = enumerate(
        read_samples(dataset.store, name, size, dataset.shards.offsets(shard), lambda _: None)
    )

    def describe(item: tuple[int, bytes]) -> _Described:
        index, data = item
        try:
            return _describe(dataset.shards.parse(data, shard, index), perceptual)
        except SampleError:
            return _Described()

    with ThreadPoolExecutor(num_threads) as pool:
        while batch := list(islice(samples, 4 * num_threads)):
            yield from pool.map(describe, batch)


def _describe(sample: Mapping[str, Any], perceptual: bool) -> _Described:
    names = fields_of_media(sample)
    text = text_of(sample)
    return _Described(
        text=None if text is None else content_hash(text),
        id=id_of(json_object(sample.get("json"))),
        media=tuple(content_hash(sample[name]) for name in names),
        perceptual=tuple(
            perceptual_hash(sample[name])
            if perceptual and name.rpartition(".")[2] in IMAGE_EXTENSIONS
            else None
            for name in names
        ),
    )


BUCKET = 1 << 22
"""Hashes that are sorted at a time. Sorting takes about 60 bytes for each of them."""


def equal_to_first(chunks: Sequence[Hashes]) -> tuple[IntArray, IntArray]:
    """Find the hashes that came before.

    The hashes are cut into buckets by their first bits, and sorted bucket by bucket. So besides the
    hashes themselves, the memory for one bucket is needed (about 250 MB), and 16 bytes for each
    hash that came before.

    Args:
        chunks: Hashes, numbered through from 0 over all chunks.

    Returns:
        (first, again): int64 [n] each. Hash ``again[i]`` equals hash ``first[i]``, the earliest of
        its kind. Sorted by `again`.

    Examples:
        >>> chunks = [np.array([[1, 1], [2, 2]], np.uint64), np.array([[2, 2], [2, 3]], np.uint64)]
        >>> first, again = equal_to_first(chunks)
        >>> first.tolist(), again.tolist()
        ([1], [2])
    """
    starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])
    num_bits = max(0, int(starts[-1]) // BUCKET).bit_length()
    firsts, agains = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for bucket in range(1 << num_bits):
        numbers, hashes = [np.zeros(0, np.int64)], [np.zeros((0, 2), np.uint64)]
        for start, chunk in zip(starts.tolist(), chunks, strict=False):
            chosen = np.arange(len(chunk))
            if num_bits:
                chosen = np.flatnonzero(chunk[:, 0] >> np.uint64(64 - num_bits) == bucket)
            numbers.append(chosen + start)
            hashes.append(chunk[chosen])
        first, again = _equal(np.concatenate(hashes), np.concatenate(numbers))
        firsts.append(first)
        agains.append(again)
    first, again = np.concatenate(firsts), np.concatenate(agains)
    order = np.argsort(again, kind="stable")
    return first[order], again[order]


def _equal(hashes: Hashes, numbers: IntArray) -> tuple[IntArray, IntArray]:
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: the earliest comes first
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
    entries: defaultdict[str, Entries] = field(default_factory=lambda: defaultdict(Entries))
    """By kind: "media", "text", "pair", "id", and "near", whose `hashes` are uint8 [n, 32]."""
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
    """
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
        ("text", contents.texts, contents.has_text),
        ("id", contents.ids, contents.has_id),
    ]
    if "pair" in kinds:
        columns.append(("pair", contents.pairs(), contents.has_pair))
    for kind, hashes, has_hash in columns:
        if kind in kinds:
            entries = corpus.entries[kind]
            chosen = np.flatnonzero(has_hash & is_usable)
            is_all = chosen.size == count
            entries.hashes.append(hashes if is_all else hashes[chosen])
            entries.samples.append(range(start, start + count) if is_all else chosen + start)
    sample = contents.sample_of_medium
    if "media" in kinds:
        chosen = np.flatnonzero(is_usable[sample])
        entries = corpus.entries["media"]
        entries.hashes.append(contents.media[chosen])
        one_each = chosen.size == count and corpus.num_media[-1] is None
        entries.samples.append(range(start, start + count) if one_each else sample[chosen] + start)
        entries.media.append(range(count) if one_each else chosen)
    if "near" in kinds:
        chosen = np.flatnonzero(is_usable[sample[contents.images]])
        media = contents.images[chosen]
        entries = corpus.entries["near"]
        entries.hashes.append(contents.perceptual[chosen])  # type: ignore[arg-type]
        entries.samples.append(sample[media] + start)
        entries.media.append(media)


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
    except (FileNotFoundError, OSError, ValueError, KeyError):  # of Arrow, too
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
