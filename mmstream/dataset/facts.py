"""The facts of a shard: what lengths depend on, without pixels. ``NAME.tar.facts``.

Facts hold the samples of a shard, in order, with their texts as they are. In place of a picture
stands the header of a JPEG, of the same upright size. So whatever counts tokens takes facts as it
takes samples, and reads about a hundredth of the bytes.

A sample that has more than texts and pictures, such as a video, is missing in the facts. It must be
read from its shard.

The file is zlib-compressed MessagePack::

    [1, crc32c of name and index, crc32c of checksums, [[key, {"0.jpg": header, ...}], null, ...]]

    index_tars, convert -> FACTS -> measure
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from crc32c import crc32c
from tqdm import tqdm

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index import Checksums, index_checksum
from mmstream.errors import DecodeError, ShardError
from mmstream.media.fields import MAX_TEXT_BYTES
from mmstream.media.types import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from mmstream.processes.run import run_in_processes
from mmstream.types import IntArray, Sample, SampleLineage, SampleRef

COMPRESSION = 1
"""Level of zlib. Higher levels take longer and save little."""

EXTRA_BYTES = 1 << 20
"""Facts are no longer than their shard and this."""


class Fact(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The facts of a sample.

    The garbage collector leaves it alone: it is in no cycle, and a shard has thousands of them.
    """

    key: str
    fields: dict[str, bytes]
    """Its files: texts, and headers in place of pictures."""

    def sample(self, url: str, ref: SampleRef) -> Sample:
        """Return the facts as the sample that a dataset would read.

        Args:
            url: Of the shard.
            ref: (shard, index) of the sample.
        """
        lineage = SampleLineage(*ref)
        return {"__key__": self.key, "__url__": url, **self.fields, "__lineage__": lineage}


class _File(msgspec.Struct, array_like=True):
    """The content of a file of facts."""

    version: int
    index_crc32c: int
    """CRC-32C of the shard's name and index."""
    checksums_crc32c: int | None
    """CRC-32C of the checksums of its samples. None: it had none."""
    samples: list[Fact | None]


def facts_name(name: str) -> str:
    """Return the name of the facts of a shard: ``a.tar`` -> ``a.tar.facts``."""
    return f"{name}.facts"


class FactsWriter:
    """Collects the facts of a shard, sample by sample. They are in memory until `close`."""

    def __init__(self) -> None:
        self._samples: list[Fact | None] = []

    def add(self, key: str, fields: Mapping[str, Any] | None) -> None:
        """Add the next sample of the shard.

        Args:
            key: Of the sample.
            fields: Its files. None: it cannot be read.
        """
        self._samples.append(None if fields is None else fact_of(key, fields))

    def close(
        self,
        name: str,
        offsets: Sequence[int] | IntArray,
        checksums: Sequence[int] | Checksums | None,
    ) -> bytes:
        """Return the bytes of the file.

        Args:
            name: Of the shard.
            offsets: Its index.
            checksums: Of its samples. None: it has none.
        """
        content = _File(1, *_identity(name, offsets, checksums), self._samples)
        return zlib.compress(msgspec.msgpack.encode(content), COMPRESSION)


def fact_of(key: str, fields: Mapping[str, Any]) -> Fact | None:
    """Return the facts of a sample.

    Args:
        key: Of the sample.
        fields: Its files, by name. Names like ``__key__`` do not count.

    Returns:
        None where it has more than texts and pictures: a video, a recording, or another file of
        more than a mebibyte.
    """
    kept: dict[str, bytes] = {}
    for name, data in fields.items():
        if name.startswith("__"):
            continue
        kind = name.rpartition(".")[2]
        if kind in VIDEO_EXTENSIONS or kind in AUDIO_EXTENSIONS or not isinstance(data, bytes):
            return None
        if kind in IMAGE_EXTENSIONS:
            data = header_of(data)
        if len(data) > MAX_TEXT_BYTES:
            return None
        kept[name] = data
    return Fact(key, kept)


def header_of(picture: bytes) -> bytes:
    """Return a header of the same upright size, or the picture where its own header is odd.

    Examples:
        >>> import io
        >>> from PIL import Image
        >>> from mmstream.media.image import header_shape
        >>> from mmstream.media.limits import Limits
        >>> file = io.BytesIO()
        >>> Image.new("RGB", (640, 480)).save(file, "PNG")
        >>> header = header_of(file.getvalue())
        >>> len(header), header_shape(header, Limits.start())
        (35, (480, 640))
    """
    from mmstream.media.image import header_shape  # with Pillow, where pictures are read
    from mmstream.media.limits import MAX_SIDE, Limits

    try:
        shape = header_shape(picture, Limits.start(1 << 40, 1 << 50, None))
    except DecodeError:
        return picture
    if shape is None or not 0 < min(shape) <= max(shape) <= MAX_SIDE:
        return picture
    return _START + struct.pack(">HH", *shape) + _COMPONENTS + _SCAN


_START = b"\xff\xd8\xff\xc0\0\x11\x08"
"""Start of image, and of a frame: length 17, 8 bits. Height and width follow."""
_COMPONENTS = b"\3\1\x11\0\2\x11\0\3\x11\0"
_SCAN = b"\xff\xda\0\x0c\3\1\0\2\0\3\0\0\x3f\0"
"""Start of scan, where a reader of sizes ends."""


def read_facts(dataset: Dataset, shard: int) -> list[Fact | None]:
    """Return the facts of the samples of a shard. None: the sample must be read from the shard.

    Raises:
        FileNotFoundError: The shard has no facts.
        ShardError: They are damaged, or of another shard.
        StorageError: The storage failed after retries.
    """
    dataset, shard = dataset.own(shard)
    shard_name = dataset.name_of(shard)
    name = facts_name(shard_name)
    most = dataset.manifest.shards[shard].num_bytes + EXTRA_BYTES
    data = dataset.index_store.read(name, most)
    columns = dataset.shards.indexes.columns(shard)
    index_crc32c, checksums_crc32c = _identity(shard_name, columns.offsets(), columns.checksums)
    file = _decode(data, most)
    if (
        file is None
        or file.version != 1
        or len(file.samples) != columns.lengths.size
        or file.index_crc32c != index_crc32c
        or (
            None not in (checksums_crc32c, file.checksums_crc32c)
            and file.checksums_crc32c != checksums_crc32c
        )
    ):
        raise ShardError(
            f"{name}: damaged, or of another shard; run `mmstream index --facts --overwrite`"
        )
    return file.samples


def _decode(data: bytes, max_bytes: int) -> _File | None:
    """Return the content of a file. None: it is damaged, or longer than facts can be."""
    decompress = zlib.decompressobj()
    try:
        unpacked = decompress.decompress(data, max_bytes)
        return msgspec.msgpack.decode(unpacked, type=_File) if decompress.eof else None
    except (zlib.error, msgspec.MsgspecError, RecursionError):
        return None


def empty_facts(
    dataset: Dataset, shard: int, indexes: Sequence[int], checksums: Checksums | None
) -> bytes:
    """Return the facts of a shard without those of some samples, as bytes of the file.

    Facts that are damaged or of another shard have none afterwards.

    Args:
        dataset: Of the shard, as it was before its checksums changed.
        shard: Position of the shard.
        indexes: Samples that must be read from the shard from now on.
        checksums: Of all its samples now.
    """
    name, columns = dataset.name_of(shard), dataset.shards.indexes.columns(shard)
    offsets, most = columns.offsets(), dataset.manifest.shards[shard].num_bytes + EXTRA_BYTES
    identities = [_identity(name, offsets, column) for column in (columns.checksums, checksums)]
    file = _decode(dataset.index_store.read(facts_name(name), most), most)
    writer = FactsWriter()
    writer._samples = [None] * columns.lengths.size
    if (
        file is not None
        and len(file.samples) == len(writer._samples)
        and (file.index_crc32c, file.checksums_crc32c)
        in (*identities, _identity(name, offsets, None))
    ):
        writer._samples = [
            None if index in indexes else fact for index, fact in enumerate(file.samples)
        ]
    return writer.close(name, offsets, checksums)


def write_facts(
    dataset: Dataset,
    *,
    overwrite: bool = False,
    num_workers: int = 1,
    progress: bool = True,
) -> int:
    """Write the facts of all shards that have none. They lie beside the indexes.

    Args:
        dataset: Whose shards are read, all bytes of them.
        overwrite: Write those too that exist already.
        num_workers: Processes.
        progress: Show a progress bar (on a terminal only).

    Returns:
        The number of shards whose facts were written.

    Raises:
        ShardError, StorageError: A shard cannot be read.
        MMStreamError: A process died. The facts that are written are kept.
    """
    existing = {} if overwrite else dataset.index_store.list()
    jobs = [
        (dataset, shard)
        for shard in range(dataset.num_shards)
        if facts_name(dataset.name_of(shard)) not in existing
    ]
    num_samples = sum(int(dataset.counts[shard]) for _, shard in jobs)
    is_hidden = None if progress else True
    with tqdm(
        total=num_samples, unit=" samples", unit_scale=True, desc="facts", disable=is_hidden
    ) as bar:
        for (_, shard), _ in run_in_processes(_write, jobs, num_workers, command="index"):
            bar.update(int(dataset.counts[shard]))
    return len(jobs)


def _write(job: tuple[Dataset, int]) -> None:
    """Write the facts of a shard."""
    (dataset, shard), writer = job, FactsWriter()
    for sample in dataset.shards.samples(shard, np.arange(dataset.counts[shard])):
        if isinstance(sample, dict):
            writer.add(sample["__key__"], sample)
        else:
            writer.add("", None)
    name, columns = dataset.name_of(shard), dataset.shards.indexes.columns(shard)
    data = writer.close(name, columns.offsets(), columns.checksums)
    dataset.index_store.write(facts_name(name), data)


def _identity(
    name: str, offsets: Sequence[int] | IntArray, checksums: Sequence[int] | Checksums | None
) -> tuple[int, int | None]:
    """Return what tells a shard from others: CRC-32C of name and index, and of checksums."""
    of_index = index_checksum(name, offsets)
    if checksums is None:
        return of_index, None
    return of_index, int(crc32c(np.asarray(checksums, dtype="<u4").tobytes()))
