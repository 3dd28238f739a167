"""Hugging Face datasets: its streaming builder of WebDataset tars in torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from datasets import Image, load_dataset
from torch.utils.data import DataLoader

from tools.bench.peers.runners.stored import Settings, Stamp, as_list, serve

SHUFFLE_BUFFER = 1000


def prepare(_corpus: str, _folder: str, _num_names: int) -> dict[str, str]:
    """Nothing is needed."""
    return {}


def make(settings: Settings) -> Iterator[Any]:
    """Yield lists of samples."""
    urls = [f"s3://{settings.bucket}/{settings.prefix}/{name}" for name in settings.names]
    files = {"train": urls}
    dataset = load_dataset("webdataset", data_files=files, split="train", streaming=True)
    dataset = dataset.cast_column("jpg", Image(decode=False))
    dataset = dataset.shuffle(seed=0, buffer_size=SHUFFLE_BUFFER)
    return iter(
        DataLoader(
            dataset,
            batch_size=settings.batch_size,
            num_workers=settings.num_workers,
            collate_fn=as_list,
            worker_init_fn=Stamp(settings.scratch),
        )
    )


if __name__ == "__main__":
    serve(prepare, make)
