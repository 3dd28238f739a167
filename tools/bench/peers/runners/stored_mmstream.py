"""mmstream: an indexed corpus, with its defaults."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmstream import Decode, ImageDecoder, Loader, Pipeline, collate, open_dataset
from tools.bench.peers.runners.stored import Settings, Stamp, serve, tar_name

LOADERS: list[Any] = []


class StampedCollate:
    """The default collate of raw samples, with a `Stamp`: a transform would cost a call a sample.

    Args:
        stamp: it stamps where it is unpickled.
    """

    def __init__(self, stamp: Stamp) -> None:
        self._stamp = stamp

    def __call__(self, samples: list[Any]) -> Any:
        """Return a batch."""
        return collate(samples)


def prepare(corpus: str, folder: str, num_names: int) -> dict[str, str]:
    """Index as many tars as there are names: each is a link to one of the corpus."""
    from mmstream.dataset.index_tars import index_tars

    tars = sorted(path.name for path in Path(corpus).glob("*.tar"))
    names = {tar_name(number): tars[number % len(tars)] for number in range(num_names)}
    for name, tar in names.items():
        os.link(Path(corpus, tar), Path(folder, name))
    index_tars(folder, progress=False)
    for name in names:
        Path(folder, name).unlink()
    return names


def make(settings: Settings) -> Iterator[Any]:
    """Yield batches of epoch after epoch."""
    url = settings.local or f"s3://{settings.bucket}/{settings.prefix}"
    stamp = Stamp(settings.scratch)
    own: dict[str, Any] = {"collate": StampedCollate(stamp)}
    if settings.decoded:
        own = {"decode": Decode(image=ImageDecoder(size=224)), "transforms": (stamp,)}
    pipeline = Pipeline(
        open_dataset(url),
        global_batch_size=settings.batch_size,
        **own,
        **dict(settings.arguments),
    )
    loader = Loader(pipeline, num_workers=settings.num_workers)
    LOADERS.append(loader)
    while True:
        yield from loader


def stats() -> dict[str, Any]:
    """Return what the loader counted."""
    counted = vars(LOADERS[0].stats)
    return {
        "stats": {name: value for name, value in counted.items() if isinstance(value, int | float)}
    }


if __name__ == "__main__":
    serve(prepare, make, lambda batch: len(batch["__valid__"]), stats)
