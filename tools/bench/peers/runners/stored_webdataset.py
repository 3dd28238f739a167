"""webdataset: shards through ``curl``, as its documentation says, or through s3torchconnector."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import webdataset as wds

from tools.bench.peers.runners.stored import Settings, Stamp, as_list, serve

SHUFFLE_BUFFER = 1000


def prepare(_corpus: str, _folder: str, _num_names: int) -> dict[str, str]:
    """Nothing is needed."""
    return {}


def make(settings: Settings) -> Iterator[Any]:
    """Yield lists of samples, batched in the workers."""
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    address = f"{endpoint}/{settings.bucket}/{settings.prefix}"
    urls = [f"pipe:curl -s -f {address}/{name}" for name in settings.names]
    if ("connector", True) in settings.arguments:
        urls = [f"crt://{settings.bucket}/{settings.prefix}/{name}" for name in settings.names]
        schemes: dict[str, Any] = wds.gopen_schemes
        schemes["crt"] = _open_with_connector
    dataset = wds.WebDataset(urls, shardshuffle=100, seed=0).repeat()
    dataset = dataset.shuffle(SHUFFLE_BUFFER).batched(settings.batch_size, collation_fn=as_list)
    return iter(
        wds.WebLoader(
            dataset,
            batch_size=None,
            num_workers=settings.num_workers,
            worker_init_fn=Stamp(settings.scratch),
        )
    )


def _open_with_connector(url: str, _mode: str = "rb", _buffer: int = 0, **_: Any) -> Any:
    """Return the stream of one object, from AWS' connector for torch."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    bucket, key = url.removeprefix("crt://").split("/", 1)
    client = S3Client(
        os.environ["AWS_REGION"],
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    return client.get_object(bucket, key)


if __name__ == "__main__":
    serve(prepare, make)
