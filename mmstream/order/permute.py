"""The randomness of an order: permutations that are the same on every machine.

`chunks.py`, `lanes.py` and the files of `mixture/` shuffle with these functions and with no others.
The words come from the raw Philox bit stream. Numpy guarantees that stream for all versions
(NEP 19). It does not guarantee the methods of `Generator`, so they are never used here. The key of
a stream is a hash of its purpose, for example ``(seed, epoch, "chunks")``. A permutation is the
stable argsort of such words.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def stream_key(*purpose: int | str) -> int:
    """Return the Philox key of a purpose: the first 128 bits of a SHA-256.

    Args:
        *purpose: integers and words. A numpy integer gives the key of the plain integer.

    Examples:
        >>> import numpy as np
        >>> stream_key(7, "chunks") == stream_key(np.int64(7), "chunks")
        True
        >>> stream_key(7, "chunks") == stream_key(8, "chunks")
        False
    """
    # The key is a hash of the repr, and numpy's integers have another repr.
    plain = tuple(item if isinstance(item, str) else int(item) for item in purpose)
    return int.from_bytes(hashlib.sha256(repr(plain).encode()).digest()[:16], "little")


def random_words(size: int, *purpose: int | str) -> npt.NDArray[np.uint64]:
    """Return uint64 [size] random words. They depend on `purpose` alone.

    Source: Philox4x64-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    return np.random.Philox(key=stream_key(*purpose)).random_raw(size)


def permutation(size: int, *purpose: int | str) -> npt.NDArray[np.int64]:
    """Return int64 [size], a permutation of 0 to size-1. It depends on `purpose` alone.

    Examples:
        >>> permutation(8, 1, "x").tolist()
        [2, 4, 3, 6, 5, 7, 0, 1]
    """
    return np.argsort(random_words(size, *purpose), kind="stable")
