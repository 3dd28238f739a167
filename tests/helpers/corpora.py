"""Small real corpora for the tests: tars with JPEGs, captions and JSON."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index import checksums_name, encode_checksums, encode_index, index_name
from mmstream.dataset.manifest import MANIFEST_NAME, Manifest, ShardInfo
from mmstream.storage import open_store
from mmstream.tar.writer import TarWriter


def jpeg(number: int, size: tuple[int, int] = (40, 30)) -> bytes:
    """A small JPEG whose colours depend on the number."""
    pixels = np.random.default_rng(number).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def captioned(number: int) -> dict[str, bytes]:
    """The fields of a good sample."""
    text = f"caption {number} " + "word " * (number % 7)
    return {
        "jpg": jpeg(number),
        "txt": text.encode(),
        "json": json.dumps({"id": number}).encode(),
    }


def write_shard(
    folder: str | Path,
    name: str,
    samples: Sequence[tuple[str, dict[str, bytes]]],
    *,
    checksums: bool = False,
) -> ShardInfo:
    """Write a shard, its index and, if wanted, its checksums; return its line of the manifest."""
    store = open_store(folder)
    with store.create(name) as file:
        writer = TarWriter(file)
        for key, fields in samples:
            writer.add(key, fields)
        writer.close()
    index = encode_index(writer.offsets)
    store.write(index_name(name), index)
    if checksums:
        store.write(checksums_name(name), encode_checksums(writer.checksums, index))
    return ShardInfo(name, len(samples), writer.num_bytes)


def write_corpus(
    folder: str | Path,
    counts: Sequence[int],
    fields_of: Callable[[int], dict[str, bytes]] = captioned,
    *,
    checksums: bool = False,
) -> str:
    """Write a whole dataset of so many samples a shard; return its folder."""
    number, shards = 0, []
    for shard, count in enumerate(counts):
        samples = [(f"{n:06d}", fields_of(n)) for n in range(number, number + count)]
        shards.append(write_shard(folder, f"shard-{shard:06d}.tar", samples, checksums=checksums))
        number += count
    manifest = Manifest(tuple(shards), checksums="written" if checksums else None)
    open_store(folder).write(MANIFEST_NAME, manifest.to_bytes())
    return str(folder)


def write_checksums(folder: str) -> str:
    """Write the sha256 of every shard into the manifest of a corpus; return its folder."""
    path = Path(folder, MANIFEST_NAME)
    manifest = Manifest.from_bytes(path.read_bytes())
    shards = tuple(
        replace(shard, sha256=hashlib.sha256(Path(folder, shard.name).read_bytes()).hexdigest())
        for shard in manifest.shards
    )
    path.write_bytes(replace(manifest, shards=shards).to_bytes())
    return folder


def equal_samples(num_samples: int, sample_bytes: int) -> Dataset:
    """A dataset on paper, without bytes, as if it lay in object storage."""
    of_shard = min(num_samples, max(1, 500_000_000 // sample_bytes))
    num_full, rest = divmod(num_samples, of_shard)
    counts = [of_shard] * num_full + [rest] * (rest > 0)
    shards = tuple(
        ShardInfo(f"shard-{number:06d}.tar", count, count * sample_bytes)
        for number, count in enumerate(counts)
    )
    return Dataset(Manifest(shards), open_store("s3://planned/corpus"))
