"""JPEGs made smaller without RGB: luma and chroma are decoded and resized each on its own.

Place in the flow: the converter calls it before it decodes a JPEG to RGB.

A JPEG stores chroma at half the size, mostly. To make it smaller and store it as a JPEG again, the
usual way widens chroma, converts to RGB, resizes three full planes and converts back. The compiled
module (mmstream/csrc/) leaves all of that out. It takes the same plain, undamaged baseline files as
for `decode_reduced`, and leaves all others to libjpeg.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.image.compiled import load_compiled
from mmstream.decoding.image.geometry import Shape
from mmstream.decoding.image.jpeg import orientation_of, read_header
from mmstream.decoding.image.limits import Limits

__all__ = ["decode_planes", "is_built"]

_UPRIGHT = (None, 1)


def decode_planes(
    data: bytes, original: Shape, factors: tuple[int, int], shape: Shape, limits: Limits
) -> list[NDArray[np.uint8]] | None:
    """Decode a plain baseline JPEG and make it smaller, by an antialiased bicubic filter.

    Args:
        data: The file.
        original: Its (height, width), from its header.
        factors: How many times smaller to decode it before the filter, 1, 2, 4 or 8: luma, and
            chroma that is as large as luma.
        shape: (height, width) of the result, at most those of the decoded picture.
        limits: Limits on pixels and memory, checked as for a decoding to RGB.

    Returns:
        Luma, uint8 [H, W]. Of a colour picture also both chromas, uint8, half as high and as wide,
        rounded up. Rows are contiguous, and behind the last row and column of luma there is memory
        for one more if their number is odd. None where another decoder must read the file or refuse
        it, where EXIF asks for a rotation, and without the compiled module.

    Raises:
        DecodeError: The header exceeds a limit.
    """
    compiled = load_compiled()
    if compiled is None or orientation_of(read_header(data)[0]) not in _UPRIGHT:
        return None
    height, width = original
    limits.check_picture(height, width)
    limits.check_memory(3 * height * width / factors[0] ** 2, height, width)
    planes = compiled.decode_planes(data, *factors, *shape)
    if planes is None:
        return None
    return [
        np.frombuffer(samples, np.uint8).reshape(-1, stride)[:rows, :columns]
        for samples, stride, rows, columns in planes
    ]


def is_built() -> bool:
    """Return whether the compiled module is there."""
    return load_compiled() is not None
