"""JPEGs at 1/4 and 1/8 of their size, by the compiled module where it is built.

Part of the decode stage, called by `decoding.image.jpeg`. libjpeg reads every coefficient of a
file at every scale; the compiled module (mmstream/csrc/) passes those that a reduced picture does
not need, several at a time, and gives the same pixels in 55 to 65 % of the time. It takes plain,
undamaged baseline files alone. Whatever else there is, it leaves to libjpeg, which judges it as
ever.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

Native = Callable[[bytes, int], tuple[bytearray, int, int] | None]


def decode_reduced(data: bytes, factor: int) -> NDArray[np.uint8] | None:
    """Decode a plain baseline JPEG smaller than it is.

    Args:
        data: The file. Its size is to be checked before: nothing here limits it.
        factor: How many times smaller. Only 4 and 8 are quicker than libjpeg.

    Returns:
        uint8 [H, W, 3], RGB, bit-equal to what libjpeg-turbo gives, sides rounded up. None where
        libjpeg is to decode the file, or to refuse it.
    """
    native = load_native() if factor in (4, 8) else None
    found = native(data, factor) if native else None
    if found is None:
        return None
    pixels, height, width = found
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)


@functools.cache
def load_native() -> Native | None:
    """Import the compiled module's function, once; None where it was not built."""
    try:
        from mmstream.decoding.image._reduced import decode_reduced as native
    except ImportError:
        log.debug("mmstream.decoding.image._reduced is not built: libjpeg decodes at every scale")
        return None
    return native
