"""MosaicML Streaming: its MDS shards, StreamingDataset and StreamingDataLoader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmstream._torchvision import import_torchvision
from tools.bench.peers.runners.stored import Settings, close_connections, dataloader_batches, serve

import_torchvision()

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


def prepare(corpus: str, folder: str, num_names: int) -> dict[str, str]:
    """Write MDS shards of the default size, and name them again and again."""
    from mmstream import open_dataset

    with MDSWriter(out=folder, columns={"jpg": "bytes", "txt": "bytes"}) as out:
        for sample in open_dataset(corpus):
            out.write({"jpg": bytes(sample["jpg"]), "txt": bytes(sample["txt"])})
    path = Path(folder, "index.json")
    index = json.loads(path.read_text())
    shards, names = index["shards"], {}
    index["shards"] = []
    for number in range(num_names):
        shard = shards[number % len(shards)]
        name = f"shard.{number + len(shards):05d}.mds"
        names[name] = shard["raw_data"]["basename"]
        index["shards"].append({**shard, "raw_data": {**shard["raw_data"], "basename": name}})
    path.write_text(json.dumps(index))
    return names


def make(settings: Settings) -> Iterator[Any]:
    """Yield lists of samples."""
    clean_stale_shared_memory()  # of earlier runs, as its documentation advises
    dataset = StreamingDataset(
        remote=f"s3://{settings.bucket}/{settings.prefix}",
        local=f"{settings.scratch}/cache",
        shuffle=True,
        shuffle_seed=0,
        batch_size=settings.batch_size,
        **dict(settings.arguments),
    )
    close_connections()
    return dataloader_batches(StreamingDataLoader, dataset, settings)


if __name__ == "__main__":
    serve(prepare, make)
