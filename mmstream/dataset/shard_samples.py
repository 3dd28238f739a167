"""The raw samples of a shard, in order, read in long ranges.

Place in the flow: facts and measures are made of shards that are read from front to back. Bytes
that do not fit their checksum are read again, as in training.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmstream.dataset.checksums import sample_checksum
from mmstream.dataset.dataset import Dataset
from mmstream.errors import SampleError
from mmstream.types import IntArray, Sample

BLOCK_BYTES = 32 << 20
"""Bytes of a shard that are read together."""

RANGE_BYTES = 8 << 20
"""Ranges of a block. They are requested side by side."""


def shard_samples(dataset: Dataset, shard: int) -> Iterator[Sample | SampleError]:
    """Yield the samples of a shard. A damaged one is its SampleError.

    A block of samples is in memory: 32 MiB, or one larger sample.

    Raises:
        ShardError: The shard is absent, cut, or was replaced.
        StorageError: The storage failed after retries.
    """
    index = dataset.index_of(shard)
    offsets = index.offsets
    start = 0
    while start < len(offsets) - 1:
        stop = _block_end(offsets, start)
        data = _read(dataset, shard, int(offsets[start]), int(offsets[stop]))
        base = int(offsets[start])
        for number in range(start, stop):
            sample_bytes = data[int(offsets[number]) - base : int(offsets[number + 1]) - base]
            try:
                checksum = None if index.checksums is None else index.checksums[number]
                if checksum is not None and sample_checksum(sample_bytes) != checksum:
                    yield dataset.read(shard, number)  # again, past what this machine holds
                else:
                    yield dataset.parse(sample_bytes, shard, number)
            except SampleError as error:
                yield error
        start = stop


def _block_end(offsets: IntArray, start: int) -> int:
    """Return the sample before which a block ends that begins with sample `start`."""
    stop = int(np.searchsorted(offsets, offsets[start] + BLOCK_BYTES, side="right")) - 1
    return max(stop, start + 1)


def _read(dataset: Dataset, shard: int, start: int, stop: int) -> memoryview:
    ranges = [
        (shard, first, min(stop, first + RANGE_BYTES)) for first in range(start, stop, RANGE_BYTES)
    ]
    pieces = []
    for piece in dataset.read_ranges(ranges):
        if isinstance(piece, OSError):
            raise dataset.explain(piece, shard, stop) from piece
        pieces.append(piece)
    return memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))
