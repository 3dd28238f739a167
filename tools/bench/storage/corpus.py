"""The data of `tools.bench.storage`: a few real tars that stand for many.

Eight tars lie on the server. The proxy gives each of them many names, so that a corpus of 1,000
shards costs no more room than these eight. Orders, windows and ranges are those of the large
corpus, because only the names and the manifest decide them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tools.bench.corpus import photographs
from tools.s3_server import Server

__all__ = ["NUM_TARS", "Bucket", "write_tars"]

NUM_TARS = 8
MIN_BYTES, MAX_BYTES = 60_000, 160_000
"""Of the JPEGs that are taken from a folder."""


def write_tars(folder: Path, samples_per_shard: int, images: Path | None) -> int:
    """Write tars of JPEGs and captions; return the mean size of a sample in the tar.

    Args:
        folder: Where the tars are written.
        samples_per_shard: Samples of each.
        images: A folder of JPEGs, of which those of 60 to 160 kB are taken. None: the photographs
            of the demo, scaled to 500x375.
    """
    from mmstream.tar.writer import TarWriter

    source = cycle(_jpegs(images) if images else [photo.jpeg for photo in photographs()])
    num_bytes = 0
    for shard in range(NUM_TARS):
        with Path(folder, f"tar-{shard}.tar").open("wb") as file:
            writer = TarWriter(file)
            for number, jpeg in enumerate(islice(source, samples_per_shard)):
                writer.add(f"{shard}-{number:06d}", {"jpg": jpeg, "txt": b"a caption"})
            writer.close()
            num_bytes += writer.num_bytes
    return num_bytes // (NUM_TARS * samples_per_shard)


def _jpegs(folder: Path) -> list[bytes]:
    paths = sorted(folder.rglob("*.jpg"))
    sized = (path for path in paths if MIN_BYTES <= path.stat().st_size <= MAX_BYTES)
    if jpegs := [path.read_bytes() for path in sized]:
        return jpegs
    raise SystemExit(f"{folder}: no JPEG of {MIN_BYTES} to {MAX_BYTES} bytes")


class Bucket:
    """The bucket of a server, readable for everybody, so that the proxy may rename objects."""

    def __init__(self, server: Server) -> None:
        from botocore.config import Config
        from botocore.session import Session

        self.name = server.bucket
        self.aliases: dict[str, str] = {}
        self._client: Any = Session().create_client(
            "s3",
            region_name=server.env["AWS_REGION"],
            endpoint_url=server.endpoint,
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
            config=Config(s3={"addressing_style": "path"}, max_pool_connections=8),
        )
        statement = {
            "Effect": "Allow",
            "Principal": "*",
            "Action": ["s3:GetObject", "s3:ListBucket"],
            "Resource": [f"arn:aws:s3:::{self.name}", f"arn:aws:s3:::{self.name}/*"],
        }
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        self._client.put_bucket_policy(Bucket=self.name, Policy=policy)

    def upload(self, folder: Path, prefix: str) -> None:
        """Upload all files of a folder and its subfolders."""
        paths = [path for path in folder.rglob("*") if path.is_file()]

        def put(path: Path) -> None:
            with path.open("rb") as file:
                key = f"{prefix}/{path.relative_to(folder)}"
                self._client.put_object(Bucket=self.name, Key=key, Body=file)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(put, paths))

    def add_names(self, prefix: str, names: Iterable[tuple[str, str]]) -> None:
        """Add names under a prefix: (name, object that has the bytes)."""
        for name, target in names:
            self.aliases[f"{self.name}/{prefix}/{name}"] = f"{self.name}/{target}"
