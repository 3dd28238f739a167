"""Hugging Face datasets in `tools.bench.compare_grid`: streaming with split_dataset_by_node.

The variable GRID_VARIANT is "stock" or "filtered". "stock": the library decodes the images and
stops at a bad one. "filtered": a user's function decodes them and drops bad samples.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Image, load_dataset
from datasets.distributed import split_dataset_by_node
from PIL import Image as Pillow
from torch.utils.data import DataLoader

from tools.bench.peers.runners.grid import GLOBAL_BATCH, Cell, Delivered, serve


def is_readable(sample: dict[str, Any]) -> bool:
    """Return whether an image can be decoded, as users write it to drop bad samples."""
    try:
        Pillow.open(io.BytesIO(sample["jpg"]["bytes"])).load()
    except Exception:
        return False
    return True


def keys_of(samples: list[dict[str, Any]]) -> list[str]:
    """Collate samples to their keys."""
    return [sample["__key__"] for sample in samples]


def batches(corpus: str, cell: Cell) -> Iterator[Delivered]:
    """Yield the batches of this rank in one epoch."""
    tars = sorted(str(path) for path in Path(corpus).glob("*.tar"))
    dataset = load_dataset("webdataset", data_files={"train": tars}, split="train", streaming=True)
    if os.environ.get("GRID_VARIANT") == "filtered":
        dataset = dataset.cast_column("jpg", Image(decode=False)).filter(is_readable)
    dataset = dataset.shuffle(seed=0, buffer_size=100)
    dataset = split_dataset_by_node(
        dataset, rank=int(os.environ["RANK"]), world_size=cell.world_size
    )
    loader = DataLoader(
        dataset,
        batch_size=GLOBAL_BATCH // cell.world_size,
        num_workers=cell.num_workers,
        collate_fn=keys_of,
    )
    for keys in loader:
        yield Delivered(list(keys))


if __name__ == "__main__":
    serve(batches)
