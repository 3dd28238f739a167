"""Samples that were read together, held until they are taken.

Bytes are compared with their checksums before anything is made of them. Samples are made when they
are taken: a dict of each would be more for Python's garbage collector to walk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.dataset.index import wrong_samples
from mmstream.dataset.source import ShardSource
from mmstream.errors import SampleError, ShardError
from mmstream.reading.large_samples import NO_CHECKSUM, LargeSample, LargeSamples
from mmstream.reading.step import Outcome
from mmstream.types import IntArray

MAX_LARGE = 16
"""Large samples of a step whose other headers are read side by side."""


class SampleRange(NamedTuple):
    """Samples of one shard, in its order. Every array has one entry per sample."""

    shard: int
    index: IntArray  # type: ignore[assignment]  # the field's name wins over tuple.index
    start: IntArray
    """The sample is bytes [start, stop) of the shard."""
    stop: IntArray
    position: IntArray
    """Position among the samples that were asked for."""
    checksum: IntArray
    """CRC-32C of the sample's bytes; `NO_CHECKSUM` where there is none."""

    def slice(self, first: int, end: int) -> SampleRange:
        """Return samples [first, end)."""
        return SampleRange(self.shard, *(column[first:end] for column in self[1:]))

    def select(self, is_wanted: npt.NDArray[np.bool_]) -> SampleRange:
        """Return some of the samples."""
        return SampleRange(self.shard, *(column[is_wanted] for column in self[1:]))

    @property
    def bounds(self) -> tuple[int, int, int]:
        """Shard, and the bytes [start, stop) of all samples together."""
        return self.shard, int(self.start[0]), int(self.stop[-1])

    @property
    def num_bytes(self) -> int:
        """Length of the range."""
        return int(self.stop[-1] - self.start[0])


class SampleTable(NamedTuple):
    """Samples of several shards, by shard and then by index. Every array has one entry per sample.

    The columns are those of `SampleRange`.
    """

    shard: IntArray
    index: IntArray  # type: ignore[assignment]
    start: IntArray
    stop: IntArray
    position: IntArray
    checksum: IntArray

    def select(self, is_wanted: npt.NDArray[np.bool_] | slice) -> SampleTable:
        """Return some of the samples."""
        return SampleTable(*(column[is_wanted] for column in self))

    def range(self, first: int, end: int) -> SampleRange:
        """Return samples [first, end), which are of one shard."""
        return SampleRange(int(self.shard[first]), *(column[first:end] for column in self[1:]))


class _HeldSample(NamedTuple):
    """A sample that was not taken yet."""

    shard: int
    index: int  # type: ignore[assignment]  # the field's name wins over tuple.index
    data: memoryview
    """Its bytes in the tar; of a large one, the first of them."""


class HeldSamples:
    """Samples that were asked for together. Each can be taken once.

    Args:
        source: what they belong to.
        num_samples: how many there are.
        is_viewed: tells which fields will be views of what was read, not bytes of their own. None:
            none.
        large_samples: makes samples of the first bytes of large ones.

    Attributes:
        large: samples of which only the first bytes are put, by position.
        num_bytes: bytes of all samples that were put.
        num_wrong: samples whose bytes are not those of their checksums. A ChecksumError takes
            their place.
    """

    def __init__(
        self,
        source: ShardSource,
        num_samples: int,
        *,
        is_viewed: Callable[[str], bool] | None = None,
        large_samples: LargeSamples | None = None,
    ) -> None:
        self._source = source
        self._is_viewed = is_viewed
        self._large_samples = large_samples
        self.large: dict[int, LargeSample] = {}
        self.num_bytes = 0
        self.num_wrong = 0
        self._held: list[_HeldSample | ShardError | SampleError | None] = [None] * num_samples

    def __len__(self) -> int:
        """Samples that were not taken yet."""
        return sum(held is not None for held in self._held)

    def put_error(self, positions: IntArray, error: ShardError | SampleError) -> None:
        """Hold why samples cannot be had."""
        for position in positions.tolist():
            self._held[position] = error

    def put(
        self,
        samples: SampleTable,
        data: Sequence[Any],
        data_starts: IntArray,
        data_of_sample: IntArray,
    ) -> None:
        """Hold samples that lie in pieces of data. Those unlike their checksums become errors.

        Args:
            samples: which ones.
            data: bytes of shards, or views of them. They stay in memory until the last sample of
                them was taken, and with views until the last of these is gone.
            data_starts: the byte where each of `data` begins, as `samples` counts them.
            data_of_sample: number of the piece of data that has each sample; it never falls.
        """
        starts = (samples.start - data_starts[data_of_sample]).tolist()
        stops = (samples.stop - data_starts[data_of_sample]).tolist()
        columns = (samples.position, samples.shard, samples.index, data_of_sample)
        for position, shard, index, number, start, stop in zip(
            *(column.tolist() for column in columns), starts, stops, strict=True
        ):
            self._held[position] = _HeldSample(shard, index, memoryview(data[number])[start:stop])
            self.num_bytes += stop - start
        for number in np.unique(data_of_sample[samples.checksum != NO_CHECKSUM]).tolist():
            first, end = np.searchsorted(data_of_sample, (number, number + 1)).tolist()
            of_data = samples.range(first, end)
            start, stop = of_data.start - data_starts[number], of_data.stop - data_starts[number]
            for wrong in wrong_samples(data[number], start, stop, of_data.checksum):
                self._put_wrong(of_data.shard, int(of_data.index[wrong]), of_data.position[wrong])

    def _put_wrong(self, shard: int, index: int, position: int) -> None:
        """Hold that the bytes of a sample are not those of its checksum."""
        location = self._source.locate(shard)
        self._held[position] = location.dataset.shards.checksum_error(location.shard, index)
        self.num_wrong += 1

    def take(self, position: int) -> Outcome:
        """Return the sample at a position."""
        return self.take_all(position, position + 1)[0]

    def take_all(self, first: int, end: int) -> list[Outcome]:
        """Return the samples at positions [first, end)."""
        large = self._assemble(range(first, end)) if self.large else {}
        outcomes: list[Outcome] = []
        for position in range(first, end):
            held, self._held[position] = self._held[position], None
            assert held is not None, "each sample can be taken once"
            if position in large:
                outcomes.append(large[position])
            else:
                outcomes.append(self._parse(held) if isinstance(held, _HeldSample) else held)
        return outcomes

    def _assemble(self, positions: Sequence[int]) -> dict[int, Outcome]:
        """Return the large samples among some positions, but for those with an error."""
        large = [
            position
            for position in positions
            if position in self.large and isinstance(self._held[position], _HeldSample)
        ]
        with ThreadPoolExecutor(MAX_LARGE, thread_name_prefix="mmstream-large") as pool:
            return dict(zip(large, pool.map(self._assemble_one, large), strict=True))

    def _assemble_one(self, position: int) -> Outcome:
        assert self._large_samples is not None, "only it makes samples large"
        held = self._held[position]
        assert isinstance(held, _HeldSample)
        return self._large_samples.sample(
            held.shard, held.index, self.large[position], bytes(held.data)
        )

    def _parse(self, held: _HeldSample) -> Outcome:
        source, dataset, shard = self._source.locate(held.shard)
        try:
            sample = dataset.shards.parse(held.data, shard, held.index, is_viewed=self._is_viewed)
        except SampleError as error:
            return error
        if source:
            sample["__source__"] = source
        return sample
