"""What decoders read of large samples: some are decoded, and their ranges are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mmstream as mm
from mmstream.forecast.large_reads import measure_large_reads
from mmstream.forecast.reads import LargeReads, Reads
from mmstream.lazy_bytes import LazyBytes
from mmstream.reading.large_samples import FIRST_BYTES, HUGE_SAMPLE_BYTES
from mmstream.tar.header import BLOCK
from tests.helpers.corpora import write_corpus
from tests.helpers.stores import watched

LEAST_BYTES = 1 << 18
NUM_ROWS = 4


def first_and_middle(data: bytes | LazyBytes) -> bytes:
    """Decodes a file from two pieces of it."""
    middle = len(data) // 2
    return data[:100] + data[middle : middle + 100]


first_and_middle.reads_ranges = True


def refuses(data: bytes | LazyBytes) -> bytes:
    raise ValueError(f"no codec for {len(data)} bytes")


refuses.reads_ranges = True


def fields_of(number: int) -> dict[str, bytes]:
    """Every third sample is small."""
    size = 10_000 if number % 3 == 2 else 600_000 + 1000 * number
    return {"mp4": np.random.default_rng(number).bytes(size), "txt": b"a film"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> mm.Dataset:
    return mm.open_dataset(write_corpus(tmp_path_factory.mktemp("large"), [7, 0, 5], fields_of))


def pipeline_of(dataset: mm.Dataset, decoder: Any, **settings: Any) -> mm.Pipeline:
    decode = mm.Decode({"mp4": decoder}, min_lazy_bytes=LEAST_BYTES)
    return mm.Pipeline(dataset, global_batch_size=NUM_ROWS, decode=decode, **settings)


def sizes_of_reads(dataset: mm.Dataset) -> list[int]:
    """Bytes of each range that was read of the shards."""
    return [stop - start for name, start, stop in dataset.store.ranges if name.endswith(".tar")]


def test_the_mean_is_that_of_the_ranges_behind_the_first_bytes(dataset: mm.Dataset) -> None:
    dataset = watched(dataset, maps_files=False, concurrent=True)
    pipeline = pipeline_of(dataset, first_and_middle)
    large, num_samples = measure_large_reads(pipeline, pipeline.order)
    assert num_samples == 8  # the whole corpus is small enough to be drawn
    # The middle, and the header of the text behind the film with all that is left.
    assert large == LargeReads(LEAST_BYTES, Reads(2, (64 << 10) + 2 * BLOCK))
    sizes = sizes_of_reads(dataset)
    assert len(sizes) == 8 * (1 + 2)
    assert sum(sizes) == 8 * (FIRST_BYTES + (64 << 10) + 2 * BLOCK)


def test_so_many_samples_are_decoded_at_most(dataset: mm.Dataset) -> None:
    dataset = watched(dataset, maps_files=False)
    pipeline = pipeline_of(dataset, first_and_middle)
    large, num_samples = measure_large_reads(pipeline, pipeline.order, num_samples=2)
    assert (num_samples, large.reads.num_requests) == (2, 2)
    assert len(sizes_of_reads(dataset)) == 2 * (1 + 2)


def test_functions_before_decoding_choose_what_is_read(dataset: mm.Dataset) -> None:
    def head_of_film(sample: mm.Sample) -> mm.Sample:
        return {**sample, "mp4": sample["mp4"][:1000]}

    pipeline = pipeline_of(dataset, first_and_middle, before=[head_of_film])
    large, _ = measure_large_reads(pipeline, pipeline.order)
    assert large.reads == Reads(1, 2 * BLOCK)


def test_nothing_is_decoded_where_nothing_large_is_read_by_ranges(dataset: mm.Dataset) -> None:
    small = replace(
        pipeline_of(dataset, first_and_middle),
        decode=mm.Decode({"mp4": first_and_middle}, min_lazy_bytes=1 << 30),
    )
    whole = replace(small, decode=mm.Decode({"mp4": len}))
    views = replace(small, decode=None, zero_copy=True)
    for pipeline, expected in (
        (small, LargeReads(1 << 30)),
        (whole, LargeReads(HUGE_SAMPLE_BYTES)),
        (views, None),
    ):
        assert measure_large_reads(pipeline, pipeline.order) == (expected, 0)


def test_samples_that_no_decoder_can_use_are_an_error(dataset: mm.Dataset) -> None:
    pipeline = pipeline_of(dataset, refuses)
    with pytest.raises(mm.SampleError, match=r"shard-0.*\.mp4: .*no codec for 6"):
        measure_large_reads(pipeline, pipeline.order)
