"""No loader: a raw client that reads ranges of the tars, as many at a time as it has connections.

The name of the client comes before the command: ``obstore`` or ``boto3``.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

from tools.bench.peers.runners.stored import Settings, serve

PAUSE_S = 0.1
"""After a range that failed for good. The next one is another range."""


def prepare(_corpus: str, _folder: str, _num_names: int) -> dict[str, str]:
    """Nothing is needed."""
    return {}


def make_obstore(settings: Settings) -> Iterator[int]:
    """Yield the bytes of each range, read by obstore in one event loop."""
    from obstore.store import S3Store

    store = S3Store(
        settings.bucket,
        prefix=settings.prefix,
        client_options={"allow_http": True},
        virtual_hosted_style_request=False,
    )
    done: Queue[int] = Queue(settings.num_connections)

    async def read_forever(ranges: Iterator[tuple[str, int]]) -> None:
        for name, start in ranges:
            try:
                data = await store.get_range_async(name, start=start, length=settings.range_bytes)
            except Exception as error:  # after its own retries
                print(f"obstore: {error!r}"[:200], file=sys.stderr)
                await asyncio.sleep(PAUSE_S)
            else:
                done.put(len(data))

    async def read_all() -> None:
        readers = (read_forever(_ranges(settings, n)) for n in range(settings.num_connections))
        await asyncio.gather(*readers)

    threading.Thread(target=lambda: asyncio.run(read_all()), daemon=True).start()
    while True:
        yield done.get()


def make_boto3(settings: Settings) -> Iterator[int]:
    """Yield the bytes of each range, read by boto3 in one thread a connection."""
    import boto3
    from botocore.config import Config

    config = Config(max_pool_connections=settings.num_connections, s3={"addressing_style": "path"})
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], config=config)
    done: Queue[int] = Queue(settings.num_connections)

    def read_forever(ranges: Iterator[tuple[str, int]]) -> None:
        for name, start in ranges:
            answer = client.get_object(
                Bucket=settings.bucket,
                Key=f"{settings.prefix}/{name}",
                Range=f"bytes={start}-{start + settings.range_bytes - 1}",
            )
            done.put(len(answer["Body"].read()))

    for number in range(settings.num_connections):
        ranges = _ranges(settings, number)
        threading.Thread(target=read_forever, args=(ranges,), daemon=True).start()
    while True:
        yield done.get()


def _ranges(settings: Settings, number: int) -> Iterator[tuple[str, int]]:
    """Yield (name, start) of ranges anywhere in the tars, for one of the connections."""
    draw = random.Random(number)
    shard_bytes = dict(settings.arguments)["shard_bytes"]
    while True:
        yield draw.choice(settings.names), draw.randrange(shard_bytes - settings.range_bytes)


MAKE: dict[str, Any] = {"obstore": make_obstore, "boto3": make_boto3}

if __name__ == "__main__":
    client = sys.argv.pop(1)
    serve(prepare, MAKE[client], int)
