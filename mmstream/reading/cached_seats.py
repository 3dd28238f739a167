"""Samples of a step that its worker reads from the node cache, past the reader process.

The reader process says in which files they lie, and leaves room for them among the bytes of the
step. The worker reads each to its place, and compares it with its checksum. So these bytes are
copied once, by all workers side by side. What is not right any more, because its file was removed
or damaged, the worker asks for again: the reader process reads it from storage then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mmstream.storage.node_cache import read_sample
from mmstream.types import IntArray


class CacheLocation(NamedTuple):
    """Where any process of the machine finds a sample in the node cache."""

    path: str
    start: int
    """The byte of the file where the sample begins."""
    checksum: int
    """CRC-32C of its bytes."""


def read_cached(
    cached: Mapping[int, CacheLocation], data: memoryview, starts: IntArray, stops: IntArray
) -> list[int]:
    """Read samples of the node cache to their places in a step.

    Args:
        cached: The samples, by seat.
        data: Where the samples of the step lie.
        starts: Sample i is bytes [starts[i], stops[i]) of it.
        stops: Where each sample ends.

    Returns:
        The seats whose bytes are not right. Their places have any content.
    """
    return [
        seat
        for seat, (path, start, checksum) in cached.items()
        if not read_sample(path, start, data[starts[seat] : stops[seat]], checksum)
    ]
