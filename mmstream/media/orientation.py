"""The orientation of an image: read from its EXIF or XMP metadata, and applied.

Place in the flow: `image.py` and `pillow.py` find the metadata in a file. `picture_orientation`
decides here what it says. `image.py` applies it to the pixels.

This is a reader of its own, for one tag, because Pillow parses all metadata and *warns* about
damaged metadata. Here an image with damaged metadata counts as upright.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TAG_ORIENTATION = 0x0112
_LAYOUTS = {1: "c", 2: "c", 3: "H", 4: "I", 5: "II", 6: "b", 7: "c", 8: "h", 9: "i", 10: "ii"}
_LAYOUTS |= {11: "f", 12: "d", 13: "I", 16: "Q"}
"""The types of TIFF. Those of two numbers are fractions, and bytes and texts are not numbers."""
_BYTE_ORDERS = {b"II*\0": "<", b"II\0*": "<", b"MM\0*": ">", b"MM*\0": ">"}
"""Starts of a TIFF header. Some programs write the second number of two bytes the wrong way."""

SIDEWAYS = (5, 6, 7, 8)
"""Orientations that swap height and width."""
UPSIDE_DOWN = (3, 4, 6, 7)
"""Orientations whose rows are reversed, before height and width are swapped."""
MIRRORED = (2, 3, 7, 8)
"""Orientations whose columns are reversed."""

MAX_ENTRIES = 512
"""Entries of an EXIF directory that are looked at. Cameras write fewer than 50."""
WHOLE_PIXELS = 2**21
"""Larger pictures are turned in bands, so that no third copy is needed."""
BAND_ROWS = 64

_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def picture_orientation(exif: bytes | None, xmp: bytes | None) -> int | None:
    r"""Return the orientation that the metadata of a picture asks for, as Pillow decides it.

    EXIF decides where it has the tag, even with a value that is none. Otherwise XMP does.

    Args:
        exif: A TIFF header and its directories, with or without the ``Exif\0\0`` prefix.
        xmp: An XMP packet.

    Returns:
        1 to 8 as the EXIF standard counts them. None where neither is readable.
    """
    value = _exif_orientation(exif) if exif else None
    if value is None and xmp:
        match = _XMP_ORIENTATION.search(xmp)
        value = int(match[1]) if match else None
    return None if value is None else int(value) if value in range(1, 9) else 1


def _exif_orientation(exif: bytes) -> Any:
    """Return what the orientation tag holds. None where the tag is absent or unreadable."""
    tiff = exif.removeprefix(b"Exif\0\0").removeprefix(b"Exif\0\0")
    order = _BYTE_ORDERS.get(tiff[:4])
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (num_entries,) = struct.unpack_from(order + "H", tiff, start)
        for position in range(start + 2, start + 2 + 12 * min(num_entries, MAX_ENTRIES), 12):
            # An entry has 12 bytes: tag (2), type (2), count (4), value (4) or where it stands.
            tag, kind, count, offset = struct.unpack_from(order + "HHII", tiff, position)
            layout = order + _LAYOUTS.get(kind, "")
            num_bytes = count * struct.calcsize(layout)
            value_offset = position + 8 if num_bytes <= 4 else offset
            if tag == _TAG_ORIENTATION and 0 < num_bytes <= len(tiff) - value_offset:
                value, *divisor = struct.unpack_from(layout, tiff, value_offset)
                if divisor:
                    value = value / divisor[0] if divisor[0] else 0
                return value
    except struct.error:  # the directory points outside the block
        pass
    return None


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
        is_reversed = orientation in UPSIDE_DOWN
        rows = slice(height - bottom, height - top) if is_reversed else slice(top, bottom)
        turned[(slice(None), rows) if orientation in SIDEWAYS else rows] = band
    return turned


def upright_bytes(height: int, width: int, orientation: int | None) -> int:
    """Return the memory that `upright` needs, with the picture that it is given."""
    return height * width * (3 if orientation in (None, 1) else 6)


def _turned(image: NDArray[np.uint8], orientation: int | None) -> NDArray[np.uint8]:
    if image.shape[2] == 1:
        rows, columns = (-1 if orientation in flips else 1 for flips in (UPSIDE_DOWN, MIRRORED))
        grey = image[::rows, ::columns]
        return grey.swapaxes(0, 1) if orientation in SIDEWAYS else grey
    import torch  # only where colours are turned: conversions read headers without torch

    # torch mirrors a channels_last picture with SIMD, sixty times as fast as numpy.
    pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    if axes := [2] * (orientation in UPSIDE_DOWN) + [3] * (orientation in MIRRORED):
        pixels = torch.flip(pixels, axes)
    turned: NDArray[np.uint8] = pixels[0].permute(1, 2, 0).numpy()
    return turned.swapaxes(0, 1) if orientation in SIDEWAYS else turned
