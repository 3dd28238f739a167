"""Order's randomness: keyed permutations that are the same on every machine and numpy version.

Words come from the raw Philox bit stream, whose output numpy guarantees (NEP 19), keyed by a hash
of what they are for; a permutation is their stable argsort. numpy's `Generator` is never used: its
streams may change between versions.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

__all__ = ["permutation", "random_words", "stream_key"]


def stream_key(*what: int | str) -> int:
    """Return the 128-bit Philox key of a tuple of integers and words."""
    plain = tuple(part if isinstance(part, str) else int(part) for part in what)  # no numpy ints
    return int.from_bytes(hashlib.sha256(repr(plain).encode()).digest()[:16], "little")


def random_words(size: int, *what: int | str) -> npt.NDArray[np.uint64]:
    """Return uint64 [size] words, a pure function of `what`.

    Source: Philox4x64-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    return np.random.Philox(key=stream_key(*what)).random_raw(size)


def permutation(size: int, *what: int | str) -> npt.NDArray[np.int64]:
    """Return int64 [size], a permutation of 0..size-1 that is a pure function of `what`."""
    return np.argsort(random_words(size, *what), kind="stable")
