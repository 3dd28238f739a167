"""Hugging Face datasets: its streaming builder of WebDataset tars in torch's DataLoader."""

from __future__ import annotations

from typing import Any

from datasets import Image, load_dataset
from torch.utils.data import DataLoader

from tools.bench.peers.runners.decoded import Prepared, Settings, sample_work, serve
from tools.bench.peers.runners.tars import link_tars, tars_in


def make(folder: str, settings: Settings) -> Any:
    """Return a new loader."""
    work = sample_work(settings)

    def prepare_sample(sample: dict[str, Any]) -> Prepared:
        image = sample["jpg"]  # decoded by the library, or its bytes
        return work(image["bytes"] if isinstance(image, dict) else image, sample["txt"])

    files = {"train": tars_in(folder)}
    dataset = load_dataset("webdataset", data_files=files, split="train", streaming=True)
    if settings.work == "mmstream":
        dataset = dataset.cast_column("jpg", Image(decode=False))
    dataset = dataset.shuffle(seed=0, buffer_size=settings.shuffle_buffer)
    dataset = dataset.map(prepare_sample, remove_columns=["__key__", "__url__", "jpg", "txt"])
    return DataLoader(
        dataset,
        batch_size=settings.batch_size,
        num_workers=settings.num_workers,
        drop_last=True,
    )


if __name__ == "__main__":
    serve(link_tars, make)
