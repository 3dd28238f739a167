"""No loader: processes that only decode and resize pictures in memory, one after another.

"mmstream": by this project's decoder, into one buffer a process. "torchvision": the same two steps
written out, simplejpeg at full size and one antialiased resize of uint8 by torch, cropped after it.
Nothing is read, tokenized, collated or sent; the batches that are counted are empty.
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
    """Decode at full size, resize the shorter side to 256, keep the centre."""
    pixels = torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1)[None]
    height, width = pixels.shape[2:]
    short = min(height, width)
    shape = height * RESIZE_SIZE // short, width * RESIZE_SIZE // short
    small = torch.nn.functional.interpolate(pixels, shape, mode="bilinear", antialias=True)
    top, left = (shape[0] - SIZE) // 2, (shape[1] - SIZE) // 2
    crop = small[0, :, top : top + SIZE, left : left + SIZE]
    out[:] = crop.permute(1, 2, 0).numpy()


def work_on(pictures: list[bytes], decode: Decode, batch_size: int, done: Any) -> None:
    """Decode over and over, and say so after each batch."""
    torch.set_num_threads(1)
    out = np.empty((batch_size, SIZE, SIZE, 3), np.uint8)
    number = 0
    while True:
        for row in out:
            decode(pictures[number % len(pictures)], row)
            number += 1
        done.put(None)


def make(corpus: str, settings: Settings) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield an empty batch whenever one of the processes has made one."""
    pictures = [bytes(sample["jpg"]) for sample in open_dataset(corpus)]
    decode = image_decoder(settings) if settings.work == "mmstream" else two_steps
    context = multiprocessing.get_context("fork")
    done = context.SimpleQueue()
    for first in range(settings.num_workers):
        share = pictures[first :: settings.num_workers]
        arguments = share, decode, settings.batch_size, done
        context.Process(target=work_on, args=arguments, daemon=True).start()
    empty = torch.zeros((1, 3, SIZE, SIZE)).expand(settings.batch_size, -1, -1, -1).contiguous()
    ids = torch.zeros((settings.batch_size, MAX_LENGTH))
    while True:
        done.get()
        yield empty, ids


if __name__ == "__main__":
    serve(link_tars, make, parts=lambda batch: batch)
