"""SPDL: its reader of tars, its pipeline of threads, and FFmpeg to decode and resize.

It has no shuffle for tars. So the tars come in a random order, and samples pass through a buffer,
as those of webdataset do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from spdl.io import get_video_filter_desc, iter_tarfile, load_image_batch, to_numpy
from spdl.pipeline import PipelineBuilder

from tools.bench.peers.runners.decoded import (
    RESIZE_SIZE,
    SIZE,
    Prepared,
    Settings,
    sample_work,
    serve,
    tokens_of_batch,
)
from tools.bench.peers.runners.tars import link_tars, tars_in

Raw = dict[str, bytes]


def shuffled_samples(tars: list[str], buffer_size: int) -> Iterator[Raw]:
    """Yield the files of each sample by their endings, through a buffer that shuffles."""
    rng = random.Random(0)
    rng.shuffle(tars)
    held: list[Raw] = []
    for tar in tars:
        sample: Raw = {}
        for name, view in iter_tarfile(Path(tar).read_bytes()):
            sample[name.rpartition(".")[2]] = bytes(view)
            if len(sample) < 2:
                continue
            held.append(sample)
            sample = {}
            if len(held) > buffer_size:
                position = rng.randrange(len(held))
                held[position], held[-1] = held[-1], held[position]
                yield held.pop()
    rng.shuffle(held)
    yield from held


def native_work(settings: Settings) -> Callable[[list[Raw]], Prepared]:
    """Return a function that decodes a batch with SPDL."""
    tokenize = tokens_of_batch(settings)
    steps = get_video_filter_desc(
        scale_width=RESIZE_SIZE,
        scale_height=RESIZE_SIZE,
        scale_algo="bilinear",
        scale_mode="crop",
        crop_width=SIZE,
        crop_height=SIZE,
        pix_fmt="rgb24",
    )

    def work(samples: list[Raw]) -> Prepared:
        images = load_image_batch(
            [sample["jpg"] for sample in samples], width=None, height=None, filter_desc=steps
        )
        pixels = torch.from_numpy(to_numpy(images)).permute(0, 3, 1, 2)
        return {"image": pixels, **tokenize([sample["txt"] for sample in samples])}

    return work


def own_work(settings: Settings) -> Callable[[list[Raw]], Prepared]:
    """Return a function that decodes a batch with mmstream."""
    decode = sample_work(settings)

    def work(samples: list[Raw]) -> Prepared:
        prepared = [decode(sample["jpg"], sample["txt"]) for sample in samples]
        return {name: torch.stack([one[name] for one in prepared]) for name in prepared[0]}

    return work


def make(folder: str, settings: Settings) -> Iterator[Any]:
    """Yield the batches of an epoch."""
    torch.set_num_threads(1)
    work = native_work if settings.work == "native" else own_work
    pipeline = (
        PipelineBuilder()
        .add_source(shuffled_samples(tars_in(folder), settings.shuffle_buffer))
        .aggregate(settings.batch_size, drop_last=True)
        .pipe(work(settings), concurrency=settings.num_workers)
        .add_sink(2)
        .build(num_threads=settings.num_workers + 1)  # one reads
    )
    with pipeline.auto_stop():
        yield from pipeline


if __name__ == "__main__":
    serve(link_tars, make)
