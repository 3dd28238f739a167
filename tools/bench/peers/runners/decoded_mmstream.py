"""mmstream: the tars as they are, shuffled, with its defaults."""

from __future__ import annotations

from typing import Any

from mmstream import Decode, Loader, Normalize, Pipeline, open_dataset, to_device
from tools.bench.peers.runners.decoded import (
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
        decode=Decode(image=image_decoder(settings), text=text_decoder(settings)),
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


if __name__ == "__main__":
    serve(prepare, make)
