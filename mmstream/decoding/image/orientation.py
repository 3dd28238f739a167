"""The orientation of an image: read from its EXIF or XMP metadata, and applied.

Place in the flow: `jpeg.py` and `pillow.py` read it from a file's header, `formats.py` applies it
to the pixels, and `device.nvjpeg` applies it on the GPU.

This is a reader of its own, for one tag, because Pillow parses all metadata and *warns* about
damaged metadata. Here an image with damaged metadata counts as upright.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

_TAG_ORIENTATION = 0x0112
_TYPE_SHORT = 3

SIDEWAYS = (5, 6, 7, 8)
"""Orientations that swap height and width."""

MAX_ENTRIES = 512
"""Entries of an EXIF directory that are looked at. Cameras write fewer than 50."""
WHOLE_PIXELS = 2**21
"""Larger pictures are turned in bands, so that no third copy is needed."""
BAND_ROWS = 64

_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')


def exif_orientation(exif: bytes) -> int | None:
    r"""Read the orientation tag of an EXIF block.

    Args:
        exif: A TIFF header and its directories, with or without the ``Exif\0\0`` prefix.

    Returns:
        1 to 8 as the EXIF standard counts them. None where the tag is absent or unreadable.
    """
    tiff = exif[6:] if exif.startswith(b"Exif\0\0") else exif
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (num_entries,) = struct.unpack_from(order + "H", tiff, start)
        for i in range(min(num_entries, MAX_ENTRIES)):
            # An entry has 12 bytes: tag (2), type (2), count (4), value (4).
            tag, kind, count = struct.unpack_from(order + "HHI", tiff, start + 2 + 12 * i)
            if tag == _TAG_ORIENTATION:
                (value,) = struct.unpack_from(order + "H", tiff, start + 10 + 12 * i)
                is_valid = kind == _TYPE_SHORT and count == 1 and 1 <= value <= 8
                return int(value) if is_valid else None
    except struct.error:  # the directory points outside the block
        pass
    return None


def xmp_orientation(xmp: bytes) -> int | None:
    """Read ``tiff:Orientation`` from an XMP packet: 1 to 8, or None."""
    match = _XMP_ORIENTATION.search(xmp)
    return int(match[1]) if match else None


def upright(image: NDArray[np.uint8], orientation: int | None) -> NDArray[np.uint8]:
    """Turn an image upright.

    Args:
        image: uint8 [H, W, 3] as stored, or [H, W, 1].
        orientation: 1 to 8. None counts as 1.

    Returns:
        The same, or [W, H, ...] for orientations 5 to 8. C-contiguous. The same array for 1.
    """
    if orientation in (None, 1):
        return image
    height, width, _ = image.shape
    if height * width <= WHOLE_PIXELS:
        return np.ascontiguousarray(_turned(image, orientation))
    shape = (width, height, image.shape[2]) if orientation in SIDEWAYS else image.shape
    turned = np.empty(shape, np.uint8)
    for top in range(0, height, BAND_ROWS):
        bottom = min(top + BAND_ROWS, height)
        band = _turned(image[top:bottom], orientation)
        # Example: turned upside down, rows 0 to 63 of 100 become rows 36 to 99.
        is_reversed = orientation in (3, 4, 6, 7)
        rows = slice(height - bottom, height - top) if is_reversed else slice(top, bottom)
        turned[(slice(None), rows) if orientation in SIDEWAYS else rows] = band
    return turned


def upright_bytes(height: int, width: int, orientation: int | None) -> int:
    """Return the memory that `upright` needs, with the picture that it is given."""
    return height * width * (3 if orientation in (None, 1) else 6)


def _turned(image: NDArray[np.uint8], orientation: int | None) -> NDArray[np.uint8]:
    import torch  # only where something is turned: conversions read headers without torch

    # torch mirrors a channels_last picture with SIMD, sixty times as fast as numpy.
    pixels = upright_tensor(torch.from_numpy(image)[None].permute(0, 3, 1, 2), orientation)
    turned: NDArray[np.uint8] = pixels[0].permute(1, 2, 0).numpy()
    return turned


def upright_tensor(pixels: torch.Tensor, orientation: int | None) -> torch.Tensor:
    """Turn pictures [B, 3, H, W] on any device upright. The result may share their memory."""
    import torch

    rows = [2] if orientation in (3, 4, 6, 7) else []
    columns = [3] if orientation in (2, 3, 7, 8) else []
    if rows or columns:
        pixels = torch.flip(pixels, rows + columns)
    return pixels.transpose(2, 3) if orientation in SIDEWAYS else pixels
