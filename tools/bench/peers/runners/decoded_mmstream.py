"""mmstream: the tars as they are, shuffled, with its defaults."""

from __future__ import annotations

from typing import Any

import torch

from mmstream import Decode, Loader, Normalize, Pipeline, open_dataset, to_device
from tools.bench.peers.runners.decoded import (
    MAX_LENGTH,
    MEAN,
    STD,
    Settings,
    image_decoder,
    serve,
    text_decoder,
)
from tools.bench.peers.runners.tars import link_tars


def make(folder: str, settings: Settings) -> Any:
    """Return a new loader."""
    pipeline = Pipeline(
        open_dataset(folder),
        global_batch_size=settings.batch_size,
        decode=Decode(
            image=image_decoder(settings),
            text=text_decoder(settings) if settings.has_text else None,
        ),
    )
    loader = Loader(pipeline, num_workers=settings.num_workers, num_threads=settings.num_threads)
    if settings.normalize:
        return to_device(loader, "cpu", normalize=Normalize(MEAN, STD))
    return loader


def prepare(corpus: str, folder: str) -> None:
    """Link the tars and write an index and a manifest, as a conversion does."""
    from mmstream.dataset.index_tars import index_tars

    link_tars(corpus, folder)
    index_tars(folder, progress=False)


def fields(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and token ids, which are empty where texts are left out."""
    images = batch["image"]
    return images, batch.get("input_ids", torch.zeros(len(images), MAX_LENGTH))


if __name__ == "__main__":
    serve(prepare, make, fields)
