"""Perceptual hashes: 256 bits that hardly change when a picture is encoded again or resized.

    image -> grey, 64 x 64 -> its 16 x 16 lowest frequencies -> 1 bit each: above their median

The idea is that of PDQ (Facebook, 2019) and of pHash. Two pictures are compared by the number of
bits that differ, their Hamming distance. Two unrelated pictures differ in about 128 bits.

Pictures are decoded as small as the format can (JPEG: scaled while it is decoded), so a hash costs
a fraction of a full decoding.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt

from mmstream.converting.unwarned import unwarned

__all__ = ["HASH_BYTES", "perceptual_hash"]

HASH_BYTES = 32

SIDE = 64
"""Pixels a side of the small picture."""

FREQUENCIES = 16
"""Lowest frequencies a side, without the constant one."""

MAX_PIXELS = 50_000_000
"""Larger pictures get no hash: decoding them takes too much memory."""

MIN_CONTRAST = 4.0
"""Least standard deviation of grey levels (0 to 255). A flatter picture has noise to compare."""


def perceptual_hash(data: bytes) -> bytes | None:
    """Return the 32 bytes of a picture's hash.

    The first frame of an animation counts. The EXIF orientation is applied.

    Args:
        data: The bytes of an image file.

    Returns:
        256 bits, or None for a picture that cannot be decoded, is too large, or is almost of one
        colour: its bits would be noise.
    """
    try:
        pixels = _small_grey(data)
    except Exception:  # Pillow has many for damaged bytes
        return None
    if pixels is None or float(pixels.std()) < MIN_CONTRAST:
        return None
    frequencies = _DCT @ pixels @ _DCT.T
    bits = frequencies > np.median(frequencies)
    return np.packbits(bits).tobytes()


def _small_grey(data: bytes) -> npt.NDArray[np.float32] | None:
    from PIL import Image  # planning and the command line do without it

    # Pillow warns of large pictures too: see MAX_PIXELS.
    with unwarned, Image.open(io.BytesIO(data), formats=_FORMATS) as image:
        if image.width * image.height > MAX_PIXELS:
            return None
        orientation = image.getexif().get(_ORIENTATION, 1)
        image.draft("L", (2 * SIDE, 2 * SIDE))
        grey: Any = image if image.mode == "L" else image.convert("RGB").convert("L")
        small = grey.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    turn = _TURNS.get(orientation)
    return np.asarray(
        small if turn is None else small.transpose(Image.Transpose[turn]), dtype=np.float32
    )


_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "AVIF")
"""What Pillow may take bytes of strangers for. Others run programs, such as Ghostscript."""

_ORIENTATION = 0x0112
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def _dct_rows() -> npt.NDArray[np.float32]:
    """Return the rows 1 to 16 of the cosine transform (DCT-II) of 64 values: float32 [16, 64]."""
    frequency = np.arange(1, FREQUENCIES + 1)[:, None]
    position = 2 * np.arange(SIDE)[None, :] + 1
    return np.cos(np.pi * frequency * position / (2 * SIDE)).astype(np.float32)


_DCT = _dct_rows()
