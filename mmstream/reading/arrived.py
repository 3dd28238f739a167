"""What a reader process has of ranges and steps: bytes, errors, and words on the node cache."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.errors import SampleError, ShardError
from mmstream.reading.cached_seats import CacheLocation
from mmstream.reading.held import SampleRange
from mmstream.reading.large_samples import LargeSample
from mmstream.reading.packed_rows import PackedRows
from mmstream.reading.plan import PlannedRange
from mmstream.types import IntArray


@dataclass(eq=False)
class Arrived:
    """A range on its way, then its bytes, or what is wrong with them."""

    planned: PlannedRange
    ready: asyncio.Task[None] | None = None
    transfers: list[asyncio.Future[memoryview]] = field(default_factory=list)
    data: memoryview = field(default_factory=lambda: memoryview(b""))
    errors: dict[int, ShardError | SampleError] = field(default_factory=dict)
    """By position in the window."""
    first: int = 0
    """Its first byte in the shard."""
    num_left: int = 0
    """Samples that were not taken yet."""
    cached: dict[int, CacheLocation] = field(default_factory=dict)
    """By position: samples that were not taken yet and lie in the node cache, not in `data`."""

    @property
    def is_ready(self) -> bool:
        """Whether its samples may be taken."""
        return self.ready is not None and self.ready.done()

    async def wait(self) -> None:
        """Wait until its samples may be taken.

        Raises:
            StorageError: storage failed for good.
        """
        assert self.ready is not None
        if self.ready.done():
            self.ready.result()
        else:
            await asyncio.shield(self.ready)

    def put(self, samples: SampleRange, data: memoryview, first: int) -> None:
        """Copy samples into its bytes, and nothing of what lies between them.

        Args:
            samples: some of the range.
            data: their bytes, which were compared with their checksums.
            first: the byte of the shard that comes first in `data`.
        """
        for start, stop in zip(samples.start.tolist(), samples.stop.tolist(), strict=True):
            self.data[start - self.first : stop - self.first] = data[start - first : stop - first]


class CachedSample(NamedTuple):
    """A sample that whoever takes it reads from the node cache."""

    location: CacheLocation
    arrived: Arrived
    position: int
    """In its window."""


@dataclass(frozen=True)
class StepSamples:
    """The samples of a step on this rank, in the order of rows."""

    shard: IntArray
    index: IntArray
    valid: npt.NDArray[np.bool_]
    """Of each row."""
    sizes: IntArray
    """Bytes of each sample in its tar, headers included; 0 where there is an error."""
    data: list[memoryview]
    """These bytes; empty where there is an error, and where a sample is in `cached`."""
    errors: dict[int, ShardError | SampleError]
    """By seat."""
    large: dict[int, LargeSample]
    """By seat: the samples of which `data` has the first bytes only."""
    cached: dict[int, CachedSample] = field(default_factory=dict)
    """By seat."""
    packed: PackedRows | None = None
    """How samples make rows, where rows are packs. None: seats are rows."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all samples."""
        return int(self.sizes.sum())
