"""What the samples of a shard hold, as arrays of hashes. Read from its sidecar, or from its tar.

sidecars or tars -> CONTENTS -> equal hashes, near hashes -> duplicates, leaks
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mmstream.converting.quality.hashes import content_hash, text_of
from mmstream.converting.quality.perceptual_hash import HASH_BYTES, perceptual_hash
from mmstream.converting.sidecar import id_of, open_sidecar, sidecar_name
from mmstream.dataset.checksums import read_samples
from mmstream.dataset.dataset import Dataset
from mmstream.decoding.fields import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from mmstream.errors import SampleError
from mmstream.types import IntArray

__all__ = ["Hashes", "ShardContents", "fields_of_media", "read_contents"]

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
        read_samples(dataset.store, name, size, dataset.offsets(shard), lambda _: None)
    )

    def describe(item: tuple[int, bytes]) -> _Described:
        index, data = item
        try:
            return _describe(dataset.parse(data, shard, index), perceptual)
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
        id=_id_in_json(sample.get("json")),
        media=tuple(content_hash(sample[name]) for name in names),
        perceptual=tuple(
            perceptual_hash(sample[name])
            if perceptual and name.rpartition(".")[2] in IMAGE_EXTENSIONS
            else None
            for name in names
        ),
    )


def _id_in_json(data: object) -> str | None:
    if not isinstance(data, bytes):
        return None
    try:
        return id_of(msgspec.json.decode(data, type=dict[str, Any]))
    except (ValueError, RecursionError):
        return None
