"""No loader: processes that only decode and resize images in memory.

"mmstream" uses mmstream's decoder, with one buffer per process. "torchvision" decodes at full size
with simplejpeg, resizes uint8 once with antialiasing by torch, and crops. Nothing is read,
tokenized, collated or sent, so the counted batches are empty.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import simplejpeg
import torch

from mmstream import open_dataset
from tools.bench.peers.runners.decoded import (
    MAX_LENGTH,
    RESIZE_SIZE,
    SIZE,
    Settings,
    image_decoder,
    serve,
)
from tools.bench.peers.runners.tars import link_tars

Decode = Callable[[bytes, np.ndarray[Any, Any]], object]


def two_steps(data: bytes, out: np.ndarray[Any, Any]) -> None:
    """Decode at full size, resize the shorter side to 256 and crop the centre."""
    pixels = torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1)[None]
    height, width = pixels.shape[2:]
    short = min(height, width)
    shape = height * RESIZE_SIZE // short, width * RESIZE_SIZE // short
    small = torch.nn.functional.interpolate(pixels, shape, mode="bilinear", antialias=True)
    top, left = (shape[0] - SIZE) // 2, (shape[1] - SIZE) // 2
    crop = small[0, :, top : top + SIZE, left : left + SIZE]
    out[:] = crop.permute(1, 2, 0).numpy()


def decode_forever(images: list[bytes], decode: Decode, batch_size: int, done: Any) -> None:
    """Decode again and again, and put None into a queue after each batch."""
    torch.set_num_threads(1)
    out = np.empty((batch_size, SIZE, SIZE, 3), np.uint8)
    number = 0
    while True:
        for row in out:
            decode(images[number % len(images)], row)
            number += 1
        done.put(None)


def make(corpus: str, settings: Settings) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield an empty batch for each batch that one of the processes has decoded."""
    images = [bytes(sample["jpg"]) for sample in open_dataset(corpus)]
    decode = image_decoder(settings) if settings.work == "mmstream" else two_steps
    context = multiprocessing.get_context("fork")
    done = context.SimpleQueue()
    for first in range(settings.num_workers):
        arguments = images[first :: settings.num_workers], decode, settings.batch_size, done
        context.Process(target=decode_forever, args=arguments, daemon=True).start()
    empty = torch.zeros((1, 3, SIZE, SIZE)).expand(settings.batch_size, -1, -1, -1).contiguous()
    ids = torch.zeros((settings.batch_size, MAX_LENGTH))
    while True:
        done.get()
        yield empty, ids


if __name__ == "__main__":
    serve(link_tars, make, fields=lambda batch: batch)
