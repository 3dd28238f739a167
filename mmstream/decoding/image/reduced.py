"""JPEGs at 1/4 and 1/8 of their size, with the compiled module where it is built.

Place in the flow: `jpeg.py` calls it before it calls libjpeg.

libjpeg decodes every coefficient of a file at every scale. The compiled module (mmstream/csrc/)
skips those that a reduced picture does not need, several at a time. It gives the same pixels in 55
to 65 % of the time. It takes only plain, undamaged baseline files, and leaves all others to
libjpeg.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.image.compiled import load_compiled

__all__ = ["decode_reduced"]


def decode_reduced(data: bytes | memoryview, factor: int) -> NDArray[np.uint8] | None:
    """Decode a plain baseline JPEG smaller than it is.

    Args:
        data: The file. The caller has checked its size: nothing here limits it.
        factor: How many times smaller. Only 4 and 8 are faster than libjpeg.

    Returns:
        uint8 [H, W, 3], RGB, sides rounded up, bit-equal to libjpeg-turbo's result. None where
        libjpeg must decode the file, or refuse it.
    """
    compiled = load_compiled() if factor in (4, 8) else None
    decoded = compiled.decode_reduced(bytes(data), factor) if compiled else None
    if decoded is None:
        return None
    pixels, height, width = decoded
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
