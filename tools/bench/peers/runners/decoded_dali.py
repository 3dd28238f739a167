"""NVIDIA DALI on the CPU: its own reader of tars, decoder and resizer, in threads of C++.

Texts are tokenized in one call a batch, in Python, because DALI has no tokenizer.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from nvidia.dali import fn, pipeline_def, types

from tools.bench.peers.runners.decoded import (
    MEAN,
    RESIZE_SIZE,
    SIZE,
    STD,
    Prepared,
    Settings,
    serve,
    tokens_of_batch,
)
from tools.bench.peers.runners.tars import link_tars, tars_in

SIDES = (SIZE, SIZE)


@pipeline_def  # type: ignore[untyped-decorator]
def photographs(tars: list[str], settings: Settings) -> tuple[Any, Any]:
    """Read, decode, resize the shorter side and crop the centre."""
    encoded, texts = fn.readers.webdataset(
        paths=tars,
        index_paths=[f"{tar}.dali" for tar in tars],
        ext=["jpg", "txt"],
        random_shuffle=True,
        initial_fill=settings.shuffle_buffer,
        missing_component_behavior="error",
    )
    images = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
    images = fn.resize(images, resize_shorter=RESIZE_SIZE, interp_type=types.INTERP_LINEAR)
    if not settings.normalize:
        return fn.crop(images, crop=SIDES), texts
    floats = fn.crop_mirror_normalize(
        images,
        crop=SIDES,
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[255 * value for value in MEAN],
        std=[255 * value for value in STD],
    )
    return floats, texts


def make(folder: str, settings: Settings) -> Iterator[Prepared]:
    """Yield batches of epoch after epoch."""
    pipeline = photographs(
        tars_in(folder),
        settings,
        batch_size=settings.batch_size,
        num_threads=settings.num_workers,
        device_id=None,
        seed=0,
    )
    tokenize = tokens_of_batch(settings)
    while True:
        images, texts = pipeline.run()
        pixels = torch.from_numpy(images.as_array())
        yield {
            "image": pixels if settings.normalize else pixels.permute(0, 3, 1, 2),
            **tokenize([bytes(texts.at(row)) for row in range(settings.batch_size)]),
        }


def prepare(corpus: str, folder: str) -> None:
    """Link the tars and index them with DALI's command."""
    link_tars(corpus, folder)
    tool = str(Path(sys.executable).parent / "wds2idx")
    for tar in tars_in(folder):
        subprocess.run([tool, tar, f"{tar}.dali"], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    serve(prepare, make)
