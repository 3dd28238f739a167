"""Hugging Face datasets: its streaming builder of WebDataset tars in torch's DataLoader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import fsspec
from datasets import Image, load_dataset
from s3fs import S3FileSystem
from torch.utils.data import DataLoader

from tools.bench.peers.runners.stored import Settings, dataloader_batches, serve

SHUFFLE_BUFFER = 1000


class _S3(S3FileSystem):  # type: ignore[misc]
    """s3fs that takes an argument of which it knows nothing.

    datasets 5.2.0 gives ``block_size=0`` to every file system, and s3fs 2026.9 hands it on to
    aiobotocore, which refuses it. So no tar could be read without this class.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("block_size", None)
        super().__init__(*args, **kwargs)


fsspec.register_implementation("s3", _S3, clobber=True)


def prepare(_corpus: str, _folder: str, _num_names: int) -> dict[str, str]:
    """Nothing is needed."""
    return {}


def make(settings: Settings) -> Iterator[Any]:
    """Yield lists of samples."""
    files: Any = f"s3://{settings.bucket}/{settings.prefix}/*.tar"
    if ("http", True) in settings.arguments:
        address = f"{os.environ['AWS_ENDPOINT_URL']}/{settings.bucket}/{settings.prefix}"
        files = [f"{address}/{name}" for name in settings.names]
    dataset = load_dataset("webdataset", data_files={"train": files}, split="train", streaming=True)
    dataset = dataset.cast_column("jpg", Image(decode=False))
    dataset = dataset.shuffle(seed=0, buffer_size=SHUFFLE_BUFFER)
    return dataloader_batches(DataLoader, dataset, settings)


if __name__ == "__main__":
    serve(prepare, make)
