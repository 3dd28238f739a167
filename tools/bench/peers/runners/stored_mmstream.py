"""mmstream: an indexed corpus, with its defaults."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmstream import BadSamplePolicy, Decode, ImageDecoder, Loader, Pipeline, open_dataset
from tools.bench.peers.runners.stored import LATE, Settings, Stamp, serve, tar_name

LOADERS: list[Any] = []

LATE_FIGURES: dict[str, Any] = {}
"""Samples and CPU seconds of each kind of process, when the late part of the run began."""


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
    policy = BadSamplePolicy()
    # Workers unpickle it and the reader process does not. A transform would cost a call a sample.
    object.__setattr__(policy, "stamp", stamp)
    own: dict[str, Any] = {"bad_samples": policy}
    if settings.decoded:
        own["decode"] = Decode(image=ImageDecoder(size=224))
    pipeline = Pipeline(
        open_dataset(url),
        global_batch_size=settings.batch_size,
        **own,
        **dict(settings.arguments),
    )
    loader = Loader(pipeline, num_workers=settings.num_workers)
    LOADERS.append(loader)
    makers = getattr(loader, "_makers", None)  # other versions have none
    if makers is not None and not makers.settings.num_workers:  # raw samples need no worker
        for number in range(settings.num_workers):
            stamp.stamp(f"{number}")
    late_from: float | None = None
    while True:
        for batch in loader:
            now = time.monotonic()
            late_from = late_from or now + LATE * settings.seconds
            if now >= late_from and not LATE_FIGURES:
                LATE_FIGURES.update(_figures(loader))
            yield batch


def stats() -> dict[str, Any]:
    """Return what the loader counted, and CPU seconds for a late sample by kind of process."""
    loader = LOADERS[0]
    counted = vars(loader.stats)
    figures = {name: value for name, value in counted.items() if isinstance(value, int | float)}
    if LATE_FIGURES:
        now = _figures(loader)
        num_samples = max(1, now.pop("samples") - LATE_FIGURES["samples"])
        for name, seconds in now.items():
            figures[f"{name}_cpu_s_per_sample"] = (seconds - LATE_FIGURES[name]) / num_samples
    return {"stats": figures}


def _figures(loader: Loader) -> dict[str, Any]:
    return {"samples": loader.stats.num_samples, **loader.cpu_seconds()}


if __name__ == "__main__":
    serve(prepare, make, lambda batch: len(batch["__valid__"]), stats)
