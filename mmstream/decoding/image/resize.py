"""Decoded pixels -> the planned result, with one antialiased resize from uint8 to uint8.

Place in the flow: `decoder.py` calls `render` with the pixels of `media.image` and a view of
`geometry.py`. The result is written into the row of the batch where there is one.

The filter is torch's antialiased one, on a channels_last view of the decoded array. It runs in SIMD
integer arithmetic, without a copy before it and without floats.

A centre crop is cut after the resize, though the pixels outside it are then resized for nothing.
The position of the filter is ``scale * (i + 0.5)``, counted from the picture's own edge. A crop
that is cut before gives the same values only if it starts at a whole number of filter periods.
Common sizes do not: from 500x375 to 298x224 the filter repeats every 149 columns, and the crop
starts at 37. A random crop is a box of whole pixels, so it is cut before the resize.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mmstream.decoding.image.geometry import View
from mmstream.media.types import Shape

Pixels = NDArray[np.uint8]


def render(
    image: Pixels,
    view: View,
    interpolation: str,
    fill: tuple[int, int, int] | int,
    out: Pixels | None = None,
) -> Pixels:
    """Make one result of a picture.

    The pixels are bit-equal to torchvision v2's ``resize(antialias=True)`` of the same box as a
    uint8 tensor, on CPUs where torchvision too resizes in uint8 (AVX2, AVX-512, ARM).

    Args:
        image: uint8 [H, W, 3], the whole picture. Or [H, W, 1], a mask.
        view: How to make the result.
        interpolation: "bilinear", "bicubic", "lanczos" or "nearest".
        fill: RGB of what the picture does not cover. Of a mask: one number.
        out: Where to write the result: uint8 of the view's shape. None: a new array.

    Returns:
        uint8 [H, W, 3] or [H, W, 1], or for tiles [num_tiles, side, side, 3], row by row.
        C-contiguous. It is ``out``, or it may share memory with `image`.
    """
    top, left, height, width = view.box
    if _sticks_out(view, image.shape[:2]):
        around = View(view.box, image.shape[:2], (height, width), (-top, -left))
        image = _lay(image, around, fill)
    else:
        image = image[top : top + height, left : left + width]
    if view.resized != (height, width):
        image = _resize(image, view.resized, interpolation)
    image = image[max(0, -view.offset[0]) :, max(0, -view.offset[1]) :]
    image = image[: view.shape[0], : view.shape[1]]
    if view.flip:  # torch mirrors pixels with SIMD, numpy byte by byte
        image = _pixels(torch.flip(_tensor(image), (3,)))
    if out is None and image.shape[:2] == view.shape:
        out = np.ascontiguousarray(image)
    else:
        out = _lay(image, view, fill, out)
    return out if view.tile is None else _divide(out, view.tile)


def render_bytes(view: View, picture: Shape) -> int:
    """Return the memory that `render` needs for a view of a whole picture, the picture included.

    Example: 4000x3000 pixels become 299x224. The picture has 36 MB. It is first made narrower, to
    299x3000 pixels (2.7 MB), and then lower (0.2 MB).
    """
    _, _, height, width = view.box
    num_pixels = picture[0] * picture[1]
    if _sticks_out(view, picture):
        num_pixels += height * width
    if view.resized != (height, width):
        num_pixels += (height + view.resized[0]) * view.resized[1]
    if view.flip or view.shape != view.resized or view.resized != picture:  # a copy
        num_pixels += view.shape[0] * view.shape[1]
    return 3 * num_pixels


def has_lanczos() -> bool:
    """Tell whether this torch resizes by Lanczos's filter."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 12)


def _sticks_out(view: View, picture: Shape) -> bool:
    """Tell whether the box of a view is larger than the picture, which is then padded."""
    top, left, height, width = view.box
    return min(top, left) < 0 or top + height > picture[0] or left + width > picture[1]


def _lay(
    image: Pixels, view: View, fill: tuple[int, int, int] | int, out: Pixels | None = None
) -> Pixels:
    """Copy resized pixels to their offset in the result, and fill the rest."""
    out = np.empty((*view.shape, image.shape[2]), np.uint8) if out is None else out
    height, width, _ = image.shape
    top, left = max(0, view.offset[0]), max(0, view.offset[1])
    if (height, width) != view.shape:
        out[:] = fill
    np.copyto(out[top : top + height, left : left + width], image)
    return out


def _divide(image: Pixels, side: int) -> Pixels:
    """Divide a result into square tiles, row by row."""
    rows, columns = image.shape[0] // side, image.shape[1] // side
    grid = image.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
    return np.ascontiguousarray(grid).reshape(rows * columns, side, side, 3)


def _resize(image: Pixels, shape: tuple[int, int], interpolation: str) -> Pixels:
    if interpolation == "nearest":
        return _pixels(F.interpolate(_tensor(image), shape, mode="nearest"))
    resized = F.interpolate(
        _tensor(image), shape, mode=interpolation, align_corners=False, antialias=True
    )
    return _pixels(resized)


def _tensor(image: Pixels) -> torch.Tensor:
    """Return [1, 3, H, W], a channels_last view."""
    # Views are numpy's, which cost less than torch's.
    # [None] would give the first dimension the stride 0, and torch would not keep channels_last.
    return torch.from_numpy(image.reshape(1, *image.shape).transpose(0, 3, 1, 2))


def _pixels(tensor: torch.Tensor) -> Pixels:
    """Return the [H, W, 3] array of what `_tensor` made."""
    pixels: Pixels = tensor.numpy()[0].transpose(1, 2, 0)
    return pixels
