"""Resize and centre crop, uint8 to uint8, with torchvision's geometry and ATen's filter.

Part of the decode stage: between the pixels of `mmstream.decoding.image` and a row of the batch.
The filter is ATen's antialiased bilinear on a channels_last view of the decoded array, which runs
in SIMD integer arithmetic: no copy before it and no float.

Why the whole picture is resized before it is cut, though the cut-off part is wasted: the filter's
position is ``scale * (i + 0.5)`` counted from the picture's own edge, so a part cut out beforehand
gives the same values only when it starts at a whole number of filter periods, which the common
sizes do not allow (500x375 to 298x224 repeats every 149 columns, and the crop starts at 37).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mmstream.decoding.pillow import check_pixels


def resized_shape(
    height: int, width: int, size: tuple[int, int], resize_size: int | None
) -> tuple[int, int]:
    """Return the (height, width) to which a picture is resized before it is cropped.

    Args:
        height: Of the picture, in pixels.
        width: Of the picture, in pixels.
        size: (height, width) of the crop.
        resize_size: The shorter side after resizing; None: the smallest picture that covers the
            crop, which for a square is its side.

    Returns:
        (height, width); the longer side is rounded down, as torchvision's ``Resize`` does.
    """
    crop_height, crop_width = (resize_size, resize_size) if resize_size else size
    if width * crop_height >= height * crop_width:  # wider than the crop: the height decides
        return crop_height, max(crop_width, int(crop_height * width / height))
    return max(crop_height, int(crop_width * height / width)), crop_width


def resize_and_crop(
    image: NDArray[np.uint8],
    size: tuple[int, int],
    resize_size: int | None = None,
    *,
    max_pixels: int,
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Resize a picture and cut out its centre.

    Bit-equal (no differing byte over 398 random geometries from 1x1 to 700x900) to torchvision v2's
    ``Resize(resize_size or size, antialias=True)`` followed by ``CenterCrop(size)`` on the same
    pixels as a uint8 tensor, for a square ``size`` on CPUs where torchvision too resizes in uint8
    (AVX2, AVX-512, ARM).

    Args:
        image: uint8 [H, W, 3], C-contiguous.
        size: (height, width) of the result.
        resize_size: The shorter side before the crop; see `resized_shape`.
        max_pixels: Limit on the resized picture, which for a very long one is far larger than both
            the source and the result.
        out: uint8 array of the result's shape to write to.

    Returns:
        ``out``, or a new C-contiguous array: uint8 [size[0], size[1], 3].

    Raises:
        DecodeError: The resized picture would exceed max_pixels.
    """
    height, width, _ = image.shape
    new_height, new_width = resized_shape(height, width, size, resize_size)
    if (new_height, new_width) != (height, width):
        check_pixels(new_height, new_width, max_pixels)
        # [None] before permute: the batch's stride is then H*W*3, and ATen keeps channels_last.
        view = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
        resized = F.interpolate(
            view, (new_height, new_width), mode="bilinear", align_corners=False, antialias=True
        )
        image = resized[0].permute(1, 2, 0).numpy()
    top = round((new_height - size[0]) / 2)  # half to even, as torchvision's CenterCrop
    left = round((new_width - size[1]) / 2)
    crop = image[top : top + size[0], left : left + size[1]]
    if out is None:
        return crop if crop.shape == image.shape else np.ascontiguousarray(crop)
    np.copyto(out, crop)
    return out
