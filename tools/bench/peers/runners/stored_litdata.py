"""LitData: its optimized chunks, StreamingDataset and StreamingDataLoader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmstream._torchvision import import_torchvision
from tools.bench.peers.runners.stored import Settings, dataloader_batches, serve

import_torchvision()

from litdata import StreamingDataLoader, StreamingDataset, optimize  # noqa: E402
from litdata.streaming import downloader  # noqa: E402

# litdata's obstore refuses a server without TLS otherwise.
downloader._OBSTORE_CLIENT_OPTIONS = {**downloader._OBSTORE_CLIENT_OPTIONS, "allow_http": True}


def samples_of(corpus: str) -> Iterator[dict[str, Any]]:
    """Yield the fields of each sample."""
    from mmstream import open_dataset

    for sample in open_dataset(corpus):
        yield {"jpg": bytes(sample["jpg"]), "txt": bytes(sample["txt"]).decode()}


def prepare(corpus: str, folder: str, num_names: int) -> dict[str, str]:
    """Write chunks of the size in its documentation, and name them again and again."""
    optimize(fn=samples_of, inputs=[corpus], output_dir=folder, chunk_bytes="64MB", num_workers=1)
    path = Path(folder, "index.json")
    index = json.loads(path.read_text())
    chunks, names = index["chunks"], {}
    index["chunks"] = []
    for number in range(num_names):
        chunk = chunks[number % len(chunks)]
        name = f"chunk-0-{number + len(chunks)}.bin"
        names[name] = chunk["filename"]
        index["chunks"].append({**chunk, "filename": name})
    path.write_text(json.dumps(index))
    return names


def make(settings: Settings) -> Iterator[Any]:
    """Yield lists of samples."""
    dataset = StreamingDataset(
        f"s3://{settings.bucket}/{settings.prefix}",
        cache_dir=f"{settings.scratch}/cache",
        shuffle=True,
        drop_last=True,
        seed=0,
        max_cache_size="8GB",
        **dict(settings.arguments),
    )
    return dataloader_batches(StreamingDataLoader, dataset, settings, _as_bytes)


def _as_bytes(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return samples without views of chunks, which a worker cannot send."""
    return [{"jpg": bytes(sample["jpg"]), "txt": sample["txt"]} for sample in samples]


if __name__ == "__main__":
    serve(prepare, make)
