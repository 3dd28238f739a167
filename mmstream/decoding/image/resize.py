"""Pixels to a result: one antialiased resize, uint8 to uint8, written where it is asked for.

Part of the decode stage: between the pixels of `decoding.image.formats` and a row of the batch.
The filter is ATen's antialiased one on a channels_last view of the decoded array, which runs in
SIMD integer arithmetic: no copy before it and no float.

Why a centre crop is cut after the resize, though the cut-off part is wasted: the filter's position
is ``scale * (i + 0.5)`` counted from the picture's own edge, so a part cut out beforehand gives the
same values only when it starts at a whole number of filter periods, which the common sizes do not
allow (500x375 to 298x224 repeats every 149 columns, and the crop starts at 37). A random crop is a
box of whole pixels, which is cut first.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mmstream.decoding.image.geometry import View

Pixels = NDArray[np.uint8]


def render(
    image: Pixels,
    view: View,
    interpolation: str,
    fill: tuple[int, int, int],
    out: Pixels | None = None,
) -> Pixels:
    """Make one result of a picture.

    Bit-equal to torchvision v2's ``resize(antialias=True)`` of the same box as a uint8 tensor, on
    CPUs where torchvision too resizes in uint8 (AVX2, AVX-512, ARM).

    Args:
        image: uint8 [H, W, 3], the picture that the view's box is of.
        view: What to do.
        interpolation: "bilinear" or "bicubic".
        fill: RGB of what the picture does not cover.
        out: uint8 of the view's shape to write to.

    Returns:
        ``out``, or an array that may share memory with `image` but is C-contiguous: uint8
        [H, W, 3], for tiles [num_tiles, side, side, 3], row by row.
    """
    top, left, height, width = view.box
    image = image[top : top + height, left : left + width]
    if view.resized != (height, width):
        image = _resize(image, view.resized, interpolation)
    image = image[max(0, -view.offset[0]) :, max(0, -view.offset[1]) :]
    image = image[: view.shape[0], : view.shape[1]]
    if view.flip:  # ATen mirrors pixels in SIMD, numpy byte by byte
        image = _pixels(torch.flip(_tensor(image), (3,)))
    if out is None and image.shape[:2] == view.shape:
        out = np.ascontiguousarray(image)
    else:
        out = _lay(image, view, fill, out)
    return out if view.tile is None else _divide(out, view.tile)


def _lay(
    image: Pixels, view: View, fill: tuple[int, int, int], out: Pixels | None = None
) -> Pixels:
    out = np.empty((*view.shape, 3), np.uint8) if out is None else out
    height, width, _ = image.shape
    top, left = max(0, view.offset[0]), max(0, view.offset[1])
    if (height, width) != view.shape:
        out[:] = fill
    np.copyto(out[top : top + height, left : left + width], image)
    return out


def _divide(image: Pixels, side: int) -> Pixels:
    rows, columns = image.shape[0] // side, image.shape[1] // side
    grid = image.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
    return np.ascontiguousarray(grid).reshape(rows * columns, side, side, 3)


def _resize(image: Pixels, shape: tuple[int, int], interpolation: str) -> Pixels:
    resized = F.interpolate(
        _tensor(image), shape, mode=interpolation, align_corners=False, antialias=True
    )
    return _pixels(resized)


def _tensor(image: Pixels) -> torch.Tensor:
    # [None] before permute: the batch's stride is then H*W*3, and ATen keeps channels_last.
    return torch.from_numpy(image)[None].permute(0, 3, 1, 2)


def _pixels(tensor: torch.Tensor) -> Pixels:
    pixels: Pixels = tensor[0].permute(1, 2, 0).numpy()
    return pixels
